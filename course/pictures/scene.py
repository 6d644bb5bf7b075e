"""The data model of pictures, which render.py turns into HTML and card.py into SVG.

To draw lesson 07, write `course/pictures/choosing.py`, or extend an existing module:

    def record(prompt: str) -> list[tuple[str, float]]:
        return runs.top_tokens(runs.next_logits(runs.encode(prompt, 200)).softmax(-1), 8)

    def draw(top_tokens: list[tuple[str, float]]) -> scene.Scene:
        bars = [scene.Bar(word(text), [(p, "first")], percent(p)) for text, p in top_tokens]
        caption = f"The model prefers {word(top_tokens[0][0])}, with {percent(top_tokens[0][1])}."
        return scene.Scene(caption, scene.Panel("The next token", scene.Bars(bars)))

    PICTURES = {"top-p": scene.Picture("One day, a girl named", record, draw)}

`record` runs the code of the course through its public functions (`generate`, `Engine.step`,
sampling functions, cache objects) and returns plain data. It raises UserError for an unsuitable
prompt. `draw` is pure: data in, a Scene out. The package imports all its modules and merges their
PICTURES, whose keys are slugs of lessons. Tests compare the record with `generate` or another
oracle, and the numbers of the scene with the record; one test renders every picture.

A panel holds one of six forms:

    Cells   rows of squares, or a table if cells have text   computed or cached tokens, owners
    Bars    one bar per row, of one or more parts            probabilities, amounts
    Tokens  lines of tokens, with a number under each        sequences, drafts, positions
    Lanes   spans and moments on a time axis                 requests, threads, processes
    Lines   curves over two axes, linear or logarithmic      a quantity as a function of another
    Player  the engine step by step, by server/player.js     batch, queue and pages of a run

Text is plain: `word(text)` marks a token inside it, and there is no other markup. A kind is a
colour, the same in each form; a panel's key gives its meaning there. Colours that are not
self-explanatory need a key, because a reader who sees no colours gets its words.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

KINDS = {
    "": "plain",
    "first": "blue: what the panel is about",
    "second": "orange: what it is compared with",
    "third": "purple",
    "good": "green: accepted, kept, chosen",
    "bad": "red: refused, too much",
    "kept": "pale: there from before",
    "idle": "hatched: empty or padding",
    "gone": "struck through: cut, or out of the window",
    **{f"owner{number}": f"of request, slot or rank {number}" for number in range(1, 7)},
}


class Bar(NamedTuple):
    name: str
    parts: list[tuple[float, str]]  # (length, kind)
    value: str  # text after the bar
    tick: float | None = None  # position of a vertical line across the row


class Cell(NamedTuple):
    kind: str = ""
    text: str = ""
    share: float = 1.0  # opacity of the colour, 0 to 1


class Row(NamedTuple):
    name: str
    cells: list[Cell]
    value: str = ""


class Token(NamedTuple):
    text: str
    kind: str = ""
    number: str = ""  # under the token: an id, a position or a score


class Line(NamedTuple):
    tokens: list[Token]
    name: str = ""
    value: str = ""


class Span(NamedTuple):
    start: float
    end: float  # equal to start for a moment
    kind: str
    text: str = ""


class Lane(NamedTuple):
    name: str
    spans: list[Span]
    value: str = ""


class Curve(NamedTuple):
    name: str
    points: list[tuple[float, float]]
    kind: str
    dots: bool = False  # points without a line
    bars: bool = False  # a bar from the bottom of the chart to each point


class Axis(NamedTuple):
    name: str
    ticks: list[tuple[float, str]] = []  # (value, label); [] lets the renderer choose
    log: bool = False


class Mark(NamedTuple):
    """A dashed line across a chart."""

    text: str
    x: float | None = None
    y: float | None = None


@dataclass
class Cells:
    rows: list[Row]
    head: list[str] = field(default_factory=list)  # column names, if cells have text


@dataclass
class Bars:
    rows: list[Bar]
    largest: float | None = None  # length that fills a row; None: the longest bar


@dataclass
class Tokens:
    lines: list[Line]


@dataclass
class Lanes:
    lanes: list[Lane]
    axis: Axis


@dataclass
class Lines:
    curves: list[Curve]
    x: Axis
    y: Axis
    marks: list[Mark] = field(default_factory=list)


@dataclass
class Player:
    """A run of the engine, made by `runs.player`."""

    setup: dict[str, Any]  # in the format of server/player.js
    frames: list[dict[str, Any]]
    first: int  # index of the frame shown first


Form = Cells | Bars | Tokens | Lanes | Lines | Player


@dataclass
class Panel:
    title: str
    form: Form
    note: str = ""
    key: dict[str, str] = field(default_factory=dict)  # kind -> its meaning in this panel
    wide: bool = False  # full page width


class Scene:
    def __init__(self, caption: str, *panels: Panel):
        self.caption = caption  # one or two sentences
        self.panels = panels


class Picture(NamedTuple):
    """The prompt and functions that make the picture of a lesson."""

    prompt: str  # of the picture in the book
    record: Callable[[str], Any]
    draw: Callable[[Any], Scene]
    card: tuple[int, ...] = ()  # indices of the panels in its SVG file for Readme.md


# Text helpers for captions, notes and values.


def word(text: str) -> str:
    """Mark a token inside a text, to be shown in a box that makes its spaces visible."""
    return f"`{text.replace('`', chr(0x2CB))}`"


def percent(p: float) -> str:
    """Format a probability in percent; a positive one is never shown as 0."""
    if 0 < p < 0.0005:
        return "< 0.1\u00a0%"
    whole = p in (0, 1) or 0.0995 <= p < 0.995
    return f"{100 * p:.0f}\u00a0%" if whole else f"{100 * p:.1f}\u00a0%"  # a no-break space


def signed(number: float, digits: int = 2) -> str:
    """Format a number with a minus sign that is as wide as a digit."""
    return f"{number:.{digits}f}".replace("-", "\u2212")


def times(count: int, noun: str, plural: str = "") -> str:
    """Format a count with its noun: "1 step", "2 steps"."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
