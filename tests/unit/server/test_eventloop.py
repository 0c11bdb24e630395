"""On which event loop the router serves."""

import asyncio
import sys

import pytest

from kvreturn.server.eventloop import run


async def library() -> str:
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


def test_the_router_serves_on_uvloop_where_that_is_installed() -> None:
    pytest.importorskip("uvloop")
    assert run(library()) == "uvloop"


def test_the_router_serves_without_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert run(library()) == "asyncio"
