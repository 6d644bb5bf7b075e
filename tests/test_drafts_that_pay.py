"""Drafts in the steps where they are measured to be faster; the texts stay."""

import itertools
import re
import time

import pytest
from conftest import random_tokens
from drafting import Scripted
from engines import greedy

from engine.drafter import AdaptiveSpeculation, SpeculationTrial
from engine.engine import Engine

LONG = greedy(400)


@pytest.fixture
def model(tiny):
    return tiny(n_layer=1, block_size=512)


def new_trial():
    return SpeculationTrial()


class Timed:
    """A drafter whose steps, and the engine's others, take as long as a function says.

    seconds: (rows, drafting) to the seconds of a step. asked: of each step, whether it drafted.
    """

    def __init__(self, monkeypatch, seconds, propose=lambda request, count: []):
        self.seconds = seconds
        self.scripted = Scripted(propose)
        self.asked = []
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def propose(self, requests, counts):
        self.asked[-1] = True
        return self.scripted.propose(requests, counts)

    def step(self, engine, count=1) -> None:
        for _ in range(count):
            self.asked.append(False)
            engine.step()

    def run(self, engine) -> list[bool]:
        """Write all texts of the engine; returns which of its steps asked for drafts."""
        compute = engine.compute

        def timed(scheduled):
            self.now += self.seconds(len(scheduled), self.asked[-1])
            return compute(scheduled)

        engine.compute = timed
        while engine.busy:
            self.step(engine)
        return self.asked


def slower(rows, drafting) -> float:
    return 2.0 if drafting else 1.0


def trials_engine(model, drafter, *params, rows=1, **options) -> Engine:
    """An engine that tries drafts, and texts with these parameters."""
    engine = Engine(
        model,
        max_num_seqs=rows,
        page_size=16,
        drafter=drafter,
        adaptive_speculation=AdaptiveSpeculation(),
        **options,
    )
    for row, own in enumerate(params):
        engine.add([1 + row, 2], own)
    return engine


def runs(asked: list[bool]) -> list[tuple[bool, int]]:
    """Steps one after the other that were alike."""
    return [(value, len(list(group))) for value, group in itertools.groupby(asked)]


def test_where_drafts_do_not_pay_they_stop_and_are_tried_again(model, monkeypatch):
    drafter = Timed(monkeypatch, slower)
    engine = trials_engine(model, drafter, LONG)
    # The prompt, a first step of drafts that does not count, then 16 and 16 and 256 that do.
    steps = [(True, 1 + 1 + 16), (False, 16 + 256), (True, 17), (False, 93)]
    assert runs(drafter.run(engine)) == steps


def test_where_drafts_pay_they_stay(model, monkeypatch):
    drafter = Timed(monkeypatch, lambda rows, drafting: 1.0 if drafting else 1.1)
    engine = trials_engine(model, drafter, LONG)
    first = [(True, 1 + 1 + 16), (False, 16), (True, 1 + 256 + 16), (False, 16)]
    assert runs(drafter.run(engine))[:4] == first


def noted(trial, drafts, count, tokens, seconds) -> None:
    for _ in range(count):
        trial.record_step(drafts, tokens, seconds)


def test_older_steps_count_in_a_trial():
    trial = new_trial()
    noted(trial, True, 16, 3, 2.0)
    noted(trial, False, 16, 1, 1.0)
    assert trial.drafting_pays
    noted(trial, True, 256, 3, 2.0)
    noted(trial, True, 16, 1, 2.0)  # hardly a draft is accepted in this part of the text
    noted(trial, False, 16, 1, 1.0)
    assert trial.drafting_pays and trial.should_draft


def test_a_trial_changes_its_mode():
    trial = new_trial()
    noted(trial, True, 16, 3, 2.0)
    noted(trial, False, 16, 1, 1.0)
    noted(trial, True, 16, 1, 2.0)
    assert not trial.should_draft  # 2 tokens on average, in 2 seconds
    noted(trial, False, 64, 1, 1.1)
    assert trial.should_draft


def test_a_trial_decides_every_16_steps():
    trial = new_trial()
    noted(trial, True, 16, 3, 2.0)
    noted(trial, False, 16, 1, 1.0)
    noted(trial, True, 15, 0, 100.0)
    assert trial.should_draft
    noted(trial, True, 1, 0, 100.0)
    assert not trial.should_draft


def test_throughput_is_of_the_last_64_steps():
    trial = new_trial()
    noted(trial, False, 1, 1, 1.0)
    noted(trial, True, 10, 100, 9.0)
    noted(trial, True, 63, 1, 2.0)
    noted(trial, True, 1, 65, 50.0)
    assert trial.throughput(True) == 2 / 2.0


def test_each_batch_size_has_its_own_trial(model, monkeypatch):
    drafter = Timed(monkeypatch, lambda rows, drafting: 1.0 + (rows > 1) * drafting - drafting / 2)
    engine = trials_engine(model, drafter, *map(greedy, (60, 80, 400)), rows=3)
    asked = drafter.run(engine)
    together = asked[:80]
    assert runs(together) == [(True, 1 + 1 + 16), (False, 80 - 18)]
    # Alone: a first step that does not count, 16 and 16, and then they pay.
    assert runs(asked[80:])[:3] == [(True, 17), (False, 16), (True, 257 + 16)]


def test_only_steps_that_decode_count(model, monkeypatch):
    drafter = Timed(monkeypatch, slower)
    engine = trials_engine(model, drafter, LONG, rows=2, max_num_batched_tokens=8)
    drafter.step(engine, 10)
    trial = engine.adaptive_speculation.trials[1]
    assert trial.steps == 8  # of ten, without the prompt and the first with drafts
    engine.add(random_tokens(53), LONG)
    drafter.step(engine, 8)  # seven positions each
    assert (trial.steps, engine.adaptive_speculation.trials[2].steps) == (8, 0)


def test_a_drafter_without_memory_does_not_pay(model, monkeypatch):
    def fail(request, count):
        raise MemoryError

    drafter = Timed(monkeypatch, slower, fail)
    engine = trials_engine(model, drafter, greedy(60))
    assert runs(drafter.run(engine)) == [(True, 1 + 1 + 16), (False, 60 - 18)]


WRITE = ["--prompt", "Lily and Tom and Lily and", "--max-new-tokens", 90, "--ignore-eos"]


def drafted(err: str) -> int:
    return int(re.search(r" of (\d+) drafts accepted", err)[1])


def test_the_command_line_drafts_where_it_pays_unless_gamma_is_given(engine_cli, tiny_checkpoint):
    args = ["--model", tiny_checkpoint, "--draft", tiny_checkpoint, *WRITE]
    code, always, err = engine_cli(*args, "--gamma", 3)
    assert (code, drafted(err)) == (0, 65)
    code, out, err = engine_cli(*args)
    assert (code, out) == (0, always)
    assert 0 < drafted(err) < 65  # steps without drafts were tried
