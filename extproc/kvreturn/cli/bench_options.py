"""What the options of `kvreturn bench` take."""

from pathlib import Path
from typing import Any

import click

from kvreturn.bench.spread import Spread

PICTURES, PAGES = (".png", ".svg", ".pdf"), (".html", ".htm")
_METRICS = "/metrics"


class SpreadType(click.ParamType[Spread]):
    """A distribution."""

    name = "DISTRIBUTION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Spread:  # noqa: ANN401
        """See `Spread.parse`."""
        if isinstance(value, Spread):
            return value
        try:
            return Spread.parse(str(value))
        except ValueError as e:
            self.fail(str(e), param, ctx)


class Output(click.Path):
    """A file to write, of which is known now whether it can be.

    Args:
        endings: one of which its name must have; none for any.
    """

    def __init__(self, *endings: str) -> None:
        super().__init__(dir_okay=False, path_type=Path)
        self._endings = endings

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:  # noqa: ANN401
        """A path in a folder that exists."""
        path = Path(str(super().convert(value, param, ctx)))
        if (self._endings and path.suffix not in self._endings) or not path.absolute().parent.is_dir():
            ending = f" ending in {', '.join(self._endings)}" if self._endings else ""
            self.fail(f"{path}: give a name{ending}, in an existing folder", param, ctx)
        return path


def base_url(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    """A base URL of an API; people give it with its `/v1`, as clients have it, and without."""
    return None if value is None else _url(value).removesuffix("/v1") + "/v1"


def metrics_urls(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> list[str]:
    """URLs of metrics; people leave out the path."""
    return [_url(v).removesuffix(_METRICS) + _METRICS for v in values]


def headers(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """`NAME: VALUE` pairs."""
    pairs = [value.partition(":") for value in values]
    if not all(name.strip() and colon for name, colon, _ in pairs):
        raise click.BadParameter("give NAME: VALUE")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _url(value: str) -> str:
    scheme, found, rest = value.partition("://")
    if scheme not in {"http", "https"} or not found or not rest.strip("/"):
        raise click.BadParameter(f"{value!r} is no URL: give http://HOST:PORT")
    return value.rstrip("/")
