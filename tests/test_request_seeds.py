"""Draws: a row with a seed equals its own run, and the race picks what a sort would."""

import itertools
import math

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from draws import bits, random_logits, seeded
from engines import alone as own_text
from hypothesis import given, settings
from hypothesis import strategies as st

import sampling
from infer import generate
from sampling import SamplingParams, exponential, sample, splitmix64

LAST = 2**64 - 1  # the largest seed


def rows_of(model, prompts, params, **options) -> list[list[int]]:
    each = [SamplingParams(**fields) for fields in params]
    steps = list(generate(model, prompts, each, **options))
    return [[step[row] for step in steps if step[row] is not None] for row in range(len(prompts))]


def alone(model, prompt, fields, **options) -> list[int]:
    return own_text(model, prompt, **options, **fields)


anything = st.fixed_dictionaries(
    {
        "max_new_tokens": st.integers(0, 16),
        "seed": st.sampled_from([0, 1, 2, 2**63, LAST]),
        "temperature": st.sampled_from([0, 0.7, 1.0, 3.0]),
        "top_k": st.sampled_from([0, 1, 5]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3]),
        "ignore_eos": st.booleans(),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 1.0]),
        "presence_penalty": st.sampled_from([0.0, 0.0, -1.0]),
    }
)


@given(
    requests=st.lists(st.tuples(st.integers(0, 40), anything), min_size=2, max_size=5),
    data=st.data(),
    stride=st.sampled_from([None, 1, 5, 16]),
    use_cache=st.booleans(),
)
@settings(max_examples=20)
def test_a_row_has_the_output_of_its_own_run_whatever_its_mates(
    build, requests, data, stride, use_cache
):
    model = build(seed=3, eos_token_id=7)
    prompts = [random_tokens(length, seed=length) for length, _ in requests]
    params = [fields for _, fields in requests]
    expected = [alone(model, *pair, stride=stride) for pair in zip(prompts, params)]
    order = data.draw(st.permutations(range(len(requests))))
    order = order[: data.draw(st.integers(1, len(requests)))]
    shuffled = [prompts[row] for row in order], [params[row] for row in order]
    outputs = rows_of(model, *shuffled, stride=stride, use_cache=use_cache)
    assert outputs == [expected[row] for row in order]


OTHER = {"seed": 2, "temperature": 3.0, "top_k": 2, "top_p": 0.3, "max_new_tokens": 7}
OTHER |= {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 3.0}
OTHER |= {"ignore_eos": False}


@pytest.mark.parametrize("field, value", OTHER.items())
def test_two_rows_that_differ_in_one_field_alone(tiny, field, value):
    base = {"max_new_tokens": 20, "seed": 1, "temperature": 1.0, "top_k": 30, "top_p": 0.95}
    base |= {"presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1}
    base |= {"ignore_eos": True}
    model = tiny(seed=5, eos_token_id=alone(tiny(seed=5), [1, 2], base)[9])
    params = [base, base | {field: value}]
    expected = [alone(model, [1, 2], fields) for fields in params]
    assert expected[0] != expected[1]
    assert rows_of(model, [[1, 2]] * 2, params) == expected
    assert rows_of(model, [[1, 2]] * 2, params[::-1]) == expected[::-1]


def test_rows_at_the_edges(tiny):
    """The longest prompt may want no token; an empty one counts what it starts from as a prompt."""
    params = [{"max_new_tokens": 0}, {"max_new_tokens": 3, "ignore_eos": True}]
    expected = [[], alone(tiny(), [1, 2], params[1])]
    assert rows_of(tiny(), [random_tokens(12), [1, 2]], params) == expected
    for name, value in (("frequency_penalty", -2.0), ("repetition_penalty", 0.1)):
        fields = {"max_new_tokens": 6, "ignore_eos": True, name: value}
        assert alone(tiny(), [], fields) == alone(tiny(), [60], fields)
    for count in (0, 1, 3):
        with pytest.raises(ValueError, match=f"^{count} params for 2 prompts$"):
            rows_of(tiny(), [[1], [2]], [{}] * count)


@torch.inference_mode()
def test_each_draw_is_that_of_the_definition(build):
    """A probability over the number of seed, id and length, also past the context window."""
    model = build()
    text = [5, 6, 7]
    fields = {"max_new_tokens": 25, "temperature": 0.8, "seed": 11, "ignore_eos": True}
    for token in alone(model, text, fields, stride=1):
        probs = (model(torch.tensor([text[-16:]]))[0, -1].float() / 0.8).softmax(dim=-1)
        speeds = [prob / number(11, len(text), id) for id, prob in enumerate(probs.tolist())]
        assert token == speeds.index(max(speeds))
        text = text + [token]


@torch.inference_mode()
def test_rows_without_a_seed_draw_from_the_generator_alone(tiny):
    params = SamplingParams(max_new_tokens=8, temperature=1.0, top_p=0.9, ignore_eos=True)
    model = tiny()
    generator = seeded(3)
    state = torch.get_rng_state()
    tokens = torch.tensor([[1, 2], [3, 4]])
    for step in generate(model, tokens.tolist(), params, seeded(3)):
        drawn = sample(model(tokens)[:, -1].float(), params, generator)
        assert step == drawn.tolist()
        tokens = torch.cat([tokens, drawn[:, None]], dim=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_row_with_a_seed_takes_nothing_from_the_generator(tiny):
    common = {"max_new_tokens": 9, "temperature": 1.0, "ignore_eos": True}
    prompts = [[1, 2], [3], [4, 5, 6]]
    plain = rows_of(tiny(), prompts[1:], [common] * 2, generator=seeded(7))
    own = alone(tiny(), prompts[0], common | {"seed": 1})
    for order in ([0, 1, 2], [1, 0, 2]):
        params = [common if row else common | {"seed": 1} for row in order]
        outputs = rows_of(tiny(), [prompts[row] for row in order], params, generator=seeded(7))
        assert [outputs[order.index(row)] for row in range(3)] == [own, *plain]


def number(seed: int, position: int, token: int) -> float:
    return -math.log(((bits(bits(seed, position), token) >> 12) + 0.5) / 2**52)


def test_the_generator_is_splitmix64():
    """Numbers that others publish for the state 1234567."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    ours = splitmix64(torch.tensor(1234567), torch.arange(4))
    assert [value % 2**64 for value in ours.tolist()] == known


DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [9, 70_000])
def test_noise_of_each_seed_position_and_token(device, size):
    rng_keys = list(itertools.product([0, 1, 2**63, LAST], [0, 7, 2**31 + 5, 2**40, 2**63 - 1]))
    noise = sampling.exponential_noise(torch.zeros(len(rng_keys), size, device=device), rng_keys)
    assert noise.shape == (len(rng_keys), size) and noise.dtype == torch.float32
    for row, (seed, position) in zip(noise.tolist(), rng_keys):
        for token in (0, 1, 8, size - 1):
            assert row[token] == pytest.approx(number(seed, position, token), rel=1e-6)


def test_noise_of_filtered_tokens_is_not_computed(torch_numbers):
    logits = torch.randn(3, 1000)
    rng_keys = [(1, 5), (LAST, 6), (7, 2**40)]
    whole = sampling.exponential_noise(logits, rng_keys)
    filtered = sampling.top_k_filter(logits, 20)
    noise = sampling.exponential_noise(filtered, rng_keys)
    assert torch_numbers == [3000, 60]
    assert torch.equal(noise, torch.where(filtered > -torch.inf, whole, 1.0))


def test_noise_is_finite_and_above_zero_whatever_the_bits():
    least, most, half = exponential(torch.tensor([-1, 0, -(2**63)])).tolist()  # all ones, all zeros
    assert least == pytest.approx(2**-53, rel=1e-9)
    assert most == pytest.approx(53 * math.log(2), rel=1e-9)
    assert half == pytest.approx(math.log(2), rel=1e-9)
    assert exponential(torch.tensor([-1])).float().item() > 0


def check_race(logits, p, seed=0):
    noise = torch.empty_like(logits).exponential_(generator=seeded(seed))
    probs = sampling.top_p_filter(logits, p).softmax(dim=-1)
    expected = torch.multinomial(probs, 1, generator=seeded(seed))[:, 0]
    assert torch.equal(sampling.exponential_race(logits, noise, p), expected), (p, seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["random", "ties", "infinite", "equal", "peaked"])
def test_the_race_draws_the_token_that_a_sort_would(kind, dtype):
    # In float64, whether 25 of 50 equal tokens reach 0.5 depends on the order of the sum.
    size = 50 if dtype == torch.float32 else 53
    for seed, p in itertools.product(range(8), (1e-300, 0.01, 0.1, 0.5, 0.75, 0.9, 0.99, 1 - 1e-7)):
        check_race(random_logits(kind, 40, size, seed).to(dtype), p, seed)


def test_logits_that_differ_are_in_order_where_their_probabilities_do_not():
    logits = torch.tensor([[0.0, 1e-8, 2e-8]])
    assert logits.softmax(dim=-1).unique().numel() == 1
    for numbers in itertools.permutations((1.0, 1e-3, 1e-6)):
        noise = torch.tensor([numbers])
        assert sampling.exponential_race(logits, noise, 0.3).tolist() == [2]
        expected = 2 if numbers[2] < numbers[1] else 1
        assert sampling.exponential_race(logits, noise, 0.5).tolist() == [expected]


@pytest.mark.parametrize("rounds", [0, 1, 8, 1000])
def test_any_number_of_rounds_gives_the_same_tokens_and_none_without_mass(monkeypatch, rounds):
    """Not even where the random number is 0, and 0 / 0 is NaN, the largest for argmax."""
    monkeypatch.setattr(sampling, "MAX_REJECTION_ROUNDS", rounds)
    for p in (0.05, 0.5, 0.9):
        check_race(2 * torch.randn(300, 60, generator=seeded(2)), p)
    logits = torch.randn(100, 8, generator=seeded(0))
    logits[:, [0, 5]] = -torch.inf
    logits[:, 2] = -200
    probs = logits.softmax(dim=-1)
    # The mass before a token without any may be too little.
    assert (probs.double().sum(dim=-1).float() < 1).any()
    for least, top_p in itertools.product((0.0, 1e-45), (0.5, 1 - 1e-9, 1.0)):
        monkeypatch.setattr(
            torch.Tensor, "exponential_", lambda self, least=least, **options: self.fill_(least)
        )
        drawn = sample(logits, SamplingParams(temperature=1.0, top_p=top_p))
        assert (probs[torch.arange(100), drawn] > 0).all()


@pytest.mark.parametrize("first", [1, LAST - 1])
def test_sample_k_is_the_output_of_seed_plus_k(cli, tiny_checkpoint, first):
    args = ("--model", tiny_checkpoint, "--max-new-tokens", 12, "--temperature", 1)
    args += ("--prompt", "One day", "--seed")
    _, out, err = cli(*args, first, "--num-samples", 3)
    several = out.removesuffix("\n").split("\n" + "-" * 40 + "\n")
    seeds = [(first + k) % 2**64 for k in range(3)]
    assert [text + "\n" for text in several] == [cli(*args, seed)[1] for seed in seeds]
    assert len(set(several)) == 3 and err.endswith(f", seed {first}\n")


def test_the_embedded_model_tells_the_same_story(cli):
    """The output of a seed, written down: it is that of each machine and version."""
    draft = CHECKPOINTS / "stories-draft"
    story = "Once upon a time, in a small house, there lived a boy named Tim. Tim loved to\n"
    args = ("--model", draft, "--max-new-tokens", 16, "--temperature", 0.8, "--seed", 1)
    assert cli("--prompt", "Once upon a time", *args)[:2] == (0, story)
