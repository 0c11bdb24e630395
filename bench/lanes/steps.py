"""A router that notes when each step of a request begins and ends.

For the waterfall only: `kvreturn serve` with a stopwatch around the functions that the steps are, so that the product
itself carries none. Requests must come one at a time.

usage: python steps.py OUT_FILE SETTINGS_FILE
"""

import functools
import inspect
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(_ROOT / "extproc")]

from kvreturn.cli.main import main as kvreturn
from kvreturn.core.turn import Turn
from kvreturn.server import calls
from kvreturn.server.calls import Calls
from kvreturn.server.exchange import Exchange
from kvreturn.server.world import World
from kvreturn.upstream.client import PrefillClient
from kvreturn.upstream.pool import Pool

STEPS: list[tuple[Any, str, str]] = [
    (Calls, "_request", "call"),
    (Calls, "_told", "in all"),
    (Turn, "_read", "read"),
    (World, "take", "take"),
    (Pool, "choose", "choose"),
    (PrefillClient, "_post", "P leg"),
    (Turn, "_forward", "rewrite"),
    (calls, "reply", "answer"),
]


class _Stopwatch:
    """Collects the steps of one exchange after another."""

    def __init__(self, path: Path) -> None:
        self._out = path.open("w")
        self._steps: list[tuple[str, float, float]] = []

    def around(self, owner: Any, name: str, step: str) -> None:  # noqa: ANN401 - a class or a module
        """Put itself around a function."""
        inner = getattr(owner, name)
        note = self._steps.append

        if inspect.iscoroutinefunction(inner):

            @functools.wraps(inner)
            async def timed_async(*args: object, **kwargs: object) -> object:
                begun = time.perf_counter()
                try:
                    return await inner(*args, **kwargs)
                finally:
                    note((step, begun, time.perf_counter()))

            setattr(owner, name, timed_async)
            return

        @functools.wraps(inner)
        def timed(*args: object, **kwargs: object) -> object:
            begun = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                note((step, begun, time.perf_counter()))

        setattr(owner, name, timed)

    def at_end(self, owner: Any, name: str) -> None:  # noqa: ANN401 - as above
        """Write down what was noted when this function is called, and begin anew."""
        inner: Callable[..., object] = getattr(owner, name)

        @functools.wraps(inner)
        def ended(*args: object, **kwargs: object) -> object:
            print(json.dumps(self._steps), file=self._out, flush=True)
            self._steps.clear()
            return inner(*args, **kwargs)

        setattr(owner, name, ended)


def main() -> None:
    """Serve."""
    out, settings = sys.argv[1:]
    stopwatch = _Stopwatch(Path(out))
    for owner, name, step in STEPS:
        stopwatch.around(owner, name, step)
    stopwatch.at_end(Exchange, "close")
    kvreturn(["serve", "--config", settings, "--log-level", "warning"])


if __name__ == "__main__":
    main()
