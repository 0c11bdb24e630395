"""The side channel between nodes: vLLM's handshake, and our question whether D still holds what it offered.

vLLM's own listener answers one kind of message and ends on any other. Ours answers the same one, survives any other,
and adds two of our own, on the same port: `claim` (hold these blocks for me, once) and `release` (nobody reads them).
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import zmq

from kvreturn_connector.pins import PinTable

logger = logging.getLogger("vllm.kvreturn")
_NAME, _VERSION = b"kvreturn", 1
_POLL_MS = 1000
_GONE_SECONDS = 5.0  # for so long a peer that did not answer is not asked again


def path(host: str, port: int) -> str:
    """ZMQ's address of a side channel."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def listen(
    host: str,
    port: int,
    *,
    metadata: Mapping[tuple[int, int], bytes],
    get_meta: bytes,
    pins: PinTable | None,
    ready: threading.Event,
    stop: threading.Event,
) -> None:
    """Answer until `stop` is set.

    Args:
        host: to bind to.
        port: to bind to.
        metadata: vLLM's handshake payloads by (pipeline rank, tensor rank).
        get_meta: vLLM's word for its question.
        pins: of this engine; None if it keeps none.
        ready: set once the socket is bound.
        stop: ends the loop within a second.
    """
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    try:
        if ":" in host:
            socket.setsockopt(zmq.IPV6, 1)
        socket.bind(path(host, port))
        ready.set()
        while not stop.is_set():
            if not socket.poll(_POLL_MS):
                continue
            frames = socket.recv_multipart()
            try:
                identity, _, question = frames
                answer = _answer(msgspec.msgpack.decode(question), metadata, get_meta, pins)
            except Exception as e:  # noqa: BLE001 - a stranger's message must not end the thread
                logger.warning("kvreturn: dropped a message on the side channel: %s", type(e).__name__)
                continue
            socket.send_multipart([identity, b"", *answer])
    finally:
        context.destroy(linger=0)


def _answer(
    question: Any, metadata: Mapping[tuple[int, int], bytes], get_meta: bytes, pins: PinTable | None
) -> list[bytes]:
    kind, *rest = question
    if kind in (get_meta, get_meta.decode(errors="replace")):
        pp_rank, tp_rank = rest
        # The peer estimates the offset of our clock by it, to compare deadlines of pins.
        return [metadata[pp_rank, tp_rank], msgspec.msgpack.encode(time.perf_counter())]
    if kind not in (_NAME, _NAME.decode()):
        raise ValueError("unknown question")
    version, verb, request_id, mark = rest
    if version != _VERSION or pins is None:
        return [msgspec.msgpack.encode("version")]
    if verb == "claim":
        return [msgspec.msgpack.encode(pins.claim(request_id, mark) or "")]
    if verb == "release":
        return [msgspec.msgpack.encode("" if pins.release(request_id, mark) else "used")]
    raise ValueError("unknown verb")


class Asker:
    """Asks D, in the background.

    Args:
        timeout: seconds to wait for an answer.
        clock: monotonic seconds.
    """

    def __init__(self, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout = timeout
        self._clock = clock
        self._context = zmq.Context()
        self._threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="kvreturn-ask")
        self._gone: dict[tuple[str, int], float] = {}

    def claim(self, address: tuple[str, int], request_id: str, mark: bytes) -> "Future[str]":
        """Ask D to hold the blocks for us. The result is empty, or the reason why not."""
        return self._threads.submit(self._ask, address, "claim", request_id, mark)

    def release(self, address: tuple[str, int], request_id: str, mark: bytes) -> "Future[str]":
        """Tell D that nobody will read the blocks. If it does not hear it, its TTL frees them.

        The result is empty, or the reason why there was nothing to free.
        """
        return self._threads.submit(self._ask, address, "release", request_id, mark)

    def close(self) -> None:
        """Stop asking."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._context.destroy(linger=0)

    def _ask(self, address: tuple[str, int], verb: str, request_id: str, mark: bytes) -> str:
        if self._gone.get(address, 0.0) > self._clock():
            return "node_gone"
        socket = self._context.socket(zmq.REQ)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            if ":" in address[0]:
                socket.setsockopt(zmq.IPV6, 1)
            socket.connect(path(*address))
            socket.send(msgspec.msgpack.encode((_NAME, _VERSION, verb, request_id, mark)))
            if not socket.poll(int(self._timeout * 1000)):
                self._gone[address] = self._clock() + _GONE_SECONDS
                return "node_gone"
            self._gone.pop(address, None)
            answer = msgspec.msgpack.decode(socket.recv())
            return answer if isinstance(answer, str) else "node_gone"
        except (zmq.ZMQError, msgspec.MsgspecError):
            return "node_gone"
        finally:
            socket.close()
