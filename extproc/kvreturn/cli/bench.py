"""`kvreturn bench`."""

import asyncio
import json
import signal
import sys
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvreturn.bench import output, text
from kvreturn.bench.conversation import Replayed, Synthetic
from kvreturn.bench.counters import CountersError
from kvreturn.bench.deployment import Manner, Open, on_deployment, on_sim, targets
from kvreturn.bench.drive import Load
from kvreturn.bench.replay import ReplayError, read
from kvreturn.bench.run import Plan, Run, bench
from kvreturn.bench.sample import LegName
from kvreturn.bench.summary import summarize
from kvreturn.bench.talk import APIS_BY_NAME, TalkError
from kvreturn.cli.bench_options import PAGES, PICTURES, Output, SpreadType, base_url, headers, metrics_urls
from kvreturn.cli.heartbeat import Heartbeat
from kvreturn.demo.show import Starting
from kvreturn.demo.stack import SimOptions
from kvreturn.envoy.process import ProcessError
from kvreturn.envoy.runner import find_envoy

VOID = 3
STOPPED = 130
BROKEN = 1
_LOG_LINES = 200
_MADE_UP = {"turns", "first_tokens", "turn_tokens", "system_tokens"}
_WHERE = {"url", "model", "off_url", "off_model", "router_metrics", "off_router_metrics", "prefill_metrics"}
_spread = SpreadType()
_positive = click.FloatRange(min=0, min_open=True)
_count = click.IntRange(min=1)


@click.command(context_settings={"show_default": True})
@click.option("--sim", is_flag=True, help="Start simulated nodes, a router and Envoy, and play on these.")
@click.option("--url", callback=base_url, help="Gateway with read-back on.")
@click.option("--model", help="Name of the model there.")
@click.option("--off-url", callback=base_url, help="Gateway with read-back off.  [default: that of --url]")
@click.option("--off-model", help="Name of the model for which read-back is off.  [default: that of --model]")
@click.option("--router-metrics", multiple=True, callback=metrics_urls, help="Admin port of a router. Repeatable.")
@click.option(
    "--off-router-metrics",
    multiple=True,
    callback=metrics_urls,
    help="As above, behind --off-url, if others are there.",
)
@click.option("--prefill-metrics", multiple=True, callback=metrics_urls, help="URL of a prefill node. Repeatable.")
@click.option("--api", type=click.Choice(sorted(APIS_BY_NAME)), default="chat")
@click.option("--stream/--no-stream", default=True)
@click.option("--api-key", envvar="KVRETURN_BENCH_API_KEY", show_envvar=True, help="Sent as a bearer token.")
@click.option("--header", "sent", multiple=True, callback=headers, help="NAME: VALUE, for every request. Repeatable.")
@click.option("--timeout", type=_positive, default=300.0, help="Seconds for one answer.")
@click.option("--rounds", type=_count, default=3, help="How often both legs are played.")
@click.option("--conversations", type=_count, default=5, help="Of each leg in each round.")
@click.option("--clients", type=_count, default=2, help="Conversations at a time (closed loop).")
@click.option("--rate", type=_positive, help="Requests per second, whoever still waits (open loop, Poisson).")
@click.option(
    "--file", "path", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Play what it holds."
)
@click.option("--turns", type=_spread, default="6", help="Requests of a conversation.")
@click.option("--first-tokens", type=_spread, default="2000", help="What the first request says.")
@click.option("--turn-tokens", type=_spread, default="500", help="What each further one adds.")
@click.option(
    "--output-tokens", type=_spread, default="64", help="Length of an answer; of --file, as recorded unless given."
)
@click.option(
    "--gap",
    type=_spread,
    default="0.2",
    help="Seconds from an answer to the next request; of --file, as recorded unless given.",
)
@click.option("--system-tokens", type=click.IntRange(min=0), default=0, help="Of a system prompt that all share.")
@click.option("--seed", default=0, help="Of all that is drawn.")
@click.option("--sim-prefill-cache", is_flag=True, help="The simulated P keeps a prefix cache, which nobody else uses.")
@click.option(
    "--sim-prefill-rate", type=_positive, default=SimOptions().prefill_rate, help="Tokens/s of the simulated P."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--html", type=Output(*PAGES), help="Write a report with plots, in one file.")
@click.option("--plot", "picture", type=Output(*PICTURES), help="Write the plots only.")
@click.option("--stats-json-output", "stats", type=Output(), help="Write all turns, as vLLM's benchmark does.")
@click.option("--turn-log", type=Output(), help="Write the turns of the leg `off`, for `kvreturn analyze`.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    api: str,
    stream: bool,
    api_key: str | None,
    sent: dict[str, str],
    timeout: float,
    rounds: int,
    conversations: int,
    clients: int,
    rate: float | None,
    seed: int,
    as_json: bool,
    html: Path | None,
    picture: Path | None,
    stats: Path | None,
    turn_log: Path | None,
    **more: Any,  # noqa: ANN401 - where to play, and what: read below
) -> None:
    """Play the same conversations with and without read-back, leg by leg, and compare.

    On a running deployment, serve the model under two names and set `proof: "off"` for one of them, or let a second
    router and Envoy with it stand before the same nodes. DISTRIBUTION is a number, uniform:LOW:HIGH,
    lognormal:MEAN[:MEDIAN/MEAN] or exponential:MEAN. Ctrl-C ends it with the report of what there is.

    Exit codes: 0 done, 1 the deployment or a counter does not answer (any more: with the report of what there is) or a
    file cannot be written, 2 wrong arguments, 3 the numbers
    mean nothing (the warnings say why), 130 stopped.
    """
    given = {n for n in ctx.params if ctx.get_parameter_source(n) is not ParameterSource.DEFAULT}
    plan = Plan(_source(more, given), conversations, rounds, Load(clients, rate), seed)
    if api_key:
        sent["authorization"] = f"Bearer {api_key}"
    manner = Manner(api, stream, timeout, sent)
    if html or picture:  # what is missing should be missed now
        from kvreturn.bench import plots  # noqa: F401, PLC0415
    run = _run(more, given, manner, plan)
    hidden = {"api_key", "sent"}
    params = {n: str(v) for n, v in ctx.params.items() if v not in (None, [], {}, ()) and n not in hidden}
    summary = summarize(run, params, simulated=bool(more["sim"]))
    try:
        output.write(run, summary, html, picture, stats, turn_log)
    except OSError as e:
        raise click.ClickException(f"cannot write a file: {e}") from None
    click.echo(json.dumps(summary.as_json()) if as_json else text.render(summary))
    if run.stopped:
        sys.exit(BROKEN if run.broken else STOPPED)
    if summary.void:
        sys.exit(VOID)


def _run(more: dict[str, Any], given: set[str], manner: Manner, plan: Plan) -> Run:
    console = Console(stderr=True, quiet=not sys.stderr.isatty())
    logs: deque[str] = deque(maxlen=_LOG_LINES)
    run = Run()
    with Starting(console) as starting:
        ground = _ground(more, given, manner, logs, starting)
        try:
            asyncio.run(_until_signal(ground, plan, console, starting, run))
        except (ProcessError, CountersError) as e:
            if not any(played.samples for played in run.played):
                raise click.ClickException(str(e)) from None
            run.stopped, run.broken = True, str(e)
        except TalkError as e:
            raise click.ClickException(f"the first requests failed: {e}") from None
    if not run.played:
        raise click.Abort
    return run


def _source(more: dict[str, Any], given: set[str]) -> Synthetic | Replayed:
    """What to play."""
    path, answer, gap = more["path"], more["output_tokens"], more["gap"]
    if path is None:
        return Synthetic(more["turns"], more["first_tokens"], more["turn_tokens"], answer, gap, more["system_tokens"])
    wrong = given & _MADE_UP
    if wrong:
        raise click.UsageError(
            f"--{min(wrong).replace('_', '-')} is for conversations that are made up: not with --file"
        )
    try:
        tokens = round(answer.mean) if "output_tokens" in given else None
        return Replayed(read(path, tokens, gap.mean if "gap" in given else None))
    except ReplayError as e:
        raise click.UsageError(str(e)) from None


def _ground(more: dict[str, Any], given: set[str], manner: Manner, logs: deque[str], starting: Starting) -> Open:
    """Where to play."""
    if more["sim"]:
        wrong = given & _WHERE
        if wrong:
            raise click.UsageError(f"--{min(wrong).replace('_', '-')} is for a running deployment: not with --sim")
        try:
            find_envoy()  # before all the nodes are started in vain
        except ProcessError as e:
            raise click.ClickException(str(e)) from None
        options = SimOptions(prefill_cache=more["sim_prefill_cache"], prefill_rate=more["sim_prefill_rate"])
        return partial(on_sim, options, manner, lambda name, line: logs.append(f"{name}: {line}"), starting)
    url, model = more["url"], more["model"]
    if not (url and model):
        raise click.UsageError("give --url and --model of a deployment, or --sim")
    urls, models = (more["off_url"] or url, url), (more["off_model"] or model, model)
    if urls[0] == urls[1] and models[0] == models[1]:
        raise click.UsageError(
            "both legs would be the same: give --off-model, a name of the model for which the router has "
            '`proof: "off"`, or --off-url, a gateway whose router has it'
        )
    routers = (more["off_router_metrics"] or more["router_metrics"], more["router_metrics"])
    return partial(on_deployment, targets(urls, models, more["prefill_metrics"], routers), manner)


async def _until_signal(ground: Open, plan: Plan, console: Console, starting: Starting, run: Run) -> None:
    """Play it; when it is to stop, what was played so far is what there is."""
    task = asyncio.ensure_future(_play(ground, plan, console, starting, run))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        run.stopped = True


async def _play(ground: Open, plan: Plan, console: Console, starting: Starting, run: Run) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    heartbeat = Heartbeat()
    connector = aiohttp.TCPConnector(limit=0)  # or an open loop would wait for connections
    async with aiohttp.ClientSession(connector=connector) as session, ground(session) as there:
        starting.done()
        with Progress(*columns, console=console, transient=True, disable=console.quiet) as bar:
            turns = bar.add_task("the first requests", total=None)

            def told(leg: LegName, number: int, total: int, before: int, done: int) -> None:
                what = f"round {number + 1} of {plan.rounds}, {leg}"
                bar.update(turns, total=total, completed=before + done, description=what)
                heartbeat(f"{what}: {before + done:,} of {total:,} turns")

            await there.play(bench(there.legs, plan, session, told, run))
