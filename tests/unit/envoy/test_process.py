"""Child processes: what comes out, and how they end."""

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvreturn.envoy.process import Child, ProcessError


def child(code: str, lines: list[str] | None = None, name: str = "child") -> Child:
    lines = [] if lines is None else lines
    return Child(name, [sys.executable, "-c", code], lambda source, line: lines.append(f"{source}: {line}"))


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        (r"b'one\ntwo\n'", ["one", "two"]),
        (r"b'no end'", ["no end"]),
        (r"b'dos\r\n\r\nlast'", ["dos", "", "last"]),
        (r"b'\xff\n'", ["\ufffd"]),
        ("b'x' * 200_000 + b'\\n'", None),
    ],
)
async def test_output_comes_line_by_line(written: str, lines: list[str] | None) -> None:
    got: list[str] = []
    process = child(f"import os,sys; data={written}\nwhile data: data = data[os.write(1, data):]", got)
    await process.start()
    assert await process.wait() == 0
    texts = [line.removeprefix("child: ") for line in got]
    if lines is None:  # longer than a line may be: it comes in pieces, none of it lost
        assert len(texts) > 1
        assert "".join(texts) == "x" * 200_000
    else:
        assert texts == lines


async def test_stderr_comes_too() -> None:
    got: list[str] = []
    process = child("import sys; print('out', flush=True); print('err', file=sys.stderr)", got, "name")
    await process.start()
    await process.wait()
    assert got == ["name: out", "name: err"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('why'); raise SystemExit(3)", "child exited with code 3; its last lines:\n  why"),
        ("import os; os.kill(os.getpid(), 9)", "child was killed by SIGKILL, without any output"),
        ("for i in range(30): print(i)", "child exited with code 0; its last lines:\n  10\n  11\n"),
    ],
)
async def test_an_epitaph_tells_how_it_ended(code: str, said: str) -> None:
    process = child(code)
    await process.start()
    assert process.epitaph(await process.wait()).startswith(said)


async def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(ProcessError, match="child: cannot start /no/such/program: No such file"):
        await Child("child", ["/no/such/program"], lambda *_: None).start()


class TestStopping:
    async def test_asks_first(self) -> None:
        got: list[str] = []
        code = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("bye"), sys.exit(7)))
print("up", flush=True)
time.sleep(60)"""
        process = child(code, got)
        await process.start()
        await _until(lambda: got == ["child: up"])
        assert await process.stop(5) == 7
        assert got[-1] == "child: bye"

    async def test_kills_the_whole_group_of_one_that_will_not(self) -> None:
        got: list[str] = []
        code = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if pid := os.fork():
    os.write(1, b"%d\\n" % pid)
time.sleep(60)"""
        process = child(code, got)
        await process.start()
        await _until(lambda: len(got) == 1)
        started = time.monotonic()
        assert await process.stop(0.2) == -9
        assert time.monotonic() - started < 2
        grandchild = int(got[0].removeprefix("child: "))
        await _until(lambda: not _alive(grandchild))

    async def test_of_one_that_is_dead_returns_its_code(self) -> None:
        process = child("raise SystemExit(4)")
        await process.start()
        await process.wait()
        assert await process.stop(1) == 4


class TestReadiness:
    async def test_is_asked_until_it_is_there(self) -> None:
        answers = iter([False, False, True])
        process = child("import time; time.sleep(60)")
        await process.start()

        async def probe() -> bool:
            return next(answers)

        await process.ready(probe, 5)
        assert next(answers, None) is None
        await process.stop(1)

    async def test_fails_when_the_process_dies(self) -> None:
        process = child("raise SystemExit('broken')")
        await process.start()
        with pytest.raises(ProcessError, match="child exited with code 1; its last lines:\n  broken"):
            await process.ready(_never, 30)

    async def test_fails_after_a_while(self) -> None:
        process = child("import time; time.sleep(60)")
        await process.start()
        with pytest.raises(ProcessError, match=r"child is not ready after 0\.1 s"):
            await process.ready(_never, 0.1)
        await process.stop(1)


async def _never() -> bool:
    return False


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is waited for is another process
            await asyncio.sleep(0.01)


def _alive(pid: int) -> bool:
    """Whether a process runs; one that ended and that nobody has waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
