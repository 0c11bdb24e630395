"""The fast lane's scripts, as they stand in a parsed bootstrap."""

import json
import re
from collections.abc import Mapping
from typing import Any

from kvreturn.envoy import names
from kvreturn.envoy.reading import Chain, Doc, Route, chains, is_type, normalise

_PLAIN = "plain"  # the route whose requests without a body the script leaves alone


def is_pass(http_filter: Doc) -> bool:
    """Whether a filter of a chain runs fast_lane.lua."""
    return "function Answer:pass(" in source(http_filter)


def is_hold(http_filter: Doc) -> bool:
    """Whether it runs hand_over.lua."""
    return "local function tell(" in source(http_filter)


def takes_requests(http_filter: Doc) -> bool:
    """Whether it runs fast_lane.lua with request.lua: the router hears of requests by it."""
    return is_pass(http_filter) and names.REQUEST_PATH in source(http_filter)


def has_scripts(bootstrap: Mapping[str, Any]) -> bool:
    """Whether turns can take the fast lane through an Envoy of this bootstrap."""
    return any(takes_requests(f) for c in chains(normalise(bootstrap)) for f in c.filters)


def source(http_filter: Doc) -> str:
    """A filter's Lua; empty if it is none, or stands elsewhere."""
    config = http_filter.get("typed_config", {})
    code = config.get("default_source_code", {}) if is_type(config, "lua.v3.Lua") else {}
    return str(code.get("inline_string", config.get("inline_code", "")))


def version(script: str) -> str | None:
    """Of what script and router tell each other."""
    return _constant(script, "SCRIPTS", r'"(.*)"')


def routers(script: str) -> list[str]:
    """The routers that a script calls, as Envoy knows them."""
    found: list[str] = json.loads(f"[{_constant(script, 'ROUTERS', '{(.*)}') or ''}]")
    return found


def request_seconds(script: str) -> float:
    """For how long a script waits until it hears what becomes of a request; 0 if it does not say."""
    return float(_constant(script, "REQUEST_SECONDS", r"([\d.e+]+)") or 0)


def _constant(script: str, name: str, form: str) -> str | None:
    found = re.search(rf"^local {name} = {form}$", script, re.MULTILINE)
    return found and found[1]


def calls(chain: Chain, route: Route, *, bodiless: bool) -> bool | None:
    """Whether a script tells the router of a route's requests; None if the chain has none that could.

    Args:
        chain: with the scripts, or without.
        route: one of its own.
        bodiless: of those too that have no body.
    """
    scripts = [f for f in chain.filters if takes_requests(f)]
    if not scripts:
        return None
    left = route.route.get("name") == _PLAIN and (bodiless or route.without_body)
    return not left and any(_runs(route, f) for f in scripts)


def _runs(route: Route, http_filter: Doc) -> bool:
    """A route can have another script run, too."""
    other = {"name", "source_code"} & route.filter_config(http_filter.get("name", "")).keys()
    return route.passes(http_filter) and not other
