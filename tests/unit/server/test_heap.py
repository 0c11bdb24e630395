"""How the router's process keeps its memory; in processes of their own, since it cannot be undone."""

import platform
import subprocess
import sys

import pytest

BODIES = """
import resource
from kvreturn.server import heap
{prepare}
for turn in range(60):
    if turn == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    copies = [b"x" * 1_000_000 for _ in range(8)]
    del copies
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
START = """
import gc
import kvreturn.server.app
from kvreturn.server import heap
{prepare}
print(len(gc.get_objects()))
"""


def run(script: str, prepare: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", script.format(prepare=prepare)], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep to their own ways")
def test_large_bodies_use_memory_that_is_there_already() -> None:
    pages = 50 * 8 * 1_000_000 // 4096
    assert run(BODIES, "") > pages // 2
    assert run(BODIES, "heap.keep_large()") < pages // 50


def test_the_collector_need_not_look_through_what_starting_made() -> None:
    assert run(START, "") > 30_000
    assert run(START, "heap.leave_start_alone()") < 100
