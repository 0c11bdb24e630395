"""Addresses that cannot be listened on are found before anything starts."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvreturn.core.address import are_told_apart
from kvreturn.envoy.ports import unavailable


@pytest.fixture
def taken() -> Iterator[str]:
    """An address on which somebody listens who shares it, as Envoy and gRPC servers do."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        s.bind(("127.0.0.1", 0))
        s.listen()
        yield f"127.0.0.1:{s.getsockname()[1]}"


def test_one_that_somebody_listens_on_is_named_with_its_setting(taken: str) -> None:
    said = unavailable({"envoy.listen": taken})
    assert said == [f"{taken} (envoy.listen): Address already in use; free it, or choose another one"]


def test_one_that_only_closing_connections_use_is_free() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = server.getsockname()
        with socket.create_connection(address):
            accepted, _ = server.accept()
            accepted.close()  # we close first: the address stays in TIME_WAIT
    assert unavailable({"listen": f"{address[0]}:{address[1]}"}) == []


def test_one_that_is_not_ours_is_named() -> None:
    (said,) = unavailable({"listen": "198.51.100.1:80"})
    assert said.startswith("198.51.100.1:80 (listen): Cannot assign requested address")


def test_a_unix_socket_is_taken_only_while_somebody_listens(tmp_path: Path) -> None:
    listen = f"unix:{tmp_path}/s"
    assert unavailable({"listen": listen}) == []
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(f"{tmp_path}/s")
        s.listen()
        assert unavailable({"listen": listen}) == [
            f"{listen} (listen): Address already in use; free it, or choose another one"
        ]
    assert (tmp_path / "s").exists()
    assert unavailable({"listen": listen}) == []


@pytest.mark.parametrize(
    ("listens", "apart"),
    [
        (["127.0.0.1:1"], True),
        (["localhost:1", "[fd00::1]:1", "unix:/run/router"], True),
        (["router:1"], False),  # a headless Service has all routers under one name
        (["127.0.0.1:1", "router-0.routers:1"], False),
        ([], True),
    ],
)
def test_servers_are_told_apart_by_addresses_and_not_by_names(listens: list[str], *, apart: bool) -> None:
    assert are_told_apart(listens) is apart
