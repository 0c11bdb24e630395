"""The supervisor of worker processes, with workers that do as told."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

import pytest

from kvreturn.server import supervisor
from kvreturn.server.supervisor import REFUSED, Supervisor, SupervisorError
from support.harness import settings

# Starts gRPC, as a router does, and ends well when told to.
GRPC = """
import asyncio, signal, grpc.aio
async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = grpc.aio.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print("up", flush=True)
    await stop.wait()
    await server.stop(0)
asyncio.run(main())
"""


def supervise(code: str, count: int = 1, drain_timeout: float = 1.0) -> Supervisor:
    return Supervisor(
        count,
        lambda index: [sys.executable, "-c", code, str(index)],
        lambda: settings(drain_timeout=drain_timeout),
    )


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.005)


async def test_fr131_twenty_restarts_without_one_that_hangs(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is forked from a process that runs gRPC, as this one does: that hangs at random (grpc#29044)."""
    caplog.set_level(logging.INFO)
    one = supervise(GRPC, 2)
    running = asyncio.create_task(one.run())
    written: list[str] = []

    def are_up(times: int) -> bool:
        written.append(capfd.readouterr().out)
        return "".join(written).count("up") == times

    for i in range(1, 11):
        await until(partial(are_up, 2 * i))
        for process in one._running.values():
            process.terminate()
    await until(lambda: are_up(22))
    one._stop()
    await asyncio.wait_for(running, 10)
    assert caplog.text.count("exited with code 0; it is started again in 0 s") == 20


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("import sys; sys.exit(3)", "exited with code 3"),
        ("import os; os.abort()", "was killed by SIGABRT"),
    ],
)
async def test_a_worker_that_dies_at_once_again_and_again_ends_all(
    code: str, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "_BACKOFF", (0.0, 0.01))
    dies = f"import sys, time\nif sys.argv[1] == '0': time.sleep(60)\n{code}"
    with pytest.raises(SupervisorError, match=f"worker 1 {how}, 5 times in a row within 10 s of its start"):
        await asyncio.wait_for(supervise(dies, 2).run(), 20)
    assert caplog.text.count("it is started again") == 4
    assert f"worker 1 {how}, 5 times in a row within 10 s of its start; stopping" in caplog.text


async def test_a_worker_that_cannot_start_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SupervisorError, match="worker 0 could not start"):
        await asyncio.wait_for(supervise(f"raise SystemExit({REFUSED})").run(), 10)
    assert "started again" not in caplog.text


async def test_a_worker_that_does_not_end_is_killed_and_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "_BEYOND", 0.1)
    stuck = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    one = supervise(stuck, drain_timeout=0.1)
    running = asyncio.create_task(one.run())
    await until(lambda: "up" in capfd.readouterr().out)
    (process,) = one._running.values()
    one._stop()
    with pytest.raises(SupervisorError, match="worker 0 was killed by SIGKILL while it drained"):
        await asyncio.wait_for(running, 10)
    assert process.returncode == -signal.SIGKILL


async def test_a_sighup_that_comes_early_waits_for_the_worker(capfd: pytest.CaptureFixture[str]) -> None:
    early = (
        "import signal, time, sys\ntime.sleep(0.2)\nsignal.signal(signal.SIGHUP, lambda *_: print('hup', flush=True))\n"
    )
    early += "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})\ntime.sleep(60)"
    one = supervise(early)
    running = asyncio.create_task(one.run())
    await until(lambda: bool(one._running))
    os.kill(os.getpid(), signal.SIGHUP)
    await until(lambda: "hup" in capfd.readouterr().out)
    one._stop()
    await asyncio.wait_for(running, 10)
