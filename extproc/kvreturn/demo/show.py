"""How the demo shows what it does: its start, its turns as rows that come one by one, and a plot."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.text import Text

from kvreturn.demo.run import PAUSE, Turn
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

[bold]off:[/]   the prefill node P computes the whole history anew each turn.
[bold]lazy:[/]  P reads back from the decode node D what D holds; the client waits.
[bold]eager:[/] P reads it back right after the turn, into its prefix cache, while the
       agent's tools run ({pause:g} s in every way): before the client asks again.
{cache}
Each turn is played in all three ways, and on a plain node, P and D in one: all
answers must be equal."""
_CACHES = {
    False: """\
In each turn P loses its KV of the conversation, as if other traffic took the
room. Off and lazy have a P without prefix cache. Eager needs one, so it has a
P of its own; its cache is dropped while D generates, and then all comes back.""",
    True: """\
All have one P, with a prefix cache that nobody else uses: it keeps the prompts
by itself, and only what D generated is left to read back.""",
}
_NODES: dict[Engine, str] = {
    "sim": "simulated nodes and timing",
    "vllm-cpu": "real vLLM on the CPU, tiny random model",
}
_CURVES = (
    ("off", "#b35900", "P computes the history again"),
    ("lazy", "#00687a", "P reads it back from D, the client waits"),
    ("eager", "#5b3a8c", "P has it back before the client asks"),
)
_LONG = 3.0  # seconds

# Rows stay below 80 columns and come one by one: so they can be read in any terminal, and in the log of a CI run as
# well. Each group's title stands over its columns.
_GROUPS = f"{'':11} {' computed by P ':─^20} {' TTFT, ms ':─^18} {' read back ':─^13}"
_NAMES = (
    f"{'turn':>4}{'prompt':>7}{'off':>7}{'lazy':>7}{'eager':>7}{'off':>7}{'lazy':>6}{'eager':>6}{'lazy':>7}{'eager':>7}"
    "  outcome"
)
_OUTCOME = 12  # columns that are left for it


def legend(engine: Engine, rate: float, *, all_cached: bool) -> str:
    """What is real and what is not, and what the columns mean.

    Args:
        engine: what the nodes are.
        rate: of the simulated P, in tokens/s.
        all_cached: whether all ways are played on a P with a prefix cache.
    """
    return _LEGENDS[engine].format(rate=rate) + _LEGEND.format(pause=PAUSE, cache=_CACHES[all_cached])


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
        off, lazy, eager = (turn.ways[name] for name in ("off", "lazy", "eager"))
        row = Text(
            f"{turn.turn:>4}{turn.prompt_tokens:>7,}"
            f"{off.computed_tokens:>7,}{lazy.computed_tokens:>7,}{eager.computed_tokens:>7,}"
            f"{off.ttft_ms:>7,.0f}{lazy.ttft_ms:>6,.0f}{eager.ttft_ms:>6,.0f}"
            f"{lazy.read_back_tokens:>7,}{eager.returned_tokens:>7,}"
        )
        outcome = lazy.outcome if lazy.outcome == eager.outcome else f"lazy {lazy.outcome}, eager {eager.outcome}"
        row.append("  " if len(outcome) <= _OUTCOME else "\n      ").append(outcome)
        if not turn.identical:
            row.append("\n      ANSWERS DIFFER", style="bold red")
        self._line(row)
        self._shown += 1
        self._announce()

    def _announce(self) -> None:
        if self._shown < self._total:
            self._status.update(f"turn {self._shown + 1} of {self._total}: off, lazy, eager, and on a plain node")
        else:
            self._status.stop()

    def _line(self, text: Text) -> None:
        self._console.print(text, no_wrap=True, overflow="ignore", crop=False)


def plot(turns: Sequence[Turn], path: Path, engine: Engine) -> None:
    """Time to first token over prompt length, each way a curve, as a picture."""
    import matplotlib as mpl  # noqa: PLC0415 - takes half a second, and only --plot needs it

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    prompts = [t.prompt_tokens for t in turns]
    for name, color, label in _CURVES:
        axes.plot(prompts, [t.ways[name].ttft_ms for t in turns], "o-", color=color, label=f"{name}: {label}")
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
