"""The fast lane's scripts in a Lua interpreter of this process, with a stand-in for Envoy around them."""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lupa import luajit21

from kvreturn.core.packed import unpack
from kvreturn.envoy.lanes import hold_script, pass_script

SSE = {":status": "200", "content-type": "text/event-stream; charset=utf-8", "transfer-encoding": "chunked"}
TURN = {"turn": "a-secret", "router": "kvreturn_router@here"}
Headers = Mapping[str, str]
End = Literal["empty", "last"]


@dataclass
class Call:
    """A call of a script to the router.

    Attributes:
        cluster: that it goes to.
        headers: of the call.
        body: of it.
        waited: whether the answer was held until it was done.
        passed: bytes that the client had by then.
    """

    cluster: str
    headers: dict[str, str]
    body: bytes
    waited: bool
    passed: int

    @property
    def text(self) -> bytes:
        """The node's bytes, packed in gRPC's frame."""
        assert self.body[0] == 0
        assert int.from_bytes(self.body[1:5], "big") == len(self.body) - 5
        return unpack(self.body[5:])

    @property
    def about(self) -> list[str]:
        return self.headers["x-kvreturn-part"].split(" ")

    @property
    def number(self) -> int:
        return int(self.about[0])

    @property
    def last(self) -> bool:
        return self.about[1] == "1"


_pass_script = functools.cache(pass_script)
_hold_script = functools.cache(functools.partial(hold_script, 0.02))


@functools.cache
def interpreter() -> tuple[Any, Any]:
    """LuaJIT, as Envoy has it, and the stand-in."""
    lua = luajit21.LuaRuntime(encoding=None, unpack_returned_tuples=True)
    return lua, lua.execute(Path(__file__).with_name("envoy_api.lua").read_bytes())


def packed(pieces: Iterable[bytes], takes: Collection[int] = ()) -> bytes:
    """What the script keeps of these pieces; it is taken before each of these numbers, and at the end."""
    lua, _ = interpreter()
    kept = lua.execute((pass_script(1) + "\nreturn new_kept()").encode())
    out = []
    for i, piece in enumerate(pieces):
        if i in takes:
            out.append(kept.take(kept))
        kept.add(kept, piece)
    return b"".join([*out, kept.take(kept)])


@dataclass
class FastLane:
    """One answer on its way through the scripts.

    Args:
        headers: of the answer.
        turn: what the router has put into the metadata.
        limit: as `limits.event_bytes`.
        change: edits the passing script.
        status: gRPC's, of answers that are not the router's.
    """

    headers: Headers = field(default_factory=lambda: SSE)
    turn: Headers | None = field(default_factory=lambda: TURN)
    limit: int = 1 << 20
    change: Callable[[str], str] = lambda script: script
    status: bytes | None = None
    calls: list[Call] = field(default_factory=list)
    out: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        lua, stream = interpreter()
        self._lua = lua
        ours = {b"kvreturn": self._table(self.turn)} if self.turn is not None else {}
        self._metadata = lua.table_from(ours)
        headers = self._table(self.headers)
        script = self.change(_pass_script(self.limit)).encode()
        self.passing = stream(script, headers, self._metadata, self._call)
        self.holding = stream(_hold_script().encode(), headers, self._metadata, self._call)

    def _table(self, values: Headers) -> Any:  # noqa: ANN401 - lupa has no types
        return self._lua.table_from({k.encode(): v.encode() for k, v in values.items()})

    def _call(self, cluster: bytes, headers: Any, body: bytes, timeout: int, asynchronous: bool) -> bytes | None:  # noqa: ANN401, FBT001
        assert 0 < timeout <= 5000
        named = {k.decode(): v.decode() for k, v in headers.items()}
        self.calls.append(Call(cluster.decode(), named, body, not asynchronous, len(b"".join(self.out))))
        return self.status

    @property
    def taken_on(self) -> bool:
        """Whether the script has said so to the router."""
        ours = self._metadata[b"kvreturn"]
        return bool(ours) and ours[b"lane"] == TURN["turn"].encode()

    @property
    def errors(self) -> list[bytes]:
        return [e for s in (self.passing, self.holding) for e in s.errors.values()]

    def at(self, milliseconds: int) -> None:
        """Set Envoy's clock."""
        self.passing.now = milliseconds

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
