"""Entry point. Subcommands are imported when they are called: `serve` must not pay for what `demo` needs."""

import importlib

import click

import kvreturn

_COMMANDS = {
    "demo": "Play a multi-turn agent conversation, with and without read-back, and compare.",
    "envoy-config": "Print a complete Envoy bootstrap for the configured pools.",
    "serve": "Run the ext_proc server.",
    "sim": "Run a simulated vLLM node.",
    "up": "Run the ext_proc server and Envoy together.",
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"kvreturn.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(sorted(_COMMANDS.items()))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(kvreturn.__version__)
def main() -> None:
    """Bring a decode node's KV cache back to the prefill node, turn after turn."""


if __name__ == "__main__":
    main()
