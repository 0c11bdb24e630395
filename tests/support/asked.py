"""A request on its way through the fast lane's script."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from support.lanes import Answers, Call, Exchange, header_map, ours, read_map, scripts, worker

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","messages":[]}'
Fields = Sequence[tuple[str, str]]


def fields(path: str = CHAT, kind: str | None = "application/json", **more: str) -> list[tuple[str, str]]:
    """Headers of a request."""
    out = [(":authority", "a"), (":path", path), (":method", "POST"), (":scheme", "http")]
    out += [("content-type", kind)] if kind is not None else []
    return [*out, *((name.replace("_", "-"), value) for name, value in more.items())]


@dataclass
class Asked:
    """One request on its way through the script.

    Args:
        fields: its headers.
        body: pieces of its body, None if it has none.
        answers: what comes of a call; None if there is no such cluster.
        route: name of its route.
        slow: whether calls take longer than the body.
        on: the thread that it passes; one of its own if that is None.
    """

    fields: Fields
    body: Sequence[bytes] | None = None
    answers: Answers = lambda _: ours(b"go\n\n")
    route: str = "inference"
    slow: bool = False
    on: Any = None

    def __post_init__(self) -> None:
        self.exchange = Exchange(None, self.route)
        self.exchange.answers = self.answers
        self.exchange.lua[b"slow"] = self.slow
        headers = header_map(self.fields)
        thread = self.on or worker(scripts()[0])
        self._stream = thread.request(thread, self.exchange.lua, headers, self.body is None)
        pieces = self.body or []
        passed = [self._stream.chunk(self._stream, p, i == len(pieces)) for i, p in enumerate(pieces, 1)]
        self.sent = read_map(headers)
        """The headers that go on."""
        self.passed = b"".join(passed)
        """The body that goes on."""

    @property
    def calls(self) -> list[Call]:
        return self.exchange.calls

    @property
    def errors(self) -> list[bytes]:
        return list(self._stream.errors.values())

    @property
    def routed_anew(self) -> bool:
        """Whether Envoy chooses the route by the changed headers."""
        return bool(self._stream.cleared)

    @property
    def response(self) -> tuple[int, dict[str, str], bytes] | None:
        """What the script answers itself. Nothing goes on then."""
        said = self._stream.response
        if said is None:
            return None
        headers = {k.decode(): v.decode() for k, v in said.headers.items()}
        return int(headers.pop(":status")), headers, said.body
