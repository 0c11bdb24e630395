"""How the demo shows its turns: a table that grows, and a plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from kvreturn.demo.run import Turn


class LiveTable:
    """A table on the terminal that grows with every turn. Use as a context manager.

    Args:
        console: where to show it.
        total: number of turns to come.
        simulated: whether the figures are of simulated nodes, which the table says.
    """

    def __init__(self, console: Console, total: int, *, simulated: bool) -> None:
        self._total = total
        self._turns: list[Turn] = []
        self._note = "simulated nodes and timing" if simulated else "real vLLM"
        self._live = Live(self._table(), console=console, auto_refresh=False)

    def __enter__(self) -> Self:
        """Begin to show."""
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the table as it is."""
        self._live.stop()

    def add(self, turn: Turn) -> None:
        """Show one more turn."""
        self._turns.append(turn)
        self._live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        table = Table(title=f"turn {len(self._turns)} of {self._total}   ({self._note})", title_justify="left")
        for name in (
            "turn",
            "prompt\ntokens",
            "computed by P\noff",
            "\non",
            "read back\nfrom D",
            "TTFT ms\noff",
            "\non",
        ):
            table.add_column(name, justify="right")
        table.add_column("outcome")
        table.add_column("same\nanswer")
        for t in self._turns:
            table.add_row(
                str(t.turn),
                f"{t.prompt_tokens:,}",
                f"{t.off.computed_tokens:,}",
                f"{t.on.computed_tokens:,}",
                f"{t.on.read_back_tokens:,}",
                f"{t.off.ttft_ms:,.0f}",
                f"{t.on.ttft_ms:,.0f}",
                t.on.outcome,
                "yes" if t.identical else "[bold red]NO[/]",
            )
        return table


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
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    nodes = "simulated nodes and timing" if simulated else "real vLLM nodes on the CPU"
    axes.set_title(f"One agent conversation, turn by turn ({nodes})", loc="left")
    figure.savefig(path, dpi=150)
    plt.close(figure)
