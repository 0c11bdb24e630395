"""How the demo shows what it does: its start, its turns as rows that come one by one, and a plot."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.text import Text

from kvreturn.demo.run import Turn
from kvreturn.demo.stack import Engine

_LEGENDS: dict[Engine, str] = {
    "sim": """\
[bold]Simulated:[/] the nodes and all timing ({rate:,.0f} prompt tokens/s; no GPU is used).
[bold]Real:[/]      the openai client, Envoy, the router, and every byte between them.""",
    "vllm-cpu": """\
[bold]Real:[/] vLLM and NIXL on the CPU, their counters, the client, Envoy, the router.
[bold]Tiny:[/] the model, with random weights: times mean nothing for GPUs; tokens do.""",
}
_LEGEND = """

[bold]off:[/] the prefill node P computes the whole history anew each turn.
[bold]on:[/]  P reads back from the decode node D what D holds of it.
Each turn is played off, on, and on a plain node: all answers must be equal."""
_NODES: dict[Engine, str] = {
    "sim": "simulated nodes and timing",
    "vllm-cpu": "real vLLM on the CPU, tiny random model",
}
_LONG = 3.0  # seconds

# Rows stay below 80 columns with the longest outcome, and come one by one: so they can be read in any terminal, and in
# the log of a CI run as well. Each group's title stands over its two columns.
_GROUPS = f"{'':14}{' computed by P ':─^17}{'read back':>11}  {' TTFT, ms ':─^14}"
_NAMES = f"{'turn':>5}{'prompt':>9}{'off':>8}{'on':>9}{'from D':>11}{'off':>9}{'on':>7}  outcome"


def legend(engine: Engine, rate: float) -> str:
    """What is real and what is not, and what the columns mean. `rate`: of the simulated P, in tokens/s."""
    return _LEGENDS[engine].format(rate=rate) + _LEGEND


class Starting:
    """Says what is being waited for and for how long; what took long gets a line that stays. A context manager.

    Call it with each thing that is started next.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status(self)  # drawn anew all the time, so the seconds run
        self._what = ""
        self._since = time.monotonic()

    def __enter__(self) -> Self:
        """Nothing is shown before the first call."""
        return self

    def __exit__(self, *_: object) -> None:
        """Take the line away."""
        self._status.stop()

    def __rich__(self) -> str:
        """The line that is shown meanwhile."""
        return f"starting {self._what} ({self._seconds:.0f} s)"

    def __call__(self, what: str) -> None:
        """Now this is being started, and what was before it is there."""
        self.done()
        self._what, self._since = what, time.monotonic()
        self._status.start()

    def done(self) -> None:
        """All is there."""
        self._status.stop()
        if self._what and self._seconds > _LONG:
            self._console.print(f"Ready after {self._seconds:.0f} s: {self._what}.", highlight=False)

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._since


class TurnTable:
    """A table that grows with every turn, and a line below it that says what is under way. Use as a context manager.

    Args:
        console: where to show it.
        total: number of turns to come.
    """

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._shown = 0
        self._status = console.status("")

    def __enter__(self) -> Self:
        """Show the head."""
        self._console.print()
        self._line(Text(_GROUPS))
        self._line(Text(_NAMES, style="bold"))
        self._status.start()
        self._announce()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the rows as they are."""
        self._status.stop()

    def add(self, turn: Turn) -> None:
        """Show one more turn."""
        off, on = turn.ways["off"], turn.ways["on"]
        row = Text(
            f"{turn.turn:>5}{turn.prompt_tokens:>9,}{off.computed_tokens:>8,}{on.computed_tokens:>9,}"
            f"{on.read_back_tokens:>11,}{off.ttft_ms:>9,.0f}{on.ttft_ms:>7,.0f}  {on.outcome}"
        )
        if not turn.identical:
            row.append("  ANSWERS DIFFER", style="bold red")
        self._line(row)
        self._shown += 1
        self._announce()

    def _announce(self) -> None:
        if self._shown < self._total:
            self._status.update(f"turn {self._shown + 1} of {self._total}: off, on, and on a plain node")
        else:
            self._status.stop()

    def _line(self, text: Text) -> None:
        self._console.print(text, no_wrap=True, overflow="ignore", crop=False)


def plot(turns: Sequence[Turn], path: Path, engine: Engine) -> None:
    """Time to first token over prompt length, off and on, as a picture."""
    import matplotlib as mpl  # noqa: PLC0415 - takes half a second, and only --plot needs it

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    prompts = [t.prompt_tokens for t in turns]
    axes.plot(
        prompts,
        [t.ways["off"].ttft_ms for t in turns],
        "o-",
        color="#b35900",
        label="off: P computes the history again",
    )
    axes.plot(prompts, [t.ways["on"].ttft_ms for t in turns], "o-", color="#00687a", label="on: P reads it back from D")
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("time to first token, ms")
    axes.set_ylim(bottom=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.set_title(f"One agent conversation, turn by turn ({_NODES[engine]})", loc="left")
    figure.savefig(path, dpi=150)
    plt.close(figure)
