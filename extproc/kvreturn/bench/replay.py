"""Conversations from files: histories with their messages, or logs that tell how long the prompts were and when."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvreturn.analyze.fields import COMPLETION, CONVERSATION, PROMPT, first, read_count, read_time
from kvreturn.analyze.observation import LineError
from kvreturn.bench.conversation import Ask, Conversation

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}  # of ShareGPT
_HISTORY = ("messages", "conversations")
_SYSTEM = frozenset({"system", "developer"})
_LONGEST_GAP = 60.0  # seconds
LARGEST = 128 << 20
"""Bytes of the largest file that is read: in memory, a log of short lines takes twelve times as much."""


class ReplayError(Exception):
    """A file that cannot be played; the message says where and why."""


def read(path: Path, output_tokens: int | None, gap: float | None) -> list[Conversation]:
    """Conversations of a file.

    It is a list of histories as JSON, one of them, or one on each line; or a log with `conversation_id`, `ts` and
    `prompt_tokens` on each line. A history is a list of chat messages, or an object with one under `messages`
    (OpenAI) or `conversations` (ShareGPT), or under `request` in a log of requests. The model's own answers take the
    place of the recorded ones.

    Args:
        path: of the file.
        output_tokens: length of all answers; None for that of the recorded ones.
        gap: seconds between an answer and the next request; None for a log's, and for none in histories.

    Raises:
        ReplayError: it holds none.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise ReplayError(f"{path}: larger than {LARGEST >> 20} MB, and more than is played: give a part of it")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise ReplayError(f"{path}: {getattr(e, 'strerror', None) or 'not UTF-8 text'}") from None
    items = list(_items(path, text))
    if all(isinstance(item, dict) and _messages(item) is None for _, item in items):
        return _of_log(items, output_tokens, gap)
    found = [c for place, item in items if (c := _of_history(place, item, output_tokens, gap or 0.0))]
    if not found:
        raise ReplayError(f"{path}: no history in it has a message of a user or a tool")
    return _whole(found)


def _whole(found: Sequence[Conversation]) -> list[Conversation]:
    """Of a log of requests, whose histories grow, those that no other one goes on with."""
    texts = [(c.system, *(a.text for a in c.asks)) for c in found]
    begun = {each[:length] for each in texts for length in range(1, len(each))}
    return [c for c, each in zip(found, texts, strict=True) if each not in begun]


def _messages(item: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON
    """The messages of an object, its own or those of a request that was logged in it; None if it has none."""
    inner = first(item, ("request", "request_body", "body"))
    return first({**inner, **item} if isinstance(inner, dict) else item, _HISTORY)


def _items(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """The histories or lines of a file, each with its place for messages."""
    try:
        whole = _loads(text)
    except ValueError:
        pass
    else:
        # A list of messages is one history, any other list is a list of histories.
        if isinstance(whole, list) and not all(isinstance(m, dict) and "role" in m for m in whole):
            yield from ((f"{path}, item {number}", item) for number, item in enumerate(whole))
        else:
            yield str(path), whole
        return
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ReplayError(f"{path}: empty")
    for number, line in lines:
        try:
            yield f"{path}:{number}", _loads(line)
        except ValueError as e:
            raise ReplayError(f"{path}:{number}: not JSON: {e}") from None


def _loads(text: str) -> Any:  # noqa: ANN401 - JSON
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _of_history(place: str, item: Any, output_tokens: int | None, gap: float) -> Conversation | None:  # noqa: ANN401
    messages = _messages(item) if isinstance(item, dict) else item
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise ReplayError(f"{place}: no history: give a list of messages, under `messages` or `conversations` or alone")
    system, asks, said = "", list[Ask](), list[str]()
    for message in messages:
        role, text = _said(place, message)
        if role in _SYSTEM and not asks:
            system = f"{system}\n\n{text}".strip()
        elif role == "assistant":
            if said:
                asks.append(_ask(said, output_tokens or max(1, len(text) // 4), gap if asks else 0.0))
                said = []
        else:  # users and tools alike: a model that was not given the tools calls none
            said.append(text)
    if said:
        answer = output_tokens or (asks[-1].max_tokens if asks else 64)
        asks.append(_ask(said, answer, gap if asks else 0.0))
    return Conversation(_name(item), system, asks) if asks else None


def _ask(said: Sequence[str], max_tokens: int, gap: float) -> Ask:
    return Ask("\n\n".join(said) or "Go on.", 0, max_tokens, gap)


def _name(item: Any) -> str:  # noqa: ANN401 - JSON
    name = first(item, ("id", *CONVERSATION)) if isinstance(item, dict) else None
    return "" if name is None else str(name)


def _said(place: str, message: dict[str, Any]) -> tuple[str, str]:
    role, text = message.get("role", message.get("from")), message.get("content", message.get("value"))
    if not isinstance(role, str):
        raise ReplayError(f"{place}: a message without `role` (or ShareGPT's `from`)")
    if isinstance(text, list):
        text = "".join(str(part.get("text") or "") for part in text if isinstance(part, dict))
    return _ROLES.get(role, role), str(text or "")


def _of_log(items: Sequence[tuple[str, Any]], output_tokens: int | None, gap: float | None) -> list[Conversation]:
    """Conversations as long, and as far apart, as a log tells; what they say is made up."""
    turns: defaultdict[str, list[tuple[float, int, int]]] = defaultdict(list)
    for place, item in items:
        name = first(item, CONVERSATION)
        try:
            ts, prompt, completion = read_time(item, "auto"), read_count(item, PROMPT), read_count(item, COMPLETION)
        except LineError as e:
            raise ReplayError(f"{place}: {e}") from None
        if name is None or prompt is None:
            raise ReplayError(f"{place}: neither a history nor a turn with `conversation_id`, `ts`, `prompt_tokens`")
        turns[str(name)].append((ts, prompt, completion or 0))
    return [_of_turns(name, sorted(rows), output_tokens, gap) for name, rows in turns.items()]


def _of_turns(
    name: str, rows: Sequence[tuple[float, int, int]], output_tokens: int | None, gap: float | None
) -> Conversation:
    asks: list[Ask] = []
    before, then = 0, rows[0][0]
    for ts, prompt, completion in rows:
        answer = output_tokens or completion or 64
        # A prompt that shrank (compaction) is played as one that grew by a little: histories here only grow.
        waits = min(ts - then, _LONGEST_GAP) if gap is None else gap
        asks.append(Ask(None, max(1, prompt - before), answer, waits if asks else 0.0))
        before, then = max(before, prompt) + answer, ts
    return Conversation(name, "", asks)
