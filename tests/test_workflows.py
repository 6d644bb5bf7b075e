"""What GitHub runs: the tests on both systems, and the book of main, put on GitHub Pages."""

import yaml
from conftest import ROOT

from command_line import OPTIONAL


def workflow(name: str) -> dict:
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text("utf-8"))


def steps_of(job: dict) -> list[str]:
    return [step.get("run") or step["uses"].partition("@")[0] for step in job["steps"]]


def test_the_tests_run_on_both_systems_with_each_python():
    (job,) = workflow("test.yml")["jobs"].values()
    matrix = job["strategy"]["matrix"]
    assert matrix["os"] == ["ubuntu-latest", "macos-latest"]
    assert matrix["python"] == ["3.11", "3.12", "3.13"]
    steps = steps_of(job)
    assert steps[0] == "actions/checkout" and job["steps"][0]["with"]["fetch-depth"] == 0
    gate = (ROOT / ".ci" / "run").read_text()
    for command in ("make test", ".venv/bin/ruff check .", ".venv/bin/ruff format --check ."):
        assert command in gate and any(step.startswith(command) for step in steps), command


def packages(name: str) -> set[str]:
    lines = (ROOT / name).read_text("utf-8").splitlines()
    return {line.partition("==")[0] for line in lines if "==" in line}


def test_running_needs_no_package_of_tests_or_benchmarks():
    assert OPTIONAL <= packages("requirements-test.txt")
    assert not packages("requirements-test.txt") & packages("requirements.txt")


def test_the_book_is_made_of_main_and_put_on_pages():
    found = workflow("book.yml")
    build, deploy = (found["jobs"][name] for name in ("build", "deploy"))
    assert found[True]["push"] == {"branches": ["main"]}  # YAML reads `on` as true
    assert build["steps"][0]["with"] == {"fetch-depth": 0, "ref": "main"}
    assert steps_of(build)[-2:] == ["make book PYTHON=python", "actions/upload-pages-artifact"]
    assert build["steps"][-1]["with"]["path"] == "book"
    assert deploy["needs"] == "build" and steps_of(deploy) == ["actions/deploy-pages"]
    assert deploy["permissions"] == {"pages": "write", "id-token": "write"}
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert "https://OWNER.github.io/REPOSITORY" in page
