"""One HTML file that needs nothing else: figures inside, tables that sort, light and dark, phone and desk."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from lowbitrl.diagnose.figures import dark

TALL = 20  # rows from which a table scrolls in a window of its own
Cell = str | float | int | None | Sequence[float]
STYLE = """
:root{color-scheme:light dark;--ink:#222;--paper:#fff;--line:#d5d5d5;--soft:#8882}
@media(prefers-color-scheme:dark){:root{--ink:#ddd;--paper:#181a1b;--line:#444}}
body{font:16px/1.5 system-ui,sans-serif;max-width:76rem;margin:1.5rem auto;padding:0 1rem;color:var(--ink);
background:var(--paper)}
h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2.2rem}
.scroll{overflow-x:auto}.tall{max-height:30rem;overflow:auto}.tall th{position:sticky;top:0;background:var(--paper)}
table{border-collapse:collapse;font-size:.9rem}
td,th{padding:.25rem .7rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
td:first-child,th:first-child,td.word{text-align:left}
.call ul{padding-left:1.2rem}.call li{margin:.3rem 0}
th button{all:unset;cursor:pointer;font-weight:600}th button:focus-visible{outline:2px solid #2f86b7}
th[aria-sort=ascending] button::after{content:" \\2191"}th[aria-sort=descending] button::after{content:" \\2193"}
small{opacity:.75}
figure{margin:1rem 0}img{width:100%;min-width:38rem;max-width:66rem;height:auto}
pre{overflow-x:auto;background:var(--soft);padding:.8rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(13rem,1fr));gap:.8rem;margin:1.2rem 0}
.tile{background:var(--soft);padding:.7rem 1rem;border-radius:.4rem}.tile b{display:block;font-size:1.7rem;line-height:1.3}
.call{border-left:4px solid #2f86b7;padding:.2rem 1rem;background:var(--soft)}.bad{border-color:#c2185b}
"""
SCRIPT = """
for(const table of document.querySelectorAll("table"))table.querySelectorAll("th button").forEach((button,i)=>
button.addEventListener("click",()=>{const head=button.parentElement,body=table.tBodies[0];
const up=head.getAttribute("aria-sort")!=="ascending";
table.querySelectorAll("th").forEach(th=>th.removeAttribute("aria-sort"));
head.setAttribute("aria-sort",up?"ascending":"descending");
const key=row=>{const v=row.cells[i].dataset.value,n=Number(v);return v===""||Number.isNaN(n)?v:n};
const less=(a,b)=>typeof a===typeof b?(a>b)-(a<b):typeof a==="number"?-1:1;
[...body.rows].sort((r,s)=>(up?1:-1)*less(key(r),key(s))).forEach(row=>body.append(row))}));
"""


def page(title: str, parts: Sequence[str]) -> str:
    """A whole document."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<title>{html.escape(title)}</title><link rel="icon" href="data:,"><style>{STYLE}</style></head>'
        f"<body><h1>{html.escape(title)}</h1>{''.join(parts)}<script>{SCRIPT}</script></body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A heading and what is under it."""
    return f"<section><h2>{html.escape(title)}</h2>{''.join(parts)}</section>"


def text(words: str) -> str:
    """A paragraph."""
    return f"<p>{html.escape(words)}</p>"


def callout(lines: Sequence[str], bad: bool = False) -> str:
    """What must be seen first: a sentence, and the lines that go with it."""
    first, *rest = lines
    points = "".join(f"<li>{html.escape(line)}</li>" for line in rest)
    inside = f"<p><strong>{html.escape(first)}</strong></p>" + (f"<ul>{points}</ul>" if points else "")
    return f'<div class="call{" bad" if bad else ""}">{inside}</div>'


def tiles(found: Sequence[tuple[str, str, str]]) -> str:
    """Figures that must be seen first: (what, figure, what it means) each."""
    inside = "".join(
        f'<div class="tile">{html.escape(what)}<b>{html.escape(value)}</b><small>{html.escape(words)}</small></div>'
        for what, value, words in found
    )
    return f'<div class="tiles">{inside}</div>'


def code(words: str) -> str:
    """Text to copy."""
    return f"<pre>{html.escape(words)}</pre>"


def table(rows: Sequence[Mapping[str, Cell]]) -> str:
    """Rows with the keys of the first as columns; an interval [value, low, high] sorts by its value."""
    if not rows:
        return text("nothing to show")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    head = "".join(f"<th><button>{html.escape(c)}</button></th>" for c in columns)
    body = "".join(f"<tr>{''.join(_cell(row.get(c)) for c in columns)}</tr>" for row in rows)
    tall = " tall" if len(rows) > TALL else ""
    return (
        f'<div class="scroll{tall}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _cell(value: Cell) -> str:
    if value is None:
        return '<td data-value="">-</td>'
    if isinstance(value, str):
        return f'<td class="word" data-value="{html.escape(value)}">{html.escape(value)}</td>'
    if isinstance(value, int | float):
        return f'<td data-value="{value!r}">{value:.4g}</td>'
    middle, low, high = value
    return f'<td data-value="{middle!r}">{middle:.4g} <small>[{low:.3g}, {high:.3g}]</small></td>'


def figure(path: Path, words: str) -> str:
    """A figure in the file, in its dark version where the reader's system is dark."""
    sources = f'<source media="(prefers-color-scheme: dark)" srcset="{_data(dark(path))}">'
    image = f'<img alt="{html.escape(words)}" src="{_data(path)}">'
    return (
        f'<figure><div class="scroll"><picture>{sources}{image}</picture></div>'
        f"<figcaption><small>{html.escape(words)}</small></figcaption></figure>"
    )


def _data(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
