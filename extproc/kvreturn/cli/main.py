"""Entry point. Subcommands are imported when they are called: `serve` must not pay for what `demo` needs."""

import importlib

import click

import kvreturn

_COMMANDS = {
    "analyze": "Tell from logs whether read-back is worth it.",
    "bench": "Play the same conversations with and without read-back on a deployment, and compare.",
    "demo": "Play a multi-turn agent conversation, with and without read-back, and compare.",
    "doctor": "Check a running deployment, or its files, and say what to do.",
    "envoy-config": "Print a complete Envoy bootstrap for the configured pools.",
    "serve": "Run the ext_proc server.",
    "sim": "Run a simulated vLLM node.",
    "up": "Run the ext_proc server and Envoy together.",
}


_EXTRAS = {
    "betterproto2": "envoy",
    "cryptography": "redis",
    "envoy_data_plane": "envoy",
    "matplotlib": "demo",
    "openai": "demo",
    "redis": "redis",
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

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as e:
            extra = _EXTRAS.get((e.name or "").partition(".")[0])
            if extra is None:
                raise
            raise click.ClickException(
                f"this needs {e.name}, which is not installed: run pip install '.[{extra}]' in kvreturn's source folder"
            ) from None

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
