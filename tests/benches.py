"""A benchmark's script in this process, on a small model: what it wrote and what it said."""

import functools
import importlib.util

import pandas
import pytest
from conftest import save_speaking
from matplotlib.figure import Figure

EVERY_ID = tuple(range(4096))


def save_endless(build, directory, **shape):
    """Save a model of which each token is an EOS, so a text that heeds EOS ends after one."""
    return save_speaking(build, directory, eos_token_ids=EVERY_ID, **shape)


def near(value):
    return pytest.approx(value, rel=1e-3)  # results have four digits


class Bench:
    """Runs a script with these options and those of the call: exit code, rows and stderr.

    memory_jobs: jobs for processes of their own, which take seconds and are not run.
    draws: whether the plot is drawn, which takes a while. figures: what was drawn.
    """

    def __init__(self, request, script, *default_args):
        self.run_main = request.getfixturevalue("run_main")
        self.directory = request.getfixturevalue("tmp_path")
        self.script = script
        self.default_args = default_args
        self.memory_jobs = []
        self.draws = False
        self.figures = []
        self.plot = script.plot
        self.patch = request.getfixturevalue("monkeypatch").setattr
        self.patch(script.common, "in_own_process", self.in_own_process)
        self.patch(script.common, "bandwidth", lambda *_: 1e9)
        self.patch(script, "plot", self.draw)

    def __call__(self, *args):
        output = self.directory / "run.csv"
        code, _, err = self.run_main(
            self.script.main, "--output", output, *self.default_args, *args
        )
        return code, pandas.read_csv(output) if output.exists() else None, err

    def rows(self, *args, says: str = ""):
        code, rows, err = self(*args)
        assert code == 0 and says in err, err
        return rows

    def stops(self, said, *args):
        code, rows, _ = self(*args)
        assert said in code and rows is None

    @property
    def summary(self):
        return pandas.read_csv(self.directory / "run_summary.csv")

    def change(self, name, call, of=None):
        """Replace a function of the script. call: it gets the real one first."""
        owner = of or self.script
        self.patch(owner, name, functools.partial(call, getattr(owner, name)))

    def installed(self, **packages):
        find = importlib.util.find_spec

        def find_spec(name):
            return name if packages.get(name) else None if name in packages else find(name)

        self.patch(importlib.util, "find_spec", find_spec)

    def spy(self, name, of=None) -> list:
        calls = []

        def call(real, *args, **options):
            calls.append((*args, *options.values()))
            return real(*args, **options)

        self.change(name, call, of)
        return calls

    def in_own_process(self, *job):
        self.memory_jobs.append(job)
        return 1e6 * len(self.memory_jobs)

    def draw(self, summary):
        self.figures.append(self.plot(summary) if self.draws else Figure())
        return self.figures[-1]
