"""Two of the pictures as SVG files that need no page: for Readme.md, which shows no HTML.

`python lessons.py picture 17 --output FILE.svg` writes one; those of the repository are in
`course/pictures/`. A card is white in light and dark, and its colours are written out.
"""

from book import recordings
from book.draw import escape
from book.pictures import PICTURES, recorded
from book.serving import Batches
from book.speculating import Speculation

WIDTH = 860
MARGIN = 24
CELL = 9  # the width of a letter: every text is stretched to it, whatever the reader's fonts are
LETTERS = 'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="15"'
WORDS = 'font-family="system-ui, Helvetica, Arial, sans-serif"'
INK, SOFT = "#1d1f23", "#575c65"
GREEN, MAGENTA, EMPTY = "#cfeccb", "#f3d3ee", "#f0eee8"
OWNERS = ("#a9cdf0", "#f3c79a", "#b5dfae", "#dfb9dc", "#efb3a8", "#d3d1ca")


def rect(x: float, y: float, width: float, height: float, fill: str, edge: str = "none") -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" '
        f'fill="{fill}" stroke="{edge}"/>'
    )


def words(x: float, y: float, text: str, size: int = 14, ink: str = SOFT, bold: str = "") -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" {WORDS} font-size="{size}" fill="{ink}"{weight}>'
        f"{escape(text)}</text>"
    )


def letters(x: float, y: float, text: str) -> str:
    """Text in letters of one width."""
    shown = text.replace("\n", "\\n").strip()
    left = x + CELL * (len(text) - len(text.lstrip(" ")))
    length = f'textLength="{CELL * len(shown)}" lengthAdjust="spacingAndGlyphs"'
    return shown and (
        f'<text x="{left:g}" y="{y:g}" {LETTERS} {length} fill="{INK}">{escape(shown)}</text>'
    )


def legend(y: float, *kinds: tuple[str, str]) -> str:
    """Colours and what they mean, side by side."""
    shown = ""
    x = MARGIN
    for fill, text in kinds:
        shown += rect(x, y - 11, 14, 14, fill, SOFT) + words(x + 20, y, text)
        x += 44 + 7.2 * len(text)
    return shown


def card(height: float, title: str, body: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
        f'viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">\n'
        f"<title>{escape(title)}</title>\n"
        + rect(0.5, 0.5, WIDTH - 1, height - 1, "#fff", "#dedad0")
        + words(MARGIN, 38, title, 18, INK, "bold")
        + f"{body}\n</svg>\n"
    )


def speculation(prompt: str, record: Speculation) -> str:
    """The text, each token on the colour of the model that wrote it."""
    accepted = sum(verdict.accepted for verdict in record.verdicts)
    tokens = [(recordings.text_of(id), "none") for id in recordings.encode(prompt, 100)]
    count = len(tokens)
    tokens += [
        (text, GREEN if place < verdict.accepted else MAGENTA)
        for verdict in record.verdicts
        for place, text in enumerate(verdict.tokens)
    ]
    x, y = MARGIN, 76
    body = ""
    for text, fill in tokens:
        width = CELL * len(text.replace("\n", "\\n"))
        if x + width > WIDTH - MARGIN:
            x, y = MARGIN, y + 32
        body += rect(x, y - 18, max(width - 1, 0), 25, fill)
        body += letters(x, y, text)
        x += width
    body += legend(
        y + 42,
        (GREEN, "guessed by the small model, accepted"),
        (MAGENTA, "the large model's own"),
    )
    passes = len(record.verdicts)
    title = (
        f"{len(tokens) - count} tokens in {passes} passes of the large model: "
        f"{accepted} were guessed by a small one"
    )
    return card(y + 62, title, body)


def batches(_, record: Batches) -> str:
    """The rows of a batch, step by step, without and with requests that join at any step."""
    size = 30
    body = ""
    y = 68
    runs = (
        ("A static batch waits for its longest text", record.static),
        ("The engine: whoever ends leaves, whoever waits joins", record.continuous),
    )
    for name, steps in runs:
        idle = sum(owner is None for step in steps for owner in step)
        body += words(MARGIN, y, f"{name}: {len(steps)} steps, {idle} places idle", 14, INK)
        for row in range(len(steps[0])):
            top = y + 14 + row * size
            body += words(MARGIN, top + 19, f"row {row + 1}", 13)
            for at, step in enumerate(steps):
                owner = step[row]
                left = MARGIN + 54 + at * size
                fill = EMPTY if owner is None else OWNERS[owner]
                body += rect(left, top, size - 2, size - 2, fill)
                if owner is not None:
                    body += letters(left + 9.5, top + 19, "ABCDEF"[owner])
        y += 14 + len(steps[0]) * size + 34
    texts = len(record.lengths)
    first, second = (len(steps) for _, steps in runs)
    title = f"{texts} texts in {len(record.static[0])} rows: {first} steps in static batches, "
    title += f"{second} in the engine"
    return card(y - 12, title, body)


CARDS = {"speculative-decoding": speculation, "continuous-batching": batches}


def svg_of(id: str, prompt: str | None = None) -> str:
    """The picture of a lesson as an SVG file; "" if there is none. Raises UserError."""
    slug = id.partition("-")[2]
    if slug not in CARDS:
        return ""
    prompt = PICTURES[slug].prompt if prompt is None else prompt
    return CARDS[slug](prompt, recorded(PICTURES[slug], prompt))
