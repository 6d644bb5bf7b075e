"""Commits read from git, and their diffs as HTML."""

import ast
import bisect
import functools
import html
import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pygments.filter
import pygments.lexers
from pygments import token as tokens
from pygments.formatters import HtmlFormatter

import lessons as course
from lessons import LessonError

SUFFIXES = (".py", ".c", ".h", ".js", ".html")  # of code files


@dataclass
class Line:
    kind: str  # "+", "-" or " "
    old: int  # line number in the old file, from 0; for "+" the number of the next line
    new: int  # line number in the new file, from 0

    @property
    def number(self) -> int:
        """Return the line number in the file that has the line; in the new file if both do."""
        return self.old if self.kind == "-" else self.new


@dataclass
class Hunk:
    function: str  # enclosing function by git's guess; `heading` parses Python instead
    first: int  # first line in the new file
    lines: list[Line] = field(default_factory=list)


@dataclass
class Change:
    """The changes of a commit to one file."""

    path: str
    old: str  # blob id; zeros if the file does not exist
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
    "log --first-parent --diff-merges=first-parent --reverse --root --patch --full-index "
    "--no-renames --no-color --no-ext-diff --no-textconv --unified=3 --src-prefix=a/ "
    "--dst-prefix=b/ --format=%x01%H%x1f%s%x1f%b%x02"
).split()


def read_commits(ref: str) -> list[Commit]:
    """Return the commits of the first-parent history with their changes, oldest first."""
    with tempfile.TemporaryDirectory() as folder:
        attributes = Path(folder, "attributes")  # override the reader's, for function names
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
                first = new + (head[3] == "0")  # git gives the line before an empty hunk
                change.hunks.append(Hunk(head[4].strip(), max(first, 0)))
            elif change.hunks and line[:1] in ("+", "-", " "):
                change.hunks[-1].lines.append(Line(line[0], old, new))
                old += line[0] != "+"
                new += line[0] != "-"
        yield change


@functools.cache
def blob(name: str) -> str:
    """Return the text of a blob by its id; "" for zeros."""
    return read_bytes(name).decode("utf-8", "replace") if name.strip("0") else ""


def read_bytes(name: str) -> bytes:
    """Return the bytes of a blob. Raises LessonError if git cannot read it."""
    command = [*course.GIT, "cat-file", "blob", name]
    result = subprocess.run(command, cwd=course.ROOT, capture_output=True)
    if result.returncode:
        raise LessonError(f"git cat-file blob {name} failed")
    return result.stdout


@functools.cache
def definition_lines(name: str, path: str) -> list[tuple[int, str]]:
    """Return (line, name) of each function, class and constant in a file, lines from 0."""
    found = []
    if path.endswith(".py"):
        found += [(first, words) for first, _, words in definitions(name)]
    for number, line in enumerate(blob(name).split("\n")):
        method = re.match(r"  (?:async )?(?!if|for|while|switch)(\w+)\(.*\{$", line)
        if method and not path.endswith(".py"):  # a method in JavaScript
            found.append((number, method[1]))
        found += [(number, words) for words in defined(line) if not line.startswith(" ")]
    return found


@functools.cache
def definitions(name: str) -> list[tuple[int, int, str]]:
    """Return the functions and classes of a Python file, outer ones first.

    Each is (first line, line after the last, name), with lines from 0.
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
    """Return the function or class that encloses the first changed line inside any.

    Return "" if no changed line is inside one, or if the hunk shows the definition's first line.
    """
    if not change.path.endswith(".py"):
        words = hunk.function
        # git truncates at 80 bytes
        return words if len(words) < 79 else words.rpartition(" ")[0] + " …"
    for line in hunk.lines:
        if line.kind == " ":
            continue
        name, start = change.new, hunk.lines[0].new
        if line.kind == "-":
            name, start = change.old, hunk.lines[0].old
        for first, after, words in reversed(definitions(name)):
            if first <= line.number < after:
                return words if first < start else ""
    return ""


def code_lines(commits: list[Commit], kind: str) -> str:
    """Return the lines of code, without tests, that commits add ("+") or remove ("-")."""
    found = []
    for change in (change for commit in commits for change in commit.changes if change.is_code):
        lines = blob(change.old if kind == "-" else change.new).split("\n")
        for hunk in change.hunks:
            found += [lines[line.number] for line in hunk.lines if line.kind == kind]
    return "\n".join(found)


def defined(text: str) -> list[str]:
    """Return the names of functions, classes and constants that lines of Python or C define."""
    names = (
        r"^\s*(?:async )?(?:def|class) (\w+)|^([A-Z][A-Z_]+) = "
        r"|^(?:static |inline |INLINE |async )*\w+\*? \**(\w+)\([^;]*$"
    )
    return ["".join(found) for found in re.findall(names, text, re.MULTILINE)]


# Syntax highlighting.

# Pygments token -> token whose CSS class it gets. All other tokens are plain text.
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
    """A filter that keeps only coloured tokens; a page without tags for names is half as big."""

    def filter(self, lexer, stream):
        for found, value in stream:
            yield next((KINDS[kind] for kind in KINDS if found in kind), tokens.Text), value


@functools.cache
def highlight(name: str, path: str) -> list[str]:
    """Return the highlighted lines of a blob as HTML."""
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


# Diffs as HTML.

FOLD = 4  # minimum number of unchanged lines to fold


@dataclass
class DiffSection:
    """A piece of a diff as HTML: lines of hunks in one <pre>, or the gap between hunks."""

    html: str
    is_open: bool | None  # None: same as the neighbouring pieces
    names: list[str] = field(default_factory=list)  # of the enclosing definitions
    lines: list[Line] = field(default_factory=list)


def show_change(
    change: Change,
    folded: bool,
    anchors: dict[int, str] | None = None,
    notes: dict[int, str] | None = None,
    only_linked: bool = False,
) -> str:
    """Return the hunks of a change as HTML.

    folded: include the lines between hunks, one click away. anchors: line of the new file -> id
    that links lead to. notes: line -> HTML of a note on the definition that begins there.
    only_linked: fold changes in definitions that have no anchor.
    """
    if not change.hunks:
        return "<p>Data: left out here.</p>"
    old = highlight(change.old, change.path)
    new = list(highlight(change.new, change.path))
    for number, id in (anchors or {}).items():
        new[number] = f'<span class="at" id="{id}"></span>{new[number]}'
    named = [definition_at(change.new, change.path, line) for line in anchors or {}]
    notes_by_name = {
        definition_at(change.new, change.path, line): notes[line] for line in notes or {}
    }
    notes_by_name.pop("", None)
    pieces = []
    shown = 0  # lines of the new file shown so far
    for hunk in change.hunks:
        between = new[shown : hunk.first]
        near = folded and len(between) < FOLD and bool(pieces)  # close enough to join
        for number, (name, lines) in enumerate(split_hunk(change, hunk)):
            is_open = not only_linked or any(f"{name}.".startswith(f"{each}.") for each in named)
            note = notes_by_name.pop(name, "")
            joins = pieces and pieces[-1].is_open == is_open and not note and (number or near)
            before = spans(between) if near and not number else ""
            body = before + "".join(show_lines(lines, old, new))
            if joins:
                pieces[-1].html = pieces[-1].html.removesuffix("</pre>") + f"{body}</pre>"
                pieces[-1].names.append(name)
                pieces[-1].lines += lines
                continue
            where = ""
            if not number and not near:
                pieces.append(DiffSection(gap(between, folded), None))
                where = heading(change, hunk) if change.is_code or change.is_test else ""
            head = f'<h4 class="where"><code>{html.escape(where)}</code></h4>' if where else ""
            note = note and f'<p class="said">{note}</p>'
            pieces.append(
                DiffSection(f"{note}{head}<pre>{body}</pre>", is_open, [name], list(lines))
            )
        shown = max([hunk.first] + [line.new + 1 for line in hunk.lines if line.kind != "-"])
    if change.new.strip("0"):
        pieces.append(DiffSection(gap(new[shown:] if blob(change.new) else [], folded), None))
    return fold_closed(pieces)


def fold_closed(pieces: list[DiffSection]) -> str:
    """Return the pieces as HTML; fold each run of closed pieces behind a count of its changes."""
    parts = []
    closed = []  # closed pieces and the gaps between them
    for piece in [*pieces, DiffSection("", True)]:
        if piece.is_open is False or (piece.is_open is None and closed):
            closed.append(piece)
            continue
        after = [closed.pop()] if closed and closed[-1].is_open is None else []
        if closed:
            names = dict.fromkeys(name for each in closed for name in each.names)
            lines = [line.kind for each in closed for line in each.lines]
            summary = ", ".join(f"<code>{html.escape(name)}</code>" for name in names if name)
            summary = (
                f"{summary or 'top of the file'}: +{lines.count('+')} &minus;{lines.count('-')}"
            )
            body = "".join(each.html for each in closed)
            parts.append(f'<details class="gap more"><summary>{summary}</summary>{body}</details>')
        parts += [each.html for each in [*after, piece]]
        closed = []
    return "".join(parts)


@functools.cache
def definition_starts(name: str, path: str) -> list[tuple[int, str]]:
    """Return the first line of each stretch of a file and its definition, (line, name).

    Blank lines and comments above a definition belong to it. In Python the lines after a definition
    belong to the enclosing class, or to "". In other languages a function extends to the next one.
    """
    lines = blob(name).split("\n")
    starts = {}
    found = definition_lines(name, path)
    if path.endswith(".py"):
        inner_first = [each for each in reversed(definitions(name)) if each[2].count(".") < 2]
        starts = {after: words.rpartition(".")[0] for _, after, words in inner_first}
        found = [(first, words) for first, _, words in inner_first]
    for first, words in found:
        while first and re.fullmatch(r"\s*((#(?!include|define)|//|/?\*).*)?", lines[first - 1]):
            first -= 1
        starts[first] = words
    return sorted(starts.items())


def definition_at(name: str, path: str, line: int) -> str:
    """Return the function, method or class that encloses a line of a file; "" for none."""
    starts = definition_starts(name, path)
    index = bisect.bisect_right(starts, line, key=lambda start: start[0])
    return starts[index - 1][1] if index else ""


def split_hunk(change: Change, hunk: Hunk) -> Iterator[tuple[str, list[Line]]]:
    """Yield the lines of a hunk grouped by their definition, (name, lines)."""
    definition = functools.partial(definition_at, change.new, change.path)
    for name, lines in itertools.groupby(hunk.lines, key=lambda line: definition(line.new)):
        yield name, list(lines)


def gap(lines: list[str], folded: bool) -> str:
    """Return the HTML of unchanged lines between hunks: folded, shown, or only counted."""
    if not lines:
        return ""
    count = f"{len(lines)} unchanged line{'s' * (len(lines) > 1)}"
    if not folded:
        return f'<p class="gap">{count}</p>'
    if len(lines) < FOLD:
        return f"<pre>{spans(lines)}</pre>"
    return f'<details class="gap"><summary>{count}</summary><pre>{spans(lines)}</pre></details>'


def show_lines(lines: list[Line], old: list[str], new: list[str]) -> Iterator[str]:
    """Yield the lines of a hunk as HTML.

    Removed lines and their replacement are one block, side by side on a wide screen.
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
    """Wrap each line in a <span>, so that CSS can draw a + or - that is not copied."""
    return "".join(f"<span>{line or ' '}</span>" for line in lines)
