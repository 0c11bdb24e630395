"""Session stores to test, and what to put into them."""

from dataclasses import dataclass
from typing import Any

from kvreturn.core.outcome import Outcome
from kvreturn.core.ports import Record, SessionStore
from support.harness import Clock

A, B, C = b"a" * 17, b"b" * 17, b"c" * 17


def handle(text: str = "h", ttl: float = 450.0) -> Record:
    """A record that can be taken."""
    return Record(ttl, text.encode(), None, "d:1", "p:1")


def marker(reason: Outcome = Outcome.NO_HANDLE_FROM_DECODE, ttl: float = 450.0) -> Record:
    """A record that says why there is nothing to take."""
    return Record(ttl, None, reason)


@dataclass
class Subject:
    """A store, and how to let time pass for it.

    Attributes:
        store: the store.
        clock: what it reads.
        client: of its server, if it has one.
    """

    store: SessionStore
    clock: Clock
    client: Any = None

    async def advance(self, seconds: float) -> None:
        """Let time pass: for us, and for what the server holds."""
        self.clock.now += seconds
        if self.client:
            async for key in self.client.scan_iter("kvr1*"):
                await self.client.pexpire(key, max(await self.client.pttl(key) - int(seconds * 1000), 0))
