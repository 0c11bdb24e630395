"""The side channel: vLLM's own question, ours, and strangers'."""

import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from kvreturn_connector.pins import PinTable
from kvreturn_connector.sidechannel import Asker, listen

META = b"get_meta_msg"


@pytest.fixture
def port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture
def pins(port: int) -> Iterator[PinTable]:
    table = PinTable(10, 480.0, time.perf_counter)
    ready, stop = threading.Event(), threading.Event()
    options = {"metadata": {(0, 0): b"payload"}, "get_meta": META, "pins": table, "ready": ready, "stop": stop}
    thread = threading.Thread(target=listen, args=("127.0.0.1", port), kwargs=options)
    thread.start()
    assert ready.wait(2)
    yield table
    stop.set()
    thread.join(3)
    assert not thread.is_alive()


@pytest.fixture
def asker() -> Iterator[Asker]:
    asker = Asker(0.3)
    yield asker
    asker.close()


def question(port: int, message: bytes) -> list[bytes] | None:
    context = zmq.Context()
    try:
        client = context.socket(zmq.REQ)
        client.connect(f"tcp://127.0.0.1:{port}")
        client.send(message)
        return client.recv_multipart() if client.poll(300) else None
    finally:
        context.destroy(linger=0)


def test_vllms_handshake_is_answered_as_vllm_does(pins: PinTable, port: int) -> None:
    assert pins.pins == 0
    before = time.perf_counter()
    answer = question(port, msgspec.msgpack.encode((META, 0, 0)))
    assert answer
    assert answer[0] == b"payload"
    assert before <= msgspec.msgpack.decode(answer[1]) <= time.perf_counter()


@pytest.mark.parametrize("message", [b"\xff\xff", b"", msgspec.msgpack.encode(("x", 1)), msgspec.msgpack.encode(7)])
def test_a_strangers_message_ends_nothing(pins: PinTable, port: int, message: bytes) -> None:
    """vLLM 0.32.0's own listener thread ends on such a message, and the node is unreachable from then on."""
    assert pins.pins == 0
    assert question(port, message) is None
    assert question(port, msgspec.msgpack.encode((META, 0, 0)))


def test_a_pin_is_claimed_and_released_over_it(pins: PinTable, port: int, asker: Asker) -> None:
    pins.pin("a", [1], b"A", releasable=True)
    pins.pin("b", [2], b"B", releasable=True)
    address = ("127.0.0.1", port)
    assert asker.claim(address, "a", b"A").result(2) == ""
    assert asker.claim(address, "a", b"A").result(2) == "used"
    assert asker.claim(address, "b", b"X").result(2) == "mac"
    asker.release(address, "b", b"B")
    deadline = time.monotonic() + 2
    while pins.pins > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pins.take_orders().release == {"b"}


def test_a_peer_that_does_not_answer_costs_the_timeout_once(port: int, asker: Asker) -> None:
    begun = time.monotonic()
    assert asker.claim(("127.0.0.1", port), "a", b"A").result(2) == "node_gone"
    assert 0.25 < time.monotonic() - begun < 1.0
    begun = time.monotonic()
    assert asker.claim(("127.0.0.1", port), "a", b"A").result(2) == "node_gone"
    assert time.monotonic() - begun < 0.1
