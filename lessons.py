"""Walk, check and practise the lessons: the commits on main whose message ends in `Lesson: ID`.

git and the standard library only. Lessons are read from main (origin/main where there is no main), whatever is checked
out, so that a reader who stands on lesson 07 still sees lesson 08.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT

ROOT = Path(__file__).resolve().parent


class LessonError(Exception):
    """Something that the reader can put right; the message says how."""


@dataclass(frozen=True)
class Lesson:
    id: str
    commit: str
    subject: str


def git(*args: str, cwd: Path = ROOT) -> str:
    """The output of a git command. Raises LessonError with git's own words if it fails."""
    result = subprocess.run(["git", *args], cwd=cwd, capture_output=True, text=True)
    if result.returncode:
        raise LessonError((result.stderr.strip() or f"git {args[0]} failed").splitlines()[-1])
    return result.stdout.strip()


def find_lessons() -> list[Lesson]:
    """All lessons, in order, from the first-parent line of main. Raises LessonError if there are none to find."""
    if git("rev-parse", "--is-shallow-repository") == "true":
        raise LessonError("this clone is shallow and lacks the history; get it with: git fetch --unshallow")
    for ref in ("refs/heads/main", "refs/remotes/origin/main"):
        if (
            subprocess.run(["git", "rev-parse", "--verify", "--quiet", ref], cwd=ROOT, capture_output=True).returncode
            == 0
        ):
            break
    else:
        raise LessonError("neither main nor origin/main is here; get it with: git fetch origin main:main")
    log = git("log", "--first-parent", "--reverse", "--format=%H%x1f%s%x1f%(trailers:key=Lesson,valueonly)%x1e", ref)
    rows = [row.strip("\n").split("\x1f") for row in log.split("\x1e") if row.strip()]
    lessons = [Lesson(trailer.strip(), commit, subject) for commit, subject, trailer in rows if trailer.strip()]
    if not lessons:
        raise LessonError(f"no commit on {ref} ends in a `Lesson: ID` trailer")
    return lessons


def find(lessons: list[Lesson], wanted: str) -> Lesson:
    """The lesson with that id, or the only one whose id begins so (`07`). Raises LessonError otherwise."""
    matches = [lesson for lesson in lessons if lesson.id == wanted] or [
        lesson for lesson in lessons if lesson.id.startswith(wanted)
    ]
    if len(matches) != 1:
        raise LessonError(
            f"{wanted!r} names no lesson, or several; there are {', '.join(lesson.id for lesson in lessons)}"
        )
    return matches[0]


def here(lessons: list[Lesson]) -> Lesson | None:
    """The last lesson that HEAD contains."""
    contained = set(git("rev-list", "HEAD").split())
    return next((lesson for lesson in reversed(lessons) if lesson.commit in contained), None)


def need_clean_tree() -> None:
    if git("status", "--porcelain"):
        raise LessonError("the working tree has changes; commit them or put them away with: git stash -u")


def test_files(lesson: Lesson, only: str = "AM") -> list[str]:
    """The files under tests/ that the lesson adds (A) or modifies (M)."""
    if git("rev-list", "--parents", "-n", "1", lesson.commit) == lesson.commit:  # the first commit has no parent
        return git("ls-tree", "-r", "--name-only", lesson.commit, "tests/").splitlines()
    changed = git("diff", "--name-only", f"--diff-filter={only}", f"{lesson.commit}^", lesson.commit, "--", "tests/")
    return changed.splitlines()


def python() -> str:
    """The interpreter for tests: the one `make test` set up if there is one, else the one that runs this file."""
    venv = ROOT / ".venv" / "bin" / "python"
    return str(venv) if venv.exists() else sys.executable


# The commands. Each takes the lessons and the parsed arguments.


def cmd_list(lessons, args):
    """list the lessons, * where you stand"""
    tags = set(git("tag").split())
    standing = here(lessons)
    for lesson in lessons:
        print("*" if lesson == standing else " ", lesson.id.ljust(28), lesson.subject.partition(": ")[2])
    if missing := [lesson.id for lesson in lessons if lesson.id not in tags]:
        print(
            f"{len(missing)} of {len(lessons)} tags are missing; make them with: python lessons.py tag", file=sys.stderr
        )


def cmd_tag(lessons, args):
    """make the tags from the trailers"""
    existing = dict(line.split() for line in git("tag", "--format=%(refname:short) %(objectname)").splitlines())
    for lesson in lessons:
        state = "kept" if existing.get(lesson.id) == lesson.commit else "moved" if lesson.id in existing else "made"
        if state != "kept":
            git("tag", "--no-sign", "--force", lesson.id, lesson.commit)
        print(state, lesson.id)


def cmd_show(lessons, args):
    """show a lesson: its message and its diff"""
    subprocess.run(["git", "show", "--stat", "--patch", find(lessons, args.id).commit], cwd=ROOT)


def cmd_diff(lessons, args):
    """show what came since the lesson before, each commit apart"""
    index = lessons.index(find(lessons, args.id))
    if index == 0:
        raise LessonError(f"{lessons[0].id} is the first lesson; see: python lessons.py show {lessons[0].id}")
    span = f"{lessons[index - 1].commit}..{lessons[index].commit}"
    subprocess.run(
        ["git", "log", "--first-parent", "--reverse", "--format=%n%C(yellow)%s%C(reset)", "--patch", span], cwd=ROOT
    )


def cmd_start(lessons, args):
    """make a branch with the code before a lesson and the tests of it, to write the lesson yourself"""
    lesson = find(lessons, args.id)
    if lesson == lessons[0]:
        raise LessonError(f"{lesson.id} is the set-up; the first lesson to write is {lessons[1].id}")
    need_clean_tree()
    branch = f"my-{lesson.id}"
    if git("branch", "--list", branch):
        raise LessonError(f"you have a branch {branch} already; go on with: git switch {branch}")
    git("switch", "--quiet", "--create", branch, f"{lesson.commit}^")
    git("checkout", lesson.commit, "--", *test_files(lesson))
    who = ("-c", "user.name=lessons.py", "-c", "user.email=lessons@localhost", "-c", "commit.gpgsign=false")
    git(*who, "commit", "--quiet", "--no-verify", "-m", f"start {lesson.id}: its tests, red until you write it")
    print(git("show", "--no-patch", "--format=%B", lesson.commit).rpartition("\n")[0])
    print(f"\nYou are on branch {branch}. Write the lesson, then: python lessons.py check")


def cmd_check(lessons, args):
    """run a lesson's tests on your code (default: the lesson you started, or where you stand)"""
    branch = git("branch", "--show-current")
    if args.id:
        lesson = find(lessons, args.id)
    elif branch.startswith("my-"):
        lesson = find(lessons, branch.removeprefix("my-"))
    elif (lesson := here(lessons)) is None:
        raise LessonError("this commit contains no lesson; name one: python lessons.py check ID")
    files = [file for file in test_files(lesson) if file.startswith("tests/test_") and (ROOT / file).exists()]
    if not files:
        raise LessonError(f"the tests of {lesson.id} are not here; get them with: python lessons.py start {lesson.id}")
    return subprocess.run([python(), "-m", "pytest", *files], cwd=ROOT).returncode


def cmd_verify(lessons, args):
    """check each lesson: green at its commit, its tests red on the code before it"""
    chosen = list(dict.fromkeys(find(lessons, wanted) for wanted in args.ids)) or lessons
    with tempfile.TemporaryDirectory(prefix="lessons-") as scratch, ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda lesson: verify_and_report(lesson, lesson == lessons[0], Path(scratch)), chosen))
    git("worktree", "prune")
    print(f"{sum(done)} passed, {len(done) - sum(done)} failed")
    return 0 if all(done) else 1


def verify_and_report(lesson: Lesson, first: bool, scratch: Path) -> bool:
    began = time.perf_counter()
    try:
        complaint, note = verify(lesson, first, scratch)
    except LessonError as error:
        complaint, note = str(error), ""
    print(
        f"{'FAILED' if complaint else 'ok    '} {lesson.id:28} {time.perf_counter() - began:5.1f} s  {note}", flush=True
    )
    if complaint:
        print(complaint, flush=True)
    return not complaint


def verify(lesson: Lesson, first: bool, scratch: Path) -> tuple[str, str]:
    """(what is wrong, or nothing; a note), after running the lesson's suite at its commit, and its new tests before it.

    Red means: on the code before the lesson every new test fails, but those named `test_still_*`, and at least one
    fails by an assertion, not for want of a name.
    """
    tree = scratch / lesson.id
    git("worktree", "add", "--quiet", "--detach", str(tree), lesson.commit)
    try:
        results, output = run_tests(tree)
        if not results or any(outcome != "passed" for outcome in results.values()):
            return f"the suite is not green at {lesson.id}:\n{output}", ""
        note = f"{len(results)} passed"
        if first:
            return "", note
        files = [file for file in test_files(lesson, "A") if file.startswith("tests/test_")]
        if not files:
            return "the lesson adds no test file", note
        git("checkout", "--quiet", f"{lesson.commit}^", cwd=tree)
        git("checkout", lesson.commit, "--", *test_files(lesson), cwd=tree)
        results, output = run_tests(tree, files)
        wrong = [name for name, outcome in results.items() if outcome == "passed" and "test_still_" not in name]
        if wrong:
            return "these tests pass on the code before the lesson:\n  " + "\n  ".join(wrong), note
        asserted = sum(outcome == "assertion" for outcome in results.values())
        if not asserted:
            return f"no test fails by an assertion on the code before the lesson:\n{output}", note
        red = sum(outcome != "passed" for outcome in results.values())
        return "", f"{note}; before it {red} of its {len(results)} fail, {asserted} by assertion"
    finally:
        git("worktree", "remove", "--force", str(tree))


def run_tests(tree: Path, files: list[str] | tuple = ()) -> tuple[dict[str, str], str]:
    """Run pytest in a directory, on one thread: test name -> passed, skipped, assertion or error; the output's end."""
    report = tree / "report.xml"
    report.unlink(missing_ok=True)
    command = [python(), "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *files]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    pytest = subprocess.run(command, cwd=tree, env=one_thread, stdout=PIPE, stderr=STDOUT, text=True)
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
    return results, "\n".join(pytest.stdout.splitlines()[-40:])


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for function in (cmd_list, cmd_tag, cmd_show, cmd_diff, cmd_start, cmd_check, cmd_verify):
        name = function.__name__.removeprefix("cmd_")
        command = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        command.set_defaults(function=function)
        if function is cmd_verify:
            command.add_argument("ids", nargs="*", metavar="ID", help="lesson ids, or their beginnings; default: all")
        elif function is cmd_check:
            command.add_argument("id", nargs="?", metavar="ID", help="a lesson id, or its beginning: 07")
        elif function in (cmd_show, cmd_diff, cmd_start):
            command.add_argument("id", metavar="ID", help="a lesson id, or its beginning: 07")
    args = parser.parse_args(argv)
    try:
        return args.function(find_lessons(), args) or 0
    except (LessonError, FileNotFoundError) as error:  # FileNotFoundError: git is not installed
        print(f"lessons.py: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
