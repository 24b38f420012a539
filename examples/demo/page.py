"""The page that the demo leaves: one HTML file that needs no network and no script."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from deq_zoo.task import Picture

_STRIP = 5  # times as wide as high: a narrow page scrolls such a picture instead of shrinking it
_STYLE = """
:root{--ink:#1d232a;--soft:#5b6570;--line:#e2e5e9;--page:#f7f8fa;--card:#fff;--accent:#3b6fb6}
@media(prefers-color-scheme:dark){:root{--ink:#e8eaed;--soft:#a2abb5;--line:#333a42;
--page:#14181c;--card:#1d232a;--accent:#8ab4f0}}
*{box-sizing:border-box}
body{font:16px/1.55 system-ui,sans-serif;margin:0;background:var(--page);color:var(--ink)}
main{max-width:1040px;margin:0 auto;padding:40px 20px 64px}
h1{font-size:clamp(26px,5vw,38px);line-height:1.15;margin:0 0 8px}
h2{font-size:22px;margin:48px 0 4px}p{max-width:68ch;color:var(--soft);margin:4px 0 16px}
.numbers{display:grid;grid-template-columns:repeat(auto-fit,minmax(200px,1fr));gap:12px;
margin:20px 0}
.numbers div,figure{background:var(--card);border:1px solid var(--line);border-radius:10px}
.numbers div{padding:12px 18px}.numbers b{display:block;font-size:26px;color:var(--accent)}
.numbers span{color:var(--soft);font-size:14px}
.row{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,280px),1fr));gap:14px}
figure{margin:0;padding:12px;min-width:0}figure img{width:100%;height:auto;display:block;
border-radius:6px;background:#fff}
figcaption{color:var(--soft);font-size:14px;margin-top:8px}
table{border-collapse:collapse;background:var(--card);width:100%}
th,td{border:1px solid var(--line);padding:8px 12px;text-align:left}
.scroll{overflow-x:auto}.scroll img{min-width:760px}
pre{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px;
overflow-x:auto}a{color:var(--accent)}
"""


class Section(NamedTuple):
    """A part of the page: what a visitor sees there, and the words about it.

    Args:
        title: the heading.
        words: one paragraph.
        pictures: shown side by side where there is room.
        rows: of a table, the first one its header.
        code: commands that repeat it.
    """

    title: str
    words: str
    pictures: Sequence[Picture] = ()
    rows: Sequence[Sequence[str]] = ()
    code: str = ""


def render(title: str, words: str, numbers: Iterable[tuple[str, str]], parts: list[Section]) -> str:
    """Return the page.

    Args:
        title: its heading.
        words: the first paragraph.
        numbers: large numbers below it, each with its meaning.
        parts: what follows.
    """
    large = "".join(
        f"<div><b>{escape(n)}</b><span>{escape(what)}</span></div>" for n, what in numbers
    )
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>"
        f"<h1>{escape(title)}</h1><p>{escape(words)}</p><div class=numbers>{large}</div>"
        f"{''.join(map(_section, parts))}</main></body></html>"
    )


def _section(part: Section) -> str:
    figures = "".join(map(_figure, part.pictures))
    code = f"<pre>{escape(part.code)}</pre>" if part.code else ""
    return (
        f"<h2>{escape(part.title)}</h2><p>{escape(part.words)}</p>"
        f"{f'<div class=row>{figures}</div>' if figures else ''}{_table(part.rows)}{code}"
    )


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode()
    image = f'<img alt="{escape(picture.name)}" src="data:image/png;base64,{data}">'
    width, height = struct.unpack(">II", picture.png[16:24])  # of every PNG
    if width > _STRIP * height:
        image = f"<div class=scroll>{image}</div>"
    return f"<figure>{image}<figcaption>{escape(picture.caption)}</figcaption></figure>"


def _table(rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    header, *body = (
        "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
        for tag, row in zip(("th", *["td"] * len(rows)), rows, strict=False)
    )
    lines = "".join(f"<tr>{row}</tr>" for row in body)
    return f"<div class=scroll><table><tr>{header}</tr>{lines}</table></div>"
