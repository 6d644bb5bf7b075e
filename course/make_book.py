"""Write the book: the lessons on main as static web pages that need no server and no network.

Only the search, the copy buttons, the engine's player and the page Play need JavaScript.

Run it with `python lessons.py book`. Lessons, diffs, answers and plots are read from git, so the
book cannot disagree with the code.
"""

import argparse
import html
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

try:
    import jinja2
    import markdown_it
    import pygments  # noqa: F401
    from markupsafe import Markup
except ImportError as error:
    print(
        f"lessons.py: error: the book needs the package {error.name}; "
        "set all of them up with: make book",
        file=sys.stderr,
    )
    sys.exit(2)

import lessons as course  # noqa: E402
import pictures  # noqa: E402
from book import diffs, glossary, prose, summaries  # noqa: E402
from lessons import Lesson, LessonError, git  # noqa: E402

TEMPLATES = Path(__file__).with_name("book")
LIMIT = 350_000  # maximum size of a page in bytes; larger pages move sections out
LONG = 120  # changed lines of code from which a diff counts as long
MAX_SHOWN = 10_000  # changed lines of a commit between lessons whose diff is shown
NOTE = 300  # maximum length of a note beside code, in characters
# Written into each page, so that `check_output` recognizes an older book.
MARK = '<meta name="generator" content="lessons.py book">'
# Lesson pages.


def title(lesson: Lesson) -> str:
    return lesson.subject.partition(": ")[2]


def parts_of(lessons: list[Lesson]) -> dict[str, list[Lesson]]:
    """Group the lessons by part: title of the part -> its lessons."""
    parts = {}
    name = ""
    for lesson in lessons:
        name = course.PARTS.get(lesson.slug, name)
        parts.setdefault(name, []).append(lesson)
    return parts


class Neighbour(NamedTuple):
    """The previous or the next page: a lesson, or the summary of a part."""

    page: str
    label: str


def neighbours_of(
    lessons: list[Lesson], summarised: dict[str, str]
) -> dict[str, tuple[Neighbour | None, Neighbour | None]]:
    """Return the previous and the next page of each lesson and summary, by page.

    The summary of a part follows its last lesson. summarised: title of a part -> page.
    """
    pages = []
    for title, group in parts_of(lessons).items():
        pages += [Neighbour(f"{lesson.id}.html", lesson.id) for lesson in group]
        if title in summarised:
            pages.append(Neighbour(summarised[title], f"{title.partition(':')[0]}: summary"))
    pairs = zip([None, *pages], [*pages[1:], None])
    return {each.page: pair for each, pair in zip(pages, pairs)}


class Stop(NamedTuple):
    """A lesson on the one-evening path, as the pages show it."""

    lesson: Lesson
    minutes: int
    idea: str
    skipped: str  # numbers of the lessons between the previous stop and this one
    bridge: str  # summary of the skipped lessons


def evening_of(lessons: list[Lesson]) -> list[Stop]:
    """Return the stops of the one-evening path through these lessons."""
    stops = []
    skipped = []
    for lesson in lessons:
        stop = course.EVENING.get(lesson.slug)
        if not stop:
            skipped.append(lesson.number)
            continue
        numbers = " to ".join(dict.fromkeys((skipped[0], skipped[-1]))) if skipped else ""
        stops.append(Stop(lesson, stop.minutes, stop.idea, numbers, stop.bridge if skipped else ""))
        skipped = []
    return stops


# The sections of a lesson's message that the search indexes.
SECTIONS = (
    *("problem", "idea", "traps", "reading", "testing", "steps", "implement", "error_texts"),
    *("exercise", "predict", "trying"),
)


@dataclass
class Section:
    """A folded part of a lesson's page, moved to a page of its own if the page is too large."""

    name: str  # of its own page, without .html
    summary: str
    body: str
    has_own_page: bool = False


def lesson_pages(
    lesson: Lesson,
    message: str,
    commit: diffs.Commit,
    before: list[diffs.Commit],
    ids: dict[str, str],
    make: Callable[..., str],
    **context,
) -> tuple[dict[str, str], str]:
    """Return the pages of a lesson, name -> HTML, and the HTML of its sections for the search.

    before: the commits between the previous lesson and this one. ids: slug -> id of all lessons.
    """
    parts = course.read_message(message)
    changes = [change for change in commit.changes if not change.is_test]
    reading, anchors = link_code(prose.to_html(parts.get("Read", "").strip()), changes)
    order = [*anchors, *(change.path for change in changes)]
    changes.sort(key=lambda change: (not change.is_code, order.index(change.path)))
    notes = notes_of(reading, parts)
    # A long diff opens only the definitions that Read names.
    added = sum(change.count("+") + change.count("-") for change in changes if change.is_code)
    long = added > LONG and any(anchors.values())
    files, movable = [], []
    for change in changes:
        found = anchors.get(change.path, {})
        closed = not change.is_code or context["previous"] is None or (long and not found)
        line_notes = {line: notes[id] for line, id in found.items() if id in notes}
        name = f"{lesson.id}.code-{len(files) + 1}"
        body = file_diff(change, change.is_code, closed, found, line_notes, long and not closed)
        files.append(Section(name, change.path, body))
        if closed and not found:
            movable.append(files[-1])
    preparing = [
        diff_section(f"{lesson.id}.before-{number}", each) for number, each in enumerate(before, 1)
    ]
    tests = test_section(lesson, [change for change in commit.changes if change.is_test])
    sections = preparing + tests + movable
    link_words = glossary.link_first_uses(lesson.id, ids)
    problem, idea = split_problem(parts[""])
    interface, error_texts = course.split_implement(parts.get("Implement", ""))
    context |= {
        "lesson": lesson,
        "problem": link_words(prose.to_html(problem)),
        "idea": link_words(prose.to_html(idea)),
        "traps": link_words(prose.traps(parts.get("Traps", ""))),
        "predict": link_words(prose.question(parts.get("Predict", ""))),
        "trying": link_words(prose.commands(message)),
        "reading": link_words(reading),
        "testing": link_words(prose.to_html(prose.capitalize(parts.get("Tests", "")))),
        "exercise": link_words(context["exercise"]),
        "steps": prose.steps(parts.get("Steps", "")),
        "implement": prose.specification(interface),
        "error_texts": prose.specification(error_texts),
        "files": files,
        "tests": tests,
        "before": preparing,
    }
    pages = {
        f"{lesson.id}.html": fit_page(lambda: make("lesson.html", **context), sections, lesson.id)
    }
    for section in sections:
        if section.has_own_page:
            pages[f"{section.name}.html"] = make("part.html", **context | {"section": section})
    return pages, "".join(context[name] for name in SECTIONS)


def split_problem(text: str) -> tuple[str, str]:
    """Split a message after its first paragraph; return both pieces.

    A formula may interrupt the paragraph, which goes on to the end of its sentence.
    """
    problem, _, rest = text.partition("\n\n")
    while rest and not problem.endswith((".", ":", "?")):
        more, _, rest = rest.partition("\n\n")
        problem = f"{problem}\n\n{more}"
    return problem, rest


def link_code(reading: str, changes: list[diffs.Change]) -> tuple[str, dict[str, dict[int, str]]]:
    """Link each name in the `Read:` section, which is HTML, to its definition in the diff.

    Return the HTML and the anchors, path -> line -> id, with files in the order of the section.
    """
    anchors = {}
    shown = ""
    for clause in re.split(r"(?<=[;.]\s)", reading):  # each clause names the files it is about
        words = re.findall(r"[\w.-]*\w", re.sub(r"<[^>]*>", " ", clause))
        named = [change for change in changes if Path(change.path).name in words]

        def link(found: re.Match, named: list[diffs.Change] = named) -> str:
            definition = find_code(found[1], named) or find_code(found[1], changes)
            if not definition:
                return found[0]
            change, line = definition
            id = f"code-{changes.index(change)}-{line + 1}"
            anchors.setdefault(change.path, {})[line] = id
            return f'<a href="#{id}">{found[0]}</a>'

        shown += re.sub(r"<code>([\w.]+)(?:\([^<]*)?</code>", link, clause)
        for change in named:
            anchors.setdefault(change.path, {})
    return shown, anchors


def notes_of(reading: str, parts: dict[str, str]) -> dict[str, str]:
    """Return a note for each definition that `Read:` links to, id of the link -> HTML.

    A note is the first sentence of the explanation or the traps that contains the name as code. A
    sentence is used once.
    """
    text = re.sub(r"^    .*", "", parts[""], flags=re.MULTILINE) + parts.get("Traps", "")
    blocks = re.split(r"\n\s*\n|^- ", text, flags=re.MULTILINE)
    sentences = [
        each
        for block in blocks
        for each in re.split(r"(?<=[.?]) (?=[`A-Z])", prose.join_lines(block))
        if each.endswith(".") and "longer than" not in each and len(each) < NOTE
    ]
    notes = {}
    for id, name in re.findall(r'<a href="#(code-[\d-]+)"><code>([\w.]+)', reading):
        last = name.rpartition(".")[2]
        named = rf"`(?:\w+\.)*{last}(?:\([^`]*\))?`"
        if re.search(r"._.|[a-z][A-Z]", last):  # not an English word
            named += rf"|(?<![\w.]){last}(?!\w)"
        note = next((prose.inline(each) for each in sentences if re.search(named, each)), "")
        if note and note not in notes.values():
            notes[id] = note
    return notes


def find_code(name: str, changes: list[diffs.Change]) -> tuple[diffs.Change, int] | None:
    """Return the change and the line that define a function or method; None if none does."""
    definitions = [
        (f".{found}", change, line)
        for change in changes
        if change.is_code
        for line, found in diffs.definition_lines(change.new, change.path)
    ]
    definitions.sort(key=lambda definition: definition[0] != f".{name}")
    return next(
        (definition[1:] for definition in definitions if definition[0].endswith(f".{name}")), None
    )


def fit_page(render: Callable[[], str], sections: list[Section], name: str) -> str:
    """Render a page of at most LIMIT bytes by moving its largest sections to their own pages.

    Raises LessonError, which names the page, if it is still too large without them.
    """
    page = render()
    while len(page.encode()) > LIMIT:
        inside = [section for section in sections if not section.has_own_page]
        if not inside:
            raise LessonError(
                f"the page of {name} has more than {LIMIT} bytes, and nothing is left to move"
            )
        max(inside, key=lambda section: len(section.body)).has_own_page = True
        page = render()
    return page


# Paths outside the lessons' subject. The first three are older locations of the last two.
LEFT_OUT_PATHS = ("answers/", "pictures/", "tools/", "course/", "tests/book_pages/")


def diff_section(name: str, commit: diffs.Commit) -> Section:
    """Return the section of a commit between two lessons: its message and its diff.

    Diffs of data, of the book's own code and of more than MAX_SHOWN lines are left out.
    """
    body = prose.to_html(commit.body)
    is_huge = sum(change.count("+") + change.count("-") for change in commit.changes) > MAX_SHOWN
    for change in commit.changes:
        is_data = Path(change.path).suffix in (".csv", ".json")
        if is_huge or is_data or change.path.startswith(LEFT_OUT_PATHS):
            path = f"<code>{html.escape(change.path)}</code>"
            body += f"<p>{path}: {change.count('+')} new lines, left out here.</p>"
        else:
            body += file_diff(change, False)
    return Section(name, commit.subject, body)


def test_section(lesson: Lesson, changes: list[diffs.Change]) -> list[Section]:
    """Return a list with the section of a lesson's tests; an empty list without tests."""
    if not changes:
        return []
    files = ", ".join(Path(change.path).name for change in changes)
    added = sum(change.count("+") for change in changes)
    body = "".join(file_diff(change, False) for change in changes)
    return [Section(f"{lesson.id}.tests", f"Tests: {files}, {added} new lines", body)]


def file_diff(change: diffs.Change, folded: bool, closed: bool = False, *shown) -> str:
    """Return the diff of a file as HTML.

    folded, shown: passed to `show_change`. closed: fold the whole diff behind the file's name.
    """
    counts = f"+{change.count('+')} &minus;{change.count('-')}"
    name = f"<h3><code>{html.escape(change.path)}</code> <small>{counts}</small></h3>"
    body = diffs.show_change(change, folded, *shown)
    if closed:
        body = f"<details><summary>{name}</summary>{body}</details>"
    else:
        body = name + body
    return f'<section class="file">{body}</section>'


# Front page.

# Lower bounds of the colours of tokens on the page Play. From the first on, a token has no colour.
PROBABILITY_LEVELS = (0.9, 0.5, 0.2, 0.05, 0.0)
CARD = "18-speculative-decoding"  # lesson whose picture is on the front page
# Prefix of a plot's file name -> slugs of its lessons, and its alternative text.
PLOTS = {
    "speculative": (
        ("speculative-decoding", "benchmark-speculative"),
        "Speculative decoding: speed-up over the target alone with a KV cache, for 3 to 7 "
        "drafts per pass, greedy and sampled, in three dtypes; error bars are minimum and "
        "maximum",
    ),
    "kv_cache": (
        ("benchmark-kv-cache",),
        "Decoding with and without a KV cache, and transformers, by dtype: tokens/s after the "
        "first token",
    ),
    "batching": (
        ("native-batches", "native-prefill"),
        "Throughput over batch size, in tokens/s: this engine in torch and in C, and other engines",
    ),
    "engine": (
        ("continuous-batching", "chunked-prefill", "adaptive-speculation"),
        "The engine in torch, in C, and in C with int8 weights: tokens/s beside one request at "
        "a time, static batches and transformers; the longest ITL while a long prompt arrives; "
        "the cost of sampling and the gain of drafts",
    ),
    "graphs": (
        ("compiled-step",),
        "Decode steps of the engine in torch, static, compiled and in C: speed-up over torch's "
        "steps, for one and eight sequences, greedy and sampled; the seconds to compile them",
    ),
    "progress": (
        ("kv-cache-dynamic", "variable-batching", "native-backend", "native-greedy"),
        "Tokens/s of each lesson's own script at its tag, for one sequence and for 32: bars by "
        "lesson",
    ),
    "quality": (
        ("kl-divergence", "rotated-int8", "native-16-bit-weights"),
        "Divergence from float32 over bytes per weight: each dtype in torch and in C, and "
        "llama.cpp's files of 4 to 32 bits; the number beside a point is its share of equal top "
        "tokens",
    ),
    "serving": (
        ("load-generator",),
        "Servers under load, beside transformers' and llama.cpp's: tokens/s with 32 clients; "
        "TTFT and ITL while requests arrive at random",
    ),
    "scaling": (
        ("tensor-parallel", "replicas"),
        "Several processes, in tokens/s: ranks by gather and by reduce, and replicas; measured, "
        "and predicted as dotted lines",
    ),
}
VARIANTS = {  # suffix of a plot's file name -> addition to its text
    "_bfloat16": ", in bfloat16",
    "_gpt2": ", with a model of GPT-2's shape",
    "_llama": ", with a Llama of 134.5 million parameters",
    "_batches": ", in batches of 1, 8 and 32 sequences, in float32 and bfloat16",
    "_one_thread": ", on one thread",
    "_sizes": ", for 1 to 64 sequences, with TTFT and peak memory",
}


def introduction(readme: str) -> tuple[str, str, str]:
    """Return the title of Readme.md, and its introduction and section Start as HTML.

    Raises LessonError if one of them is missing.
    """
    pattern = r"# ([^\n]*)\n(.*?)\n\nOne command .*?\n## Start\n(.*?)\n## "
    found = re.match(pattern, readme, re.DOTALL)
    if not found:
        raise LessonError(
            "Readme.md on main has no title, text before `One command`, and section Start"
        )
    parser = markdown_it.MarkdownIt("commonmark", {"html": False})
    # Drop the pictures; the pages of their lessons show them.
    words = re.sub(r" [^.\n]*:\n\n(?:\[?!\[[^\n]*\n)+\n", "\n", found[2])
    # Drop the paragraph on how to make the book.
    words = "\n\n".join(each for each in words.split("\n\n") if "`make book`" not in each)
    return found[1], parser.render(words), parser.render(found[3])


def read_card(ref: str, names: set[str], lessons: list[Lesson]) -> tuple[str, str, str] | None:
    """Return the id of the front page's card, its title and its height; None without a card."""
    path = f"course/pictures/{CARD}.svg"
    if path not in names or CARD not in {lesson.id for lesson in lessons}:
        return None
    svg = git("show", f"{ref}:{path}")
    return (
        CARD,
        html.unescape(re.search("<title>(.*?)</title>", svg)[1]),
        re.search(r' height="(\d+)"', svg)[1],
    )


def png_size(data: bytes) -> tuple[int, int]:
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


# The whole book.


def web_scripts() -> dict[str, str]:
    """Return the scripts that the page Play loads; {} and a note on stderr if the build fails."""
    import web_model

    from native.build import BuildError

    try:
        return web_model.scripts()
    except BuildError as error:
        print(f"note: the book has no page Play: {error}", file=sys.stderr)
        return {}


def make_pages(
    ref: str, lessons: list[Lesson], figures: dict[str, str], scripts: dict[str, str]
) -> dict[str, str | bytes]:
    """Return the files of the book, name -> content.

    figures: id of a lesson -> HTML of its picture. scripts: returned by `web_scripts`.
    """
    texts = summaries.read_summaries()
    titles = [title for title in parts_of(lessons) if title.partition(":")[0] in texts]
    summarised = {title: summaries.page_name(title) for title in titles}
    make = page_maker(ref, lessons, bool(scripts), summarised)
    names = set(git("ls-tree", "-r", "--name-only", ref).splitlines())
    commits = diffs.read_commits(ref)
    indices = {commit.hash: index for index, commit in enumerate(commits)}
    pages = {}
    sizes = {}
    exercises = []
    entries = []
    plots, files = read_plots(ref, names)
    last = -1  # index of the previous lesson's commit
    ids = {lesson.slug: lesson.id for lesson in lessons}
    part = {lesson: name for name, group in parts_of(lessons).items() for lesson in group}
    neighbours = neighbours_of(lessons, summarised)
    evening = evening_of(lessons)
    following = dict(zip((stop.lesson for stop in evening), [*evening[1:], None]))
    for number, lesson in enumerate(lessons):
        index = indices[lesson.commit]
        commit = commits[index]
        before = commits[last + 1 : index]
        last = index
        message = course.message(lesson)
        exercise = prose.to_html(prose.capitalize(course.read_message(message).get("Exercise", "")))
        path = f"course/answers/{lesson.id}.md"
        answered = path in names
        exercises.append((lesson, exercise, answered))
        added_code = diffs.code_lines([commit], "+")
        added = diffs.code_lines(before, "+") + "\n" + added_code
        papers = papers_of([*before, commit], added)
        made, shown = lesson_pages(
            lesson,
            message,
            commit,
            before,
            ids,
            make,
            part=part[lesson],
            adds=title(lesson),
            previous=lessons[number - 1] if number else None,
            neighbours=neighbours[f"{lesson.id}.html"],
            papers=papers,
            exercise=exercise,
            answer=prose.answer(git("show", f"{ref}:{path}")) if answered else None,
            answered_at=course.answer_commit(ref, path) if answered else None,
            picture=figures.get(lesson.id, ""),
            on_evening=lesson in following,
            after=following.get(lesson),
            plots=[plot for plot in plots if lesson.slug in plot["lessons"]],
            plays=pictures.RECORDED in figures.get(lesson.id, ""),
        )
        pages |= made
        sizes[lesson.id] = {
            "adds": title(lesson),
            "code": sum(change.count("+") for change in commit.changes if change.is_code),
            "tests": sum(change.count("+") for change in commit.changes if change.is_test),
        }
        entries.append(search_entry(lesson, shown, added_code, papers))
        page = summarised.get(part[lesson])
        if page and neighbours[f"{lesson.id}.html"][1].page == page:  # the last lesson of its part
            summary = texts[part[lesson].partition(":")[0]]
            pages[page], entry = summary_page(
                summary, lesson, lessons, make, part[lesson], neighbours[page]
            )
            entries.append({"page": page} | entry)
    levels = [
        f"from {least:.0%}" if least else f"below {PROBABILITY_LEVELS[-2]:.0%}"
        for least in PROBABILITY_LEVELS
    ]
    headline, first, start = introduction(git("show", f"{ref}:Readme.md"))
    pages |= files
    card = read_card(ref, names, lessons)
    if card:
        pages[f"{CARD}.svg"] = git("show", f"{ref}:course/pictures/{CARD}.svg")
    pages["index.html"] = make(
        "index.html",
        heading=headline,
        introduction=first,
        start=start,
        lessons=lessons,
        card=card,
        sizes=sizes,
        plots=plots,
        evening=evening,
    )
    pages["exercises.html"] = make("exercises.html", exercises=exercises)
    pages["search.html"] = make("search.html")
    prompt = pictures.PICTURES["init"].prompt
    pieces = [pictures.render.panel(part) for part in pictures.scene_of("init").panels]
    first = lessons[1]
    cache = ids.get("kv-cache-dynamic")
    pages["transformer.html"] = make(
        "transformer.html", prompt=prompt, pieces=pieces, first=first, cache=cache
    )
    words = [(word, ids.get(word.slug)) for word in glossary.ENTRIES]
    pages["glossary.html"] = make("glossary.html", words=words)
    pages["search-index.js"] = f"window.SEARCH_INDEX = {json.dumps(entries, ensure_ascii=False)};\n"
    assets = ["style.css", "../pictures/scenes.css", "book.js", "pictures.js"]
    if scripts:
        pages["play.html"] = make("play.html", ids=ids, levels=levels)
        pages |= scripts
        assets += ["model.js", "play.js"]
    for name in assets:
        pages[Path(name).name] = (TEMPLATES / name).read_text("utf-8")
    if any(pictures.RECORDED in page for page in figures.values()):
        pages["player.js"] = pictures.PLAYER.read_text("utf-8")
    return pages


def summary_page(
    summary: summaries.Summary,
    last: Lesson,
    lessons: list[Lesson],
    make: Callable[..., str],
    title: str,
    neighbours: tuple[Neighbour | None, Neighbour | None],
) -> tuple[str, dict[str, str]]:
    """Return the page of a part's summary, and its entry in the search index.

    last: the last lesson of the part. title: of the part.
    """
    by_slug = {lesson.slug: lesson for lesson in lessons}
    link_words = glossary.link_first_uses(last.id, {slug: by_slug[slug].id for slug in by_slug})
    introduction, *sections = (
        (heading, link_words(summaries.to_html(text, by_slug)))
        for heading, text in [("", summary.introduction), *summary.sections]
    )
    context = {"introduction": introduction[1], "sections": sections, "neighbours": neighbours}
    lines = shown_lines(introduction[1] + "".join(body for _, body in sections))
    entry = {"title": f"{title}: summary", "text": "\n".join(lines)}
    return make("summary.html", part_title=title, **context), entry


def page_maker(
    ref: str, lessons: list[Lesson], play: bool, summarised: dict[str, str]
) -> Callable[..., str]:
    """Return a function that renders a template: make(name, **context) -> HTML.

    play: whether the book has the page Play. summarised: title of a part -> page of its summary.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals |= {
        "parts": list(parts_of(lessons).items()),
        "mark": Markup(MARK),
        "commit": git("rev-parse", "--short", ref),
        "lesson": None,
        "part_title": None,
        "play": play,
        "summarised": summarised,
    }

    def make(name: str, **context) -> str:
        return environment.get_template(name).render(context)

    return make


def papers_of(commits: list[diffs.Commit], added: str) -> dict[str, str]:
    """Return the papers that messages or added code name, name -> address.

    A paper that removed code names too is left out: that code only moved.
    """
    moved = prose.find_papers(diffs.code_lines(commits, "-"))
    papers = prose.find_papers("\n".join(commit.body for commit in commits))
    new = prose.find_papers(added)
    return papers | {name: address for name, address in new.items() if name not in moved}


def read_plots(ref: str, names: set[str]) -> tuple[list[dict], dict[str, bytes]]:
    """Return the front page's entry for each plot, and the plots, name -> PNG.

    Raises LessonError for a plot that PLOTS does not describe.
    """
    plots = []
    files = {}
    paths = [path for path in names if re.fullmatch(r"benchmark_results/.*\.png", path)]
    for path in sorted(paths):
        name = Path(path).name
        start = next((start for start in PLOTS if name.startswith(start)), None)
        if start is None:
            raise LessonError(f"{path} has no alternative text; add one to PLOTS in make_book.py")
        slugs, text = PLOTS[start]
        text += "".join(words for end, words in VARIANTS.items() if f"{end}." in name) + "."
        files[name] = diffs.read_bytes(f"{ref}:{path}")
        width, height = png_size(files[name])
        plot = {"name": name, "text": text, "width": width, "height": height, "lessons": slugs}
        plots.append(plot)
    return plots, files


def search_entry(lesson: Lesson, shown: str, code: str, papers: dict[str, str]) -> dict[str, str]:
    """Return a lesson's entry in the search index: a line per paragraph, item, formula and command.

    shown: HTML of its sections; output of commands is not indexed. code: the lines it adds.
    """
    lines = shown_lines(re.sub(r'<pre class="output.*?</pre>', "", shown, flags=re.DOTALL))
    lines.append(f"Defines {', '.join(sorted(set(diffs.defined(code))))}")
    if papers:
        lines.append(f"Papers: {'; '.join(papers)}")
    return {
        "page": f"{lesson.id}.html",
        "title": f"{lesson.id}: {title(lesson)}",
        "text": "\n".join(lines),
    }


def shown_lines(shown: str) -> list[str]:
    """Return the text of HTML, a line per paragraph, item and line of code."""
    shown = re.sub(r"<[^>]*>", "", re.sub(r"<(?:p|li|pre)\b", "\n<", shown))
    lines = (" ".join(line.split()) for line in html.unescape(shown).split("\n"))
    return [line for line in lines if line]


def check_output(output: Path) -> None:
    """Raise LessonError unless the path is free, an empty folder or an older book."""
    index = output / "index.html"
    older = index.is_file() and MARK in index.read_text("utf-8", "replace")
    if not older and (any(output.iterdir()) if output.is_dir() else os.path.lexists(output)):
        raise LessonError(
            f"{output} contains files that are not this book; choose another folder with --output"
        )
    if not output.parent.is_dir():
        raise LessonError(
            f"{output.parent} is no directory; --output must be a new folder in an existing one"
        )


def write(pages: dict[str, str | bytes], output: Path) -> None:
    """Write the files into a new folder, then replace the older book with it."""
    with tempfile.TemporaryDirectory(prefix=".book-", dir=output.parent) as folder:
        made = Path(folder, "new")
        made.mkdir()
        for name, content in pages.items():
            (made / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        if output.exists():
            output.rename(Path(folder, "old"))
        made.rename(output)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "book")
    output = parser.parse_args(argv).output.absolute()
    try:
        ref, lessons = course.read_main()
        check_output(output)
        output = output.resolve()  # a symlink to an older book stays a symlink
        figures = {lesson.id: pictures.figure(lesson.id) for lesson in lessons}
        pages = make_pages(ref, lessons, figures, web_scripts())
        write(pages, output)
    except (LessonError, OSError) as error:
        print(f"lessons.py: error: {course.printable(str(error), keep='')}", file=sys.stderr)
        return 2
    size = sum((output / name).stat().st_size for name in pages)
    shown = course.printable(str(output / "index.html"), keep="")
    print(f"{shown}: {len(pages)} files, {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
