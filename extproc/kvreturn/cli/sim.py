"""`kvreturn sim`."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

import click

from kvreturn.config import SECRET_ENV
from kvreturn.core.address import split_address
from kvreturn.sim import TEMPLATES, NodeConfig, RealClock, Timing, run_node

_GIGA = 1e9
_DEFAULTS = NodeConfig()


@click.command()
@click.argument("role", type=click.Choice(["prefill", "decode", "single"]))
@click.option("--listen", default="127.0.0.1:8100", show_default=True, help="Address of the OpenAI server.")
@click.option("--side-listen", default="127.0.0.1:0", show_default=True, help="Address of the side channel to peers.")
@click.option(
    "--connector",
    type=click.Choice(["kvreturn", "stock"]),
    default="kvreturn",
    show_default=True,
    help="Behave like vLLM with our connector, or without.",
)
@click.option("--model", "models", multiple=True, default=("sim",), show_default=True, help="Served names.")
@click.option("--template", type=click.Choice(sorted(TEMPLATES)), default="plain", show_default=True)
@click.option(
    "--tokenizer",
    type=click.Choice(["exact", "blurry"]),
    default="exact",
    show_default=True,
    help="blurry: generated text does not always encode back to the tokens that were generated.",
)
@click.option("--block-size", default=_DEFAULTS.block_size, show_default=True, help="Tokens per KV block.")
@click.option("--num-blocks", default=_DEFAULTS.num_blocks, show_default=True, help="KV blocks.")
@click.option("--max-model-len", default=_DEFAULTS.max_model_len, show_default=True, help="Longest sequence in tokens.")
@click.option(
    "--data-parallel-size", default=1, show_default=True, help="Engines behind the server, chosen by request header."
)
@click.option("--prefix-caching/--no-prefix-caching", default=True, show_default=True)
@click.option("--bidirectional/--no-bidirectional", default=True, show_default=True, help="bidirectional_kv_xfer.")
@click.option("--ttl", default=_DEFAULTS.decoder_ttl, show_default=True, help="decoder_kv_blocks_ttl, seconds.")
@click.option(
    "--scheduling-policy",
    type=click.Choice(["fcfs", "priority"]),
    default="fcfs",
    show_default=True,
    help="priority: heed the requests' priority.",
)
@click.option(
    "--retention-budget",
    default=_DEFAULTS.retention_budget,
    show_default=True,
    help="Share of the blocks that finished turns may keep pinned, with our connector.",
)
@click.option("--prefill-rate", default=_DEFAULTS.timing.prefill_rate, show_default=True, help="Tokens per second.")
@click.option("--decode-rate", default=_DEFAULTS.timing.decode_rate, show_default=True, help="Tokens per second.")
@click.option(
    "--transfer-rate", default=_DEFAULTS.timing.transfer_rate / _GIGA, show_default=True, help="GB/s between nodes."
)
@click.option("--speed", default=1.0, show_default=True, help="Run the clock so many times faster.")
def command(
    role: str,
    listen: str,
    side_listen: str,
    connector: str,
    models: tuple[str, ...],
    template: str,
    tokenizer: str,
    block_size: int,
    num_blocks: int,
    max_model_len: int,
    data_parallel_size: int,
    prefix_caching: bool,
    bidirectional: bool,
    ttl: float,
    scheduling_policy: str,
    retention_budget: float,
    prefill_rate: float,
    decode_rate: float,
    transfer_rate: float,
    speed: float,
) -> None:
    """Run a simulated vLLM node: its API, its blocks and its timing are imitated; no model is behind it."""
    try:
        host, port = split_address(listen)
        side_host, _, side_port = side_listen.rpartition(":")
        config = NodeConfig(
            role=role,  # type: ignore[arg-type] # click has checked these choices
            connector=connector,  # type: ignore[arg-type]
            model=models[0],
            aliases=models[1:],
            template=template,
            tokenizer=tokenizer,  # type: ignore[arg-type]
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            data_parallel_size=data_parallel_size,
            prefix_caching=prefix_caching,
            bidirectional=bidirectional,
            decoder_ttl=ttl,
            scheduling_policy=scheduling_policy,  # type: ignore[arg-type]
            retention_budget=retention_budget,
            side_host=side_host.strip("[]"),
            side_port=int(side_port),
            secret=os.environ.get(SECRET_ENV, "").encode(),
            timing=Timing(prefill_rate=prefill_rate, decode_rate=decode_rate, transfer_rate=transfer_rate * _GIGA),
        )
        clock = RealClock(speed)
    except ValueError as e:
        raise click.UsageError(str(e)) from None
    try:
        asyncio.run(_serve(config, host, port, clock))
    except OSError as e:
        raise click.ClickException(f"cannot listen on {listen} or {side_listen}: {e.strerror}") from None


async def _serve(config: NodeConfig, host: str, port: int, clock: RealClock) -> None:
    task = asyncio.create_task(run_node(config, host, port, clock=clock, ready=_announce(config)))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _announce(config: NodeConfig) -> Callable[[str], None]:
    def ready(url: str) -> None:
        click.echo(f"simulated {config.role} node ({config.connector}, template {config.template}): {url}/v1", err=True)

    return ready
