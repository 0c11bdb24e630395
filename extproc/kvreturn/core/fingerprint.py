"""Finding the turn before: keyed digests of everything that shapes the prompt, chained item by item.

A fingerprint only *finds* (design.md, "Sessions without client changes"): equal messages do not imply equal tokens.
"""

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

_SIZE, _BLOCK = 16, 64
_TURN, _PROMPT = b"t", b"p"
_NEAR = 4096
_SAME_SESSION = 8  # nearest items for which the same session's turn is preferred to another's
SALT = "kvreturn-salt-"
_encoder = msgspec.json.Encoder(order="deterministic")


def canonical(value: Any) -> bytes:  # noqa: ANN401 - JSON
    """JSON text that does not depend on the order of members or on white space."""
    try:
        return _encoder.encode(value)
    except (msgspec.MsgspecError, UnicodeEncodeError):  # lone surrogates, which clients do send
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose conversations these are. No key made in one scope is ever found in another.

    Attributes:
        key: secret of all routers that share a store, at most 64 bytes.
        tenant: who asks.
    """

    key: bytes
    tenant: bytes

    def trail(self, root: Any, items: Iterable[bytes]) -> "Trail":  # noqa: ANN401 - JSON
        """Digest a prompt.

        Args:
            root: what the whole prompt depends on (API, model, `cache_salt`, ...), as JSON values.
            items: its parts in order, in a canonical form.
        """
        first = _digest(self.key, self.tenant + b"\0" + canonical(root))
        return Trail(self.key, (first,)).extend(items)

    def session_key(self, model: str, session: str) -> bytes:
        """Where it is stored which nodes a session of this model used last."""
        return b"s" + _digest(self.key, self.tenant + b"\0session\0" + canonical([model, session]))

    def conversation_key(self, session: str) -> bytes:
        """What records are kept together by that a session of any model left: its owner may end it."""
        return b"c" + _digest(self.key, self.tenant + b"\0conversation\0" + session.encode(errors="surrogatepass"))

    def salt(self, own: str) -> str:
        """A `cache_salt` that only this tenant's requests have.

        Args:
            own: the one that the client sent, empty for none: it goes on telling its own requests apart.
        """
        text = own.encode(errors="surrogatepass")
        return SALT + _digest(self.key, self.tenant + b"\0salt\0" + text).hex()

    def response_key(self, response_id: str) -> bytes:
        """Where it is stored which node keeps a response."""
        text = response_id.encode(errors="surrogatepass")
        return b"r" + _digest(self.key, self.tenant + b"\0response\0" + text)

    def leg_key(self, engine: str, request: str, prompt: bytes) -> bytes:
        """Where it is stored what the P leg of a turn knew, for its D leg.

        Args:
            engine: id of P's engine.
            request: id of P's request, which names its blocks.
            prompt: digest of all that shapes the prompt: from a leg with another prompt nothing is found.
        """
        return b"l" + _digest(self.key, self.tenant + b"\0leg\0" + canonical([engine, request]) + b"\0" + prompt)

    def anybodys_key(self, response_id: str) -> bytes:
        """Where it is stored that some tenant has a response of this id."""
        return b"a" + _digest(self.key, response_id.encode(errors="surrogatepass"))


@dataclass(frozen=True, slots=True)
class Trail:
    """Digests of all prefixes of a prompt: `digests[i]` is that of its first i items."""

    key: bytes
    digests: tuple[bytes, ...]

    def extend(self, items: Iterable[bytes]) -> "Trail":
        """The trail of a longer prompt."""
        digests, keyed = list(self.digests), _keyed(self.key)
        last = digests[-1]
        for item in items:
            whole = keyed.copy()
            whole.update(last)
            whole.update(item)
            digests.append(last := whole.digest()[:_SIZE])
        return Trail(self.key, tuple(digests))

    @property
    def depth(self) -> int:
        """Number of items."""
        return len(self.digests) - 1

    def candidates(self, session: bytes | None = None) -> list[bytes]:
        """Where a predecessor may be stored, nearest first: a whole turn before the prompt of one.

        Only the nearest few thousand items are looked at: a turn adds some, not thousands.

        Args:
            session: key of the client's session: its own turn goes before an equal one of another session. And another
                session that has sent just this prompt keeps its turn: it will want it, and P still has the prompt.
        """
        near = self.digests[1:][-_NEAR:]
        keys = [k for d in reversed(near) for k in (_TURN + d, _PROMPT + d)]
        nearest = 2 * _SAME_SESSION
        found = [k for key in keys[:nearest] for k in self.places(key, session)] + keys[nearest:]
        if session and self.depth:
            found.remove(_PROMPT + self.digests[-1])
        return found

    def places(self, key: bytes, session: bytes | None) -> list[bytes]:
        """Where what is stored under a key of this trail is found, its own session's place first."""
        return [b"i" + _digest(self.key, session + key), key] if session else [key]

    def turn_key(self) -> bytes | None:
        """Where a turn with all of these items (its answer included) is stored. None if there are no items."""
        return _TURN + self.digests[-1] if self.depth else None

    def prompt_key(self) -> bytes | None:
        """Where a turn is found whose prompt has all of these items, whatever its answer. None if there are none."""
        return _PROMPT + self.digests[-1] if self.depth else None


def segments(data: bytes, size: int) -> Sequence[bytes]:
    """Cut a prompt without messages into items of `size` bytes. What is left over is no item."""
    return [data[i : i + size] for i in range(0, len(data) - size + 1, size)]


def keyed_hash(key: bytes, value: bytes) -> bytes:
    """16 bytes that stand for `value` without telling it."""
    return _digest(key, value)


def _digest(key: bytes, data: bytes) -> bytes:
    whole = _keyed(key).copy()
    whole.update(data)
    return whole.digest()[:_SIZE]


@functools.lru_cache(maxsize=16)
def _keyed(key: bytes) -> "hashlib._Hash":
    """What digests under a key begin with."""
    # CPUs have SHA-256 in hardware: half of BLAKE2b's time. With the key before the text it is a keyed hash, since only
    # half of the digest is kept: who sees that cannot go on from there. The key fills a block, so that no key's end can
    # pass for the beginning of a text.
    return hashlib.sha256(key.ljust(_BLOCK, b"\0"))
