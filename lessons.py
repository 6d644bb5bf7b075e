"""Walk, practise and check the lessons: the commits on main whose message ends in `Lesson: ID`.

git and the standard library only. Lessons are read from main (origin/main where there is no main), whatever is checked
out, so that a reader who stands on lesson 07 still sees lesson 08.

An older version of this file, such as the one at each tag, runs main's version in its place. A version that main never
had, your own edit, committed or not, runs as it is.
"""

import argparse
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

ROOT = Path(__file__).resolve().parent
REFS = ("refs/heads/main", "refs/remotes/origin/main", "refs/remotes/upstream/main")
PARTS = ("00", "20", "27", "32", "39")  # the first lesson of each part of the course; the engine comes in two
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
STOPPED = threading.Event()  # verify was stopped: no further tests begin, and running ones end

# No hook runs, and the reader's configuration does not change what is parsed here.
SETTINGS = (f"core.hooksPath={os.devnull}", "i18n.logOutputEncoding=utf-8", "log.showSignature=false")
GIT = ["git", *(word for setting in SETTINGS for word in ("-c", setting))]


class LessonError(Exception):
    """Something that the reader can put right; the message, one line, says how."""


@dataclass(frozen=True)
class Lesson:
    id: str
    commit: str
    subject: str

    @property
    def branch(self) -> str:  # on which a reader writes it
        return f"my-{self.id}"


def run_git(*args: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess:
    decode = {"capture_output": True, "encoding": "utf-8", "errors": "replace"}
    try:
        return subprocess.run([*GIT, *args], cwd=cwd or ROOT, env=os.environ | env, **decode)
    except FileNotFoundError:
        raise LessonError("git is not installed, and the lessons are git commits") from None


def git(*args: str, cwd: Path | None = None, **env: str) -> str:
    """The output of a git command. Raises LessonError with git's own words, in one line, if it fails."""
    result = run_git(*args, cwd=cwd, **env)
    if result.returncode:
        words = [line.strip() for line in result.stderr.splitlines() if not line.startswith("hint:")]
        raise LessonError(" ".join(words) or f"git {args[0]} failed")
    return result.stdout.strip("\n")  # and no more: the separators in a log are white space to strip()


def succeeds(*args: str) -> bool:
    return run_git(*args).returncode == 0


def show(*args: str) -> None:
    """Run a git command for the reader to see, with the pager and the colours that the reader has set."""
    sys.stdout.flush()
    subprocess.run([*GIT, *args], cwd=ROOT)


# Which commits are lessons, and where the reader stands.


def read_main() -> tuple[str, list[Lesson]]:
    """The ref that is read as main, and its lessons in order. Raises LessonError if there are none.

    Only the first-parent line counts: an earlier edition may be there as a second parent.
    """
    if not (ROOT / ".git").exists():  # a zip, perhaps unpacked inside another repository
        raise LessonError("this folder is no git clone, so it has no history; get the course with: git clone URL")
    if git("rev-parse", "--is-shallow-repository") == "true":
        raise LessonError("this clone is shallow and lacks the history; get it with: git fetch --unshallow")
    present = git("for-each-ref", "--format=%(refname)", *REFS).splitlines()
    if not present:
        raise LessonError("neither main nor origin/main is here; get it with: git fetch origin main:main")
    for ref in (ref for ref in REFS if ref in present):
        form = "--format=%H%x1f%s%x1f%(trailers:key=Lesson,valueonly)%x1e"
        log = git("log", "--first-parent", "--reverse", form, ref)
        rows = [row.strip("\n").split("\x1f") for row in log.split("\x1e") if row.strip()]
        lessons = [Lesson(trailer.strip(), commit, subject) for commit, subject, trailer in rows if trailer.strip()]
        if lessons:
            return ref, lessons
    raise LessonError(
        "main has no lessons on its first-parent line (a fork that merged the course has them beside it); "
        "get the course's own main with: git remote add upstream URL && git fetch upstream"
    )


def find(lessons: list[Lesson], wanted: str) -> Lesson:
    """The lesson with that id (`06-top-k`), number (`6`, `06`) or slug (`top-k`), or the only one that begins so.

    Raises LessonError if there is none, or several.
    """
    names = {lesson: (lesson.id, *lesson.id.split("-", 1)) for lesson in lessons}
    matches = [lesson for lesson in lessons if wanted in names[lesson] or wanted and wanted.zfill(2) in names[lesson]]
    if not matches:
        matches = [lesson for lesson in lessons if any(name.startswith(wanted) for name in names[lesson])]
    if not matches:
        raise LessonError(f"{wanted!r} names no lesson; see: python lessons.py list")
    if len(matches) > 1:
        raise LessonError(f"{wanted!r} may be {', '.join(lesson.id for lesson in matches)}")
    return matches[0]


def standing(lessons: list[Lesson]) -> Lesson | None:
    """The lesson started on this branch (my-07-top-p, or my-07-top-p-1 after `restart`), else the last in HEAD."""
    branch = git("branch", "--show-current")
    for name in (branch, re.sub(r"-\d+$", "", branch)):
        for lesson in lessons:
            if lesson.branch == name:
                return lesson
    commits = set(git("rev-list", "HEAD").split())
    return next((lesson for lesson in reversed(lessons) if lesson.commit in commits), None)


def chosen(lessons: list[Lesson], wanted: str | None) -> Lesson:
    """The lesson that the reader names, else the one where the reader stands."""
    lesson = find(lessons, wanted) if wanted else standing(lessons)
    if lesson is None:
        raise LessonError("this commit contains no lesson; name one by its id")
    return lesson


def message(lesson: Lesson) -> str:
    """A lesson's message without its trailer."""
    return git("show", "--no-patch", "--format=%B", lesson.commit).rpartition("\nLesson:")[0].rstrip()


def test_files(lesson: Lesson, only: str = "AM") -> list[str]:
    """The test files that the lesson adds (A) or modifies (M)."""
    if not succeeds("rev-parse", "--verify", "--quiet", f"{lesson.commit}^"):  # the first commit has no parent
        files = git("ls-tree", "-r", "--name-only", lesson.commit, "tests/")
    else:
        changes = ("--name-only", "--no-renames", f"--diff-filter={only}", f"{lesson.commit}^", lesson.commit)
        files = git("diff", *changes, "--", "tests/")
    return [file for file in files.splitlines() if file.startswith("tests/test_")]


def python() -> str:
    """The interpreter for tests: the one `make test` set up if there is one, else the one that runs this file."""
    venv = ROOT / ".venv" / "bin" / "python"
    return str(venv) if venv.exists() else sys.executable


@contextmanager
def worktree(commit: str):
    """A checkout of a commit in a temporary folder, which is gone afterwards, also after Ctrl-C."""
    try:
        with tempfile.TemporaryDirectory(prefix="lessons-", ignore_cleanup_errors=True) as folder:
            git("worktree", "add", "--quiet", "--detach", f"{folder}/tree", commit)
            yield Path(folder, "tree")
    finally:
        git("worktree", "prune")


# The commands. Each takes the lessons and the parsed arguments.


def cmd_list(lessons, args):
    """list the lessons, * where you stand"""
    tags = read_tags()
    here = standing(lessons)
    for lesson in lessons:
        print("*" if lesson == here else " ", lesson.id.ljust(28), lesson.subject.partition(": ")[2])
    if missing := sum(tags.get(lesson.id) != lesson.commit for lesson in lessons):
        print(f"{missing} of {len(lessons)} tags are missing; make them with: python lessons.py tag", file=sys.stderr)


def read_tags() -> dict[str, str]:
    """The commit of each tag."""
    form = "--format=%(refname:lstrip=2) %(objectname) %(*objectname)"  # the last only where a tag is annotated
    return {line.split()[0]: line.split()[-1] for line in git("for-each-ref", form, "refs/tags").splitlines()}


def cmd_tag(lessons, args):
    """make the tags from the trailers"""
    tags = read_tags()
    for lesson in lessons:
        state = "kept" if tags.get(lesson.id) == lesson.commit else "moved" if lesson.id in tags else "made"
        if state != "kept":
            git("tag", "--no-sign", "--force", lesson.id, lesson.commit)
        if not args.quiet:
            print(state, lesson.id)


def cmd_show(lessons, args):
    """show a lesson: its message and its diff"""
    show("show", "--stat", "--patch", find(lessons, args.id).commit)


def cmd_diff(lessons, args):
    """show what came since the lesson before, each commit apart; on your branch for a lesson not the lesson itself"""
    index = lessons.index(find(lessons, args.id))
    if index == 0:
        raise LessonError(f"{lessons[0].id} is the first lesson; see: python lessons.py show {lessons[0].id}")
    writing = git("branch", "--show-current").startswith(lessons[index].branch)
    span = f"{lessons[index - 1].commit}..{lessons[index].commit}{'^' if writing else ''}"
    show("log", "--first-parent", "--reverse", "--format=%n%C(yellow)%s%C(reset)", "--patch", span)


def cmd_try(lessons, args):
    """run the commands of a lesson's `Try:` section, on your code if you stand on that lesson"""
    lesson = chosen(lessons, args.id)
    commands = try_commands(message(lesson))
    if not commands:
        raise LessonError(f"the message of {lesson.id} has no command to try")
    env = os.environ | {"PATH": os.pathsep.join((str(Path(python()).parent), os.environ.get("PATH", os.defpath)))}
    with ExitStack() as stack:
        folder = ROOT
        if lesson != standing(lessons):
            print(f"You do not stand on {lesson.id}: this runs in a temporary copy of it.", file=sys.stderr)
            folder = stack.enter_context(worktree(lesson.commit))
            (folder / ".venv").symlink_to(ROOT / ".venv")  # for `make`, which else makes its own
        for command in commands:
            print(f"$ {command}", flush=True)
            subprocess.run(command, shell=True, cwd=folder, env=env)


SECTIONS = ("Try", "Read", "Tests", "Implement", "Exercise")


def read_message(text: str) -> dict[str, str]:
    """The sections of a message by name; "" is what stands before them, without the subject."""
    pieces = re.split(rf"^({'|'.join(SECTIONS)}):", text, flags=re.MULTILINE)
    return {"": pieces[0].partition("\n")[2].strip("\n")} | dict(zip(pieces[1::2], pieces[2::2]))


def try_commands(text: str) -> list[str]:
    """The commands of a message's `Try:` section, with their here-documents and without their outputs."""
    return [words for kind, words in read_try(text) if kind == "command"]


def read_try(text: str) -> list[tuple[str, str]]:
    """A message's `Try:` section in order: ("prose", "command" or "output", its text), without indentation."""
    parts, end = [], None  # end: the line that ends the here-document, while in one
    for line in read_message(text).get("Try", "").strip("\n").split("\n"):
        words, last = line.removeprefix("    "), parts[-1] if parts else ["", ""]
        if end or last[0] == "command" and last[1].endswith("\\"):
            last[1] += "\n" + words
            end = None if words == end else end
        elif words.startswith("$ "):
            parts.append(["command", words.removeprefix("$ ")])
            document = re.search(r"(?<!<)<<-?['\"]?(\w+)", words)
            end = document and document[1]
        elif last[0] == (kind := "output" if line.startswith("    ") else "prose") or not line and last[0] == "output":
            last[1] += "\n" + words
        else:
            parts.append([kind, words])
    return [(kind, words.strip("\n")) for kind, words in parts if words.strip()]


def cmd_answer(lessons, args):
    """show the worked answer to a lesson's exercise"""
    lesson = chosen(lessons, args.id)
    answer = f"{read_main()[0]}:answers/{lesson.id}.md"
    if not succeeds("cat-file", "-e", answer):
        raise LessonError(f"the exercise of {lesson.id} has no written answer")
    print(git("show", answer))


def cmd_start(lessons, args):
    """make a branch with the code before a lesson and the lesson's tests, to write the lesson yourself"""
    lesson = find(lessons, args.id)
    if lesson == lessons[0]:
        raise LessonError(f"{lesson.id} is the set-up; the first lesson to write is {lessons[1].id}")
    if is_branch(lesson.branch):
        raise LessonError(
            f"you have a branch {lesson.branch} already; go on with: git switch {lesson.branch}, "
            f"or begin anew with: python lessons.py restart {lesson.id}"
        )
    begin(lesson)


def cmd_restart(lessons, args):
    """begin a lesson anew; your branch is kept under another name"""
    lesson = chosen(lessons, args.id)
    if not is_branch(lesson.branch):
        raise LessonError(f"there is no branch {lesson.branch}; begin with: python lessons.py start {lesson.id}")
    kept = next(name for n in count(1) if not is_branch(name := f"{lesson.branch}-{n}"))
    git("branch", kept, lesson.branch)
    try:
        begin(lesson)
    except BaseException:
        git("branch", "-D", kept)
        raise
    print(f"What you wrote before is on branch {kept}.")


def is_branch(name: str) -> bool:
    return succeeds("rev-parse", "--verify", "--quiet", f"refs/heads/{name}")


def begin(lesson: Lesson) -> None:
    """Switch to the lesson's branch, set to the code before the lesson and the lesson's tests. If it fails, undo it."""
    if git("status", "--porcelain", "--untracked-files=no"):
        raise LessonError("tracked files have changes; commit them or put them away with: git stash")
    with tempfile.TemporaryDirectory(prefix="lessons-") as folder:  # the commit is made aside, in an index of its own
        index = {"GIT_INDEX_FILE": f"{folder}/index"}
        git("read-tree", f"{lesson.commit}^", **index)
        git("restore", "--staged", f"--source={lesson.commit}", "--", "tests", **index)
        tree = git("write-tree", **index)
    who = ("-c", "user.name=lessons.py", "-c", "user.email=lessons@localhost")
    words = f"start {lesson.id}: its tests, red until you write it"
    commit = git(*who, "commit-tree", tree, "-p", f"{lesson.commit}^", "-m", words)
    added = git("diff", "--name-only", "--no-renames", "--diff-filter=A", "HEAD", commit).splitlines()
    if mine := [file for file in added if (ROOT / file).exists()]:
        files = ", ".join(mine)
        raise LessonError(f"git does not track these files, which are in the way; git add and commit, or move: {files}")
    back = git("branch", "--show-current") or git("rev-parse", "HEAD")
    ref = f"refs/heads/{lesson.branch}"
    undo = (ref, git("rev-parse", ref)) if is_branch(lesson.branch) else ("-d", ref)
    try:
        git("switch", "--quiet", "--force-create", lesson.branch, commit)
    except BaseException:
        git("update-ref", *undo)
        git("checkout", "--quiet", "--force", back)
        for file in added:
            (ROOT / file).unlink(missing_ok=True)
        raise
    print(message(lesson))
    print(f"\nYou are on branch {lesson.branch}: the code before the lesson, with the lesson's tests.")
    print("Write the lesson, then: python lessons.py check")
    print("To leave, git add and commit, then: git switch main")
    print(f"To discard it: git switch main && git branch -D {lesson.branch}")


def cmd_check(lessons, args):
    """run a lesson's tests on your code, then all the others"""
    lesson = chosen(lessons, args.id)
    files = [file for file in test_files(lesson) if (ROOT / file).exists()]
    if not files:
        way = f"git switch {lesson.branch}" if is_branch(lesson.branch) else f"python lessons.py start {lesson.id}"
        raise LessonError(f"the tests of {lesson.id} are not here; get them with: {way}")

    def run(*arguments: str) -> int:
        pytest = [python(), "-m", "pytest", "--maxfail=3", "--tb=short", *arguments]
        return subprocess.run(pytest, cwd=ROOT, env=os.environ | ONE_THREAD).returncode

    print(f"{lesson.id}: its own tests, on your code", flush=True)
    code = run(*files)
    if code == 0:
        print(f"{lesson.id}: its own tests pass. All others, because a lesson must not break another:", flush=True)
        code = run(*(f"--ignore={file}" for file in files))
        code = 0 if code == 5 else code  # 5: there are no others
    print(f"\n{lesson.id}: {'not yet' if code else 'all tests pass'}")
    print(f"To compare with the lesson's code: python lessons.py compare {lesson.id}")
    print("To go back to main: git add and commit, then git switch main")
    following = lessons[lessons.index(lesson) + 1 :]
    print(f"The next lesson: python lessons.py start {following[0].id}" if following else "This is the last lesson.")
    return code


def cmd_compare(lessons, args):
    """show what you would change to get to a lesson's code: - yours, + the lesson's; tests and texts are left out"""
    lesson = chosen(lessons, args.id)
    with tempfile.TemporaryDirectory(prefix="lessons-") as folder:
        index = {"GIT_INDEX_FILE": f"{folder}/index"}
        git("read-tree", lesson.commit, **index)  # the lesson's files,
        git("add", "--update", **index)  # as they are here, those not committed yet among them
        mine = git("write-tree", **index)
    if lesson != standing(lessons):
        print(f"You do not stand on {lesson.id}: this shows all that lies between.", file=sys.stderr)
    difference = ("diff", mine, lesson.commit, "--", ":/", ":!tests", ":!*.md", ":!lessons.py")
    if succeeds(difference[0], "--quiet", *difference[1:]):
        print(f"Your code is that of {lesson.id}.")
    show(*difference)


def cmd_verify(lessons, args):
    """check each lesson: green at its commit, its tests red on the code before it

    The whole suite runs for the lessons you name and those of the newest part; the lessons of finished parts run their
    own tests only, unless --all is given.
    """
    selected = list(dict.fromkeys(find(lessons, wanted) for wanted in args.ids)) or lessons
    newest_part = max(part for part in PARTS if part <= lessons[-1].id)
    trees = queue.SimpleQueue()  # one for each of two threads; the next lesson's checkout writes only what differs

    def report(lesson: Lesson) -> bool:
        tree, began, note = trees.get(), time.perf_counter(), ""
        try:
            whole = args.all or bool(args.ids) or lesson.id >= newest_part
            complaint, note = verify(lesson, lesson == lessons[0], whole, tree)
        except LessonError as error:
            complaint = str(error)
        finally:
            trees.put(tree)
        if not STOPPED.is_set():
            state, seconds = "FAILED" if complaint else "ok    ", time.perf_counter() - began
            print(f"{state} {lesson.id:28} {seconds:5.1f} s  {note}", *filter(None, [complaint]), sep="\n", flush=True)
        return not complaint

    with ExitStack() as stack:
        for lesson in selected[:2]:
            trees.put(stack.enter_context(worktree(lesson.commit)))
        with ThreadPoolExecutor(2) as pool:
            try:
                done = list(pool.map(report, selected))
            except BaseException:
                STOPPED.set()
                raise
    print(f"{sum(done)} passed, {len(done) - sum(done)} failed")
    return 0 if all(done) else 1


def cmd_book(lessons, args):
    """make the book: the lessons as web pages that are read without a network"""
    script = ROOT / "tools" / "make_book.py"
    if not script.exists():
        raise LessonError("what makes the book is on main only; go there with: git switch main")
    output = [] if args.output is None else ["--output", os.path.abspath(args.output)]
    return subprocess.run([python(), str(script), *output]).returncode


def verify(lesson: Lesson, first: bool, whole: bool, tree: Path) -> tuple[str, str]:
    """(what is wrong, or nothing; a note), after running tests at the lesson's commit, and its own on the code before.

    Green means: every test passes at the lesson, of the whole suite or of the files that the lesson changes. Red means:
    on the code before the lesson every new test fails, but those named `test_still_*`, and at least one fails by an
    assertion, not for want of a name.
    """
    files = test_files(lesson, "A")
    check_out(tree, lesson.commit)
    results, output = run_tests(tree, [] if whole else test_files(lesson))
    if not results or any(outcome != "passed" for outcome in results.values()):
        return f"the suite is not green at {lesson.id}:\n{output}", ""
    note = f"{len(results)} passed"
    if first:
        return "", note
    if not files:
        return "the lesson adds no test file", note
    check_out(tree, f"{lesson.commit}^")
    git("checkout", lesson.commit, "--", "tests", cwd=tree)
    results, output = run_tests(tree, files)
    wrong = [name for name, outcome in results.items() if outcome == "passed" and "test_still_" not in name]
    if wrong:
        return "these tests pass on the code before the lesson:\n  " + "\n  ".join(wrong), note
    asserted = sum(outcome == "assertion" for outcome in results.values())
    if not asserted:
        return f"no test fails by an assertion on the code before the lesson:\n{output}", note
    red = sum(outcome != "passed" for outcome in results.values())
    return "", f"{note}; before it {red} of its {len(results)} fail, {asserted} by assertion"


def check_out(tree: Path, commit: str) -> None:
    """Make a worktree hold that commit and nothing else."""
    git("checkout", "--quiet", "--force", "--detach", commit, cwd=tree)
    git("clean", "-ffdxq", cwd=tree)


def run_tests(tree: Path, files: list[str]) -> tuple[dict[str, str], str]:
    """Run pytest in a directory, on one thread: test name -> passed, skipped, assertion or error; the output's end."""
    report = tree / "report.xml"
    report.unlink(missing_ok=True)
    command = [python(), "-m", "pytest", "--tb=short", "-p", "no:cacheprovider", f"--junitxml={report}", *files]
    env = os.environ | ONE_THREAD | {"PYTHONDONTWRITEBYTECODE": "1"}  # bytecode of the commit before could be taken
    output = None
    with subprocess.Popen(command, cwd=tree, env=env, stdout=-1, stderr=subprocess.STDOUT, text=True) as pytest:
        while output is None:
            try:
                output, _ = pytest.communicate(timeout=0.2)
            except subprocess.TimeoutExpired:
                if STOPPED.is_set():
                    pytest.kill()
    results = {}
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        failure, error, skipped = case.find("failure"), case.find("error"), case.find("skipped")
        outcome = "passed" if skipped is None else "skipped"
        if failure is not None:
            by_assertion = failure.get("message", "").startswith(("assert", "AssertionError", "Failed: DID NOT RAISE"))
            outcome = "assertion" if by_assertion else "error"
        elif error is not None:
            outcome = "error"
        results[f"{case.get('classname')}.{case.get('name')}"] = outcome
    if pytest.returncode not in (0, 1):  # 2: a file could not be collected
        results["collection"] = "error"
    return results, "\n".join(output.splitlines()[-40:])


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"lessons.py: error: {message}; see: python lessons.py --help\n")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="lessons.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(quiet=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    reading = (cmd_list, cmd_tag, cmd_show, cmd_diff, cmd_try, cmd_answer)
    for function in (*reading, cmd_start, cmd_check, cmd_compare, cmd_restart, cmd_verify, cmd_book):
        name, words = function.__name__.removeprefix("cmd_"), function.__doc__
        command = commands.add_parser(name, help=words.splitlines()[0], description=words)
        command.set_defaults(function=function)
        help = "a lesson's id, number or slug, or how one begins: 06-top-k, 6, top-k, top"
        if function is cmd_verify:
            command.add_argument("ids", nargs="*", metavar="ID", help=f"{help}; default: all lessons")
            command.add_argument("--all", action="store_true", help="run the whole suite at each lesson")
        elif function is cmd_tag:
            command.add_argument("--quiet", action="store_true", help="say nothing, and do nothing without a history")
        elif function is cmd_book:
            command.add_argument("--output", metavar="FOLDER", help="a new one, or an older book; default: book")
        elif function in (cmd_show, cmd_diff, cmd_start):
            command.add_argument("id", metavar="ID", help=help)
        elif function is not cmd_list:
            command.add_argument("id", nargs="?", metavar="ID", help=f"{help}; default: where you stand")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character still shows the others
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # set where git runs this, as `git rebase --exec` does
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
        print(f"lessons.py: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough, as in `list | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more at its end
        return 141  # what a shell reports for a program that such a pipe ends


def newest_main():
    """The `main` to run: that of main's lessons.py if this file is an older version of it, else the one above.

    All that the two versions must agree on: main() takes no argument, and __file__ says where the repository is.
    """
    try:
        ref, _ = read_main()
        this, newest = git("hash-object", __file__), git("rev-parse", f"{ref}:lessons.py")
        versions = git("log", "--full-history", "--format=%h", f"--find-object={this}", ref, "--", "lessons.py")
        if this == newest or not versions:
            return main
        source = git("show", newest)
    except LessonError:  # main() will say it
        return main
    module = {"__name__": "lessons", "__file__": __file__}
    exec(compile(source, f"{ref}:lessons.py", "exec"), module)
    return module["main"]


if __name__ == "__main__":
    try:
        for stop in (signal.SIGTERM, signal.SIGHUP):  # end as Ctrl-C does, with nothing left behind
            if signal.getsignal(stop) == signal.SIG_DFL:  # nohup ignores SIGHUP
                signal.signal(stop, signal.default_int_handler)
        sys.exit(newest_main()())
    except KeyboardInterrupt:
        sys.exit(130)
