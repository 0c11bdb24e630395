"""The supervisor of worker processes, with workers that do as told."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

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

SLEEPS = "import time; print('up', flush=True); time.sleep(60)"


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
    assert caplog.text.count("exited with code 0; it is started again in 0 s, and knows of no drained nodes") == 20


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


async def test_a_worker_that_refuses_settings_which_were_changed_waits_for_good_ones_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "_BACKOFF", (0.0, 0.01))
    bad = tmp_path / "bad"
    one = supervise(f"import os, time\nif os.path.exists({str(bad)!r}): os._exit({REFUSED})\n{SLEEPS}", 2)
    running = asyncio.create_task(one.run())
    written: list[str] = []

    def are_up(times: int) -> bool:
        written.append(capfd.readouterr().out)
        return "".join(written).count("up") == times

    await until(partial(are_up, 2))
    bad.touch()
    one._running[1].kill()
    await until(lambda: caplog.text.count(f"exited with code {REFUSED}; it is started again") == 6)
    bad.unlink()
    await until(partial(are_up, 3))
    one._stop()
    await asyncio.wait_for(running, 10)


async def test_a_worker_that_the_machine_has_no_room_for_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "_BACKOFF", (0.0, 0.01))
    programs = iter(["/nowhere", sys.executable])  # the system's refusal comes as an OSError either way
    one = Supervisor(1, lambda _: [next(programs), "-c", SLEEPS], settings)
    running = asyncio.create_task(one.run())
    await until(lambda: "up" in capfd.readouterr().out)
    one._stop()
    await asyncio.wait_for(running, 10)


async def test_a_worker_that_has_just_died_keeps_no_signal_from_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    one = supervise(SLEEPS)
    running = asyncio.create_task(one.run())
    await until(lambda: "up" in capfd.readouterr().out)
    dead = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await dead.wait()
    one._running = {1: dead, **one._running}
    one._stop()
    await asyncio.wait_for(running, 10)


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


async def test_workers_that_have_not_read_a_shorter_drain_timeout_get_the_time_that_they_know_of(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "_BEYOND", 0.1)
    file = [5.0]
    drains = "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.7), exit(0)))\n" + SLEEPS
    one = Supervisor(1, lambda _: [sys.executable, "-c", drains], lambda: settings(drain_timeout=file[0]))
    running = asyncio.create_task(one.run())
    await until(lambda: "up" in capfd.readouterr().out)
    file[0] = 0.1  # and no SIGHUP
    one._stop()
    await asyncio.wait_for(running, 10)


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
