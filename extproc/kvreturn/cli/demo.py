"""`kvreturn demo`."""

import asyncio
import json
import signal
import sys
from collections import deque
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import click
import openai
from rich.console import Console

from kvreturn.demo.run import Turn, play, sentence, summary
from kvreturn.demo.script import Script, ScriptError, built_in, from_file
from kvreturn.demo.show import TurnTable, plot
from kvreturn.demo.stack import SimOptions, simulated
from kvreturn.envoy.process import ProcessError, Sink
from kvreturn.envoy.runner import find_envoy
from kvreturn.sim import TEMPLATES

_LOG_LINES = 200
_LEGEND = """\
[bold]Simulated:[/] the nodes and all timing ({rate:,.0f} prompt tokens/s; no GPU is used).
[bold]Real:[/]      the openai client, Envoy, the router, and every byte between them.

[bold]off:[/] the prefill node P computes the whole history anew each turn.
[bold]on:[/]  P reads back from the decode node D what D holds of it.
Each turn is played off, on, and on a plain node: all answers must be equal."""
_PICTURES = (".png", ".svg", ".pdf")


@click.command()
@click.option(
    "--conversation",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Play the user and tool messages of this chat history (JSON) instead of the built-in conversation.",
)
@click.option("--template", type=click.Choice(sorted(TEMPLATES)), default="plain", show_default=True)
@click.option("--tokenizer", type=click.Choice(["exact", "blurry"]), default="exact", show_default=True)
@click.option(
    "--prefill-cache/--no-prefill-cache",
    default=False,
    show_default=True,
    help="Whether the prefill node has a prefix cache. With one node and nobody else on it the cache alone keeps all "
    "but the generated tokens, which production nodes do not.",
)
@click.option("--plot", "picture", type=click.Path(dir_okay=False, path_type=Path), help="Write a plot of the TTFT.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--verbose", is_flag=True, help="Show the logs of nodes, router and Envoy.")
def command(
    conversation: Path | None,
    template: str,
    tokenizer: str,
    prefill_cache: bool,
    picture: Path | None,
    as_json: bool,
    verbose: bool,
) -> None:
    """Play a multi-turn agent conversation through real Envoy, with and without read-back, and compare.

    The same conversation runs three times, in step: `off` (the prefill node computes the whole history each turn), `on`
    (it reads back from the decode node), and on a plain single node, the oracle. All answers must be the same; if not,
    the exit code is 1. Nodes and their timing are simulated; client, Envoy, router and protocol are real.
    """
    try:
        script = from_file(conversation) if conversation else built_in()
    except ScriptError as e:
        raise click.ClickException(str(e)) from None
    _check_picture(picture)
    _check_envoy()
    options = SimOptions(template=template, tokenizer=tokenizer, prefill_cache=prefill_cache)
    logs: deque[str] = deque(maxlen=_LOG_LINES)

    def sink(name: str, line: str) -> None:
        logs.append(f"{name}: {line}")
        if verbose:
            click.echo(logs[-1], err=True)

    console = Console(stderr=as_json, quiet=as_json)
    try:
        turns = asyncio.run(_until_signal(_run(script, options, console, sink)))
    except ProcessError as e:
        raise click.ClickException(str(e)) from None
    except openai.APIStatusError as e:
        raise click.ClickException(f"the nodes refused a request of the conversation: {e.message}") from None
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise click.Abort from None
    except Exception:
        if not verbose:
            click.echo("\n".join(["The last log lines:", *logs]), err=True)
        raise
    result = _tell(turns, console, picture, as_json=as_json)
    if not result["identical"]:
        click.echo("The answers differ: this must never happen.", err=True)
        sys.exit(1)


def _check_envoy() -> None:
    """Before all the nodes are started in vain."""
    try:
        find_envoy()
    except ProcessError as e:
        raise click.ClickException(str(e)) from None


def _check_picture(picture: Path | None) -> None:
    if picture and (picture.suffix not in _PICTURES or not picture.absolute().parent.is_dir()):
        endings = ", ".join(_PICTURES)
        raise click.ClickException(f"--plot {picture}: give a name ending in {endings}, in a folder that exists")


def _tell(turns: list[Turn], console: Console, picture: Path | None, *, as_json: bool) -> dict[str, Any]:
    result = summary("sim", turns)
    if picture:
        plot(turns, picture, simulated=True)
        console.print(f"\nPlot: {picture}")
    if as_json:
        click.echo(json.dumps(result))
    else:
        console.print("\n" + sentence(result), highlight=False)
        if result["identical"]:
            console.print("In every turn all three answers were the same.")
    return result


async def _until_signal(work: Coroutine[Any, Any, list[Turn]]) -> list[Turn]:
    """Run it, and end it in order when it is to stop or its terminal goes: the processes of the demo go with it."""
    task = asyncio.ensure_future(work)
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await task


async def _run(script: Script, options: SimOptions, console: Console, sink: Sink) -> list[Turn]:
    turns: list[Turn] = []
    console.print(_LEGEND.format(rate=options.prefill_rate), highlight=False)
    with console.status("") as status:
        async with simulated(options, sink, lambda what: status.update(f"starting {what}")) as stack:
            status.stop()
            with TurnTable(console, script.length) as table:
                async for turn in play(stack, script):
                    turns.append(turn)
                    table.add(turn)
    return turns
