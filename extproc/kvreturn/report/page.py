"""Reports as one HTML file that loads nothing, in light and dark."""

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --line: #8883; --soft: #5c6066; --back: #fff; --ink: #1a1c1f; --card: #f4f6f8;
  --off: #b3560f; --on: #14798c; --bad: #b3261e; --warn: #8a6100; }
@media (prefers-color-scheme: dark) { :root { --soft: #a2a7ae; --back: #15171a; --ink: #e6e8ea; --card: #1e2226;
  --off: #e8945a; --on: #4fc0d4; --bad: #ff8a80; --warn: #e5b94e; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  background: var(--back); color: var(--ink); }
h1 { font-size: 1.3rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem; }
.verdict { font-size: 1.2rem; border-left: 4px solid var(--on); padding-left: 1rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .75rem; margin: 1.5rem 0; }
.cards div { background: var(--card); border-radius: .5rem; padding: .75rem 1rem; }
.cards b { display: block; font-size: 1.6rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.cards span { color: var(--soft); font-size: .9em; }
.told { list-style: none; padding: 0; } .told li { border-left: 4px solid var(--line); padding: .3rem 0 .3rem 1rem;
  margin: .4rem 0; background: var(--card); border-radius: 0 .4rem .4rem 0; }
.told .void { border-color: var(--bad); } .told .doubt { border-color: var(--warn); }
.told b { margin-right: .4rem; } .told .void b { color: var(--bad); } .told .doubt b { color: var(--warn); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th { color: var(--soft); font-weight: 600; font-size: .9em; }
th, td { text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
td:not(.basis, .w) { white-space: nowrap; }
td.basis { color: var(--soft); font-size: .9em; }
svg { display: block; width: 100%; max-width: 52rem; height: auto; margin: 1.5rem auto; }
"""


def document(title: str, heading: str, parts: Iterable[str]) -> str:
    """A whole page.

    Args:
        title: of the tab.
        heading: above everything.
        parts: HTML.
    """
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(heading)}</h1>{''.join(parts)}</html>\n"
    )


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], classes: str) -> str:
    """A table under its title; nothing if it has no rows.

    Args:
        title: above it.
        heads: of the columns.
        rows: HTML of the cells.
        classes: t text, n number, b basis, w text that may wrap, by column.
    """
    body = "".join(f"<tr>{_cells('td', row, classes)}</tr>" for row in rows)
    if not body:
        return ""
    return f'<h2>{title}</h2><div class="wide"><table><tr>{_cells("th", heads, classes)}</tr>{body}</table></div>'


def _cells(tag: str, texts: Sequence[str], classes: str) -> str:
    names = {"t": "", "n": ' class="n"', "b": ' class="basis"', "w": ' class="w"'}
    return "".join(f"<{tag}{names[c]}>{text}</{tag}>" for text, c in zip(texts, classes, strict=True))
