"""Write the book: the lessons on main as web pages that need no server and no network.

Only the search, the copy buttons, the engine's player and the page Play need JavaScript.

`python lessons.py book` runs it. Lessons, diffs, answers and plots are read from git, so the book
cannot disagree with the code.
"""

import argparse
import ast
import functools
import html
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

try:
    import jinja2
    import markdown_it
    import pygments.filter
    import pygments.lexers
    from markupsafe import Markup
    from pygments import token as tokens
    from pygments.formatters import HtmlFormatter
except ImportError as error:
    print(
        f"lessons.py: error: the book needs the package {error.name}; "
        "set all of them up with: make book",
        file=sys.stderr,
    )
    sys.exit(2)

import lessons as course  # noqa: E402
import pictures  # noqa: E402
from book import glossary  # noqa: E402
from lessons import Lesson, LessonError, git  # noqa: E402

TEMPLATES = Path(__file__).with_name("book")
LIMIT = 300_000  # bytes of a page; what makes it larger gets a page of its own
# In each page, so that an older book can be replaced.
MARK = '<meta name="generator" content="lessons.py book">'
TITLES = {  # of the parts, by their first lesson
    "00": "Part I: decoding, caching, speculation",
    "20": "Part II-A: native speed",
    "30": "Part II-B: Llama and Qwen",
    "37": "Part II-C: the engine",
    "48": "Part III-A: the engine at the machine's limit",
    "55": "Part III-B: the door",
    "74": "Part III-C: more than one process",
}
ARXIV = "https://arxiv.org/abs/"
PAPERS = {  # as lessons and docstrings name them
    "Agrawal et al. 2023": ARXIV + "2308.16369",
    "Ainslie et al. 2023": ARXIV + "2305.13245",
    "Braverman et al. 2019": ARXIV + "1906.05664",
    "Chen et al. 2023": ARXIV + "2302.01318",
    "Daliri et al. 2024": ARXIV + "2408.07978",
    "Dettmers et al. 2022": ARXIV + "2208.07339",
    "Eldan & Li 2023": ARXIV + "2305.07759",
    "Fan et al. 2018": ARXIV + "1805.04833",
    "Holtzman et al. 2020": ARXIV + "1904.09751",
    "Keskar et al. 2019": ARXIV + "1909.05858",
    "Kwon et al. 2023": ARXIV + "2309.06180",
    "Leviathan et al. 2022": ARXIV + "2211.17192",
    "Radford et al. 2019": "https://cdn.openai.com/better-language-models/"
    "language_models_are_unsupervised_multitask_learners.pdf",
    "Salmon et al. 2011": "https://doi.org/10.1145/2063384.2063405",
    "Saxena 2023": "https://github.com/apoorvumang/prompt-lookup-decoding",
    "Shazeer 2020": ARXIV + "2002.05202",
    "Su et al. 2021": ARXIV + "2104.09864",
    "Touvron et al. 2023": ARXIV + "2302.13971",
    "Llama 2 (Touvron et al. 2023)": ARXIV + "2307.09288",
    "Xiao et al. 2022": ARXIV + "2211.10438",
    "Yu et al. 2022": "https://www.usenix.org/conference/osdi22/presentation/yu",
    "Zhang & Sennrich 2019": ARXIV + "1910.07467",
    "Zheng et al. 2023": ARXIV + "2312.07104",
}
SUFFIXES = (".py", ".c", ".h", ".js", ".html")  # of code
NUMBER = r"\b\d\d(?:0[1-9]|1[0-2])\.\d{5}\b"  # of a paper on arXiv: year, month, and a count
TRACKERS = {"transformers": "huggingface/transformers", "vllm": "vllm-project/vllm"}


# What git knows.


@dataclass
class Line:
    kind: str  # "+", "-" or " "
    old: int  # its place in the old file, from 0; for "+" that of the next line there
    new: int  # the same in the new file

    @property
    def number(self) -> int:
        """In the file that has it; in the new one if both do."""
        return self.old if self.kind == "-" else self.new


@dataclass
class Hunk:
    function: str  # that it lies in, as git found it; for Python `heading` knows better
    first: int  # its first line in the new file
    lines: list[Line] = field(default_factory=list)


@dataclass
class Change:
    """What a commit does to a file."""

    path: str
    old: str  # blob ids; zeros for none
    new: str
    hunks: list[Hunk] = field(default_factory=list)

    def count(self, kind: str) -> int:
        return sum(line.kind == kind for hunk in self.hunks for line in hunk.lines)

    @property
    def is_test(self) -> bool:
        return self.path.startswith("tests/")

    @property
    def is_code(self) -> bool:
        return Path(self.path).suffix in SUFFIXES and not self.is_test


@dataclass
class Commit:
    hash: str
    subject: str
    body: str
    changes: list[Change]


ATTRIBUTES = "*.c diff=cpp\n*.safetensors binary\ntokenizer.json -diff\n"
LOG = (
    "log",
    "--first-parent",
    "--diff-merges=first-parent",
    "--reverse",
    "--root",
    "--patch",
    "--full-index",
    "--no-renames",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--unified=3",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "--format=%x01%H%x1f%s%x1f%b%x02",
)


def read_commits(ref: str) -> list[Commit]:
    """The commits of the first-parent line, oldest first, with their changes."""
    with tempfile.TemporaryDirectory() as folder:
        attributes = Path(folder, "attributes")  # the reader's own may name functions otherwise
        attributes.write_text(ATTRIBUTES)
        settings = ("-c", f"core.attributesFile={attributes}", "-c", "core.quotePath=false")
        text = course.run_git(*settings, *LOG, ref).stdout
    commits = []
    for part in re.split(r"^\x01", text, flags=re.MULTILINE)[1:]:
        head, _, patch = part.partition("\x02\n")
        hash, subject, body = head.split("\x1f")
        commits.append(Commit(hash, subject, body.strip("\n"), list(read_patch(patch))))
    return commits


def read_patch(patch: str) -> Iterator[Change]:
    for part in re.split(r"^diff --git ", patch, flags=re.MULTILINE)[1:]:
        lines = part.split("\n")
        names = re.fullmatch(r"a/(.*) b/\1", lines[0])
        if not names:
            raise LessonError(f"git quotes this path, which the book cannot show: {lines[0]}")
        index = next((line for line in lines if line.startswith("index ")), "index 0..0")
        change = Change(names[1], *index.split()[1].split(".."))
        old = 0
        new = 0
        for line in lines[1:]:
            head = re.match(r"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,(\d+))? @@ ?(.*)", line)
            if head:
                old = int(head[1]) - 1
                new = int(head[2]) - 1
                first = new + (head[3] == "0")  # nothing is left: the line before it is named
                change.hunks.append(Hunk(head[4].strip(), max(first, 0)))
            elif change.hunks and line[:1] in ("+", "-", " "):
                change.hunks[-1].lines.append(Line(line[0], old, new))
                old += line[0] != "+"
                new += line[0] != "-"
        yield change


@functools.cache
def blob(name: str) -> str:
    """A file's text by its id; empty for zeros."""
    return read_bytes(name).decode("utf-8", "replace") if name.strip("0") else ""


def read_bytes(name: str) -> bytes:
    """Raises LessonError if git cannot read it."""
    command = [*course.GIT, "cat-file", "blob", name]
    result = subprocess.run(command, cwd=course.ROOT, capture_output=True)
    if result.returncode:
        raise LessonError(f"git cat-file blob {name} failed")
    return result.stdout


@functools.cache
def places_of(name: str, path: str) -> list[tuple[int, str]]:
    """What a file defines: (line, name) of each function, class and constant, lines from 0."""
    found = []
    if path.endswith(".py"):
        found += [(first, words) for first, _, words in definitions(name)]
    for number, line in enumerate(blob(name).split("\n")):
        method = re.match(r"  (?:async )?(?!if|for|while|switch)(\w+)\(.*\{$", line)
        if method and not path.endswith(".py"):  # of JavaScript
            found.append((number, method[1]))
        found += [(number, words) for words in defined(line) if not line.startswith(" ")]
    return found


@functools.cache
def definitions(name: str) -> list[tuple[int, int, str]]:
    """The functions and classes of a Python file, outer ones first.

    Of each (its first line, the line after its last, name), lines from 0.
    """
    try:
        tree = ast.parse(blob(name))
    except SyntaxError:
        return []
    found = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = min(part.lineno for part in (child, *child.decorator_list))
                found.append((first - 1, child.end_lineno, prefix + child.name))
                inner = f"{prefix}{child.name}."
            visit(child, inner)

    visit(tree, "")
    return found


def heading(change: Change, hunk: Hunk) -> str:
    """The function or class of the first changed line that lies in one.

    Empty if there is none, and where the hunk shows its first line.
    """
    if not change.path.endswith(".py"):
        words = hunk.function
        # git cuts after 80 bytes
        return words if len(words) < 79 else words.rpartition(" ")[0] + " …"
    for line in hunk.lines:
        if line.kind == " ":
            continue
        removed = line.kind == "-"
        inside = [
            (first, words)
            for first, after, words in definitions(change.old if removed else change.new)
            if first <= line.number < after
        ]
        if inside:
            first, words = inside[-1]
            shown = {
                other.old if removed else other.new
                for other in hunk.lines
                if other.kind in (" ", line.kind)
            }
            return "" if first in shown else words
    return ""


# Colours.

# What Pygments finds -> the kind whose class it gets; all else has the colour of text.
KINDS = {
    tokens.Comment.Preproc: tokens.Keyword,
    tokens.Comment: tokens.Comment,
    tokens.Keyword: tokens.Keyword,
    tokens.Operator.Word: tokens.Keyword,
    tokens.String: tokens.String,
    tokens.Number: tokens.Number,
    tokens.Name.Function: tokens.Name.Function,
    tokens.Name.Class: tokens.Name.Function,
    tokens.Name.Decorator: tokens.Name.Function,
}


class FewKinds(pygments.filter.Filter):
    """Leave the kinds of token that have a colour: a page without a tag for each name is half."""

    def filter(self, lexer, stream):
        for found, value in stream:
            yield next((KINDS[kind] for kind in KINDS if found in kind), tokens.Text), value


@functools.cache
def highlight(name: str, path: str) -> list[str]:
    """The lines of a blob as HTML."""
    return colour(blob(name), path)


def colour(text: str, path: str) -> list[str]:
    try:
        lexer = pygments.lexers.get_lexer_for_filename(path, stripnl=False, ensurenl=False)
    except pygments.util.ClassNotFound:
        shown = html.escape(text, quote=False)
    else:
        lexer.add_filter(FewKinds())
        shown = pygments.highlight(text, lexer, HtmlFormatter(nowrap=True))
    return shown.removesuffix("\n").split("\n")


# A diff as HTML.

FOLD = 4  # unchanged lines from which on they are folded


def show_change(change: Change, folded: bool, marks: dict[int, str] | None = None) -> str:
    """The hunks of a change. folded: the lines between them are there too, one click away.

    marks: the ids of lines of the new file that links lead to.
    """
    if not change.hunks:
        return "<p>Data: left out here.</p>"
    old = highlight(change.old, change.path)
    new = list(highlight(change.new, change.path))
    for number, id in (marks or {}).items():
        new[number] = f'<span class="at" id="{id}"></span>{new[number]}'
    parts = []
    shown = 0  # lines of the new file so far
    for hunk in change.hunks:
        between = new[shown : hunk.first]
        body = "".join(show_lines(hunk.lines, old, new))
        if folded and len(between) < FOLD and parts:  # one piece of code
            parts[-1] = parts[-1].removesuffix("</pre>") + spans(between) + body + "</pre>"
        else:
            words = heading(change, hunk) if change.is_code or change.is_test else ""
            parts.append(gap(between, folded))
            if words:
                parts.append(f'<h4 class="where"><code>{html.escape(words)}</code></h4>')
            parts.append(f"<pre>{body}</pre>")
        shown = max([hunk.first] + [line.new + 1 for line in hunk.lines if line.kind != "-"])
    if change.new.strip("0"):
        parts.append(gap(new[shown:] if blob(change.new) else [], folded))
    return "".join(parts)


def gap(lines: list[str], folded: bool) -> str:
    """Unchanged lines."""
    if not lines:
        return ""
    count = f"{len(lines)} unchanged line{'s' * (len(lines) > 1)}"
    if not folded:
        return f'<p class="gap">{count}</p>'
    if len(lines) < FOLD:
        return f"<pre>{spans(lines)}</pre>"
    return f'<details class="gap"><summary>{count}</summary><pre>{spans(lines)}</pre></details>'


def show_lines(lines: list[Line], old: list[str], new: list[str]) -> Iterator[str]:
    """Lines of a hunk.

    Removed ones and those in their place are one block, side by side where there is room.
    """
    index = 0
    while index < len(lines):
        runs = {kind: [] for kind in " -+"}
        for kind in " -+":
            while index < len(lines) and lines[index].kind == kind:
                runs[kind].append((old if kind == "-" else new)[lines[index].number])
                index += 1
        yield spans(runs[" "])
        removed = f"<del>{spans(runs['-'])}</del>" if runs["-"] else ""
        added = f"<ins>{spans(runs['+'])}</ins>" if runs["+"] else ""
        both = removed + added
        yield f'<span class="pair">{both}</span>' if removed and added else both


def spans(lines: list[str]) -> str:
    """Each line a block, so that a mark can stand before it that nobody copies."""
    return "".join(f"<span>{line or ' '}</span>" for line in lines)


def whole_file(change: Change) -> str:
    """The new file, with the lines marked that the change adds."""
    added = {line.number for hunk in change.hunks for line in hunk.lines if line.kind == "+"}
    lines = highlight(change.new, change.path)
    parts = []
    for new, run in itertools.groupby(range(len(lines)), key=lambda number: number in added):
        shown = spans([lines[number] for number in run])
        parts.append(f"<ins>{shown}</ins>" if new else shown)
    return f'<pre class="numbered">{"".join(parts)}</pre>'


# A message as HTML.

# What stands in backticks is code. Where a text has none, what looks like code is.
TICKS = r"`(?P<ticks>[^`]+)`"
CODE = r"""(?P<code> <\|\w+\|>
    | (?<![\w-])--[a-z][\w-]*
    | (?<![\w/.])[\w-]+(?:/[\w.-]+)*/?\.(?:py|c|h|md|json|jinja|toml|csv|safetensors)\b
    | \w+::\w+
    | (?<![\w.])
        (?: (?:\w+\.)*_*[A-Za-z]\w*_\w+ (?:\([^()\n]*\))?
            | [A-Z]\w+\.[a-z_]\w* (?:\([^()\n]*\))?
            | [a-z]\w*\.[A-Z]\w+
            | [A-Za-z]\w*\((?!s\))[^()\n]*\) )
        (?: \.\w+ | \[\w+\] | ="?[\w.]*\w"? )* )"""
PAPER = "|".join(re.escape(name).replace(r"\ ", r"\s") for name in PAPERS)
LINKS = rf"""(?P<arxiv>{NUMBER})
    | (?P<issue>\b(?:{"|".join(TRACKERS)})\#\d+)
    | (?P<paper>{PAPER})"""
MARKED = re.compile(f"{TICKS} | {LINKS}", re.VERBOSE)
GUESSED = re.compile(f"{TICKS} | {CODE} | {LINKS}", re.VERBOSE)
Names = frozenset[str] | None  # that are code where they stand; None: code is in backticks


def names_in(text: str, names: Names) -> Names:
    """These names for a text without backticks, else None."""
    return None if "`" in text else names


def inline(text: str, names: Names = frozenset()) -> str:
    """A line of prose: code, and papers and issues as links.

    names: as of `Names`; if it is not None, what looks like code is code too.
    """
    parts = []
    end = 0
    for found in (MARKED if names is None else GUESSED).finditer(text):
        parts.append(plain(text[end : found.start()], names))
        parts.append(marked(found))
        end = found.end()
    return "".join(parts) + plain(text[end:], names)


def plain(text: str, names: Names) -> str:
    """Words between what is marked; "the end" is no name."""
    if not names:
        return html.escape(text, quote=False)
    pieces = re.split(r"((?:\b(?:the|its) )?\b\w+)", text)
    return "".join(
        f"<code>{piece}</code>" if piece in names else html.escape(piece, quote=False)
        for piece in pieces
    )


def marked(found: re.Match) -> str:
    kind = found.lastgroup
    words = found[kind]
    shown = html.escape(words, quote=False)
    if kind == "arxiv":
        return f'<a href="{ARXIV}{shown}">arXiv:{shown}</a>'
    if kind == "paper":
        return f'<a href="{html.escape(PAPERS[unwrap(words)])}">{shown}</a>'
    if kind == "issue":
        tracker, _, number = words.partition("#")
        return f'<a href="https://github.com/{TRACKERS[tracker]}/issues/{number}">{shown}</a>'
    return f"<code>{shown}</code>"


def prose(text: str, names: Names = frozenset()) -> str:
    """Paragraphs, lists, and formulas, which are indented. names: as of `inline`."""
    names = names_in(text, names)
    parts = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        lines = block.split("\n")
        for kind, pairs in itertools.groupby(zip(kinds(lines), lines), key=lambda pair: pair[0]):
            run = "\n".join(line for _, line in pairs)
            if kind == "formula":
                shown = re.sub(r"^    ", "", run, flags=re.MULTILINE)
                parts.append(f'<pre class="formula">{html.escape(shown, quote=False)}</pre>')
            elif kind == "list":
                items = re.split(r"^- ", run, flags=re.MULTILINE)[1:]
                texts = [re.sub(r"^  ", "", item, flags=re.MULTILINE) for item in items]
                shown = "".join(f"<li>{prose(item, names)}</li>" for item in texts)
                parts.append(f"<ul>{shown}</ul>")
            elif run.strip():
                parts.append(f"<p>{inline(unwrap(run), names)}</p>")
    return "".join(parts)


def kinds(lines: list[str]) -> Iterator[str]:
    """What each line of a block belongs to: a paragraph, a formula or a list."""
    in_list = False
    for line in lines:
        in_list |= line.startswith("- ")
        yield "list" if in_list else "formula" if line.startswith("    ") else "paragraph"


def unwrap(text: str) -> str:
    """One line; a word that a hyphen cuts at the end of a line is whole."""
    return " ".join(re.sub(r"(?<=\w)-\n\s*(?=\w)", "-", text).split())


def capital(text: str) -> str:
    """A section begins as a sentence does, unless it begins with code."""
    text = text.strip()
    return text if re.match(r"\w*[_.(`=A-Z]", text) else text[:1].upper() + text[1:]


def remark(text: str) -> str:
    """What stands right behind a section's name, without the parentheses around all of it."""
    whole = re.fullmatch(r"\((.*)\)", unwrap(text))
    return capital(whole[1] if whole else text)


def commands(message: str) -> str:
    """The `Try:` section: each command with a button that copies it, then what it printed."""
    shown = {"prose": lambda text: prose(remark(text)), "command": command, "output": output}
    return "".join(shown[kind](text) for kind, text in course.read_try(message))


def command(text: str) -> str:
    """A command to copy, with the Python of a here-document in colours."""
    script = re.fullmatch(r"(python -[^\n]*<<'(\w+)'[^\n]*\n)(.*\n)(\2)", text, re.DOTALL)
    before = html.escape(script[1] if script else text, quote=False)
    shown = re.sub(r"(?<![\w-])--\w[\w-]*", r"<span>\g<0></span>", before)
    if script:
        shown += "".join(line + "\n" for line in colour(script[3], "x.py")) + script[4]
    lines = " lines" if "\n" in text else ""
    return f'<pre class="command{lines}"><code data-copy>{shown}</code></pre>'


def output(text: str) -> str:
    """What a command printed.

    The columns of a table stay; other lines, which may be stories, are wrapped.
    """
    table = " lines" if re.search(r"(?:\S|^) {2,}\S", text, re.MULTILINE) else ""
    return f'<pre class="output{table}">{html.escape(text, quote=False)}</pre>'


def specification(text: str, names: Names = frozenset()) -> str:
    """An `Implement:` section: a list, whose items are indented once. names: as of `inline`.

    What is indented twice goes on with the item, or is a member of it: see `members`.
    """
    names = names_in(text, names)
    lines = [line for line in text.split("\n") if line.strip()]
    before = list(itertools.takewhile(lambda line: not line.startswith("    "), lines))
    lines = lines[len(before) :]
    items = []
    for line in lines:
        if re.match(r" {4}\S", line) or not items:
            items.append([])
        items[-1].append(line)
    width = min(max(map(len, lines), default=0), 88)
    shown = ""
    for item in items:
        parts = [inline(unwrap(member), names) for member in members(item, width)]
        shown += f"<li>{'<br>'.join(parts)}</li>"
    note = inline(unwrap(remark("\n".join(before))), names)
    return (f"<p>{note}</p>" if note else "") + (f"<ul>{shown}</ul>" if shown else "")


def members(lines: list[str], width: int) -> list[str]:
    """The lines of an item, put together to its members. width: of a line that is full.

    Where lines are indented three times, those go on with a member. Elsewhere a member begins after
    a line that was not full, if that ended a sentence or a call, or this one begins with code.
    """
    deep = any(line.startswith(" " * 12) for line in lines)
    found = lines[:1]
    for number, (before, line) in enumerate(zip(lines, lines[1:])):
        word = re.match(r"\s*(`[^`]*`\S*|\S+)", line)[1]  # a line breaks before it, and not in it
        full = len(before) + 1 + len(word) > width - 4  # 4: a line may break a little early
        if deep:
            goes_on = line.startswith(" " * 12) or (number == 0 and full)
        else:
            ended = before.rstrip("`")[-1] in ".;)"
            goes_on = full or not (ended or word.startswith("`"))
        if goes_on:
            found[-1] += "\n" + line
        else:
            found.append(line)
    return found


def answer(text: str) -> str:
    """A worked answer, Markdown, as HTML: the sentence in its title, then all but the exercise."""
    parser = markdown_it.MarkdownIt("commonmark", {"html": False, "highlight": code_block})
    parser.validateLink = lambda address: address.startswith("https://")

    def first(found: re.Match) -> str:
        return f"**{found[1].upper()}{found[2]}.**\n"

    text = re.sub(r"^# [^:\n]*: (.)(.*)\n+(?:>.*\n)+", first, text)

    def deeper(tag: re.Match) -> str:
        return f"<{tag[1]}h{int(tag[2]) + 1}>"

    return re.sub(r"<(/?)h([1-5])>", deeper, parser.render(text))


def code_block(text: str, language: str, _) -> str:
    return (command if language == "sh" else output)(text.removesuffix("\n"))


# The pages.


def title(lesson: Lesson) -> str:
    return lesson.subject.partition(": ")[2]


def part_of(lesson: Lesson) -> str:
    return TITLES[max(number for number in TITLES if number <= lesson.id)]


@dataclass
class Section:
    """A folded part of a lesson's page, or a page of its own where that would grow too large."""

    name: str  # of its page
    summary: str
    body: str
    apart: bool = False


def lesson_pages(
    lesson: Lesson,
    message: str,
    commit: Commit,
    before: list[Commit],
    names: frozenset[str],
    ids: dict[str, str],
    make: Callable[..., str],
    **context,
) -> dict[str, str]:
    """The pages of a lesson, name -> HTML.

    before: the commits that prepare it. names: functions and classes, to be marked where a text
    without backticks says what to read. ids: of all lessons, by slug.
    """
    parts = course.read_message(message)
    changes = [change for change in commit.changes if not change.is_test]
    reading = parts.get("Read", "")
    paths = [change.path for change in changes]
    changes.sort(key=lambda change: (not change.is_code, place_in(reading, change, paths)))
    code = [change for change in changes if change.is_code]
    shown_reading, marks = link_code(prose(reading.strip(), names), code)
    files = []
    for change in changes:
        closed = not change.is_code or context["previous"] is None
        files.append(file_diff(change, change.is_code, closed, marks.get(change.path)))
    preparing = [
        diff_section(f"{lesson.id}.before-{number}", each) for number, each in enumerate(before, 1)
    ]
    tests = test_section(lesson, [change for change in commit.changes if change.is_test])
    sections = preparing + tests
    explain = glossary.linker(lesson.id, ids)
    classes = frozenset(name for name in names if not name.islower())  # others may well be words
    problem, _, idea = parts[""].partition("\n\n")
    names_why = names_in(parts[""], frozenset())
    context |= {
        "lesson": lesson,
        "problem": explain(prose(problem, names_why)),
        "idea": explain(prose(idea, names_why)),
        "trying": explain(commands(message)),
        "reading": explain(shown_reading),
        "testing": explain(prose(capital(parts.get("Tests", "")))),
        "exercise": explain(context["exercise"]),
        "implement": specification(parts.get("Implement", ""), classes),
        "files": files,
        "tests": tests,
        "before": preparing,
    }
    pages = {f"{lesson.id}.html": fit(lambda: make("lesson.html", **context), sections, lesson.id)}
    for section in sections:
        if section.apart:
            pages[f"{section.name}.html"] = make("part.html", **context | {"section": section})
    return pages


def place_in(reading: str, change: Change, paths: list[str]) -> int:
    """Where a text on what to read first names a file, or what a change defines or alters in it.

    paths: of all changed files. What is said of another file counts only if nothing else is found.
    """
    names = [change.path, Path(change.path).name]
    for hunk in change.hunks:
        names += heading(change, hunk).split(".")
        names += defined(
            "\n".join(
                blob(change.new).split("\n")[line.new] for line in hunk.lines if line.kind != "-"
            )
        )
    words = "|".join(re.escape(name) for name in names if name)
    own = []
    others = []
    for start, clause in clauses(reading):
        about = files_in(clause, paths)
        for found in re.finditer(rf"(?<![\w/.])(?:{words})(?!\w)", clause):
            (own if not about or change.path in about else others).append(start + found.start())
    return min(own or others or [len(reading)])


def clauses(reading: str) -> Iterator[tuple[int, str]]:
    """The parts of a text on what to read, each with its place: each is about some files."""
    for found in re.finditer(r"(?:(?!;\s|\.\s).)+", reading, re.DOTALL):
        yield found.start(), found[0]


def files_in(clause: str, paths: list[str]) -> list[str]:
    """Those of the paths that a text names, by their last part or whole."""
    named = re.findall(r"[\w/.-]*\w", clause)
    return [path for path in paths if path in named or Path(path).name in named]


def link_code(reading: str, changes: list[Change]) -> tuple[str, dict[str, dict[int, str]]]:
    """What to read, as HTML, with a link from each name to where the page shows it.

    changes: of code, in the order of the page. Returns the ids of lines too, path -> line -> id.
    """
    paths = [change.path for change in changes]
    marks = {path: {} for path in paths}
    shown = ""
    end = 0
    owner = ""  # "Engine" after `Engine.step`: `compute` is then its own rather than another's
    for start, clause in clauses(reading):
        about = files_in(re.sub(r"<[^>]*>", " ", clause), paths)
        named = [change for change in changes if change.path in about]
        for found in re.finditer(r"<code>([\w.]+)(?:\([^<]*)?</code>", clause):
            place = find_code(found[1], owner, named) or find_code(found[1], owner, changes)
            if place:
                path, line, name = place
                owner = name.rpartition(".")[0]
                id = marks[path].setdefault(line, f"code-{paths.index(path)}-{line + 1}")
                shown += reading[end : start + found.start()] + f'<a href="#{id}">{found[0]}</a>'
                end = start + found.end()
    return shown + reading[end:], marks


def find_code(name: str, owner: str, changes: list[Change]) -> tuple[str, int, str] | None:
    """Where a name is defined: (path, line, full name); None if these files do not define it."""
    places = [
        (change.path, line, found)
        for change in changes
        for line, found in places_of(change.new, change.path)
    ]
    for wanted in (f"{owner}.{name}", name):
        for path, line, found in places:
            if found == wanted:
                return path, line, found
    return next((place for place in places if place[2].endswith(f".{name}")), None)


def fit(render: Callable[[], str], sections: list[Section], name: str) -> str:
    """A page of at most LIMIT bytes: while it is larger, the largest section goes apart.

    Raises LessonError, which names the page, if that is not enough.
    """
    page = render()
    while len(page.encode()) > LIMIT:
        inside = [section for section in sections if not section.apart]
        if not inside:
            raise LessonError(
                f"the page of {name} has more than {LIMIT} bytes, and nothing is left to move"
            )
        max(inside, key=lambda section: len(section.body)).apart = True
        page = render()
    return page


# Not what lessons are about; the first three are where two of these were before.
APART = ("answers/", "pictures/", "tools/", "course/", "tests/book_pages/")


def diff_section(name: str, commit: Commit) -> Section:
    """A commit between two lessons: its message and its diff, but for data and the book's code."""
    body = prose(commit.body)
    for change in commit.changes:
        if Path(change.path).suffix in (".csv", ".json") or change.path.startswith(APART):
            path = f"<code>{html.escape(change.path)}</code>"
            body += f"<p>{path}: {change.count('+')} new lines, left out here.</p>"
        else:
            body += file_diff(change, False)
    return Section(name, commit.subject, body)


def test_section(lesson: Lesson, changes: list[Change]) -> list[Section]:
    """The section of a lesson's tests; none if it has none."""
    if not changes:
        return []
    files = ", ".join(Path(change.path).name for change in changes)
    added = sum(change.count("+") for change in changes)
    body = "".join(file_diff(change, False) for change in changes)
    return [Section(f"{lesson.id}.tests", f"Tests: {files}, {added} new lines", body)]


def file_diff(
    change: Change, folded: bool, closed: bool = False, marks: dict[int, str] | None = None
) -> str:
    """folded, marks: as of `show_change`. closed: the whole is behind its name."""
    counts = f"+{change.count('+')} &minus;{change.count('-')}"
    name = f"<h3><code>{html.escape(change.path)}</code> <small>{counts}</small></h3>"
    body = show_change(change, folded, marks)
    if closed:
        body = f"<details><summary>{name}</summary>{body}</details>"
    else:
        body = name + body
    return f'<section class="file">{body}</section>'


def find_papers(text: str) -> dict[str, str]:
    """The papers that a text names or numbers, name -> address."""
    words = unwrap(text)
    names = {address: name for name, address in PAPERS.items()}
    found = {name: address for name, address in PAPERS.items() if name in words}
    for number in re.findall(NUMBER, words):
        address = ARXIV + number
        found[names.get(address, f"arXiv:{number}")] = address
    return dict(sorted(found.items()))


# The first page.

# On the page Play a token at least as probable as the first of these is not coloured, and so on.
SHADES = (0.9, 0.5, 0.2, 0.05, 0.0)
CARD = "17-speculative-decoding"  # the picture of the first page
PLOTS = {
    "speculative_cpu.png": "Speculative decoding on a CPU: how many times as fast as the target "
    "alone with its cache, for 1 to 6 drafts a pass, greedy and sampled; bars are min and max.",
    "kv_cache_cpu.png": "The key-value cache against none, and transformers: tokens a second after "
    "the first.",
    "kv_cache_cpu_batches.png": "The same in batches of 1, 8 and 32 texts, in float32 and "
    "bfloat16.",
    "kv_cache_cpu_gpt2.png": "The same with a model of GPT-2's shape.",
    "batching_cpu.png": "Engines over batch sizes, tokens a second: the cache, half precision, "
    "int8 and native code here, transformers, CTranslate2 and llama.cpp.",
    "batching_cpu_gpt2.png": "Engines over batch sizes with a model of GPT-2's shape.",
    "batching_cpu_llama.png": "Engines over batch sizes with a Llama of 134.5 million parameters: "
    "cache, bfloat16, native code, transformers and llama.cpp.",
    "batching_cpu_one_thread.png": "Engines on one thread: cache, native code and CTranslate2.",
    "engine_cpu.png": "The engine, in torch, in C, and in C with int8 weights: tokens a second "
    "beside one text at a time, static batches and transformers; the longest gap while a long "
    "prompt arrives; what draws cost and what drafts gain.",
    "engine_cpu_gpt2.png": "The engine with a model of GPT-2's shape: tokens a second, and what "
    "draws cost.",
    "serving_cpu.png": "Servers under load, in torch, in C, and in C with int8 weights, beside "
    "transformers' and llama.cpp's: tokens a second of 32 clients beside the engine alone; time to "
    "the first token of long prompts; requests at random moments: to the first token, and from one "
    "to the next.",
    "scaling_cpu.png": "Tokens a second of the embedded target: one process, ranks by gather and "
    "by reduce, replicas; measured, and dotted as predicted.",
    "scaling_cpu_gpt2.png": "The same of ranks with a model of GPT-2's shape.",
}


PLOTS_OF = {  # how the name of a plot begins -> slugs of lessons that it belongs to
    "speculative": ("speculative-decoding", "benchmark-speculative"),
    "kv_cache": ("benchmark-kv-cache",),
    "batching": ("benchmark-batching",),
    "engine": ("continuous-batching", "chunked-prefill", "drafts-that-pay"),
    "serving": ("benchmark-serving",),
    "scaling": ("benchmark-scaling",),
}


def introduction(readme: str) -> tuple[str, str, str]:
    """The title of Readme.md, what it says before the first command, and how to start, as HTML."""
    pattern = r"# ([^\n]*)\n(.*?)\n\nOne command .*?\n## Start\n(.*?)\n## "
    found = re.match(pattern, readme, re.DOTALL)
    if not found:
        raise LessonError(
            "Readme.md on main has no title, text before `One command`, and section Start"
        )
    parser = markdown_it.MarkdownIt("commonmark", {"html": False})
    # The pictures stand on the pages of their lessons.
    words = re.sub(r" [^.\n]*:\n\n(?:\[?!\[[^\n]*\n)+\n", "\n", found[2])
    return found[1], parser.render(words), parser.render(found[3])


def read_card(ref: str, names: set[str], lessons: list[Lesson]) -> tuple[str, str, str] | None:
    """The lesson whose card the first page shows, what the card says, and its height."""
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


# All of it.


def web_scripts() -> dict[str, str]:
    """What the page Play loads; nothing, and a note on stderr, where it cannot be made."""
    import web_model

    from native.build import BuildError

    try:
        return web_model.scripts()
    except BuildError as error:
        print(f"note: the book has no page Play: {error}", file=sys.stderr)
        return {}


def make_pages(
    ref: str,
    lessons: list[Lesson],
    figures: dict[str, str],
    scripts: dict[str, str],
) -> dict[str, str | bytes]:
    """The files of the book, name -> content.

    figures: id of a lesson -> its picture, as HTML. scripts: as `web_scripts` returns them.
    """
    make = page_maker(ref, lessons, bool(scripts))
    names = set(git("ls-tree", "-r", "--name-only", ref).splitlines())
    commits = read_commits(ref)
    places = {commit.hash: place for place, commit in enumerate(commits)}
    pages = {}
    sizes = {}
    exercises = []
    entries = []
    plots, files = read_plots(ref, names)
    last = -1  # the place of the lesson before
    ids = {lesson.id.partition("-")[2]: lesson.id for lesson in lessons}
    defined_here = set()  # functions and classes so far
    for number, lesson in enumerate(lessons):
        place = places[lesson.commit]
        commit = commits[place]
        before = commits[last + 1 : place]
        last = place
        whole = infer_page(lesson, commit, make)
        pages |= whole
        message = course.message(lesson)
        exercise = prose(capital(course.read_message(message).get("Exercise", "")))
        path = f"course/answers/{lesson.id}.md"
        answered = path in names
        exercises.append((lesson, exercise, answered))
        own = code_lines([commit], "+")
        added = code_lines(before, "+") + "\n" + own
        papers = papers_of([*before, commit], added)
        defined_here |= set(defined(added))
        pages |= lesson_pages(
            lesson,
            message,
            commit,
            before,
            frozenset(defined_here),
            ids,
            make,
            part=part_of(lesson),
            adds=title(lesson),
            previous=lessons[number - 1] if number else None,
            next=lessons[number + 1] if number + 1 < len(lessons) else None,
            papers=papers,
            whole=next(iter(whole), None),
            changed=any(change.path == "infer.py" for change in commit.changes),
            exercise=exercise,
            answer=answer(git("show", f"{ref}:{path}")) if answered else None,
            answered_at=course.answered_at(ref, path) if answered else None,
            picture=figures.get(lesson.id, ""),
            plots=[plot for plot in plots if lesson.id.partition("-")[2] in plot["lessons"]],
            plays=pictures.RECORDED in figures.get(lesson.id, ""),
        )
        sizes[lesson.id] = {
            "adds": title(lesson),
            "code": sum(change.count("+") for change in commit.changes if change.is_code),
            "tests": sum(change.count("+") for change in commit.changes if change.is_test),
        }
        entries.append(search_entry(lesson, message, own, papers))
    shades = [f"from {least:.0%}" if least else f"below {SHADES[-2]:.0%}" for least in SHADES]
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
    words = [(word, ids.get(word.slug)) for word in glossary.WORDS]
    pages["glossary.html"] = make("glossary.html", words=words)
    pages["search-index.js"] = f"window.SEARCH_INDEX = {json.dumps(entries, ensure_ascii=False)};\n"
    own = ["style.css", "../pictures/scenes.css", "book.js", "pictures.js"]
    if scripts:
        pages["play.html"] = make("play.html", ids=ids, shades=shades)
        pages |= scripts
        own += ["model.js", "play.js"]
    for name in own:
        pages[Path(name).name] = (TEMPLATES / name).read_text("utf-8")
    if any(pictures.RECORDED in page for page in figures.values()):
        pages["player.js"] = pictures.PLAYER.read_text("utf-8")
    return pages


def page_maker(ref: str, lessons: list[Lesson], play: bool) -> Callable[..., str]:
    """A function that fills a template: make(name, **context) -> HTML.

    play: whether there is a page Play.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    parts = {}
    for lesson in lessons:
        parts.setdefault(part_of(lesson), []).append(lesson)
    environment.globals |= {
        "parts": list(parts.items()),
        "mark": Markup(MARK),
        "commit": git("rev-parse", "--short", ref),
        "lesson": None,
        "play": play,
    }

    def make(name: str, **context) -> str:
        return environment.get_template(name).render(context)

    return make


def infer_page(lesson: Lesson, commit: Commit, make: Callable[..., str]) -> dict[str, str]:
    """The page that shows infer.py whole, name -> HTML; empty before there is one."""
    name = blob_id(lesson.commit, "infer.py")
    if not name:
        return {}
    changes = [change for change in commit.changes if change.path == "infer.py"]
    body = whole_file(changes[0] if changes else Change("infer.py", name, name))
    page = make("file.html", lesson=lesson, changed=bool(changes), body=body)
    return {f"{lesson.id}.infer.html": page}


def blob_id(commit: str, path: str) -> str | None:
    """The id of a file at a commit; None if it is not there."""
    found = course.run_git("rev-parse", "--quiet", "--verify", f"{commit}:{path}")
    return found.stdout.strip() or None


def papers_of(commits: list[Commit], added: str) -> dict[str, str]:
    """The papers that messages name, and those that code names which was not only moved."""
    moved = find_papers(code_lines(commits, "-"))
    papers = find_papers("\n".join(commit.body for commit in commits))
    new = find_papers(added)
    return papers | {name: address for name, address in new.items() if name not in moved}


def read_plots(ref: str, names: set[str]) -> tuple[list[dict], dict[str, bytes]]:
    """What the first page says of each plot, and the plots, name -> PNG."""
    paths = {
        Path(path).name: path
        for path in sorted(names)
        if re.fullmatch(r"benchmark_results/.*\.png", path)
    }
    unknown = paths.keys() - PLOTS
    if unknown:
        raise LessonError(
            f"{paths[min(unknown)]} has no text for those who cannot see it; "
            "write one into PLOTS of make_book.py"
        )
    plots = []
    files = {}
    for name, text in PLOTS.items():
        if name in paths:
            files[name] = read_bytes(f"{ref}:{paths[name]}")
            width, height = png_size(files[name])
            of = next((slugs for start, slugs in PLOTS_OF.items() if name.startswith(start)), ())
            plot = {"name": name, "text": text, "width": width, "height": height, "lessons": of}
            plots.append(plot)
    return plots, files


def search_entry(lesson: Lesson, message: str, code: str, papers: dict[str, str]) -> dict[str, str]:
    """What the search knows of a lesson. code: the lines that it adds."""
    pieces = list(pieces_of(searchable(message).replace("`", "")))
    pieces.append(f"Defines {', '.join(sorted(set(defined(code))))}")
    if papers:
        pieces.append(f"Papers: {'; '.join(papers)}")
    return {
        "page": f"{lesson.id}.html",
        "title": f"{lesson.id}: {title(lesson)}",
        "text": "\n".join(pieces),
    }


def pieces_of(text: str) -> Iterator[str]:
    """The paragraphs, items and formulas of a message, each in a line, so that none run together.

    A line goes on with the one before if both are indented by nothing and it is no item, if it is
    indented as an item's second line, or deeper than one that was indented itself.
    """
    piece = ""
    depth = 0
    for line in [*text.split("\n"), ""]:
        own = len(line) - len(line.lstrip())
        goes_on = own > depth if depth else own < 4 and not line.startswith("- ")
        if piece and line.strip() and goes_on:
            piece += "\n" + line.strip()
            continue
        if piece:
            yield unwrap(piece)
        piece = line.strip()
        depth = own


def searchable(message: str) -> str:
    """A lesson's message without its subject and what commands printed."""
    parts = course.read_message(message)
    trying = []
    for kind, words in course.read_try(message):
        if kind == "command":  # each line a piece
            words = words.replace("\n", "\n\n")
        if kind != "output":
            trying.append(words)
    order = ("", "Read", "Tests", "Implement", "Exercise")
    return "\n\n".join([*(parts.get(name, "").strip("\n") for name in order), *trying])


def code_lines(commits: list[Commit], kind: str) -> str:
    """The lines of code, tests left out, that commits add ("+") or remove ("-")."""
    found = []
    for change in (change for commit in commits for change in commit.changes if change.is_code):
        lines = blob(change.old if kind == "-" else change.new).split("\n")
        for hunk in change.hunks:
            found += [lines[line.number] for line in hunk.lines if line.kind == kind]
    return "\n".join(found)


def defined(text: str) -> list[str]:
    """The functions, classes and constants that lines of Python or C define."""
    names = (
        r"^\s*(?:async )?(?:def|class) (\w+)|^([A-Z][A-Z_]+) = "
        r"|^(?:static |inline |INLINE |async )*\w+\*? \**(\w+)\([^;]*$"
    )
    return ["".join(found) for found in re.findall(names, text, re.MULTILINE)]


def check_output(output: Path) -> None:
    """Raise LessonError for a path that is neither free, nor an empty folder or an older book."""
    if output.is_symlink() and not output.exists():
        raise LessonError(
            f"{output} is a link that leads nowhere; name another folder with --output"
        )
    if output.is_dir() and (not any(output.iterdir()) or MARK in first_page(output)):
        return
    if output.exists():
        raise LessonError(
            f"{output} holds something that is not this book; name another folder with --output"
        )
    if not output.parent.is_dir():
        raise LessonError(
            f"{output.parent} is no folder; --output names a new folder in one that is there"
        )


def first_page(output: Path) -> str:
    try:
        return (output / "index.html").read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def write(pages: dict[str, str | bytes], output: Path) -> None:
    """Write the files into a new folder, and put it in the place of the older book."""
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
        output = output.resolve()  # a link to an older book stays one
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
