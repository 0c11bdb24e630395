"""The fast lane's scripts in a Lua interpreter of this process, with a stand-in for Envoy around them."""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lupa import luajit21

from kvreturn.core.packed import unpack
from kvreturn.envoy.lanes import hold_script, pass_script
from support.harness import settings

ROUTER = "127.0.0.1:9090"
SSE = {":status": "200", "content-type": "text/event-stream; charset=utf-8", "transfer-encoding": "chunked"}
TURN = {"turn": "a-secret", "router": ROUTER, "lane": "1"}
Headers = Mapping[str, str]
Change = Callable[[str], str]
End = Literal["empty", "last"]


@dataclass(frozen=True)
class Answer:
    """What comes of a script's call."""

    status: int = 200
    body: bytes = b""
    headers: Headers = field(default_factory=dict)


def ours(body: bytes = b"", status: int = 200) -> Answer:
    """An answer of the router's."""
    return Answer(status, body, {"x-kvreturn-reply": "1"})


# What Envoy makes up itself.
_RESET = b"upstream connect error or disconnect/reset before headers. reset reason: "
UNREACHABLE = Answer(503, _RESET + b"remote connection failure")
NO_ROUTE = Answer(503, _RESET + b"connection timeout")
FULL = Answer(503, _RESET + b"overflow")
UNHEALTHY = Answer(503, b"no healthy upstream")
CLOSED = Answer(503, _RESET + b"connection termination")
BROKEN = Answer(503, b"upstream failure")
LATE = Answer(504, b"upstream request timeout")


@dataclass
class Call:
    """A call of a script to the router.

    Attributes:
        cluster: that it goes to.
        headers: of the call.
        body: of it.
        timeout: milliseconds.
        waited: whether the exchange was held until it was done.
        passed: bytes that the client had by then.
    """

    cluster: str
    headers: dict[str, str]
    body: bytes
    timeout: float
    waited: bool
    passed: int

    @property
    def text(self) -> bytes:
        """The node's bytes."""
        return unpack(self.body)

    @property
    def about(self) -> list[str]:
        return self.headers["x-kvreturn-part"].split(" ")

    @property
    def number(self) -> int:
        return int(self.about[0])

    @property
    def last(self) -> bool:
        return self.about[1] == "1"


Answers = Callable[[Call], Answer | None]


@functools.cache
def interpreter() -> tuple[Any, Any]:
    """LuaJIT, as Envoy has it, and the stand-in."""
    lua = luajit21.LuaRuntime(encoding=None, unpack_returned_tuples=True)
    return lua, lua.execute(Path(__file__).with_name("envoy_api.lua").read_bytes())


@functools.cache
def scripts(limit: int = 1 << 20, routers: tuple[str, ...] = (ROUTER,)) -> tuple[str, str]:
    """Both scripts.

    Args:
        limit: as `limits.event_bytes`.
        routers: as `envoy.routers`.
    """
    made_of = settings(
        limits={"event_bytes": limit},
        envoy={"routers": list(routers)},
        prefill={"timeout": 30},
        store={"url": "redis://127.0.0.1", "deadline": 0.02},
    )
    return pass_script(made_of), hold_script(made_of)


def packed(pieces: Iterable[bytes], takes: Collection[int] = ()) -> bytes:
    """What the script keeps of these pieces; it is taken before each of these numbers, and at the end."""
    lua, _ = interpreter()
    kept = lua.execute((scripts()[0] + "\nreturn new_kept()").encode())
    out = []
    for i, piece in enumerate(pieces):
        if i in takes:
            out.append(kept.take(kept))
        kept.add(kept, piece)
    return b"".join([*out, kept.take(kept)])


def worker(script: str) -> Any:  # noqa: ANN401 - lupa has no types
    """One of Envoy's threads, with a script."""
    return interpreter()[1][b"worker"](script.encode())


def table(values: Headers) -> Any:  # noqa: ANN401 - lupa has no types
    return interpreter()[0].table_from({k.encode(): v.encode() for k, v in values.items()})


def header_map(values: Sequence[tuple[str, str]]) -> Any:  # noqa: ANN401 - lupa has no types
    """Headers as Envoy keeps them: of one name there may be several. Bytes beyond ASCII as Latin-1."""
    lua, api = interpreter()
    return api[b"headers"](lua.table_from([text.encode("latin-1") for field in values for text in field]))


def read_map(headers: Any) -> list[tuple[str, str]]:  # noqa: ANN401 - lupa has no types
    """The reverse."""
    return [(f[1].decode("latin-1"), f[2].decode("latin-1")) for f in headers.fields.values()]


class Exchange:
    """What Envoy has of one exchange: its metadata, and where calls of scripts go.

    Args:
        metadata: in our namespace.
        route: name of the route.
    """

    def __init__(self, metadata: Headers | None, route: str = "inference") -> None:
        self._lua = interpreter()[0]
        namespaces = {} if metadata is None else {b"kvreturn": table(metadata)}
        self._metadata = self._lua.table_from(namespaces)
        self.calls: list[Call] = []
        self.answers: Answers = lambda _: ours()
        self.passed: Callable[[], int] = lambda: 0
        values = {b"metadata": self._metadata, b"route": route.encode(), b"call": self._call}
        self.lua = self._lua.table_from(values)

    @property
    def metadata(self) -> dict[str, str]:
        """Our namespace."""
        return self.metadata_in("kvreturn")

    def metadata_in(self, namespace: str) -> dict[str, str]:
        values = self._metadata[namespace.encode()]
        return {k.decode(): v.decode() for k, v in values.items()} if values else {}

    @property
    def override(self) -> tuple[str, bool] | None:
        """The node that Envoy is to take, and whether no other will do."""
        host = self.lua[b"override"]
        return host and (host.decode(), self.lua[b"strict"])

    def _call(self, cluster: bytes, headers: Any, body: bytes, timeout: float, asynchronous: bool) -> Any:  # noqa: ANN401, FBT001
        named = {k.decode(): v.decode() for k, v in headers.items()}
        call = Call(cluster.decode(), named, body, timeout, not asynchronous, self.passed())
        answer = self.answers(call)
        if answer is None:
            return None
        self.calls.append(call)
        return table({":status": str(answer.status), **answer.headers}), answer.body


@dataclass
class FastLane:
    """One answer on its way through the scripts.

    Args:
        headers: of the answer.
        turn: what the router has put into the metadata.
        limit: as `limits.event_bytes`.
        change: edits the passing script.
        answer: what comes of a call; None if there is no such cluster.
        began: Envoy's clock as it begins, in milliseconds.
    """

    headers: Headers = field(default_factory=lambda: SSE)
    turn: Headers | None = field(default_factory=lambda: TURN)
    limit: int = 1 << 20
    change: Change = lambda script: script
    answer: Answer | None = field(default_factory=ours)
    began: int = 0
    out: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        passing, holding = scripts(self.limit)
        self.exchange = Exchange(self.turn)
        self.exchange.answers = lambda _: self.answer
        self.exchange.passed = lambda: sum(map(len, self.out))
        headers = header_map([*self.headers.items()])
        self.thread = worker(self.change(passing))
        self.at(self.began)
        self.passing = self.thread.response(self.thread, self.exchange.lua, headers)
        self.between = dict(read_map(headers))
        """The headers where ext_proc would look at them."""
        other = worker(holding)
        self.holding = other.response(other, self.exchange.lua, headers)
        self.got = dict(read_map(headers))
        """The headers that the client gets."""

    @property
    def calls(self) -> list[Call]:
        return self.exchange.calls

    @property
    def taken_on(self) -> bool:
        """Whether the script has said so to the other one."""
        return "taken" in self.exchange.metadata

    @property
    def by_ext_proc(self) -> bool:
        """Whether ext_proc looks at the answer."""
        return self.between.get("x-kvreturn-passes") != "1"

    @property
    def errors(self) -> list[bytes]:
        return [e for s in (self.passing, self.holding) for e in s.errors.values()]

    def at(self, milliseconds: int) -> None:
        """Set Envoy's clock."""
        self.thread.now = milliseconds

    def chunk(self, bytes_: bytes, *, last: bool = False) -> bytes:
        """A chunk passes; what the client gets."""
        passed = self.passing.chunk(self.passing, bytes_, last)
        out: bytes = self.holding.chunk(self.holding, passed, last)
        self.out.append(out)
        return out

    def trailers(self) -> None:
        """Trailers end the body."""
        for script in (self.passing, self.holding):
            script.trailers(script)

    def play(self, pieces: Iterable[bytes], *, by: End = "empty") -> bytes:
        """A whole answer; what the client gets.

        Args:
            pieces: of it.
            by: what ends it: an empty chunk, as Envoy's HTTP/1 codec has it, or the last one, as HTTP/2 may.
        """
        chunks = [*pieces, b""] if by == "empty" else list(pieces)
        for i, piece in enumerate(chunks, 1):
            self.chunk(piece, last=i == len(chunks))
        return b"".join(self.out)

    @property
    def told(self) -> bytes:
        """What the router has been told, in the order of the parts."""
        assert [c.number for c in self.calls] == list(range(1, len(self.calls) + 1))
        return b"".join(c.text for c in self.calls)
