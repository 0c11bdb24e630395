"""`kvreturn envoy-config`."""

from pathlib import Path

import click
import yaml

from kvreturn.config import ConfigError, Settings
from kvreturn.config_file import load_settings
from kvreturn.envoy.lint import lint
from kvreturn.envoy.process import ProcessError
from kvreturn.envoy.runner import validate


@click.command("envoy-config")
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    default="kvreturn.yaml",
    show_default=True,
    help="Settings.",
)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file instead of stdout."
)
@click.option(
    "--validate", "check", is_flag=True, help="Check the result first, with our own rules and with the Envoy binary."
)
def command(config: Path, output: Path | None, *, check: bool) -> None:
    """Print a complete Envoy bootstrap for the configured pools.

    Warnings go to stderr, and stand at the head of the result as comments.
    """
    # The import costs about a second: not before --help and errors in the arguments.
    from kvreturn.envoy import bootstrap  # noqa: PLC0415

    try:
        settings = load_settings(config)
        text = bootstrap.render(settings)
        if check:
            _check(text, settings)
        if output:
            output.write_text(text)
        else:
            click.echo(text, nl=False)
    except (ConfigError, ProcessError) as e:
        raise click.ClickException(str(e)) from e
    except OSError as e:
        raise click.ClickException(f"cannot write {output}: {e.strerror}") from e
    for warning in bootstrap.warnings(settings):
        click.echo(f"warning: {warning}", err=True)


def _check(text: str, settings: Settings) -> None:
    problems = lint(
        yaml.safe_load(text),
        service=settings.listen,
        prefill_timeout=settings.prefill.timeout,
        request_bytes=settings.limits.request_bytes,
    )
    if problems:
        raise click.ClickException("\n".join(str(p) for p in problems))
    refusal = validate(text)
    if refusal:
        raise click.ClickException(f"Envoy refuses the bootstrap: {refusal}")
    click.echo("Envoy accepts the bootstrap, and it breaks none of our rules.", err=True)
