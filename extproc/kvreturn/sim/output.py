"""Generated tokens to what the client sees: text, reasoning, tool calls, stop strings."""

import codecs
import json
import re
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from kvreturn.sim.tokenizer import Special, is_hidden, token_bytes

_CALL_HEAD = re.compile(r'\n\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')
_CALL_TAIL = len("}\n")  # closes the call's outer object; never a part of the arguments


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of the answer.

    Attributes:
        kind: where it belongs. `name` begins tool call number `call`, `arguments` goes on with it.
        text: the piece.
        call: index of the tool call.
    """

    kind: Literal["content", "reasoning", "name", "arguments"]
    text: str
    call: int = 0


@dataclass(frozen=True, slots=True)
class Heard:
    """What one token completed.

    Attributes:
        deltas: pieces that may be shown now.
        stop: the stop string that ended the answer, or None.
    """

    deltas: tuple[Delta, ...] = ()
    stop: str | None = None


@dataclass(slots=True)
class Call:
    """A finished tool call."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: f"chatcmpl-tool-{uuid.uuid4().hex[:16]}")


class Transcript:
    """Follows one choice, token by token.

    Text is cut at stop strings before thinking and tool calls are told apart, as in vLLM: a stop string may end a tool
    call. While one could still be completed, that much text is held back.

    Args:
        stops: stop strings.
        include_stop: leave the stop string in the text.
        min_tokens: stop strings do not count before so many tokens.
        thinking: tell the thinking part from the rest.
        tools: tell tool calls from the rest.
    """

    def __init__(
        self,
        *,
        stops: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        thinking: bool = False,
        tools: bool = False,
    ) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._hold = max(map(len, stops), default=1) - 1 if not include_stop else 0
        self._thinking = thinking
        self._markers: dict[int, _Kind] = {}
        if thinking:
            self._markers |= {Special.THINK: "reasoning", Special.END_THINK: "content"}
        if tools:
            self._markers |= {Special.TOOL_CALL: "call", Special.END_TOOL_CALL: "content"}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._kind: _Kind = "content"
        self._pending: deque[tuple[_Kind, str]] = deque()  # decoded, not yet released
        self._parser = _CallParser()
        self.tokens: list[int] = []
        self.text = ""
        self.reasoning = ""
        self.content = ""
        self.reasoning_tokens = 0

    @property
    def calls(self) -> list[Call]:
        """Tool calls so far."""
        return self._parser.calls

    @property
    def raw_content(self) -> str:
        """Everything after the thinking part, markers of tool calls included."""
        return self.text.rpartition("</think>")[2] if self._thinking else self.text

    @property
    def broken_call(self) -> bool:
        """Whether the answer ended inside a tool call."""
        return self._kind == "call"

    def listen(self, token: int, swallow: bool, last: bool) -> Heard:  # noqa: FBT001 - called by position, per token
        """Take one token.

        Args:
            token: its id.
            swallow: it is a stop token whose text is left out.
            last: nothing follows.
        """
        self.tokens.append(token)
        self.reasoning_tokens += self._kind == "reasoning"
        before = len(self.text)
        if not swallow and not is_hidden(token):
            self._decode(token)
        if last:
            self._append(self._kind, self._decoder.decode(b"", final=True))
        stop = self._find_stop(before) if len(self.tokens) > self._min_tokens else None
        held = 0 if last or stop else self._hold
        return Heard(tuple(self._release(len(self.text) - held)), stop)

    def _decode(self, token: int) -> None:
        marker = self._markers.get(token)
        if marker is not None:
            self._append(self._kind, self._decoder.decode(b"", final=True))
            self._append("marker", token_bytes(token).decode())
            self._kind = marker
        else:
            self._append(self._kind, self._decoder.decode(token_bytes(token)))

    def _append(self, kind: "_Kind", text: str) -> None:
        if text:
            self.text += text
            self._pending.append((kind, text))

    def _find_stop(self, before: int) -> str | None:
        for stop in self._stops:
            at = self.text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                self._truncate(at + len(stop) if self._include_stop else at)
                return stop
        return None

    def _truncate(self, length: int) -> None:
        surplus = len(self.text) - length
        self.text = self.text[:length]
        while surplus > 0:
            kind, text = self._pending.pop()
            if len(text) > surplus:
                self._pending.append((kind, text[:-surplus]))
            surplus -= len(text)

    def _release(self, end: int) -> list[Delta]:
        """Give out decoded text up to position `end` of the whole."""
        surplus = len(self.text) - end
        waiting = sum(len(text) for _, text in self._pending)
        out: list[Delta] = []
        while self._pending and waiting > surplus:
            kind, text = self._pending.popleft()
            keep = max(0, surplus - (waiting - len(text)))
            if keep and kind == "marker":
                self._pending.appendleft((kind, text))  # a marker is shown whole or not at all
                break
            if keep:
                self._pending.appendleft((kind, text[len(text) - keep :]))
            waiting -= len(text) - keep
            out.extend(self._parse(kind, text[: len(text) - keep]))
        return out

    def _parse(self, kind: "_Kind", text: str) -> list[Delta]:
        if kind == "reasoning":
            self.reasoning += text
            return [Delta("reasoning", text)]
        if kind == "call":
            return self._parser.feed(text)
        if kind == "marker":
            if text == "<tool_call>":
                self._parser.begin()
            return []
        if self._parser.calls and not text.strip():
            return []  # the line break between two calls
        self.content += text
        return [Delta("content", text)]


_Kind = Literal["content", "reasoning", "call", "marker"]


class _CallParser:
    """Tool calls out of `{"name": "f", "arguments": {...}}`, a line break before and after, as they are written."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._text = ""
        self._shown = 0  # of `_text`
        self._open = False  # the current call's head is complete

    def begin(self) -> None:
        self._text, self._shown, self._open = "", 0, False

    def feed(self, text: str) -> list[Delta]:
        self._text += text
        out = []
        if not self._open:
            head = _CALL_HEAD.match(self._text)
            if head is None:
                return []
            self._open = True
            self._shown = head.end()
            self.calls.append(Call(json.loads(head[1])))
            out.append(Delta("name", self.calls[-1].name, len(self.calls) - 1))
        end = len(self._text) - _CALL_TAIL
        if end > self._shown:
            piece = self._text[self._shown : end]
            self._shown = end
            self.calls[-1].arguments += piece
            out.append(Delta("arguments", piece, len(self.calls) - 1))
        return out
