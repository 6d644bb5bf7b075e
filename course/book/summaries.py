"""The page at the end of each part: its loop, its figures, what comes next. Texts: summaries.md.

All references to lessons are in summaries.md: {slug} becomes a link with the lesson's number, and
answer of {slug} a link to its worked answer.
"""

import html
import re
from pathlib import Path
from typing import NamedTuple

from book import prose
from lessons import Lesson, LessonError

TEXT = Path(__file__).with_name("summaries.md").read_text("utf-8")
MEASURED = "Measured"  # heading of the section whose items are figures
REFERENCE = re.compile(r"(answer of )?\{([\w-]+)\}")
SUFFIXES = {"pseudo": "py", "c": "c"}  # mark of a code block -> suffix of such files
LISTING = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SOURCE = re.compile(r"(.*) \((?:(message|answer) of \{([\w-]+)\}|`(benchmark_results/[\w.]+)`)\)")


class Section(NamedTuple):
    heading: str
    text: str

    @property
    def listings(self) -> list[tuple[str, str]]:
        """Return the code blocks, each a suffix and its text."""
        return [(SUFFIXES[mark], text) for mark, text in LISTING.findall(self.text)]


class Figure(NamedTuple):
    """A measured figure and the place that it is from."""

    text: str
    kind: str | None  # "message" or "answer" of a lesson; None for a file
    source: str  # slug of the lesson, or path of the file


class Summary(NamedTuple):
    """The summary of a part. introduction: the text before the first section."""

    introduction: str
    sections: list[Section]

    @property
    def figures(self) -> list[Figure]:
        """Return the items of the section Measured. Raises LessonError for one without a source."""
        found = []
        for section in self.sections:
            if section.heading != MEASURED:
                continue
            for item in re.split(r"^- ", section.text, flags=re.MULTILINE)[1:]:
                match = SOURCE.fullmatch(prose.join_lines(item))
                if not match:
                    raise LessonError(f"summaries.md: a figure has no source: {item.strip()}")
                found.append(Figure(match[1], match[2], match[3] or match[4]))
        return found


def read_summaries() -> dict[str, Summary]:
    """Return the summaries by the name of their part, such as "Part IV"."""
    found = {}
    for part in re.split(r"^# (?=Part )", TEXT, flags=re.MULTILINE)[1:]:
        name, _, text = part.partition("\n")
        introduction, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
        parts = (section.partition("\n") for section in sections)
        found[name] = Summary(
            introduction.strip(), [Section(heading, body.strip()) for heading, _, body in parts]
        )
    return found


def page_name(part: str) -> str:
    """Return the file name of a part's summary. part: the title of the part, or its name."""
    return f"{part.partition(':')[0].lower().replace(' ', '-')}.html"


def to_html(text: str, lessons: dict[str, Lesson]) -> str:
    """Convert prose and code blocks to HTML. lessons: by slug.

    Raises LessonError for a reference to an unknown lesson.
    """

    def link(found: re.Match) -> str:
        answer, slug = found.groups()
        if slug not in lessons:
            raise LessonError(f"summaries.md: no lesson has the slug {slug!r}")
        lesson = lessons[slug]
        adds = html.escape(lesson.subject.partition(": ")[2])
        address = f"{lesson.id}.html" + ("#answer" if answer else "")
        shown = f"{lesson.number} {slug.replace('-', ' ')}"
        return f'{answer or ""}<a href="{address}" title="{adds}">{shown}</a>'

    parts = []
    end = 0
    for found in LISTING.finditer(text):
        parts.append(REFERENCE.sub(link, prose.to_html(text[end : found.start()])))
        parts.append(prose.listing(found[2], SUFFIXES[found[1]]))
        end = found.end()
    return "".join(parts) + REFERENCE.sub(link, prose.to_html(text[end:]))
