"""What GitHub runs: the tests on both systems, and the book of main, put on GitHub Pages."""

import shutil
import subprocess
import tomllib

import pytest
import yaml
from conftest import ROOT

from command_line.parser import OPTIONAL_PACKAGES


def workflow(name: str) -> dict:
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text("utf-8"))


def steps_of(job: dict) -> list[str]:
    return [step.get("run") or step["uses"].partition("@")[0] for step in job["steps"]]


def test_the_tests_run_on_both_systems_with_each_python():
    (job,) = workflow("test.yml")["jobs"].values()
    matrix = job["strategy"]["matrix"]
    assert matrix["os"] == ["ubuntu-latest", "macos-latest"]
    assert matrix["python"] == ["3.11", "3.12", "3.13", "3.14"]
    steps = steps_of(job)
    assert steps[0] == "actions/checkout" and job["steps"][0]["with"]["fetch-depth"] == 0
    gate = (ROOT / ".ci" / "run").read_text()
    for command in ("make test", ".venv/bin/ruff check .", ".venv/bin/ruff format --check ."):
        assert command in gate and any(step.startswith(command) for step in steps), command


def test_make_takes_the_pythons_that_torch_has_wheels_for():
    program = (ROOT / "Makefile").read_text().partition("SUPPORTED = ")[2].partition("\n")[0]
    fit = {(3, 10, 9): 0, (3, 11): 1, (3, 14, 9): 1, (3, 15, 0, "alpha"): 0, (4, 0): 0}
    for version, fits in fit.items():
        with pytest.raises(SystemExit) as ended:
            exec(program.replace("sys.version_info", str(version)))
        assert ended.value.code == (not fits)


@pytest.mark.parametrize("name", ["old", "none"])
def test_make_names_a_python_that_does_not_fit(tmp_path, name):
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


def test_the_book_is_made_of_main_and_put_on_pages():
    found = workflow("book.yml")
    build, deploy = (found["jobs"][name] for name in ("build", "deploy"))
    assert found[True]["push"] == {"branches": ["main"]}  # YAML reads `on` as true
    assert build["steps"][0]["with"] == {"fetch-depth": 0, "ref": "main"}
    assert steps_of(build)[-2:] == ["make book PYTHON=python", "actions/upload-pages-artifact"]
    assert build["steps"][-1]["with"]["path"] == "book"
    assert deploy["needs"] == "build" and steps_of(deploy) == ["actions/deploy-pages"]
    assert deploy["permissions"] == {"pages": "write", "id-token": "write"}
