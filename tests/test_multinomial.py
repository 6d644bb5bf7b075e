"""Lesson 04: drawing from the softmax, checked by counting, and repeatable by its seed."""

import pytest
import torch
from conftest import run, run_rows
from draws import chi_square, seeded

import infer

RULER = "\n" + "-" * 40 + "\n"  # between the texts of a run


def test_the_second_token_follows_the_first(tiny):
    """Frequencies of the pair against the product of its two conditional probabilities."""
    model = tiny(seed=2, vocab_size=4, eos_token_id=3)
    params = {"max_new_tokens": 2, "temperature": 1.0, "ignore_eos": True}
    first, second = run(model, [[0]] * 8000, generator=seeded(0), **params)
    counts = torch.bincount(torch.tensor(first) * 4 + torch.tensor(second), minlength=16).double()
    with torch.inference_mode():
        one = model(torch.tensor([[0]]))[0, -1].softmax(dim=-1)
        two = model(torch.tensor([[0, token] for token in range(4)]))[:, -1].softmax(dim=-1)
    pairs = (one[:, None] * two).flatten()
    assert chi_square(counts, pairs) < 37.70  # 15 degrees of freedom, p = 0.001


def test_the_same_seed_gives_the_same_text(tiny):
    params = {"max_new_tokens": 20, "temperature": 1.0, "ignore_eos": True}

    def text(seed):
        return run_rows(tiny(), [[1]], generator=seeded(seed), **params)

    assert text(7) == text(7) != text(8)


def test_only_the_generator_it_is_given_is_used(tiny):
    model = tiny()
    state = torch.get_rng_state()
    run(model, [[1]], generator=seeded(0), max_new_tokens=5, temperature=1.0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture
def text(cli, tiny_checkpoint):
    """A function that runs `infer.py` on "One day": its text, and what it wrote to stderr."""
    prompt = ("--model", tiny_checkpoint, "--prompt", "One day", "--max-new-tokens", 9)

    def run(*args):
        code, out, err = cli(*prompt, *args)
        assert code == 0
        return out, err

    return run


def test_the_command_line_draws_by_seed(text):
    drawn, err = text("--temperature", 1, "--seed", 5)
    assert err.endswith(", seed 5\n") and err.count("\n") == 1
    assert drawn == text("--temperature", 1, "--seed", 5)[0]
    assert drawn != text("--temperature", 1, "--seed", 6)[0]
    assert drawn != text()[0]


def test_a_run_without_seed_can_be_repeated_from_its_report(text):
    first, err = text("--temperature", 1)
    assert text("--temperature", 1, "--seed", err.split()[-1])[0] == first
    assert text("--temperature", 1)[0] != first


def test_several_samples_are_printed_apart_in_order(text, monkeypatch):
    out, err = text("--temperature", 1, "--seed", 1, "--num-samples", 3)
    texts = out.removesuffix("\n").split(RULER)
    assert err.startswith("27 tokens")
    assert len(set(texts)) == 3
    assert all(text.startswith("One day") for text in texts)

    def one_step(model, prompts, *args, **options):
        return iter([[65, 66, 67][: len(prompts)]])

    monkeypatch.setattr(infer, "generate", one_step)
    out, _ = text("--temperature", 1, "--num-samples", 3)
    assert [part[-1] for part in out.removesuffix("\n").split(RULER)] == ["b", "c", "d"]


def test_greedy_reports_no_seed_and_says_what_changes_nothing(text):
    out, err = text()
    assert "seed" not in err and err.count("\n") == 1
    again, err = text("--seed", 6)
    assert again == out
    note = "note: temperature 0 is greedy, so these options have no effect: --seed"
    assert err.splitlines()[0] == note
    _, err = text("--seed", 6, "--num-samples", 2)
    assert err.splitlines()[0] == note + ", --num-samples"
    assert err.count("\n") == 2
