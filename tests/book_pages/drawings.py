"""What tests read in the pictures of the lessons."""

import re
import sys

import html5lib
from conftest import ROOT

sys.path.insert(0, str(ROOT / "course"))


def tree_of(body: str):
    """The tree of a piece of HTML; strict, so that it fails for one that is not valid."""
    parser = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False)
    return parser.parseFragment(f"<div>{body}</div>")


def words_of(element) -> str:
    return "".join(element.itertext())


def tokens_of(element, kind: str = "") -> list[str]:
    """The text of each token that is shown; kind: with that class."""
    return [
        words_of(code)
        for code in element.iter("code")
        if {"tok", *kind.split()} <= set(code.get("class", "").split())
    ]


def widths(element) -> list[float]:
    """The lengths of the bars, in percent."""
    styles = [bar.get("style") for bar in element.iter("i") if "bar" in bar.get("class", "")]
    return [float(re.fullmatch(r"width:([\d.]+)%", style)[1]) for style in styles]


def of_class(element, tag: str, kind: str) -> list:
    return [
        part
        for part in element.iter()
        if str(part.tag).rpartition("}")[2] == tag and kind in part.get("class", "").split()
    ]


def drawn(slug: str):
    """The recording and the tree of the picture of a lesson, as the book has it."""
    from book.pictures import PICTURES, recorded

    picture = PICTURES[slug]
    record = recorded(picture, picture.prompt)
    return record, tree_of(picture.draw(record).body)


def caption_of(slug: str, record=None) -> str:
    """The words over a picture; record: of another run than the book's."""
    from book.pictures import PICTURES, recorded

    picture = PICTURES[slug]
    record = record or recorded(picture, picture.prompt)
    return words_of(tree_of(picture.draw(record).caption))


def cells(row) -> list[str]:
    return [words_of(cell) for cell in row]


def number(text: str) -> float:
    return float(text.replace("\u2212", "-").replace(",", ""))
