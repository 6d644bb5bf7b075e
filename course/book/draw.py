"""Pieces of pictures, as HTML and SVG. Colours and sizes are in `pictures.css`."""

import html
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Drawing(NamedTuple):
    """A picture on a page."""

    body: str  # HTML
    caption: str  # what to see, in a sentence or two, as HTML
    text: str  # what those should know who cannot see it
    live: str = ""  # HTML: what a reader can move below it


class Picture(NamedTuple):
    """How the picture of a lesson is made."""

    prompt: str  # of the one in the book
    record: Callable[[str], Any]  # runs the embedded models on a prompt; UserError if too long
    draw: Callable[[Any], Drawing]  # what it recorded
    own: str = ""  # what a reader's own prompt changes, where that is not all of it


def escape(text: str) -> str:
    return html.escape(text, quote=True)


def token(text: str, kind: str = "") -> str:
    """A token's text in a box, so that its spaces can be seen. kind: a further CSS class."""
    shown = escape(text.replace("\n", "\\n")) or "&empty;"
    return (
        f'<code class="tok {kind}">{shown}</code>' if kind else f'<code class="tok">{shown}</code>'
    )


def percent(p: float) -> str:
    """A probability as a reader says it."""
    whole = p == 1 or 0.0995 <= p < 0.995
    words = f"{100 * p:.0f}" if whole else f"{100 * p:.1f}"
    return f"{words}\u00a0%"  # a line does not break there


def signed(number: float, digits: int = 2) -> str:
    """With a minus sign that is as wide as a digit."""
    return f"{number:.{digits}f}".replace("-", "\u2212")


def bars(rows: Iterable[tuple], largest: float | None = None) -> str:
    """A bar a row, and a line across it where a second length is given.

    rows: (label as HTML, length, what stands behind it, CSS class of the bar, second length).
    largest: the length that fills the row; None: the largest one.
    """
    rows = list(rows)
    largest = largest or max(length for row in rows for length in row[1:5:3]) or 1
    shown = ""
    for name, length, words, kind, *second in rows:
        bar = segment(length / largest, kind)
        for other in second:
            bar += f'<b class="tick" style="left:{100 * other / largest:.2f}%"></b>'
        shown += f'<tr><th scope="row">{name}</th><td>{bar}</td><td class="value">{words}</td></tr>'
    return f'<table class="bars">{shown}</table>'


def segment(share: float, kind: str) -> str:
    """A bar, or a part of one: share of the row's width."""
    return f'<i class="bar {kind}" style="width:{100 * share:.2f}%"></i>' if share else ""


def rows_of(rows: Iterable[tuple[str, str, str]], kind: str = "rows") -> str:
    """A table of (name, drawing, what stands behind it), all as HTML."""
    body = "".join(
        f'<tr><th scope="row">{name}</th><td>{drawing}</td><td class="value">{words}</td></tr>'
        for name, drawing, words in rows
    )
    return f'<table class="{kind}">{body}</table>'


def panel(title: str, body: str, note: str = "") -> str:
    """A titled part of a picture; parts stand side by side where there is room. All are HTML."""
    below = f'<p class="note">{note}</p>' if note else ""
    return f'<div class="panel"><p class="title">{title}</p>{body}{below}</div>'


def panels(*parts: str) -> str:
    return f'<div class="panels">{"".join(parts)}</div>'


def svg(width: float, height: float, body: str, kind: str = "") -> str:
    """A drawing of so many pixels, which shrinks where there is less room."""
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    return f'<svg class="{kind or "plain"}" {size} aria-hidden="true">{body}</svg>'


def box(x: float, y: float, width: float, height: float, kind: str, style: str = "") -> str:
    extra = f' style="{style}"' if style else ""
    return (
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{extra}/>'
    )


def path(points: Iterable[tuple[float, float]], kind: str) -> str:
    """A line through these points."""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="line {kind}" points="{places}"/>'


def label(x: float, y: float, text: str, kind: str = "") -> str:
    """Words at a place; kind: `end` or `middle` for where that is in them, and other classes."""
    words = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{words}>{escape(text)}</text>'


def squares(kinds: list[str], size: int = 16) -> str:
    """A row of squares. kinds: the CSS class of each, "" where there is none."""
    body = "".join(
        box(x * size, 1, size - 2, size - 2, kind) for x, kind in enumerate(kinds) if kind
    )
    return svg(len(kinds) * size, size, body)


def key(**kinds: str) -> str:
    """What the colours mean: CSS class -> words."""
    items = (f'<li><i class="{kind}"></i>{escape(words)}</li>' for kind, words in kinds.items())
    return f'<ul class="key">{"".join(items)}</ul>'
