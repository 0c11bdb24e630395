"""What one line of a log tells, in the forms in which it is sorted."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvreturn.core.outcome import Outcome

MAX_TOKENS = 2**31
_UNKNOWN = 2**32 - 1
_TURN = struct.Struct(">8sdQIIIIBBB")


class Link(IntEnum):
    """What tells which turns belong together."""

    NAMED = 0
    """An id in the log."""
    FOUND = 1
    """Equal messages, or equal hashes of the prompt's blocks."""
    GUESSED = 2
    """The same client, and a longer body than before."""


class Answered(IntEnum):
    """Whether the prompt holds the answer of the turn before."""

    UNKNOWN = 0
    CONFIRMED = 1
    REFUTED = 2


class LineError(Exception):
    """A line that cannot be used. The message is one of few, so that lines can be counted by it."""


@dataclass(slots=True)
class Sizes:
    """Tokens of a turn.

    Attributes:
        prompt: of its prompt.
        known: how many of these the turn after is known to repeat if it repeats what it is found by.
        completion: of its answer, None if the log does not say.
        cached: what the prefix cache had of the prompt, None if the log does not say.
        estimated: whether `prompt` was estimated from bytes.
    """

    prompt: int
    known: int
    completion: int | None = None
    cached: int | None = None
    estimated: bool = False


@dataclass(slots=True)
class Observation:
    """A turn in a log.

    Attributes:
        ts: seconds, of an epoch that all lines share.
        sizes: its tokens.
        session: what names its conversation, 8 bytes; None if nothing does.
        digests: of all prefixes of its prompt by which a turn before may be found, shortest first.
        answered: digest of the prompt with its answer, None if the log does not have the answer.
        client: who sent it, for want of anything better.
    """

    ts: float
    sizes: Sizes
    session: bytes | None = None
    digests: Sequence[bytes] = ()
    answered: bytes | None = None
    client: bytes | None = None


@dataclass(slots=True)
class Measured:
    """A turn in kvreturn's own turn log, which has neither conversations nor their times."""

    outcome: Outcome
    prompt: int | None
    read: int | None
    local: int | None
    returned: int | None = None


@dataclass(slots=True)
class Turn:
    """A turn of a conversation. Packed turns sort by conversation, then time, then place in the input."""

    session: bytes
    ts: float
    place: int
    sizes: Sizes
    link: Link
    answered: Answered

    def pack(self) -> bytes:
        """As bytes. Times are not negative, so their big-endian form sorts as they do."""
        s = self.sizes
        completion = _UNKNOWN if s.completion is None else s.completion
        cached = _UNKNOWN if s.cached is None else s.cached
        return _TURN.pack(
            self.session,
            self.ts,
            self.place,
            s.prompt,
            s.known,
            completion,
            cached,
            s.estimated,
            self.link,
            self.answered,
        )


def unpack_turn(record: bytes) -> Turn:
    """What `Turn.pack` made."""
    session, ts, place, prompt, known, completion, cached, estimated, link, answered = _TURN.unpack(record)
    sizes = Sizes(
        prompt,
        known,
        None if completion == _UNKNOWN else completion,
        None if cached == _UNKNOWN else cached,
        bool(estimated),
    )
    return Turn(session, ts, place, sizes, Link(link), Answered(answered))
