"""`kvreturn demo`."""

import asyncio
import contextlib
import json
import signal
import sys
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import click
import openai
from rich.console import Console

from kvreturn.demo.result import sentences, summary
from kvreturn.demo.run import Turn, play, warm_up
from kvreturn.demo.script import Script, ScriptError, built_in, from_file
from kvreturn.demo.show import Starting, TurnTable, legend, plot
from kvreturn.demo.stack import Engine, SimOptions, Stack, simulated
from kvreturn.demo.vllm_node import PYTHON_ENV, EngineMissingError
from kvreturn.demo.vllm_node import engine_python as find_engine
from kvreturn.demo.vllm_stack import VllmOptions, on_vllm
from kvreturn.envoy.process import ProcessError
from kvreturn.envoy.runner import find_envoy
from kvreturn.sim import TEMPLATES

_LOG_LINES = 200
Nodes = Callable[[Callable[[str], None]], AbstractAsyncContextManager[Stack]]
"""Starts the demo's processes, and says what is being waited for."""
_PICTURES = (".png", ".svg", ".pdf")


@click.command()
@click.option(
    "--engine",
    type=click.Choice(["sim", "vllm-cpu"]),
    default="sim",
    show_default=True,
    help="sim: simulated nodes. vllm-cpu: real vLLM nodes on the CPU, with a tiny random model and a shorter "
    "conversation; `make engine` installs it.",
)
@click.option(
    "--engine-python",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"The Python that vLLM is installed in.  [default: ${PYTHON_ENV}, or .venv-engine/bin/python]",
)
@click.option(
    "--conversation",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Play the user and tool messages of this chat history (JSON) instead of the built-in conversation.",
)
@click.option(
    "--template",
    type=click.Choice(sorted(TEMPLATES)),
    default="plain",
    show_default=True,
    help="Chat template; real nodes have plain only.",
)
@click.option(
    "--tokenizer",
    type=click.Choice(["exact", "blurry"]),
    default="exact",
    show_default=True,
    help="blurry: what the model says does not always encode back to the tokens that it generated.",
)
@click.option(
    "--prefill-cache/--no-prefill-cache",
    default=False,
    show_default=True,
    help="Play all ways on one prefill node that keeps its prefix cache. With nobody else on it the cache alone keeps "
    "all but the generated tokens, which busy nodes do not. Otherwise prefill nodes lose the conversation every turn.",
)
@click.option("--plot", "picture", type=click.Path(dir_okay=False, path_type=Path), help="Write a plot of the TTFT.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--verbose", is_flag=True, help="Show the logs of nodes, router and Envoy.")
def command(
    engine: Engine,
    engine_python: Path | None,
    conversation: Path | None,
    template: str,
    tokenizer: str,
    prefill_cache: bool,
    picture: Path | None,
    as_json: bool,
    verbose: bool,
) -> None:
    """Play a multi-turn agent conversation through real Envoy, with and without read-back, and compare.

    The same conversation runs four times, in step: `off` (the prefill node computes the whole history each turn),
    `lazy` (it reads back from the decode node while the client waits), `eager` (it has read back before the client asks
    again), and on a plain single node, the oracle. All answers must be the same; if not, the exit code is 1. Nodes and
    their timing are simulated, unless --engine says otherwise; client, Envoy, router and protocol are real.
    """
    real = engine == "vllm-cpu"
    if real and template != "plain":
        raise click.ClickException(f"--template {template} is for simulated nodes: leave it out")
    try:
        script = from_file(conversation) if conversation else built_in(small=real)
        python = find_engine(engine_python) if real else None
        find_envoy()  # before all the nodes are started in vain
    except (ScriptError, EngineMissingError, ProcessError) as e:
        raise click.ClickException(str(e)) from None
    _check_picture(picture)
    logs: deque[str] = deque(maxlen=_LOG_LINES)

    def sink(name: str, line: str) -> None:
        logs.append(f"{name}: {line}")
        if verbose:
            click.echo(logs[-1], err=True)

    nodes: Nodes = partial(simulated, SimOptions(template, tokenizer, prefill_cache), sink)
    if python:
        nodes = partial(on_vllm, VllmOptions(python, tokenizer == "blurry", prefill_cache), sink)
    console = Console(stderr=as_json, quiet=as_json)
    console.print(legend(engine, SimOptions().prefill_rate, all_cached=prefill_cache), highlight=False)
    with _errors(() if verbose else logs):
        turns = asyncio.run(_until_signal(_run(script, nodes, console)))
    result = _tell(engine, turns, console, picture, as_json=as_json)
    if not result["identical"]:
        click.echo("The answers differ: this must never happen.", err=True)
        sys.exit(1)


@contextlib.contextmanager
def _errors(logs: Collection[str]) -> Iterator[None]:
    """Say in words what can be said so; before any other error come the last log lines."""
    try:
        yield
    except ProcessError as e:
        raise click.ClickException(str(e)) from None
    except openai.APIStatusError as e:
        raise click.ClickException(f"the nodes refused a request of the conversation: {e.message}") from None
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise click.Abort from None
    except Exception:
        if logs:
            click.echo("\n".join(["The last log lines:", *logs]), err=True)
        raise


def _check_picture(picture: Path | None) -> None:
    if picture and (picture.suffix not in _PICTURES or not picture.absolute().parent.is_dir()):
        endings = ", ".join(_PICTURES)
        raise click.ClickException(f"--plot {picture}: give a name ending in {endings}, in a folder that exists")


def _tell(
    engine: Engine, turns: list[Turn], console: Console, picture: Path | None, *, as_json: bool
) -> dict[str, Any]:
    result = summary(engine, turns)
    if picture:
        plot(turns, picture, engine)
        console.print(f"\nPlot: {picture}")
    if as_json:
        click.echo(json.dumps(result))
    else:
        console.print("\n" + sentences(result), highlight=False)
        if result["identical"]:
            console.print("In every turn all four answers were the same.")
    return result


async def _until_signal(work: Coroutine[Any, Any, list[Turn]]) -> list[Turn]:
    """Run it, and end it in order when it is to stop or its terminal goes: the processes of the demo go with it."""
    task = asyncio.ensure_future(work)
    stopped: list[bool] = []

    def stop() -> None:
        stopped.append(True)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        return await task
    except Exception:
        if stopped:  # what broke on the way down is no news
            raise asyncio.CancelledError from None
        raise


async def _run(script: Script, nodes: Nodes, console: Console) -> list[Turn]:
    turns: list[Turn] = []
    with Starting(console) as starting:
        async with nodes(starting) as stack:
            starting("the first requests")
            await stack.while_alive(warm_up(stack))
            starting.done()

            async def played() -> None:
                with TurnTable(console, script.length) as table:
                    async for turn in play(stack, script):
                        turns.append(turn)
                        table.add(turn)

            await stack.while_alive(played())
    return turns
