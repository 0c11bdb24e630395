"""How the demo shows its turns: rows that come one by one, and a plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.text import Text

from kvreturn.demo.run import Turn

# Rows stay below 80 columns with the longest outcome, and come one by one: so they can be read in any terminal, and in
# the log of a CI run as well. Each group's title stands over its two columns.
_GROUPS = f"{'':14}{' computed by P ':─^17}{'read back':>11}  {' TTFT, ms ':─^14}"
_NAMES = f"{'turn':>5}{'prompt':>9}{'off':>8}{'on':>9}{'from D':>11}{'off':>9}{'on':>7}  outcome"


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
        off, on = turn.off, turn.on
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


def plot(turns: Sequence[Turn], path: Path, *, simulated: bool) -> None:
    """Time to first token over prompt length, off and on, as a picture."""
    import matplotlib as mpl  # noqa: PLC0415 - takes half a second, and only --plot needs it

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    prompts = [t.prompt_tokens for t in turns]
    axes.plot(prompts, [t.off.ttft_ms for t in turns], "o-", color="#b35900", label="off: P computes the history again")
    axes.plot(prompts, [t.on.ttft_ms for t in turns], "o-", color="#00687a", label="on: P reads it back from D")
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("time to first token, ms")
    axes.set_ylim(bottom=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    nodes = "simulated nodes and timing" if simulated else "real vLLM nodes on the CPU"
    axes.set_title(f"One agent conversation, turn by turn ({nodes})", loc="left")
    figure.savefig(path, dpi=150)
    plt.close(figure)
