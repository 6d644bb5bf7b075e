"""Rendering of panels as a standalone SVG file, for Readme.md, which cannot show HTML.

`python lessons.py picture 17 --output FILE.svg` writes a card; the repository's cards are beside
this file. A card has inline colours and is white in light and dark mode. It shows Tokens as flowing
text, and Cells with at most one letter each.
"""

import textwrap
from itertools import chain

from pictures import scene
from pictures.render import escape
from pictures.scene import Panel

WIDTH = 860
MARGIN = 24
LETTER = 9  # pixels per letter; textLength enforces it in any font
SQUARE = 30
CODE = 'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="15"'
PLAIN = 'font-family="system-ui, Helvetica, Arial, sans-serif"'
INK, SOFT = "#1d1f23", "#575c65"
FILLS = {
    "": "#fff",
    "good": "#cfeccb",
    "bad": "#f5cfc8",
    "third": "#f3d3ee",
    "idle": "#f0eee8",
    "owner1": "#a9cdf0",
    "owner2": "#f3c79a",
    "owner3": "#b5dfae",
    "owner4": "#dfb9dc",
    "owner5": "#efb3a8",
    "owner6": "#d3d1ca",
}


def rect(x: float, y: float, width: float, height: float, fill: str, edge: str = "none") -> str:
    size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {size} rx="3" fill="{fill}" stroke="{edge}"/>'


def words(x: float, y: float, text: str, size: int = 14, ink: str = SOFT) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" {PLAIN} font-size="{size}" fill="{ink}">{escape(text)}</text>'
    )


def letters(x: float, y: float, text: str) -> str:
    """Return monospaced text, LETTER pixels per character."""
    bare = text.strip()
    left = x + LETTER * (len(text) - len(text.lstrip()))
    length = f'textLength="{LETTER * len(bare)}" lengthAdjust="spacingAndGlyphs"'
    return bare and (
        f'<text x="{left:g}" y="{y:g}" {CODE} {length} fill="{INK}">{escape(bare)}</text>'
    )


def flow(form: scene.Tokens, y: float) -> tuple[str, float]:
    """Draw the tokens as flowing text on their colours; return the SVG and the next y."""
    x = MARGIN
    body = ""
    for token in chain.from_iterable(line.tokens for line in form.lines):
        text = token.text.replace("\n", "\\n")
        width = LETTER * len(text)
        if x + width > WIDTH - MARGIN:
            x = MARGIN
            y += 32
        body += rect(x, y, max(width - 1, 0), 25, FILLS[token.kind]) + letters(x, y + 18, text)
        x += width
    return body, y + 32


def grid(form: scene.Cells, y: float) -> tuple[str, float]:
    body = ""
    for row in form.rows:
        body += words(MARGIN, y + 19, row.name, 13)
        for at, cell in enumerate(row.cells):
            x = MARGIN + 54 + at * SQUARE
            body += rect(x, y, SQUARE - 2, SQUARE - 2, FILLS[cell.kind])
            body += letters(x + 9.5, y + 19, cell.text)
        y += SQUARE
    return body, y


def card(title: str, panels: list[Panel]) -> str:
    """Return the SVG of a title and panels below it, each with its own title and key."""
    y = 38
    body = ""
    for line in textwrap.wrap(title, 96):
        body += words(MARGIN, y, line, 16, INK)
        y += 22
    y -= 8
    for panel in panels:
        body += words(MARGIN, y + 22, panel.title, 14, INK)
        draw = flow if isinstance(panel.form, scene.Tokens) else grid
        drawn, y = draw(panel.form, y + 36)
        body += drawn
        x = MARGIN
        for kind, text in panel.key.items():
            body += rect(x, y + 7, 14, 14, FILLS[kind], SOFT) + words(x + 20, y + 18, text)
            x += 44 + 7.2 * len(text)
        y += 30 if panel.key else 6
    height = y + 12
    named = f'role="img" aria-label="{escape(title)}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
        f'viewBox="0 0 {WIDTH} {height:g}" {named}>\n<title>{escape(title)}</title>\n'
        f"{rect(0.5, 0.5, WIDTH - 1, height - 1, '#fff', '#dedad0')}"
        f"{body}\n</svg>\n"
    )
