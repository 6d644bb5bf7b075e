"""Lesson 04: drawing from the softmax, checked by counting, and repeatable by its seed."""

import pytest
import torch


def run(model, prompts, params, seed=0):
    from infer import generate

    return list(generate(model, prompts, params, generator=torch.Generator().manual_seed(seed)))


def chi_square(counts, probs):
    expected = counts.sum() * probs
    return ((counts - expected) ** 2 / expected).sum().item()


@torch.inference_mode()
def test_draws_follow_the_softmax(tiny):
    from infer import SamplingParams

    model = tiny(seed=1, vocab_size=8, eos_token_id=7)
    (step,) = run(model, [[1, 2]] * 20000, SamplingParams(max_new_tokens=1, temperature=1.0))
    counts = torch.bincount(torch.tensor(step), minlength=8).double()
    probs = model(torch.tensor([[1, 2]]))[0, -1].softmax(dim=-1)
    assert counts.min() > 5 and probs.max() < 0.9
    assert chi_square(counts, probs) < 24.32  # 7 degrees of freedom, p = 0.001
    assert chi_square(counts, probs.roll(1)) > 24.32  # the check can fail


def test_the_second_token_follows_the_first(tiny):
    """Frequencies of the pair against the product of its two conditional probabilities."""
    from infer import SamplingParams

    model = tiny(seed=2, vocab_size=4, eos_token_id=3)
    params = SamplingParams(max_new_tokens=2, temperature=1.0, ignore_eos=True)
    first, second = run(model, [[0]] * 20000, params)
    counts = torch.bincount(torch.tensor(first) * 4 + torch.tensor(second), minlength=16).double()
    with torch.inference_mode():
        one = model(torch.tensor([[0]]))[0, -1].softmax(dim=-1)
        two = model(torch.tensor([[0, token] for token in range(4)]))[:, -1].softmax(dim=-1)
    assert chi_square(counts, (one[:, None] * two).flatten()) < 37.70  # 15 degrees of freedom, p = 0.001


def test_the_same_seed_gives_the_same_text(tiny):
    from infer import SamplingParams

    model, params = tiny(), SamplingParams(max_new_tokens=20, temperature=1.0, ignore_eos=True)
    assert run(model, [[1]], params, seed=7) == run(model, [[1]], params, seed=7)
    assert run(model, [[1]], params, seed=7) != run(model, [[1]], params, seed=8)


def test_only_the_generator_it_is_given_is_used(tiny):
    from infer import SamplingParams

    model, state = tiny(), torch.get_rng_state()
    run(model, [[1]], SamplingParams(max_new_tokens=5, temperature=1.0))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_command_line_draws_by_seed(cli, tiny_checkpoint):
    def text(*args):
        code, out, err = cli("--model", tiny_checkpoint, "--prompt", "One day", "--max-new-tokens", 20, *args)
        assert code == 0
        return out

    drawn = text("--temperature", 1, "--seed", 5)
    assert drawn == text("--temperature", 1, "--seed", 5)
    assert drawn != text("--temperature", 1, "--seed", 6)
    assert drawn != text()
    assert text() == text("--seed", 6)  # greedy does not care


def test_a_run_without_seed_can_be_repeated_from_its_report(cli, tiny_checkpoint):
    arguments = ("--model", tiny_checkpoint, "--prompt", "One day", "--max-new-tokens", 20, "--temperature", 1)
    _, first, err = cli(*arguments)
    _, second, _ = cli(*arguments, "--seed", err.split()[-1])
    _, third, _ = cli(*arguments)
    assert first == second != third


def test_several_samples_are_printed_apart_in_order(cli, tiny_checkpoint):
    code, out, err = cli(
        "--model", tiny_checkpoint, "--prompt", "One day", "--max-new-tokens", 9, "--temperature", 1, "--seed", 1,
        "--num-samples", 3,
    )  # fmt: skip
    assert code == 0 and err.startswith("27 tokens")
    texts = out.split("\n" + "-" * 40 + "\n")
    assert len(set(texts)) == 3 and all(text.startswith("One day") for text in texts)


@pytest.mark.parametrize("seed", [0, 1])
def test_still_greedy_by_default(tiny, seed):
    from infer import SamplingParams, generate

    model = tiny(seed=seed)
    with torch.inference_mode():
        best = model(torch.tensor([[1, 2]]))[0, -1].argmax().item()
    assert list(generate(model, [[1, 2]], SamplingParams(max_new_tokens=1))) == [[best]]
