"""Rendering of a scene as HTML and SVG. Colours and sizes are in scenes.css.

Tables are HTML tables. Graphics (bars, squares, curves) are hidden from screen readers: their
numbers are in the text beside them, and a chart has an invisible table of its points.
"""

import html
import json
import math
from collections.abc import Callable, Iterable

from pictures import scene
from pictures.scene import Axis, Cell, Panel, Scene

WIDTH = 300  # pixels; a phone has room for 328
SQUARE = 14
POINTS = 7  # maximum number of points of a curve in its table


def escape(text: str) -> str:
    return html.escape(text, quote=True)


def shown(text: str) -> str:
    """Convert plain text to HTML, with each `word` in backticks as a token in a box."""
    parts = text.split("`")
    return "".join(chip(part) if at % 2 else escape(part) for at, part in enumerate(parts))


def chip(text: str, kind: str = "") -> str:
    """Return a token in a box. An empty text is a part of a character that a later token ends."""
    words = escape(text.replace("\n", "\\n")) or "&#9702;"
    return f'<code class="{f"tok {kind}".strip()}">{words}</code>'


def table(kind: str, rows: Iterable[str], head: str = "") -> str:
    head = head and f"<thead><tr>{head}</tr></thead>"
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<table class="{kind}">{head}<tbody>{body}</tbody></table>'


def row_of(name: str, body: str, value: str) -> str:
    """Return the cells of a table row: name, drawing and value."""
    first = f'<th scope="row">{shown(name)}</th>' if name else "<td></td>"
    return f'{first}<td>{body}</td><td class="value">{shown(value)}</td>'


def svg(width: float, height: float, body: str, kind: str) -> str:
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    return f'<svg class="{kind}" {size} aria-hidden="true">{body}</svg>'


# The six forms of a panel.


def bars(form: scene.Bars) -> str:
    ends = [sum(length for length, _ in row.parts) for row in form.rows]
    largest = form.largest or max([*ends, *(row.tick or 0 for row in form.rows)]) or 1
    rows = []
    for row in form.rows:
        drawn = "".join(
            f'<i class="{kind}" style="width:{100 * length / largest:.2f}%"></i>'
            for length, kind in row.parts
            if length
        )
        if row.tick is not None:
            drawn += f'<b style="left:{100 * row.tick / largest:.2f}%"></b>'
        rows.append(row_of(row.name, f'<span class="track">{drawn}</span>', row.value))
    return table("as-bars", rows)


def cells(form: scene.Cells) -> str:
    if not any(cell.text for row in form.rows for cell in row.cells):
        return table(
            "as-cells", (row_of(row.name, squares(row.cells), row.value) for row in form.rows)
        )
    named = any(row.name for row in form.rows)
    valued = any(row.value for row in form.rows)
    rows = []
    for row in form.rows:
        body = f'<th scope="row">{shown(row.name)}</th>' if named else ""
        for cell in row.cells:
            kind = f' class="{cell.kind}"' if cell.kind else ""
            body += f"<td{kind}>{shown(cell.text)}</td>"
        rows.append(body + (f'<td class="value">{shown(row.value)}</td>' if valued else ""))
    names = [""] * (named and bool(form.head)) + form.head
    head = "".join(f'<th scope="col">{shown(name)}</th>' for name in names)
    return f'<div class="scroll">{table("as-cells text", rows, head)}</div>'


def squares(row: list[Cell]) -> str:
    """Draw a row of squares, with equal neighbours as one SVG element."""
    size = min(SQUARE, max(1, (WIDTH - 100) // max(len(row), 1)))
    gap = 1 if size > 4 else 0
    body = ""
    at = 0
    while at < len(row):
        count = 1
        while at + count < len(row) and row[at + count] == row[at]:
            count += 1
        cell = row[at]
        if cell.kind:
            faint = f' opacity="{cell.share:.2f}"' if cell.share < 1 else ""
            path = "".join(
                f"M{x * size} 0h{size - gap}v{SQUARE - 2}h-{size - gap}z"
                for x in range(at, at + count)
            )
            body += f'<path class="{cell.kind}"{faint} d="{path}"/>'
        at += count
    return svg(len(row) * size, SQUARE - 1, body, "squares")


def tokens(form: scene.Tokens) -> str:
    named = any(line.name or line.value for line in form.lines)
    rows = []
    for line in form.lines:
        chips = "".join(
            f"<li>{chip(token.text, token.kind)}"
            + (f"<span>{escape(token.number)}</span>" if token.number else "")
            + "</li>"
            for token in line.tokens
        )
        rows.append((f'<ol class="chips">{chips}</ol>', line))
    if not named:
        return "".join(body for body, _ in rows)
    return table("as-tokens", (row_of(line.name, body, line.value) for body, line in rows))


def lanes(form: scene.Lanes, key: dict[str, str]) -> str:
    ends = [end for lane in form.lanes for span in lane.spans for end in span[:2]]
    low, high, ticks = scale(form.axis, ends)
    rows = []

    def place(value: float) -> float:
        return 100 * (value - low) / (high - low)

    for lane in form.lanes:
        spans = ""
        for span in lane.spans:
            width = place(span.end) - place(span.start)
            what = span.text or key.get(span.kind, "")
            until = f" to {span.end:g}" if width else ""
            said = f"{what}, {form.axis.name} {span.start:g}{until}; "
            inner = escape(span.text) if width else ""
            spans += (
                f'<i class="{span.kind} {"" if width else "moment"}" '
                f'style="left:{place(span.start):.2f}%;width:{width:.2f}%" title="{escape(what)}">'
                f'<span aria-hidden="true">{inner}</span><span class="unseen">{escape(said)}</span>'
                "</i>"
            )
        rows.append(row_of(lane.name, f'<span class="lane">{spans}</span>', lane.value))
    marks = "".join(f'<i style="left:{place(at):.2f}%">{escape(text)}</i>' for at, text in ticks)
    axis = f'<td></td><td><span class="axis">{marks}</span>{escape(form.axis.name)}</td><td></td>'
    body = table("as-lanes", [*rows, f"{axis}"])
    return f'<div class="scroll">{body}</div>'


def scale(axis: Axis, values: list[float]) -> tuple[float, float, list[tuple[float, str]]]:
    """Return the minimum, maximum and ticks of an axis."""
    values = [value for value in [*values, *(at for at, _ in axis.ticks)] if math.isfinite(value)]
    low = min(values)
    high = max(values)
    if axis.log:
        low = min(value for value in values if value > 0)
    elif low > 0 and not axis.ticks and low < high / 2:
        low = 0
    if high == low:
        high = low + 1
    ticks = axis.ticks
    if not ticks and axis.log:
        powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        ticks = [
            (10.0**power, f"{10**power:,}" if power >= 0 else f"{10.0**power:g}")
            for power in powers
        ]
    elif not ticks:
        step = 10 ** math.floor(math.log10((high - low) / 2))
        step *= next(many for many in (5, 2, 1) if many * step <= (high - low) / 2)
        first = math.ceil(low / step)
        places = [step * at for at in range(first, math.floor(high / step) + 1)]
        ticks = [(at, f"{at:,.10g}".replace("-", "\u2212")) for at in places]
    return low, high, ticks


def lines(form: scene.Lines, height: float = 150) -> str:
    points = [point for curve in form.curves for point in curve.points]
    x_marks = [mark.x for mark in form.marks if mark.x is not None]
    y_marks = [mark.y for mark in form.marks if mark.y is not None]
    x_scale = scale(form.x, [x for x, _ in points] + x_marks)
    y_scale = scale(form.y, [y for _, y in points] + y_marks)
    left = 12 + 6.6 * max(len(text) for _, text in y_scale[2])
    top = 10
    right = WIDTH - 10

    def share(value: float, axis: Axis, low: float, high: float) -> float:
        if axis.log:
            return math.log(max(value, low) / low) / math.log(high / low)
        return (value - low) / (high - low)

    def place(x: float, y: float) -> tuple[float, float]:
        across = share(x, form.x, *x_scale[:2])
        up = share(y, form.y, *y_scale[:2])
        return left + across * (right - left), top + (1 - up) * height

    def label(x: float, y: float, text: str, kind: str = "") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}">{escape(text)}</text>'

    def line(points: Iterable[tuple[float, float]], kind: str) -> str:
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        return f'<polyline class="{kind}" points="{places}"/>'

    body = ""
    for at, text in y_scale[2]:
        y = place(x_scale[0], at)[1]
        body += line([(left, y), (right, y)], "grid") + label(left - 5, y + 4, text, "end")
    for at, text in x_scale[2]:
        body += label(place(at, y_scale[0])[0], top + height + 16, text, "middle")
    body += label((left + right) / 2, top + height + 32, form.x.name, "middle")
    for curve in form.curves:
        drawn = [place(*point) for point in curve.points]
        if curve.dots:
            body += "".join(
                f'<circle class="{curve.kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in drawn
            )
        elif curve.bars:
            path = "".join(f"M{x:.1f} {top + height:g}V{y:.1f}" for x, y in drawn)
            body += f'<path class="{curve.kind}" d="{path}"/>'
        else:
            body += line(drawn, curve.kind)
    for mark in form.marks:
        x, y = place(mark.x or x_scale[0], mark.y or y_scale[0])
        ends = [(x, top), (x, top + height)] if mark.y is None else [(left, y), (right, y)]
        body += line(ends, "mark")
        if mark.y is None:
            near = "end" if x > WIDTH / 2 else ""
            body += label(x + (-4 if near else 4), top + 10, mark.text, near)
        else:
            body += label(right, y - 5 if y > top + 14 else y + 14, mark.text, "end")
    names = [(curve.kind, curve.name) for curve in form.curves if curve.name]
    legend = f'<p class="y">{escape(form.y.name)}</p>'
    return legend + svg(WIDTH, top + height + 36, body, "chart") + unseen(form) + keys(names)


def unseen(form: scene.Lines) -> str:
    """Return an invisible table with points of each curve, for screen readers."""
    rows = []
    for curve in form.curves:
        step = max(1, -(-(len(curve.points) - 1) // (POINTS - 1)))
        chosen = curve.points[::step]
        chosen += [curve.points[-1]] * (curve.points[-1] != chosen[-1])
        said = ", ".join(f"{y:.3g} at {x:.6g}" for x, y in chosen)
        rows.append(f'<th scope="row">{shown(curve.name)}</th><td>{said}</td>')
    said = escape(f"{form.y.name} at {form.x.name}")
    head = f'<th scope="col">curve</th><th scope="col">{said}</th>'
    return f'<div class="unseen">{table("as-points", rows, head)}</div>'


def player(form: scene.Player) -> str:
    """Return the player of a run, which stays hidden without JavaScript."""
    data = {"setup": form.setup, "frames": form.frames, "first": form.first}
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # no tag ends the script
    return (
        '<section class="recorded" aria-label="The run, step by step" hidden><div></div>'
        f'<script type="application/json">{text}</script></section>'
    )


FORMS: dict[type, Callable[..., str]] = {
    scene.Bars: bars,
    scene.Cells: cells,
    scene.Tokens: tokens,
    scene.Lines: lines,
    scene.Player: player,
}


def keys(names: Iterable[tuple[str, str]]) -> str:
    items = "".join(f'<li><i class="{kind}"></i>{shown(text)}</li>' for kind, text in names)
    return items and f'<ul class="key">{items}</ul>'


def panel(part: Panel) -> str:
    form = part.form
    body = lanes(form, part.key) if isinstance(form, scene.Lanes) else FORMS[type(form)](form)
    note = f'<p class="note">{shown(part.note)}</p>' if part.note else ""
    wide = " wide" if part.wide or isinstance(form, scene.Player) else ""
    return (
        f'<div class="panel{wide}"><p class="title">{shown(part.title)}</p>{body}'
        f"{keys(part.key.items())}{note}</div>"
    )


def picture(drawn: Scene, below: str = "") -> str:
    """Return a scene as a figure with its caption. below: HTML under the panels."""
    body = "".join(map(panel, drawn.panels))
    return (
        f'<figure class="picture scene"><figcaption>{shown(drawn.caption)}</figcaption>'
        f'<div class="panels">{body}</div>{below}</figure>'
    )
