"""What a picture is: data that `render.py` turns into HTML and `card.py` into an SVG file.

To draw lesson 07, write `course/pictures/choosing.py`, or add to a module that is there:

    def record(prompt: str) -> list[tuple[str, float]]:
        return runs.top_tokens(runs.next_logits(runs.encode(prompt, 200)).softmax(-1), 8)

    def draw(top_tokens: list[tuple[str, float]]) -> scene.Scene:
        bars = [scene.Bar(word(text), [(p, "first")], percent(p)) for text, p in top_tokens]
        caption = f"The model prefers {word(top_tokens[0][0])}, with {percent(top_tokens[0][1])}."
        return scene.Scene(caption, scene.Panel("The next token", scene.Bars(bars)))

    PICTURES = {"top-p": scene.Picture("One day, a girl named", record, draw)}

`record` runs the code of the course through its public functions (`generate`, `Engine.step`,
sampling functions, cache objects) and returns plain data. It raises UserError for a prompt that it
cannot take. `draw` is pure: data in, a Scene out. Modules of this package are found by themselves,
and their PICTURES are keyed by the slug of a lesson. Tests compare what `record` returned with
`generate` or another oracle, and the numbers of the scene with the record; one test renders every
picture.

A panel holds one of six forms:

    Cells   rows of squares; with text in them a table       what is computed, kept, who owns what
    Bars    a bar a row, of one part or several              probabilities, amounts
    Tokens  lines of tokens, with a number under each        texts, drafts, positions
    Lanes   spans and moments on one axis of time            requests, threads, processes
    Lines   curves over two axes, linear or logarithmic      how one number follows another
    Player  the engine step by step, by server/player.js     rows, queue and pages of a run

Text is plain: `word(text)` marks a token inside it, and nothing else is markup. A kind is a colour,
the same one in each form; a panel's key says what it means there. A picture whose colours do not
speak for themselves has a key, because a reader who sees no colours is told its words.
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
    **{f"owner{number}": f"of request, row or rank {number}" for number in range(1, 7)},
}


class Bar(NamedTuple):
    name: str
    parts: list[tuple[float, str]]  # length and kind of each
    value: str  # what stands behind it
    tick: float | None = None  # a line across the row, at this length


class Cell(NamedTuple):
    kind: str = ""
    text: str = ""
    share: float = 1.0  # of its colour, 0 to 1


class Row(NamedTuple):
    name: str
    cells: list[Cell]
    value: str = ""


class Token(NamedTuple):
    text: str
    kind: str = ""
    number: str = ""  # below it: an id, a position, a score


class Line(NamedTuple):
    tokens: list[Token]
    name: str = ""
    value: str = ""


class Span(NamedTuple):
    start: float
    end: float  # that of the start for a moment
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
    dots: bool = False  # points that no line joins
    bars: bool = False  # from the lower end of the axis up to each point


class Axis(NamedTuple):
    name: str
    ticks: list[tuple[float, str]] = []  # chosen by the renderer where there are none
    log: bool = False


class Mark(NamedTuple):
    """A dashed line across a chart."""

    text: str
    x: float | None = None
    y: float | None = None


@dataclass
class Cells:
    rows: list[Row]
    head: list[str] = field(default_factory=list)  # of the columns, where cells have text


@dataclass
class Bars:
    rows: list[Bar]
    largest: float | None = None  # the length that fills a row: that of the longest bar


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
    """Made by `runs.player` from a run of the engine."""

    setup: dict[str, Any]  # as server/player.js has it
    frames: list[dict[str, Any]]
    first: int  # the frame that is shown first


Form = Cells | Bars | Tokens | Lanes | Lines | Player


@dataclass
class Panel:
    title: str
    form: Form
    note: str = ""
    key: dict[str, str] = field(default_factory=dict)  # kind -> what it means here
    wide: bool = False  # as wide as the page


class Scene:
    def __init__(self, caption: str, *panels: Panel):
        self.caption = caption  # what to see, in a sentence or two
        self.panels = panels


class Picture(NamedTuple):
    """How the picture of a lesson is made."""

    prompt: str  # of the one in the book
    record: Callable[[str], Any]
    draw: Callable[[Any], Scene]
    card: tuple[int, ...] = ()  # the panels that its SVG file shows, for Readme.md


# Words of captions, notes and values


def word(text: str) -> str:
    """A token inside a text, shown in a box, so that its spaces can be seen."""
    return f"`{text.replace('`', chr(0x2CB))}`"


def percent(p: float) -> str:
    """A probability as a reader says it; what is possible is never 0."""
    if 0 < p < 0.0005:
        return "< 0.1\u00a0%"
    whole = p in (0, 1) or 0.0995 <= p < 0.995
    return f"{100 * p:.0f}\u00a0%" if whole else f"{100 * p:.1f}\u00a0%"  # a line does not break


def signed(number: float, digits: int = 2) -> str:
    """With a minus sign that is as wide as a digit."""
    return f"{number:.{digits}f}".replace("-", "\u2212")


def times(count: int, noun: str, plural: str = "") -> str:
    """A number with its noun: "1 step", "2 steps"."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
