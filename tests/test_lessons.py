"""lessons.py on a small repository of its own: three lessons, a commit that prepares one, and what readers do wrong."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "lessons.py"

# Whatever the reader has configured, hooks and signatures among them, stays out of it.
PLAIN_GIT = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}

TEST_ADD = "def test_add():\n    from calc import add\n    assert add(2, 3) == 5\n"
TEST_MUL = """def test_mul():
    from calc import apply
    assert apply("*", 2, 3) == 6


def test_still_adds():
    from calc import apply
    assert apply("+", 2, 3) == 5
"""
STUB = "def add(a, b):\n    return 0\n"
ADD = "def add(a, b):\n    return a + b\n"
DOOR = ADD + "\n\ndef apply(op, a, b):\n    return add(a, b)\n"
MUL = DOOR.replace("return add(a, b)", "return a * b if op == '*' else add(a, b)")
COMMITS = [  # message, files, lesson
    ("00 init: a place", {"calc.py": STUB, "tests/test_init.py": "def test_import():\n    import calc\n"}, "00-init"),
    ("01 add: sums", {"calc.py": ADD, "tests/test_add.py": TEST_ADD}, "01-add"),
    ("calc: one door for all operations", {"calc.py": DOOR}, None),
    ("02 mul: products", {"calc.py": MUL, "tests/test_mul.py": TEST_MUL}, "02-mul"),
]


def git(repo, *args):
    return subprocess.run(
        ["git", *args], cwd=repo, env=PLAIN_GIT, check=True, capture_output=True, text=True
    ).stdout.strip()


def commit(repo, message, files, lesson):
    for name, text in files.items():
        (repo / name).parent.mkdir(exist_ok=True)
        (repo / name).write_text(text)
    git(repo, "add", ".")
    trailer = f"\n\nLesson: {lesson}" if lesson else ""
    git(
        repo,
        "-c",
        "user.name=T",
        "-c",
        "user.email=t@localhost",
        "commit",
        "-q",
        "-m",
        f"{message}\n\nThe body.{trailer}",
    )


@pytest.fixture
def repo(tmp_path):
    git(tmp_path, "init", "-q", "-b", "main")
    shutil.copy(SCRIPT, tmp_path)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    (tmp_path / ".gitignore").write_text("__pycache__/\n.pytest_cache/\n")
    for message, files, lesson in COMMITS:
        commit(tmp_path, message, files, lesson)
    return tmp_path


def run(repo, *args):
    quick = PLAIN_GIT | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "lessons.py", *args]
    result = subprocess.run(command, cwd=repo, env=quick, capture_output=True, text=True)
    return result.returncode, result.stdout, result.stderr


def test_tags_come_from_the_trailers(repo):
    assert "3 of 3 tags are missing" in run(repo, "list")[2]
    assert run(repo, "tag")[1].split() == ["made", "00-init", "made", "01-add", "made", "02-mul"]
    assert git(repo, "tag").split() == ["00-init", "01-add", "02-mul"]
    git(repo, "tag", "--force", "02-mul", "00-init")
    assert run(repo, "tag")[1].split() == ["kept", "00-init", "kept", "01-add", "moved", "02-mul"]
    assert git(repo, "rev-parse", "02-mul") == git(repo, "rev-parse", "main")


def test_a_reader_on_an_early_lesson_sees_the_later_ones(repo):
    run(repo, "tag")
    git(repo, "checkout", "-q", "01-add")
    code, out, err = run(repo, "list")
    assert code == 0 and err == ""
    assert [line.split()[:2] for line in out.splitlines()] == [
        ["00-init", "a"],
        ["*", "01-add"],
        ["02-mul", "products"],
    ]


def test_main_may_be_only_at_the_origin(repo, tmp_path_factory):
    clone = tmp_path_factory.mktemp("clone")
    git(clone, "clone", "-q", str(repo), ".")
    git(clone, "checkout", "-q", "--detach")
    git(clone, "branch", "-q", "-D", "main")
    assert "02-mul" in run(clone, "list")[1]


def test_show_and_diff(repo):
    assert "The body." in run(repo, "show", "02")[1] and "test_mul.py" in run(repo, "show", "02")[1]
    out = run(repo, "diff", "02-mul")[1]
    assert out.index("one door for all operations") < out.index("02 mul: products")
    assert "01 add: sums" not in out


def test_start_then_check_then_write(repo):
    assert run(repo, "start", "02-mul")[0] == 0
    assert git(repo, "branch", "--show-current") == "my-02-mul" and git(repo, "status", "--porcelain") == ""
    assert "return a * b" not in (repo / "calc.py").read_text() and (repo / "tests" / "test_mul.py").exists()
    code, out, _ = run(repo, "check")
    assert code == 1 and "test_mul" in out
    (repo / "calc.py").write_text(MUL)
    assert run(repo, "check")[0] == 0


def test_verify_passes_good_lessons(repo):
    code, out, err = run(repo, "verify")
    assert code == 0, out + err
    assert "before it 1 of its 2 fail, 1 by assertion" in out
    assert out.splitlines()[-1] == "3 passed, 0 failed"
    assert git(repo, "worktree", "list").count("\n") == 0


def test_verify_fails_bad_lessons(repo):
    """Four ways to be no lesson, one commit each; the last one also breaks what was green."""
    bad = {
        "03": ({"tests/test_3.py": "def test_3():\n    assert True\n"}, "these tests pass on the code before"),
        "04": ({"sub.py": "", "tests/test_4.py": "def test_4():\n    import sub\n"}, "no test fails by an assertion"),
        "05": ({"README": "no test"}, "adds no test file"),
        "06": ({"calc.py": STUB, "tests/test_6.py": "def test_6():\n    assert True\n"}, "the suite is not green"),
    }
    for number, (files, _) in bad.items():
        commit(repo, f"{number} bad: lesson", files, f"{number}-bad")
    code, out, _ = run(repo, "verify", *bad)
    assert code == 1 and out.splitlines()[-1] == "0 passed, 4 failed"
    assert [out.count(words) for _, words in bad.values()] == [1, 1, 1, 1]


def test_what_readers_do_wrong_is_one_line(repo, tmp_path_factory):
    def error(where, *args):
        code, out, err = run(where, *args)
        assert code == 2 and out == "" and err.count("\n") == 1, err
        return err

    assert "00-init, 01-add, 02-mul" in error(repo, "show", "09-nothing")
    assert "first lesson" in error(repo, "diff", "00-init")
    (repo / "calc.py").write_text("my work")
    assert "working tree has changes" in error(repo, "start", "01-add")
    git(repo, "checkout", "calc.py")
    run(repo, "start", "01-add")
    git(repo, "switch", "-q", "main")
    assert "git switch my-01-add" in error(repo, "start", "01-add")
    git(repo, "branch", "-m", "main", "trunk")
    assert "neither main nor origin/main" in error(repo, "list")
    git(repo, "branch", "-m", "trunk", "main")
    shallow = tmp_path_factory.mktemp("shallow")
    git(shallow, "clone", "-q", "--depth", "1", f"file://{repo}", ".")
    assert "git fetch --unshallow" in error(shallow, "list")
