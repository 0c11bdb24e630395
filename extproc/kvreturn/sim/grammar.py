"""What the simulated model says: thinking, text, tool calls. Every choice is drawn from the model's state."""

import json
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvreturn.sim.model import draw, pick
from kvreturn.sim.template import tool_call_text
from kvreturn.sim.tokenizer import EOS, Kind, Special, encode, split_word
from kvreturn.sim.words import WORDS

Speech = Generator[int, int, int]
"""Yields token ids, is sent the state after each, returns the last state."""

# Purposes of `draw`: different decisions from one state must not be the same number.
_CHOICE, _LENGTH, _KIND, _CALLS, _WORD, _FORM, _TOOL, _VALUE = range(8)
# Words that are several tokens, some of them a part of a character: streams must survive that too.
_FOREIGN = ("naïve", "café", "über", "→", "日本語", "🌍")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `properties` is the schema's member of that name."""

    name: str
    properties: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Manner:
    """How the model may answer one request.

    Attributes:
        tokenizer: `blurry`: now and then a word comes as two tokens that do not encode back.
        thinks: begin with a thinking part.
        tools: what may be called; empty for none.
        must_call: a call is required (`tool_choice` required or named).
        parallel: two calls in one answer are allowed.
    """

    tokenizer: Kind = "exact"
    thinks: bool = False
    tools: tuple[Tool, ...] = ()
    must_call: bool = False
    parallel: bool = True


def speak(state: int, manner: Manner, choice: int) -> Speech:
    """The model's answer.

    Args:
        state: the state at the prompt's end.
        manner: what is allowed.
        choice: index of the choice (`n`); it perturbs every decision but no KV value.

    Yields:
        Token ids. After the end-of-sequence token it goes on with words (for `ignore_eos` and `min_tokens`), offering
        the end again after each.
    """
    speaker = _Speaker(manner, choice)
    if manner.thinks:
        state = yield Special.THINK
        state = yield from speaker.prose(state, 4 + speaker.draw(state, _LENGTH) % 16)
        state = yield Special.END_THINK
    kind = speaker.draw(state, _KIND)
    if manner.tools and (manner.must_call or kind % 8 < 5):  # noqa: PLR2004 - most of an agent's turns call a tool
        if not manner.must_call and kind // 8 % 3 == 0:
            state = yield from speaker.prose(state, 3 + kind // 32 % 10)
        calls = 2 if manner.parallel and speaker.draw(state, _CALLS) % 4 == 0 else 1
        for i in range(calls):
            if i:
                state = yield from _say("\n", state)
            state = yield from speaker.call(state)
    else:
        state = yield from speaker.prose(state, 8 + speaker.draw(state, _LENGTH) % 48)
    while True:
        state = yield EOS
        state = yield from speaker.word(state)


def _say(text: str, state: int) -> Speech:
    return (yield from _emit(encode(text), state))


def _emit(tokens: Iterable[int], state: int) -> Speech:
    for token in tokens:
        state = yield token
    return state


class _Speaker:
    def __init__(self, manner: Manner, choice: int) -> None:
        self._manner = manner
        self._choice = choice

    def draw(self, state: int, purpose: int) -> int:
        if self._choice:
            state = draw(state ^ self._choice, _CHOICE)
        return draw(state, purpose)

    def prose(self, state: int, words: int) -> Speech:
        """Sentences of `words` words in all."""
        left, space = 0, False
        for i in range(words):
            start = not left
            if start:
                left = 4 + self.draw(state, _LENGTH) % 8
            state = yield from self.word(state, capital=start, space=space)
            left, space = left - 1, True
            if not left or i == words - 1:
                state = yield from _say(".", state)
                if i < words - 1 and self.draw(state, _FORM) % 4 == 0:
                    state = yield from _say("\n", state)
                    space = False
        return state

    def word(self, state: int, *, capital: bool = False, space: bool = True) -> Speech:
        """One word."""
        form = self.draw(state, _FORM)
        if not capital and form % 64 == 0:
            return (yield from _say(f" {pick(form, _WORD, _FOREIGN)}", state))
        text = pick(self.draw(state, _WORD), _WORD, WORDS)
        tokens = encode(" " * space + (text.title() if capital else text))  # always one token
        if self._manner.tokenizer == "blurry" and form % 8 == 1:
            tokens = list(split_word(tokens[0]) or tokens)
        return (yield from _emit(tokens, state))

    def call(self, state: int) -> Speech:
        """One tool call."""
        seed = self.draw(state, _TOOL)
        tool = pick(seed, _TOOL, self._manner.tools)
        arguments = {name: self._value(draw(seed, i), spec) for i, (name, spec) in enumerate(tool.properties.items())}
        state = yield Special.TOOL_CALL
        state = yield from _say(tool_call_text(tool.name, json.dumps(arguments, ensure_ascii=False)), state)
        return (yield Special.END_TOOL_CALL)

    def _value(self, seed: int, spec: object) -> Any:  # noqa: ANN401 - a JSON value
        spec = spec if isinstance(spec, Mapping) else {}
        if isinstance(spec.get("enum"), list) and spec["enum"]:
            return pick(seed, _VALUE, spec["enum"])
        match spec.get("type"):
            case "integer" | "number":
                return seed % 1000
            case "boolean":
                return bool(seed & 1)
            case "array":
                return [self._value(draw(seed, i), spec.get("items")) for i in range(1 + seed % 2)]
            case "object":
                properties = spec.get("properties") or {}
                return {name: self._value(draw(seed, i), inner) for i, (name, inner) in enumerate(properties.items())}
            case _:
                return " ".join(pick(draw(seed, i), _WORD, WORDS) for i in range(1 + seed % 4))
