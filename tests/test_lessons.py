"""lessons.py on a small repository: three lessons, and an older edition merged in."""

import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from natives import alive, wait_until

import lessons

SCRIPT = Path(lessons.__file__)

for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # set where git runs the tests
    os.environ.pop(name, None)

PLAIN = {  # what the reader has configured stays out of it
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}

TEST_ADD = "def test_add():\n    from calc import add\n    assert add(2, 3) == 5\n"
TEST_MUL = """def test_mul():
    from calc import apply
    assert apply("*", 2, 3) == 6


def test_still_adds():
    from calc import apply
    assert apply("+", 2, 3) == 5
"""
TEST_DIV = 'def test_div():\n    from calc import apply\n    assert apply("/", 6, 3) == 2\n'
STUB = "def add(a, b):\n    return 0\n"
ADD = "def add(a, b):\n    return a + b\n"
DOOR = ADD + "\n\ndef apply(op, a, b):\n    return add(a, b)\n"
MUL = DOOR.replace("return add(a, b)", "return a * b if op == '*' else add(a, b)")
DIV = MUL.replace("else add", "else a / b if op == '/' else add")
BODY = """Products, naïvely.

Lesson: what stands here is no trailer.

Try: (paste nothing, `lessons.py try` runs it)

    $ python - <<'EOF'
    from calc import apply
    for a in (2, 3):
        print("product", apply("*", a, 7))
    EOF
    product 14
    product 21
    $ echo a long \\
      line | tr a-z A-Z
    A LONG LINE
    $ echo 'no document: <<<EOF'
    no document: <<<EOF
    $ ls -d .venv
    .venv
    $ python -c 'import sys; sys.exit("no such thing")'
    no such thing

Read: apply.

    $ echo never"""
TEST_INIT = "def test_import():\n    import calc\n"
READMES = {"Readme.md": "a door\n", "a/b.txt": "comes before calc.py\n"}
PRODUCTS = {"calc.py": MUL, "tests/test_mul.py": TEST_MUL, "Readme.md": "products\n"}
COMMITS = [  # subject, body, files, lesson
    ("00 init: a place", "A.", {"calc.py": STUB, "tests/test_init.py": TEST_INIT}, "00-init"),
    ("01 add: sums", "B.", {"calc.py": ADD, "tests/test_add.py": TEST_ADD}, "01-add"),
    ("calc: one door for all operations", "C.", READMES | {"calc.py": DOOR}, None),
    ("02 mul: products", BODY, PRODUCTS, "02-mul"),
]


def git(repo, *args):
    command = ["git", "-c", "user.name=T", "-c", "user.email=t@localhost", *args]
    options = {"cwd": repo, "env": os.environ | PLAIN, "capture_output": True, "text": True}
    return subprocess.run(command, check=True, **options).stdout.strip()


def commit(repo, subject, files, lesson=None, body="Why."):
    for name, text in files.items():
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_text(text)
    git(repo, "add", ".")
    words = f"{subject}\n\n{body}" + (f"\n\nLesson: {lesson}" if lesson else "")
    git(repo, "commit", "-q", "-m", words)


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The repository. Its main ends in the merge that joins an older edition of the lessons."""
    path = tmp_path_factory.mktemp("built")
    git(path, "init", "-q", "-b", "old")
    shutil.copy(SCRIPT, path)
    options = '[tool.pytest.ini_options]\npythonpath = ["."]\naddopts = "-q"\n'
    ignored = ".venv\n__pycache__/\n.pytest_cache/\n"
    commit(path, "files", {"pyproject.toml": options, ".gitignore": ignored})
    git(path, "branch", "main")
    commit(path, "01 add: old sums", {"calc.py": "old = 1\n"}, "01-add")
    commit(path, "02 old: old products", {"calc.py": "old = 2\n"}, "02-old")
    git(path, "switch", "-q", "main")
    for subject, body, *entry in COMMITS:
        commit(path, subject, *entry, body)
    git(path, "merge", "-q", "-s", "ours", "-m", "edition 2: calc", "old")
    git(path, "branch", "-D", "old")
    git(path, "config", "lessons.grafted", git(path, "rev-parse", "main"))  # as after `tag`, undone
    return path


@pytest.fixture
def repo(built, tmp_path, monkeypatch):
    path = tmp_path / "repo"
    shutil.copytree(built, path)
    settings = PLAIN | {"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(tmp_path)}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(lessons.tempfile, "tempdir", None)  # reads TMPDIR anew
    monkeypatch.setattr(lessons, "ROOT", path)
    yield path
    lessons.tempfile.tempdir = None
    assert git(path, "worktree", "list").count("\n") == 0
    assert not list(tmp_path.glob("lessons-*"))


@pytest.fixture
def run(capfd):
    def run(*args):
        try:
            code = lessons.main(list(args))
        except SystemExit as exit:
            code = exit.code
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def error(run):
    def error(*args):
        code, out, err = run(*args)
        assert (code, out, err.count("\n")) == (2, "", 1), (out, err)
        assert err.startswith("lessons.py: error: ")
        return err

    return error


def script(repo, *args, **options):
    settings = {"cwd": repo, "capture_output": True, "text": True} | options
    result = subprocess.run([sys.executable, str(repo / "lessons.py"), *args], **settings)
    return result.returncode, result.stdout, result.stderr


def stands(repo) -> tuple:
    """All that a command could change: references, branch, commit, tracked and other files."""
    refs = git(repo, "for-each-ref"), git(repo, "branch", "--show-current")
    return *refs, git(repo, "rev-parse", "HEAD"), git(repo, "status", "--porcelain")


def listed(out):
    return [line[3:].split() for line in out.splitlines() if not line.startswith("Part ")]


ALL = [["00-init", "a", "place"], ["01-add", "sums"], ["02-mul", "products"]]


def test_a_reader_sees_all_lessons_of_this_edition_wherever_he_stands(repo, run, monkeypatch):
    run("tag")
    for place, marks in (("main", "  *"), ("01-add", " * ")):
        git(repo, "checkout", "-q", place)
        code, out, err = run("list")
        assert (code, listed(out), err) == (0, ALL, "")
        title, *lines = out.splitlines()
        assert title == lessons.PARTS["init"]
        assert "".join(line[0] for line in lines) == marks
    # A path for one evening, with the minutes and a bridge over the lessons between.
    stop = lessons.EveningStop(7, "Multiply.", "First there are sums.")
    monkeypatch.setattr(lessons, "EVENING", {"mul": stop})
    assert [line[1] for line in run("list")[1].splitlines()[1:]] == [" ", " ", "+"]
    out = run("evening")[1]
    assert out.startswith("1 of 3 lessons, about 7 minutes.")
    bridge = "\n\n00 to 01: First there are sums.\n\n"
    assert out.endswith(f"{bridge}    02-mul, 7 minutes\n    Multiply.\n")


def published() -> list[lessons.Lesson]:
    try:
        lessons.read_main()
        return lessons.lessons_of("HEAD")
    except lessons.LessonError as error:
        pytest.skip(str(error))


def test_the_evening_leads_through_this_course():
    """A bridge stands where lessons are skipped; LESSONS.md is what the list prints."""
    line = published()
    words = (SCRIPT.parent / "LESSONS.md").read_text("utf-8")  # it may end before the last lesson
    assert lessons.table(line).startswith(words), "python lessons.py list --markdown"
    for link in re.findall(r"\((course/.*?)\)", words):
        assert (SCRIPT.parent / link).exists()
    path = [number for number, lesson in enumerate(line) if lesson.slug in lessons.EVENING]
    if set(lessons.PARTS) <= {lesson.slug for lesson in line}:  # HEAD may stand before the end
        assert len(path) == len(lessons.EVENING)
    assert [line[number].slug for number in path] == list(lessons.EVENING)[: len(path)]
    for before, number in zip([-1, *path], path):
        assert bool(lessons.EVENING[line[number].slug].bridge) == (number > before + 1)


def test_the_list_as_a_table(repo, run, monkeypatch):
    note = "a line that stands in a note\nLesson: 03-div"  # the last one is the trailer
    commit(repo, "03 div: a | b", {"calc.py": DIV, "data.txt": "1\n"}, None, f"Lesson: {note}")
    monkeypatch.setattr(lessons, "EVENING", {"mul": lessons.EveningStop(7, "Multiply.")})
    code, out, err = run("list", "--markdown")
    rows = [line for line in out.splitlines() if line[:1] == "|"][2:]
    assert (code, err) == (0, "") and f"\n## {lessons.PARTS['init']}\n" in out
    assert rows == [
        "| 00-init | a place | 2 | 2 | [00](course/answers/00-init.md) |",
        "| 01-add | sums | 1 | 3 | [01](course/answers/01-add.md) |",
        "| **02-mul** | products | 1 | 8 | [02](course/answers/02-mul.md) |",
        "| 03-div | a \\| b | 1 | 0 | [03](course/answers/03-div.md) |",
    ]


def test_tags_come_from_the_trailers(repo, run):
    assert "3 of 3 tags are missing" in run("list")[2]
    assert run("tag")[1].split() == ["made", "00-init", "made", "01-add", "made", "02-mul"]
    assert git(repo, "tag").split() == ["00-init", "01-add", "02-mul"]
    git(repo, "tag", "--force", "01-add", "main^2^")  # the lesson of the edition before
    git(repo, "tag", "--force", "-a", "-m", "a message", "02-mul", "02-mul")
    assert "1 of 3 tags" in run("list")[2]
    assert run("tag") == (0, "kept 00-init\nmoved 01-add\nkept 02-mul\n", "")
    assert git(repo, "rev-parse", "01-add") == git(repo, "rev-parse", "main~3")


def test_tags_of_the_readers_own_stay_and_those_of_an_earlier_edition_are_named(repo, run):
    """On a commit that is not that lesson in any edition, or annotated."""
    for name, place in (("00-init", "main^2"), ("02-old", "main^2"), ("02-mine", "main^2")):
        git(repo, "tag", name, place)
    git(repo, "tag", "-a", "-m", "as I learnt it", "01-add", "main^2^")
    before = git(repo, "rev-parse", "00-init", "01-add")
    assert "1 of 3 tags" in run("list")[2]
    assert run("tag", "--quiet") == (0, "", "")
    code, out, err = run("tag")
    assert (code, out) == (0, "yours 00-init\nyours 01-add\nkept 02-mul\n")
    assert git(repo, "rev-parse", "00-init", "01-add") == before
    assert run("list")[2] == ""
    first, second, earlier = err.splitlines()
    assert first.startswith("00-init is a tag of your own; ")
    assert earlier.endswith("; delete them with: git tag --delete 02-old")
    # What it says makes the lesson's tag after all, and deletes the earlier one.
    git(repo, *first.partition("takes its tag with: git ")[2].split())
    assert git(repo, "rev-parse", "00-init") == git(repo, "rev-parse", "main~4")
    git(repo, *earlier.rpartition(": git ")[2].split())
    assert git(repo, "tag").split() == ["00-init", "01-add", "02-mine", "02-mul"]


@pytest.fixture
def clone(repo, tmp_path, monkeypatch):
    path = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(repo), str(path))
    monkeypatch.setattr(lessons, "ROOT", path)
    return path


def subjects(repo, *options):
    return git(repo, "log", "--format=%s", *options).split("\n")


def join(repo, words, start, *options):
    git(repo, "switch", "-q", "--create", "beside", start)
    commit(repo, f"beside: {words}", {"beside.txt": f"{words}\n"})
    git(repo, "switch", "-q", "main")
    git(repo, "merge", "-q", *(options or ("-s", "ours")), "-m", words, "beside")
    git(repo, "branch", "-q", "-D", "beside")


def test_a_plain_log_of_a_clone_shows_this_edition_alone(repo, clone, run):
    whole, line = subjects(clone), subjects(clone, "--first-parent")
    assert "02 old: old products" in whole and "02 old: old products" not in line
    code, out, err = run("tag", "--quiet")
    assert (code, out, err.count("\n")) == (0, "", 1)
    assert subjects(clone) == line
    assert run("tag", "--quiet") == (0, "", "")
    commit(repo, "something new", {"new.txt": ""})
    git(clone, "pull", "-q", "--ff-only")
    assert subjects(clone) == ["something new", *line]
    # What it says shows the whole again, and `tag` leaves it so.
    git(clone, *err.rpartition(": git ")[2].split())
    assert subjects(clone) == ["something new", *whole]
    assert run("tag", "--quiet") == (0, "", "")
    assert subjects(clone) == ["something new", *whole]


def test_each_edition_on_the_line_of_main_is_hidden_and_no_other_merge(repo, clone, run):
    for words in ("my edition 3", "edition: without a number", "one\u2028two"):
        join(repo, words, "main^")
    join(repo, "edition 4: it changes a file", "main^", "--no-ff")
    join(repo, "edition 5: calc", "main^")
    git(clone, "pull", "-q", "--ff-only")
    git(clone, "checkout", "-q", "--detach", "main~6")
    git(clone, "branch", "-q", "-D", "main")
    merges = git(repo, "log", "--first-parent", "--format=%H", "--grep=^edition [25]: calc").split()
    err = run("tag", "--quiet")[2]
    assert err.count("\n") == 1 and len(merges) == 2
    assert sorted(git(clone, "replace", "--list").split()) == sorted(merges)
    git(clone, *err.rpartition(": git ")[2].split())
    assert run("tag", "--quiet") == (0, "", "")
    assert git(clone, "replace", "--list") == ""


def test_an_edition_stays_while_a_branch_needs_it(clone, run):
    """Grafted, git would not see that main contains where a branch of an earlier edition began."""
    earlier = git(clone, "rev-parse", "main^2^")
    git(clone, "checkout", "-q", "--detach", earlier)
    assert run("tag", "--quiet") == (0, "", "")
    git(clone, "switch", "-q", "main")
    git(clone, "update-ref", "refs/remotes/fork/main", earlier)  # as before a push
    assert run("tag", "--quiet") == (0, "", "")
    git(clone, "update-ref", "-d", "refs/remotes/fork/main")
    git(clone, "switch", "-q", "--create", "mine", earlier)
    commit(clone, "my own", {"mine.txt": ""})
    assert run("tag", "--quiet") == (0, "", "")
    git(clone, "switch", "-q", "main")
    git(clone, "branch", "-q", "-D", "mine")
    git(clone, "switch", "-q", "--create", "mine", "main~2")  # of this edition
    git(clone, "config", "core.useReplaceRefs", "no")
    assert run("tag", "--quiet") == (0, "", "")
    git(clone, "config", "--unset", "core.useReplaceRefs")
    assert "git replace -d" in run("tag", "--quiet")[2]


def test_main_comes_before_the_origins_and_a_fork_needs_the_upstreams(repo, clone, run, error):
    commit(clone, "03 sub: differences", {"sub.py": ""}, "03-sub")
    assert "03-sub" in run("list")[1]
    git(clone, "checkout", "-q", "--detach")
    git(clone, "branch", "-q", "-D", "main")
    assert listed(run("list")[1]) == ALL
    git(clone, "update-ref", "refs/remotes/upstream/main", "origin/main")
    git(clone, "switch", "-q", "--orphan", "mine")
    commit(clone, "my own", {"notes.txt": "mine\n"})
    git(clone, "merge", "-q", "--allow-unrelated-histories", "-m", "merge", "upstream/main")
    git(clone, "branch", "-M", "main")
    git(clone, "update-ref", "-d", "refs/remotes/origin/main")
    code, out, err = run("list")
    assert code == 0 and listed(out) == ALL
    assert "main has no lessons on its first-parent line; reading refs/remotes/upstream/main" in err
    git(clone, "update-ref", "-d", "refs/remotes/upstream/main")
    line = error("list")
    assert "first-parent line" in line and "git fetch upstream" in line


def test_without_the_history_it_says_what_to_do(repo, run, error, tmp_path, monkeypatch):
    git(repo, "branch", "-m", "main", "trunk")
    assert "neither main nor origin/main" in error("list")
    git(repo, "branch", "-m", "trunk", "main")
    shallow, unzipped = tmp_path / "shallow", repo / "unzipped"
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repo}", str(shallow))
    unzipped.mkdir()
    for folder, words in ((shallow, "git fetch --unshallow"), (unzipped, "git clone")):
        monkeypatch.setattr(lessons, "ROOT", folder)
        assert words in error("list")
        assert run("tag", "--quiet") == (0, "", "")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(unzipped))
        code, out, err = script(repo, "list")
    assert (code, out, err.count("\n")) == (2, "", 1) and "git is not installed" in err


MEANT = {"00-init": "0", "04-multinomial": "multi 04 04-m", "06-top-k": "06-top-k top-k"}
MEANT |= {"07-top-p": "7 07", "16-variable-batching": "16 var", "17-top": "top"}


def test_ids():
    all_lessons = [lessons.Lesson(id, "", "") for id in MEANT]
    for id, names in MEANT.items():
        assert {lessons.find_lesson(all_lessons, name).id for name in names.split()} == {id}
    refused = {"top-": "'top-' may be 06-top-k, 07-top-p", "op-k": "names no lesson"}
    refused |= {"1": "may be 16-variable-batching, 17-top", "": "may be 00-init, 04-"}
    refused["8"] = "names no lesson; see: python lessons.py list"
    for wanted, words in refused.items():
        with pytest.raises(lessons.LessonError, match=words):
            lessons.find_lesson(all_lessons, wanted)


def test_show_and_diff(repo, run, error):
    out = run("show", "02")[1]
    assert "Products" in out and "test_mul.py" in out and "+++ b/calc.py" in out
    out = run("diff", "02-mul")[1]
    assert out.index("one door for all operations") < out.index("02 mul: products")
    assert "01 add: sums" not in out and "Left out" not in out
    assert "first lesson" in error("diff", "00-init")
    assert "invalid choice" in error("lits") and "required" in error()
    files = {"course/answers/01-add.md": "An answer.\n", "Readme.md": "part one\n"}
    commit(repo, "part one", files | {"benchmark_results/b.csv": "b,c\n"})
    commit(repo, "03 sub: differences", {"calc.py": DOOR}, "03-sub")
    out = run("diff", "03-sub")[1]
    assert "+part one" in out and "03 sub" in out and "An answer." not in out
    assert "b,c" not in out and out.endswith("changes in course/ and benchmark_results/\n")


def test_control_characters_reach_no_terminal(repo, run, error):
    assert "unrecognized arguments: a\\x1b[31mb\\nc" in error("list", "a\x1b[31mb\nc")
    files = {"course/answers/03-sub.md": "A\x1b[2Jnswer.\n", "tests/test_\x1b.py": ""}
    commit(repo, "03 sub: differ\x1b[1mences", files, "03-sub", "Cle\x9bar.\n\nImplement: nothing.")
    git(repo, "checkout", "-q", "--detach", "main^")
    (repo / "tests" / "test_\x1b.py").touch()
    assert error("start", "3").endswith("or move them: tests/test_\\x1b.py\n")
    (repo / "tests" / "test_\x1b.py").unlink()
    for command, words in (
        (["list"], "differ\\x1b[1mences\n"),
        (["answer", "3"], "A\\x1b[2Jnswer.\n"),
        (["start", "3"], "\nCle\\x9bar.\n"),
    ):
        out = run(*command)[1]
        assert words in out and "\x1b" not in out and "\x9b" not in out
    assert "This lesson is for reading: python lessons.py show 03-sub\n" in out


def test_an_old_version_runs_the_newest(repo):
    old = git(repo, "rev-parse", "main^")
    line = "    args = parse(argv)\n"
    newest = SCRIPT.read_text().replace(line, f"{line}    print('newest:', ROOT)\n")
    commit(repo, "lessons.py: newer", {"lessons.py": newest})
    git(repo, "checkout", "-q", old)
    code, out, err = script(repo, "list", cwd=repo.parent)
    assert code == 0 and out.splitlines()[0] == f"newest: {repo}" and listed(out)[1:] == ALL
    # A developer's own edit runs as it is, committed or not.
    (repo / "lessons.py").write_text((repo / "lessons.py").read_text() + "# edited\n")
    assert listed(script(repo, "list")[1]) == ALL
    git(repo, "commit", "-qam", "my edit")
    assert listed(script(repo, "list")[1]) == ALL
    # On main itself the file is the newest, or edited.
    git(repo, "checkout", "-q", "main")
    assert script(repo, "list")[1].count("newest:") == 1


def test_a_stream_that_cannot_be_written(repo, run):
    reader, writer = os.pipe()
    os.close(reader)
    options = {"capture_output": False, "stdout": writer, "stderr": subprocess.PIPE}
    assert script(repo, "list", **options)[0] == 141
    command = f"{sys.executable} lessons.py list"
    results = {}
    for redirected in ("> out", "<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        limit = "ulimit -f 0; exec" if redirected == "> out" else ""
        options = {"shell": True, "cwd": repo, "capture_output": True, "text": True}
        result = subprocess.run(f"{limit} {command} {redirected}", **options)
        lines = result.stdout.count("\n"), result.stderr.count("\n")
        results[redirected] = (result.returncode, *lines)
    assert results.pop("> out") == (2, 0, 1)
    # A line on stderr says that tags are missing.
    assert list(results.values()) == [(0, 4, 1), (0, 0, 1), (0, 4, 0), (0, 0, 0)]


def test_start(repo, run):
    hook = repo / ".git" / "hooks" / "post-checkout"
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    (repo / "notes.txt").write_text("untracked")
    git(repo, "config", "user.useConfigOnly", "true")
    code, out, err = run("start", "02-mul")
    assert (code, err) == (0, "")
    assert git(repo, "branch", "--show-current") == "my-02-mul"
    assert git(repo, "status", "--porcelain") == "?? notes.txt"
    assert (repo / "calc.py").read_text() == DOOR
    assert (repo / "tests" / "test_mul.py").read_text() == TEST_MUL
    assert git(repo, "rev-parse", "HEAD^") == git(repo, "rev-parse", "main~2")
    assert "Products" in out and "Lesson: 02" not in out
    assert "Its tests: tests/test_mul.py\n" in out and "lessons.py check" in out


def test_start_refuses(repo, error):
    assert "the first lesson to write is 01-add" in error("start", "0")
    (repo / "calc.py").write_text("my work")
    assert "tracked files have changes" in error("start", "01-add")
    git(repo, "checkout", "-q", "calc.py")
    git(repo, "branch", "my-01-add")
    line = error("start", "1")
    assert "git switch my-01-add" in line and "restart 01-add" in line
    commit(repo, "03 sub: differences", {"engine/sub.py": "", "tests/test_sub.py": ""}, "03-sub")
    commit(repo, "04 div: quotients", {"tests/test_div.py": ""}, "04-div")
    git(repo, "checkout", "-q", "--detach", "main~2")
    (repo / "elsewhere").mkdir()
    for place, target in (("tests/test_sub.py", "nowhere"), ("engine", "elsewhere")):
        (repo / place).symlink_to(repo / target)  # git would write through it
        before = stands(repo)
        assert f"in the way; commit or move them: {place}" in error("start", "4")
        assert stands(repo) == before and (repo / place).is_symlink()
        (repo / place).unlink()
    assert list((repo / "elsewhere").iterdir()) == []
    # A merge that changes no file, so that git's status alone does not show it.
    git(repo, "switch", "-q", "--create", "side")
    commit(repo, "beside", {"side.txt": "beside\n"})
    git(repo, "switch", "-q", "main")
    git(repo, "merge", "-q", "-s", "ours", "--no-commit", "side")
    before = stands(repo)
    assert before[-1] == "" and "in the middle of a merge" in error("start", "2")
    assert (repo / ".git" / "MERGE_HEAD").exists() and stands(repo) == before


@pytest.mark.parametrize("times", [0, 1, 2, 3])
@pytest.mark.parametrize("command", ["start", "restart"])
def test_a_start_stopped_after_any_of_its_steps(repo, monkeypatch, command, times):
    """restart stands on the branch that it sets."""
    if command == "restart":
        git(repo, "switch", "-q", "--create", "my-02-mul", "main~3")
    before = stands(repo)
    real = lessons.git
    steps = []

    def stopping(*args, **options):
        if args[0] == "switch" and times == 0:  # while git writes this file
            (repo / "a").mkdir(exist_ok=True)
            (repo / "a" / "b.txt").write_text("half")
            raise KeyboardInterrupt
        output = real(*args, **options)
        if args[0] == "switch" or args[:2] == ("branch", "--quiet"):
            steps.append(args)
            if len(steps) == times:
                raise KeyboardInterrupt
        return output

    monkeypatch.setattr(lessons, "git", stopping)
    with pytest.raises(KeyboardInterrupt):
        lessons.main([command, "2"])
    assert len(steps) == times and stands(repo) == before


def test_restart_keeps_what_was_written(repo, run, error):
    assert "python lessons.py start 02-mul" in error("restart")
    run("start", "02-mul")
    for n in (1, 2):
        commit(repo, f"attempt {n}", {"calc.py": f"attempt = {n}\n"})
        assert f"is on branch my-02-mul-{n}." in run("restart")[1]
        assert git(repo, "show", f"my-02-mul-{n}:calc.py") == f"attempt = {n}"
        assert git(repo, "branch", "--show-current") == "my-02-mul"
        assert (repo / "calc.py").read_text() == DOOR
    git(repo, "switch", "-q", "my-02-mul-1")
    (repo / "calc.py").write_text("not committed")
    assert "tracked files have changes" in error("restart")
    assert git(repo, "branch", "--list", "my-*-3") == ""
    assert (repo / "calc.py").read_text() == "not committed"


def test_check(repo, run, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    (repo / "tests" / "test_threads.py").write_text(
        "import os\n\n\ndef test_threads():\n"
        "    assert os.environ['OMP_NUM_THREADS'] == os.environ['MKL_NUM_THREADS'] == '1'\n"
    )
    run("start", "02-mul")
    code, out, _ = run("check")
    assert code == 1 and out.startswith("02-mul: its own tests") and "1 failed, 1 passed" in out
    assert "All other tests" not in out and "02-mul: not yet" in out
    assert "To run all other tests" not in out
    (repo / "calc.py").write_text(MUL)
    code, out, _ = run("check", "--quick")
    assert code == 0 and out.count(" passed in ") == 1 and "2 passed" in out
    assert "02-mul: its own tests pass\n" in out and "all tests pass" not in out
    assert "To run all other tests: python lessons.py check 02-mul\n" in out
    code, out, _ = run("check")
    assert code == 0 and out.index("2 passed") < out.index("3 passed")  # its own, then all others
    assert "all tests pass" in out and "last lesson" in out
    assert "compare 02-mul" in out and "git switch main" in out
    many = "import pytest\n\n\n@pytest.mark.parametrize('n', range(12))\n"
    many += "def test_many(n):\n    assert not n + 1\n"
    (repo / "tests" / "test_add.py").write_text(many)
    code, out, _ = run("check")  # an earlier lesson breaks
    assert code == 1 and "not yet" in out
    assert out.index("2 passed") < out.index("10 failed")  # of 12: it stops there


def test_check_up_to_a_step(repo, run, error):
    run("start", "02-mul")
    assert "--step 1: the tests of 02-mul have no steps" in error("check", "--step", "1")
    tests = "import pytest\n\n\n"
    for step, good in ((1, True), (2, False), (3, False), (2, True)):
        test = f"def test_{step}_{good}():\n    assert {good}\n\n\n"
        tests += f"@pytest.mark.step(n={step})\n{test}"
    (repo / "tests" / "test_mul.py").write_text(tests + "def test_unmarked():\n    assert 0\n")
    code, out, _ = run("check", "--step", "1")
    assert code == 0 and "1 passed, 4 deselected" in out
    assert "02-mul: the tests of steps up to 1 pass\n" in out and "To run all other tests" in out
    code, out, _ = run("check", "--step", "2")
    assert code == 1 and "1 failed, 2 passed, 2 deselected" in out and "All other tests" not in out
    assert "the tests of 02-mul have the steps 1, 2, 3;" in error("check", "--step", "4")
    assert "the tests of 02-mul have the steps 1, 2, 3;" in error("check", "--step", "0")


def test_who_writes_a_lesson_is_not_shown_it(repo, run):
    run("start", "02-mul")
    code, out, _ = run("diff", "02-mul")
    assert code == 0 and "one door for all operations" in out and "return a * b" not in out
    git(repo, "switch", "-q", "main")
    assert "return a * b" in run("diff", "02-mul")[1]
    assert "You do not stand on 01-add" in run("compare", "01-add")[2]
    run("start", "01-add")
    assert run("compare")[2] == ""
    assert "get them with: git switch my-02-mul" in run("check", "02-mul")[2]


def test_check_takes_the_lesson_where_the_reader_stands(repo, run, error):
    git(repo, "switch", "-q", "--create", "my-mul", "main~4")  # its name is none of `start`
    code, out, _ = run("check")
    assert code == 0 and out.startswith("00-init:")  # and no other tests are there
    assert "The next lesson: python lessons.py start 01-add" in out
    assert "the tests of 02-mul are not here" in error("check", "2")
    git(repo, "switch", "-q", "--create", "mine", "main~4^")
    assert "contains no lesson" in error("check")
    for branch in ("my-01-add", "my-01-add-2", "my-01-add-b", "my-0"):
        git(repo, "switch", "-q", "--create", branch, "main")
        expected = "01-add" if branch in ("my-01-add", "my-01-add-2") else "02-mul"
        assert lessons.current_lesson(lessons.read_main()[1]).id == expected
    git(repo, "switch", "-q", "main")  # main is no lesson that one writes
    words = "you stand on main, which goes on after 02-mul; name a lesson, or begin one with: "
    for command in ("check", "compare"):
        assert error(command).endswith(f"{words}python lessons.py start 02-mul\n")
    git(repo, "switch", "-q", "--detach", "HEAD~")  # the lesson itself, and a tag is the same
    assert run("compare")[0] == 0


def test_compare(repo, run):
    run("start", "02-mul")
    (repo / "tests" / "test_mul.py").write_text("mine = 1\n")
    code, out, err = run("compare")
    assert code == 0 and "\n-    return add(a, b)\n+    return a * b if" in out
    assert out.count("diff --git") == 1  # neither tests nor Readme
    (repo / "calc.py").write_text(MUL)
    (repo / "notes.txt").write_text("untracked")
    assert run("compare")[1] == "Your code equals that of 02-mul.\n"
    assert "\n+    return 0" in run("compare", "0")[1]
    git(repo, "checkout", "-q", "--force", "--detach", "main~4^")  # before calc.py
    (repo / "calc.py").write_text(MUL.replace("a * b", "a ** b"))
    assert "\n-    return a ** b if" in run("compare", "2")[1]
    assert git(repo, "status", "--porcelain", "--", "calc.py") == "?? calc.py"


def test_try_elsewhere_is_a_temporary_copy(repo, run, error):
    git(repo, "checkout", "-q", "main~3")
    (repo / "calc.py").write_text("my work")
    (repo / ".venv").mkdir()
    code, out, err = run("try", "2")
    tried = textwrap.dedent(BODY.partition("    EOF\n")[2].partition(" -c ")[0])
    assert code == 1 and tried in out and "never" not in out
    remark = "# (paste nothing, `lessons.py try` runs it)\n"
    assert out.startswith(f"{remark}$ python - <<'EOF'\nfrom calc import apply\n")
    processor, copy, *stop = err.splitlines()
    assert processor.startswith(f"On {lessons.processor()}.")
    assert copy.startswith("You do not stand on 02-mul")
    line = "lessons.py: error: python -c 'import sys; sys.exit(\"no such thing\")': exit code 1"
    assert stop == ["no such thing", line]
    assert (repo / "calc.py").read_text() == "my work"
    assert "no command to try" in error("try", "1")


def tried(folder, capfd, *lines) -> tuple[int, str, str]:
    text = "03 x: y\n\nTry:\n\n" + "\n".join(f"    {line}" for line in lines) + "\n\nRead: x"
    code = lessons.run_script(lessons.try_script(lessons.read_try(text)), folder, dict(os.environ))
    return code, *capfd.readouterr()


SECTIONS = """x: y

Why.

Traps:
- One
  more.
- Two.

Predict: how many
are two?

Try:

    $ true

Tests: it."""


def test_a_message_has_sections_and_an_older_one_fewer():
    """Traps is a section only where it is a list; Implement ends in what only tests need."""
    found = lessons.read_message(SECTIONS)
    assert found[""] == "Why." and found["Traps"] == "\n- One\n  more.\n- Two.\n\n"
    assert found["Predict"] == " how many\nare two?\n\n" and list(found)[-1] == "Tests"
    for words in ("Traps: one, and two.", "Traps:\n\n- Two.", "a\nPredicts: b"):
        older = f"x: y\n\nWhy.\n\n{words}\n\nTry:\n\n    $ true"
        assert lessons.read_message(older)[""] == f"Why.\n\n{words}"
        assert lessons.read_try(older) == [("command", "true")]
    for text, parts in (
        ("\n    `a`\n    Errors and texts: b\n        c\n", ("\n    `a`\n", " b\n        c\n")),
        ("\n    `a`\nErrors and texts:\n    b\n", ("\n    `a`\n", "\n    b\n")),
        ("\n    `a`: Errors and texts: b", ("\n    `a`: Errors and texts: b", "")),
    ):
        assert lessons.split_implement(text) == parts


def test_try_asks_what_the_reader_predicts(repo, run):
    body = (
        "Why.\n\nPredict: how \x1b[1mmany\nare two?\n\nTry:\n\n    $ echo two\n    two\n\nRead: x"
    )
    commit(repo, "03 ask: a question", {"calc.py": DIV}, "03-ask", body)
    code, out, err = run("try", "3")
    assert (code, out) == (0, "$ echo two\ntwo\n")
    assert err.splitlines()[1:] == ["Before you run it: how \\x1b[1mmany are two?"]
    assert "Before you run it" not in run("try", "2")[2]


@pytest.mark.parametrize("bash", [True, False])
def test_try_is_one_shell(tmp_path, capfd, monkeypatch, bash):
    """Functions, variables and folders last; each command stands before its output.

    An error that the message shows does not stop the block.
    """
    if not bash:
        monkeypatch.setattr(lessons.shutil, "which", lambda _: None)
    lines = """\
$ name=Tom; say() { echo "$1 and $name"; }
$ mkdir there && cd there
$ say Lily \\
  'not two'
Lily and Tom
$ pwd | grep -o '[^/]*$'
there
$ echo 'x.py: error: no'; false
x.py: error: no
$ echo on
on
"""
    assert tried(tmp_path, capfd, *lines.splitlines()) == (0, lines, "")


def test_a_command_that_fails_stops_the_block(tmp_path, capfd):
    ends = {"no_such_command 2>/dev/null": "exit code 127", "false": "exit code 1"}
    ends |= {"echo 'no end": "exit code", "kill -KILL $(sh -c 'echo $PPID')": None}
    for line, words in ends.items():
        code, out, err = tried(tmp_path, capfd, "$ echo one", "one", f"$ {line}", "$ echo never")
        assert code not in (None, 0) and out == f"$ echo one\none\n$ {line}\n"
        if words:
            assert err.splitlines()[-1].startswith(f"lessons.py: error: {line}: {words}")


def test_what_needs_a_package_names_what_installs_it(tmp_path, capfd, monkeypatch):
    (tmp_path / "python").write_text('#!/bin/sh\ncase "$2" in *there*) ;; *) exit 1;; esac\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    packages = {"cat": ("there", "x"), "dog": ("gone", "make dog")}
    monkeypatch.setattr(lessons, "REQUIRED_PACKAGES", packages)
    code, out, err = tried(tmp_path, capfd, "$ echo cat", "cat", "$ echo dog", "$ echo never")
    assert (code, out) == (1, "$ echo cat\ncat\n$ echo dog\n")
    assert err == "lessons.py: error: echo dog: needs the package gone; get it with: make dog\n"


def test_what_runs_in_the_background_ends_with_the_block(tmp_path, capfd):
    stubborn = "(trap '' INT; exec sleep 60) & echo $! > pid"
    nested = "bash -c 'sleep 60 & echo $! > inner'"
    for last in ("true", "false"):
        tried(tmp_path, capfd, f"$ {stubborn}", f"$ {nested}", f"$ {last}")
        for name in ("pid", "inner"):
            with pytest.raises(ProcessLookupError):
                os.kill(int((tmp_path / name).read_text()), 0)


def test_a_server_in_the_background_is_there_for_the_next_command(tmp_path, capfd):
    """Where it writes at which address it listens; and a server that ends is not waited for."""
    (tmp_path / "health").touch()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    server = f"sleep 0.2; exec python -m http.server --bind 127.0.0.1 {address.split(':')[2]}"
    lines = (f"$ ({server}) 2>/dev/null >&2 &", f"model at {address}")
    code, out, _ = tried(tmp_path, capfd, *lines, f"$ curl -s -o /dev/null {address} && echo here")
    assert code == 0 and out.endswith("\nhere\n")
    assert tried(tmp_path, capfd, "$ true &", f"model at {address}")[0] == 0


def test_each_try_of_this_course_is_read_whole():
    sources = []
    for lesson in published():
        text = lessons.message(lesson)
        section = text.partition("\nTry")[2].partition("\nRead:")[0]
        commands = [text for kind, text in lessons.read_try(text) if kind == "command"]
        assert len(commands) == section.count("\n    $ ") > 0, lesson.id
        assert not any(text.endswith("\\") for text in commands), lesson.id
        sources += commands
    bash = shutil.which("bash") or pytest.skip("bash is not installed")
    subprocess.run([bash, "-n"], input="\n".join(sources), text=True, check=True)


def test_try_where_you_stand_is_your_code(repo, run):
    run("start", "02-mul")
    (repo / "calc.py").write_text(MUL.replace("a * b", "1000 * a"))
    venv = repo / ".venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "python").write_text(f'#!/bin/sh\necho from .venv\nexec {sys.executable} "$@"\n')
    (venv / "python").chmod(0o755)
    code, out, err = run("try")
    assert code == 1 and "temporary" not in err
    assert "EOF\nfrom .venv\nproduct 2000\nproduct 3000\n" in out


def test_answer(repo, run, error):
    (repo / "course" / "answers").mkdir(parents=True)
    for name, text in (("01-add", "Forty-one."), ("01-add", "Forty-two."), ("00-init", "None.")):
        commit(repo, "an answer", {f"course/answers/{name}.md": f"{text}\n"})
    hash = git(repo, "rev-parse", "--short", "HEAD^")
    git(repo, "checkout", "-q", "main~6")
    note = f"Its commands run at commit {hash}; go there with: git switch --detach {hash}\n"
    assert run("answer", "add") == run("answer") == (0, "Forty-two.\n", note)
    assert "the exercise of 02-mul has no written answer" in error("answer", "2")


# verify.


def test_verify_passes_good_lessons(repo, run, monkeypatch):
    monkeypatch.setenv("GIT_DIR", str(repo / "nowhere"))  # as where git runs it
    code, out, err = run("verify")
    assert code == 0, out + err
    lines = [line for line in out.splitlines() if line.startswith("ok")]
    red = "before it 1 of its {} fail, 1 by assertion"
    expected = {"00-init": "1 passed", "01-add": f"1 passed; {red.format(1)}"}  # their own only
    expected["02-mul"] = f"2 passed; {red.format(2)}"
    assert {line.split()[1]: line.partition(" s  ")[2] for line in lines} == expected
    assert out.splitlines()[-1] == "3 passed, 0 failed"


def test_verify_runs_whole_suites_and_both_commits_where_asked(repo, run, monkeypatch):
    for id in ("19-nineteen", "26-more"):
        commit(repo, f"{id[:2]} x: y", {f"tests/test_{id[:2]}.py": ""}, id)
    seen = {}

    def fake(lesson, before, whole, tree, without):
        seen[lesson.id[:2]] = before, whole
        return ("wrong" if lesson.id == "01-add" else ""), "note"

    def verified(*args):
        seen.clear()
        code, out, _ = run("verify", *args)
        return code, out.splitlines()[-1]

    monkeypatch.setattr(lessons, "verify", fake)
    first, *others = "00", "01", "02", "19", "26"
    assert verified() == (1, "4 passed, 1 failed")  # one part, the newest
    assert next(iter(seen)) in ("26", "19")  # two at a time, the longest first
    assert seen == {first: (False, False)} | dict.fromkeys(others, (True, False))
    monkeypatch.setattr(lessons, "PARTS", {"init": "one", "mul": "two", "nineteen": "three"})
    code, out, _ = run("verify")
    assert "\nwrong\n" in out and out.splitlines()[-2].startswith("3 lessons of finished parts ")
    assert [id for id, (before, _) in seen.items() if before] == ["26", "19"]
    whole = {first: (False, True)} | dict.fromkeys(others, (True, True))
    assert verified("--all") == (1, "4 passed, 1 failed") and seen == whole
    assert verified("0", "19", "0") == (0, "2 passed, 0 failed")
    assert seen == {id: whole[id] for id in ("00", "19")}


@pytest.mark.parametrize("words", ["GenuineIntel", "AuthenticAMD", None])
def test_verify_leaves_out_what_compares_bits_of_torch_on_intel(
    repo, run, tmp_path, monkeypatch, words
):
    """Where the commit does not have the list: later tests compare no bits."""
    monkeypatch.setattr(lessons, "CPU_INFO", tmp_path / "cpuinfo")
    if words:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {words}\n")
    commit(repo, "03 div: quotients", {"tests/test_div.py": TEST_DIV}, "03-div")
    commit(repo, "a list", {"course/torch_bits.txt": "# bits\n\n02-mul test_a\n04-late test_b\n"})
    commit(repo, "04 late: bits", {"tests/test_late.py": TEST_DIV}, "04-late")
    left_out = []

    def fake(tree, files, deselected):
        left_out.append(deselected)
        return {"test": "passed"}, ""

    monkeypatch.setattr(lessons, "run_tests", fake)
    end = "; on this Intel processor without 1 of the tests in course/torch_bits.txt\n"
    for id, without in (("1", []), ("2", ["test_a"]), ("3", ["test_a"]), ("4", [])):
        left_out.clear()
        out = run("verify", id)[1]
        is_intel = words == "GenuineIntel"
        assert left_out[:2] == [without * is_intel] * 2
        assert out.endswith("1 failed" + (end if is_intel and without else "\n"))


@pytest.mark.parametrize(
    "at, before, complaint",
    [
        ("passed skipped", "assertion", "the suite is not green at 02-mul:\nwords"),
        ("error passed", "assertion", "the suite is not green"),
        ("", "assertion", "the suite is not green"),
        ("passed", "passed assertion", "these tests pass on the code before the lesson:\n  test_0"),
        ("passed", "error error", "by an assertion on the code before the lesson:\nwords"),
        ("passed", "error assertion still", ""),
    ],
)
def test_verify_names_what_makes_a_lesson_bad(repo, run, monkeypatch, at, before, complaint):
    def fake(tree, files, without):
        assert (tree / "calc.py").read_text() == (DOOR if files else MUL)
        assert (tree / "tests/test_mul.py").exists()
        outcomes = enumerate((before if files else at).split())
        names = {"still": "test_still_0"}
        found = {names.get(each, f"test_{n}"): each for n, each in outcomes}
        return {name: each.replace("still", "passed") for name, each in found.items()}, "words"

    monkeypatch.setattr(lessons, "run_tests", fake)
    code, out, _ = run("verify", "2")
    assert code == (1 if complaint else 0) and complaint in out
    assert out.startswith("FAILED 02-mul" if complaint else "ok     02-mul")
    assert out.splitlines()[-1] == ("0 passed, 1 failed" if complaint else "1 passed, 0 failed")


def test_verify_checks_once_more_what_fails(repo, run, error, monkeypatch):
    commit(repo, "03 bare: no new file", {"tests/test_add.py": TEST_ADD + "\n"}, "03-bare")
    monkeypatch.setattr(lessons, "run_tests", lambda *_: ({"test": "passed"}, ""))
    assert "the lesson adds no test file" in run("verify", "3")[1]
    modified = lessons.test_files(lessons.read_main()[1][-1])  # what `check` runs
    assert modified == ["tests/test_add.py"]
    complaints = ["busy", "", "wrong", "wrong", ""]
    monkeypatch.setattr(lessons, "verify", lambda *_: (complaints.pop(0), "note"))
    code, out, _ = run("verify", "2")
    assert code == 0 and out.startswith("ok     02-mul") and "on the first:\nbusy\n" in out
    assert run("verify", "2")[0] == 1 and complaints == [""]
    monkeypatch.setattr(lessons, "python", lambda: "false")  # an interpreter without pytest
    for command in ("check", "verify"):
        assert error(command).endswith(" with: make test\n")


def test_outcomes(repo):
    (repo / "tests" / "test_all.py").write_text(
        "import pytest\n\n\n"
        "def test_passed():\n    pass\n\n\n"
        "def test_skipped():\n    pytest.skip('no')\n\n\n"
        "def test_assertion():\n    assert 1 == 2\n\n\n"
        "def test_assertion_raises():\n    with pytest.raises(ValueError):\n        pass\n\n\n"
        "def test_error():\n    import nowhere\n\n\n"
        "@pytest.fixture\ndef bad():\n    raise ValueError\n\n\n"
        "def test_error_before(bad):\n    pass\n"
    )
    results, output = lessons.run_tests(repo, ["tests/test_all.py"])
    assert len(results) == 6 and "no module" in output.lower()
    assert all(outcome in name for name, outcome in results.items())
    left_out = ["tests/test_all.py::test_error"]
    assert len(lessons.run_tests(repo, ["tests/test_all.py"], left_out)[0]) == 4
    (repo / "tests" / "test_all.py").write_text("import nowhere\n")
    assert set(lessons.run_tests(repo, ["tests/test_all.py"])[0].values()) == {"error"}


def test_what_hangs_is_ended(repo, monkeypatch):
    monkeypatch.setattr(lessons, "TEST_TIMEOUT", 1)
    (repo / "tests" / "test_all.py").write_text(
        "import subprocess, time\n\n\ndef test_hangs():\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        "    open('child', 'w').write(str(child.pid))\n    time.sleep(600)\n"
    )
    results, output = lessons.run_tests(repo, ["tests/test_all.py"])
    assert results == {"collection": "error"} and "in test_hangs" in output
    child = (repo / "child").read_text()
    wait_until(lambda: not alive(child))


def test_a_stopped_verify_leaves_nothing(repo, tmp_path):
    slow = (
        "import os, pathlib, time\n\n\ndef test_slow():\n"
        "    pathlib.Path(os.environ['MARK'] + str(os.getpid())).touch()\n    time.sleep(60)\n"
    )
    for n in (3, 4, 5):
        commit(repo, f"0{n} slow: sleep", {f"tests/test_{n}.py": slow}, f"0{n}-slow{n}")
    command = [sys.executable, "lessons.py", "verify", "3", "4", "5"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    env = os.environ | {"MARK": str(tmp_path / "mark-")}
    with subprocess.Popen(command, cwd=repo, env=env, start_new_session=True, **pipes) as process:
        wait_until(lambda: len(list(tmp_path.glob("mark-*"))) == 2)
        process.terminate()
        assert (*process.communicate(timeout=200), process.returncode) == (b"", b"", 130)
    marks = list(tmp_path.glob("mark-*"))
    assert len(marks) == 2  # the third one did not begin
    for mark in marks:
        with pytest.raises(ProcessLookupError):
            os.kill(int(mark.name.removeprefix("mark-")), 0)
