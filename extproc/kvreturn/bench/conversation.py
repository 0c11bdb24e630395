"""Conversations to play: what is asked in each turn, how long the answer may be, and when the next turn comes."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvreturn.bench.spread import Spread

# Short and frequent, so that most tokenizers have most of them as one token each.
_WORDS = tuple(
    """
    the of and to in is that for it as with on be at by this from or an are not was but if then when all each
    any some one two more most first last next same other new old long short high low file path line code test
    error value name type list number index count size start end open close read write call function object
    class return raise check find replace change result server client request response message user tool cache
    block memory store load save copy process time work part place case group problem fact hand eye week company
    system program question government night point home water room mother area money story month lot right study
    book word business issue side kind head house service friend father power hour game line member law car city
    community president team minute idea body information back parent face others level office door health
    person art war history party
    """.split()  # noqa: SIM905 - a list literal of so many words is hard to read
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One turn.

    Attributes:
        text: what the user or the tools say; None if only its length is known.
        tokens: how long it is then.
        max_tokens: longest answer.
        gap: seconds from the answer before to this request: the user thinks, tools run.
    """

    text: str | None
    tokens: int
    max_tokens: int
    gap: float = 0.0


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the client says, whatever the model answers.

    Attributes:
        name: that no other conversation of the run has.
        system: the system prompt, empty for none.
        asks: turn by turn, at least one.
        seed: of the text of turns of which only the length is known.
    """

    name: str
    system: str
    asks: Sequence[Ask]
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Words:
    """Text of about a given number of tokens.

    Args:
        per_token: words per token, as the model behind the deployment counts: see `Talk.words`.
    """

    per_token: float = 1.0

    def text(self, rng: random.Random, tokens: int) -> str:
        """So many tokens of words, a word at least."""
        return " ".join(rng.choices(_WORDS, k=max(1, round(tokens * self.per_token))))

    def fill(self, conversation: Conversation) -> Conversation:
        """The conversation with text in all turns of which only the length is known: the same each time."""
        rng = random.Random(conversation.seed)  # noqa: S311 - to draw the same again, not to keep secrets
        asks = [a if a.text is not None else replace(a, text=self.text(rng, a.tokens)) for a in conversation.asks]
        return replace(conversation, asks=asks)


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Conversations that are made up.

    Attributes:
        turns: how many requests a conversation has.
        first_tokens: what the first request says.
        turn_tokens: what each further one adds.
        output_tokens: length of an answer.
        gap: seconds between an answer and the next request.
        system_tokens: of a system prompt that all conversations share.
    """

    turns: Spread
    first_tokens: Spread
    turn_tokens: Spread
    output_tokens: Spread
    gap: Spread
    system_tokens: int = 0

    def conversations(self, rng: random.Random, words: Words) -> Iterator[Conversation]:
        """One after the other, without end. Their text is left to `Words.fill`: all of it together can be large."""
        system = words.text(rng, self.system_tokens) if self.system_tokens else ""
        while True:
            asks = [self._ask(rng, first=number == 0) for number in range(_count(self.turns, rng))]
            yield Conversation("", system, asks, rng.getrandbits(64))

    def _ask(self, rng: random.Random, *, first: bool) -> Ask:
        tokens = _count(self.first_tokens if first else self.turn_tokens, rng)
        gap = 0.0 if first else self.gap.draw(rng)
        return Ask(None, tokens, _count(self.output_tokens, rng), gap)


@dataclass(frozen=True, slots=True)
class Replayed:
    """Conversations from a file, over again if there are not enough.

    Attributes:
        recorded: of the file, at least one.
    """

    recorded: Sequence[Conversation]

    def conversations(self, rng: random.Random, words: Words) -> Iterator[Conversation]:
        """In the file's order, without end. Text that the file lacks is another one each time, see `Words.fill`."""
        del words
        while True:
            for conversation in self.recorded:
                yield replace(conversation, seed=rng.getrandbits(64))


def _count(spread: Spread, rng: random.Random) -> int:
    return max(1, round(spread.draw(rng)))
