"""Imports: libraries import no script, and one sequence needs no engine."""

import ast
import os
import runpy
import shutil
import subprocess
import sys
import tomllib

import pytest
from conftest import ROOT

from command_line.parser import OPTIONAL_PACKAGES


def imported(file) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def is_script(file) -> bool:
    return 'if __name__ == "__main__":' in file.read_text("utf-8")


def test_libraries_import_no_script():
    packages = [start.parent for start in ROOT.glob("*/__init__.py")]
    files = [*ROOT.glob("*.py"), *(file for package in packages for file in package.rglob("*.py"))]
    names = {file: ".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files}
    scripts = {name for file, name in names.items() if is_script(file)}
    assert {"infer", "lessons", "benchmark_kv_cache", "benchmarks.engine"} <= scripts
    libraries = {name: file for file, name in names.items() if name not in scripts}
    assert {"command_line.parser", "sampling", "loading.load", "native.step"} <= libraries.keys()
    wrong = {name: imported(file) & scripts for name, file in libraries.items()}
    assert {name: found for name, found in wrong.items() if found} == {}


def python(*arguments, **options):
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)


def test_one_sequence_needs_no_engine():
    found = python("-c", "import sys, infer; print(*sys.modules)")
    places = {name: ROOT / f"{name.replace('.', '/')}.py" for name in found.stdout.split()}
    names = [name for name, place in places.items() if place.is_file()]
    wanted = {"command_line", "constraints", "loading", "native", "quantisation", "text"}
    assert {name.partition(".")[0] for name in names if "." in name} == wanted
    assert {name for name in names if is_script(places[name])} == {"infer"}, found.stderr


SCRIPTS = sorted(file.name for file in ROOT.glob("*.py") if is_script(file))


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "lessons.py"])
def test_without_packages_a_script_says_what_to_run(script):
    """It finds its own modules where Python leaves its folder out of the path."""
    found = python("-S", "-P", script)  # without site-packages
    package = "h11" if script == "serve.py" else "torch"
    missing = f"{package} is not installed for {sys.executable}; run make"
    words = f"{script}: error: {missing}, then: .venv/bin/python {script}\n"
    assert (found.returncode, found.stdout, found.stderr) == (2, "", words)


@pytest.mark.parametrize(
    "program, code, words",
    [
        ("-m benchmarks.engine", 2, "; run make, then: .venv/bin/python -m benchmarks.engine\n"),
        ("import pandas", 2, "; run make test, then: "),
        ("import loading.no_such_module", 1, "Traceback"),
        ("import _no_such, _ctypes", 2, "_no_such is not installed"),
        ("1 / 0", 1, "Traceback"),
        ("raise SystemExit(3)", 3, ""),
    ],
)
def test_only_a_package_that_is_missing_is_one_line(program, code, words):
    is_module = program.startswith("-m")
    given = program.split() if is_module else ["-c", f"import loading.interrupt; {program}"]
    found = python("-S", *given)
    assert found.returncode == code and words in found.stderr
    assert code != 2 or found.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "users, spins",
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_sleep_at_a_barrier_soon_unless_the_user_says_how(users, spins):
    """libgomp reads the variables once, when torch loads it."""
    program = (
        "import os, sys, loading.interrupt; assert 'torch' not in sys.modules; "
        "print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    found = python("-c", program, env=environment | users, check=True)
    assert found.stdout.strip() == str(spins)


@pytest.mark.parametrize("file", ["lessons.py", "loading/interrupt.py"])
def test_an_older_python_is_one_line(monkeypatch, capsys, file):
    monkeypatch.setattr(sys, "version_info", (3, 10, 12))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / file))
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("error: Python 3.11 to 3.14 is needed; this is 3.10\n")


@pytest.mark.parametrize("name", ["old", "none"])
def test_make_names_a_python_that_does_not_fit(tmp_path, name):
    """It takes the Pythons that torch has wheels for."""
    program = (ROOT / "Makefile").read_text().partition("SUPPORTED = ")[2].partition("\n")[0]
    fit = {(3, 10, 9): 0, (3, 11): 1, (3, 14, 9): 1, (3, 15, 0, "alpha"): 0, (4, 0): 0}
    for version, fits in fit.items():
        with pytest.raises(SystemExit) as ended:
            exec(program.replace("sys.version_info", str(version)))
        assert ended.value.code == (not fits)
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    python = tmp_path / name
    if name == "old":
        python.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.10.12\nexit 1\n')
        python.chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    command = ["make", f"PYTHON={python}", ".venv/installed"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    words = f"Python 3.11 to 3.14 is needed, and {python} is"
    assert found.returncode and words in found.stdout and not (tmp_path / ".venv").exists()
    assert ("is Python 3.10.12; with" in found.stdout) == (name == "old")


def test_running_needs_no_package_of_tests_or_benchmarks():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lists = project["dependencies"], project["optional-dependencies"]["test"]
    needed, for_tests = ({line.partition("==")[0] for line in lines} for lines in lists)
    assert OPTIONAL_PACKAGES <= for_tests and not for_tests & needed
