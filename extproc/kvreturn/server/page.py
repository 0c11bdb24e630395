"""The admin view as one HTML page: no other resource, and readable without JavaScript.

All text goes through `_e`: a model's name is what a client wrote. The page fetches itself again and puts the new
content in the place of the old, so that there is one renderer, and nothing is put together in the browser.
"""

import hashlib
import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from kvreturn.core.outcome import FRESH, REUSED, Outcome
from kvreturn.server.page_style import SCRIPT, STYLE
from kvreturn.server.view import QUIET

JSON = dict[str, Any]
_ROWS = 25  # turns that get a row of their own
_BAR, _GAP, _HEIGHT = 7, 2, 44  # of the history's bars, in pixels
_NONE = "-"
_LEAST = 1  # second of prefill saved that is worth telling
_KEY = (("warm", "reused"), ("fresh", "nothing to reuse"), ("cold", "cold"), ("broken", "something failed"))
_STATES = {"up": "warm", "draining": "fresh"}
_WORST = frozenset({"read_failed", "prefill_failed", "store_unavailable", "return_failed", "breaker_open", "node_gone"})


def _source(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = (
    f"default-src 'none'; style-src {_source(STYLE)}; script-src {_source(SCRIPT)}; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The Content-Security-Policy of the page: nothing runs that is not written here."""


def page(state: JSON, config: Sequence[JSON]) -> str:
    """The page.

    Args:
        state: what `view.state` tells.
        config: what `view.config` tells.
    """
    reuse, live = state["reuse"], state["turns"]["live"]
    tiles = _reuse(reuse) + _rate(reuse) + _live(live) + _saved(reuse)
    told = _told("trouble", "Needs a look", state["trouble"]) + _told("note", "Note", state["notes"])
    main = (
        f'{told}<div class="tiles">{tiles}</div>'
        f'<div class="two">{_why(reuse)}{_nodes(state["pools"])}</div>'
        f"{_running(live)}{_recent(state['turns']['recent'])}"
        f'<div class="two">{_store(state["store"])}{_returns(state["returns"])}</div>'
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>kvreturn</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><style>{STYLE}</style></head><body><header><h1>kvreturn</h1>'
        f'<span class="dim">{_e(state["version"])}{_who(state)}</span><span id="age" class="dim"></span></header>'
        f"<main>{main}</main>{_config(config)}"
        f"<script>{SCRIPT}</script></body></html>"
    )


def _who(state: JSON) -> str:
    """Which worker this is, as its log lines have it."""
    return f" · worker {state['worker']} (0 to {state['workers'] - 1})" if state["workers"] > 1 else ""


def _e(value: object) -> str:
    return escape(str(value))


def _word(value: object) -> str:
    return _e(value) if value else _NONE


def _card(title: str, body: str, kind: str = "card") -> str:
    return f'<section class="{kind}"><h2>{_e(title)}</h2>{body}</section>'


def _told(kind: str, title: str, told: Sequence[str]) -> str:
    """A box of lines, none if there are none."""
    lines = "".join(f"<li>{_e(t)}</li>" for t in told)
    return f'<section class="{kind}"><h2>{title}</h2><ul>{lines}</ul></section>' if told else ""


def _reuse(reuse: JSON) -> str:
    on = '<b class="good">on</b>' if reuse["on"] else '<b class="bad">off</b>'
    exceptions = f", {reuse['exceptions']} models differ" if reuse["exceptions"] else ""
    note = f"proof {_e(reuse['proof'])}, return {_e(reuse['return'])}{exceptions}"
    return _card("Reuse", f'<p class="big">{on}</p><p class="dim">{note}</p>', "tile")


def _rate(reuse: JSON) -> str:
    rate = _NONE if reuse["rate"] is None else f"{reuse['rate']:.0%}"
    note = f"{reuse['reused']:,} of {reuse['continuations']:,} continuations; {reuse['turns']:,} turns in all"
    chart = _history(reuse["history"], reuse["step_seconds"])
    return _card("Hit rate", f'<p class="big">{rate}</p>{chart}<p class="dim">{note}</p>', "tile wide")


def _history(steps: Sequence[JSON], seconds: float) -> str:
    """Bars of the continuations that ended in each step, the part that was reused below."""
    most = max((s["continuations"] for s in steps), default=0) or 1
    bars = []
    for i, step in enumerate(steps):
        whole = round(_HEIGHT * step["continuations"] / most)
        part = round(_HEIGHT * step["reused"] / most)
        x, title = i * (_BAR + _GAP), f"{step['reused']} of {step['continuations']} reused"
        if whole:
            bars.append(f"<g><title>{title}</title>{_column('cold', x, whole)}{_column('warm', x, part)}</g>")
        else:
            bars.append(f'<rect class="none" x="{x}" y="{_HEIGHT - 1}" width="{_BAR}" height="1"/>')
    width = len(steps) * (_BAR + _GAP)
    label = f"Continuations that were reused, of the last {len(steps) * seconds / 60:.0f} minutes"
    return f'<svg class="chart" viewBox="0 0 {width} {_HEIGHT}" role="img" aria-label="{label}">{"".join(bars)}</svg>'


def _column(tone: str, x: int, height: int) -> str:
    return f'<rect class="{tone}" x="{x}" y="{_HEIGHT - height}" width="{_BAR}" height="{height}"/>'


def _live(live: Sequence[JSON]) -> str:
    phases = {p: sum(t["phase"] == p for t in live) for p in ("arriving", "prefill", "decode", "streaming")}
    words = " · ".join(f"{n} {p}" for p, n in phases.items() if n) or "none"
    return _card("Live turns", f'<p class="big">{len(live)}</p><p class="dim">{words}</p>', "tile")


def _saved(reuse: JSON) -> str:
    tokens, saved = reuse["tokens"], reuse["saved_seconds"]
    again = tokens["read_back"] + tokens["returned"]
    note = f"of {_short(tokens['prompt'])} prompt tokens"
    if saved >= _LEAST:  # less than that may be none, or not known: few legs have been measured
        note += f"; about {saved:,.{0 if saved >= 10 * _LEAST else 1}f} s of prefill saved"
    return _card("Tokens read back", f'<p class="big">{_short(again)}</p><p class="dim">{note}</p>', "tile")


def _why(reuse: JSON) -> str:
    outcomes = reuse["outcomes"]
    bars = _bars((_e(o), n, _tone(o)) for o, n in list(outcomes.items())[:12])
    lately = "".join(
        f"<li>{_e(w['outcome'])}{' (' + _e(w['detail']) + ')' if w['detail'] else ''}: {w['turns']}</li>"
        for w in reuse["why_not_lately"][:4]
    )
    note = f'<p class="dim">Cold among the last turns:</p><ul class="dim">{lately}</ul>' if lately else ""
    return _card("What became of turns", (bars or '<p class="dim">No turn has ended yet.</p>') + note)


def _bars(rows: Iterable[tuple[str, int, str]]) -> str:
    """A bar for each row: label (escaped), number, class."""
    told = list(rows)
    most = max((n for _, n, _ in told), default=0) or 1
    return "".join(
        f'<div class="bar"><span>{label}</span>{_meter(n / most, tone)}<span class="num">{n:,}</span></div>'
        for label, n, tone in told
    )


def _meter(share: float, tone: str) -> str:
    width = f"{max(100 * share, 0.5 if share else 0):.1f}"
    return (
        '<svg class="meter" viewBox="0 0 100 8" preserveAspectRatio="none">'
        f'<rect class="{tone}" width="{width}" height="8"/></svg>'
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], marked: Callable[[int], bool] = lambda _: False) -> str:
    """A table.

    Args:
        head: titles of its columns, each after its class and a colon: `num:age`.
        rows: of cells, escaped.
        marked: whether a row stands out.
    """
    kinds, titles = zip(*(column.split(":") for column in head), strict=True)
    top = "".join(f'<th class="{kind}">{title}</th>' for kind, title in zip(kinds, titles, strict=True))
    body = "".join(
        f"<tr{' class=marked' if marked(i) else ''}>"
        + "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in zip(kinds, row, strict=True))
        + "</tr>"
        for i, row in enumerate(rows)
    )
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def _tone(outcome: str) -> str:
    known = Outcome(outcome)
    if known in REUSED:
        return "warm"
    return "fresh" if known in FRESH else "broken" if outcome in _WORST else "cold"


def _nodes(pools: JSON) -> str:
    rows = []
    for kind, unit in (("prefill", "tokens"), ("decode", "requests")):
        most = max((n["load"] for n in pools[kind]), default=0) or 1
        for node in pools[kind]:
            state = str(node["state"])
            failures = f", {node['failures']} failures" if node["failures"] else ""
            dot = f'<span class="dot {_STATES.get(state, "broken")}"></span>'
            load = _meter(node["load"] / most, "fresh")
            rows.append([kind, _e(node["address"]), dot + _e(state) + failures, load, f"{node['load']:,} {unit}"])
    open_ = "".join(f'<li class="mono">{_e(engine)}</li>' for engine in pools["breakers_open"])
    note = f'<p class="bad">Engines whose handles are not used:</p><ul>{open_}</ul>' if open_ else ""
    return _card("Nodes", _table([":kind", "mono:node", ":state", "load:outstanding", "num:"], rows) + note)


def _running(live: Sequence[JSON]) -> str:
    if not live:
        return ""
    head = [":phase", "num:age", "num:quiet for", ":api", "name:model", ":reuse", "mono:P", "mono:D", "num:bytes in"]
    rows = [
        [
            *(
                _e(turn["phase"]),
                f"{turn['age']:.1f} s",
                f"{turn['quiet']:.1f} s",
                _e(turn["api"]),
                _word(turn["model"]),
            ),
            *(_e(turn["outcome"]), _word(turn["prefill_node"]), _word(turn["decode_node"])),
            *(_short(turn["request_bytes"]), _short(turn["response_bytes"]), _e(turn["tenant"])),
        ]
        for turn in live[:_ROWS]
    ]
    table = _table([*head, "num:bytes out", "mono:tenant"], rows, lambda i: live[i]["quiet"] > QUIET)
    more = f'<p class="dim">and {len(live) - _ROWS} more</p>' if len(live) > _ROWS else ""
    return _card("Running, the oldest first", table + more)


def _recent(recent: Sequence[JSON]) -> str:
    if not recent:
        return ""
    ticks = "".join(
        f'<rect class="{_tone(turn["outcome"])}" x="{5 * i}" width="4" height="20"/>'
        for i, turn in enumerate(reversed(recent))
    )
    width = 5 * max(len(recent), 100)
    strip = f'<svg class="strip" viewBox="0 0 {width} 20" preserveAspectRatio="none">{ticks}</svg>'
    key = "".join(f'<span class="dot {tone}"></span>{text}' for tone, text in _KEY)
    head = ["num:ago", ":outcome", ":api", "name:model", "mono:P", "mono:D", "num:status", "num:prompt"]
    rows = [
        [
            *(_ago(turn["ago"]), _outcome(turn), _e(turn["api"]), _word(turn["model"])),
            *(_word(turn["prefill_node"]), _word(turn["decode_node"])),
            *(
                _word(turn["error"] or turn["status"]),
                _count(turn["prompt"]),
                _count(turn["read"]),
                _count(turn["local"]),
            ),
            *(_count(turn["prefill_ms"]), _count(turn["first_token_ms"]), _word(turn["going"])),
            *(_word(turn["request"]), _word(turn["trace"])),
        ]
        for turn in recent[:_ROWS]
    ]
    head += ["num:read", "num:local", "num:prefill ms", "num:first token ms", ":return", "mono:request", "mono:trace"]
    table = _table(head, rows)
    return _card("Ended, the last first", f'{strip}<p class="key dim">{key}</p>{table}')


def _outcome(turn: JSON) -> str:
    detail = f' <span class="dim">{_e(turn["detail"])}</span>' if turn["detail"] else ""
    return f'<span class="dot {_tone(turn["outcome"])}"></span>{_e(turn["outcome"])}{detail}'


def _store(store: JSON) -> str:
    state = '<b class="bad">away</b>' if store["breaker_open"] else '<b class="good">in use</b>'
    rows = [
        ("state", state),
        ("kind", _e(store["url"] or store["kind"])),
        ("records" if store["kind"] == "memory" else "keys in its database", _count(store["records"])),
        ("bytes", _count(store["bytes"])),
        *([("does not tell", _e(store["not_told"]))] if store["not_told"] else []),
        *((f"{name}, on average", f"{ms} ms") for name, ms in store["milliseconds"].items()),
        *((f"errors: {_e(kind)}", f"{n:,}") for kind, n in store["errors"].items()),
    ]
    return _card("Session store", _facts(rows))


def _returns(returns: JSON) -> str:
    rows = [
        ("running", f"{returns['running']:,}"),
        ("waiting", f"{returns['waiting']:,} of at most {returns['queue']:,}"),
        *((_e(word), f"{n:,}") for word, n in returns["results"].items()),
        *((f"frees: {_e(word)}", f"{n:,}") for word, n in returns["frees"].items()),
    ]
    return _card("Eager returns, and freed blocks", _facts(rows))


def _facts(rows: Iterable[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<dt>{name}</dt><dd>{value}</dd>' for name, value in rows)}</dl>"


def _config(config: Sequence[JSON]) -> str:
    rows = [[_e(s["name"]), _e(json.dumps(s["value"], ensure_ascii=False))] for s in config]
    table = _table(["mono:setting", "mono:value"], rows, lambda i: config[i]["changed"])
    changed = sum(s["changed"] for s in config)
    title = f"<summary>Settings ({changed} are not the defaults)</summary>"
    return f'<details class="card settings">{title}{table}</details>'


def _short(number: float) -> str:
    for unit in ("", "k", "M", "G"):
        if number < 1000:  # noqa: PLR2004
            return f"{number:.3g}{unit}" if unit else f"{number:.0f}"
        number /= 1000
    return f"{number:.3g}T"


def _count(number: float | None) -> str:
    return _NONE if number is None else f"{number:,.0f}"


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"  # noqa: PLR2004
