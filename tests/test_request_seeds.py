"""A row with a seed has the text of its own run."""

import itertools
import math

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from draws import bits, chi_square
from engines import alone as own_text
from hypothesis import given, settings
from hypothesis import strategies as st

import sampling
from errors import UserError
from infer import generate
from sampling import (
    SamplingParams,
    Sequence,
    exponential,
    exponential_noise,
    sample,
    sample_batch,
    splitmix64,
)

LAST = 2**64 - 1  # the largest seed
MODELS = pytest.mark.parametrize("family", ["tiny", "tiny_llama"])


def rows_of(model, prompts, params, **options) -> list[list[int]]:
    """The text of each row of a batch. params: for each row, arguments of SamplingParams."""
    each = [SamplingParams(**fields) for fields in params]
    steps = list(generate(model, prompts, each, **options))
    for row in range(len(prompts)):  # None after the last token, and nothing but None
        column = [step[row] for step in steps]
        assert None not in column[: len(column) - column.count(None)]
    return [[step[row] for step in steps if step[row] is not None] for row in range(len(prompts))]


def alone(model, prompt, fields, **options) -> list[int]:
    """The text of a prompt in a run of its own, with one SamplingParams and no list."""
    return own_text(model, prompt, **options, **fields)


def sampled(probs, rng_keys, **fields) -> torch.Tensor:
    """What `sample` draws from these probabilities for each seed and position."""
    params = SamplingParams(**{"temperature": 1.0} | fields)
    return sample(probs.log().expand(len(rng_keys), -1), params, rng_keys=rng_keys)


# Each row


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


@MODELS
@given(
    requests=st.lists(st.tuples(st.integers(0, 20), anything), min_size=2, max_size=5),
    data=st.data(),
    stride=st.sampled_from([None, 1, 5, 16]),
    use_cache=st.booleans(),
)
@settings(max_examples=12)
def test_a_row_has_the_text_of_its_own_run_whatever_its_mates(
    request, family, requests, data, stride, use_cache
):
    model = request.getfixturevalue(family)(seed=3, eos_token_id=7)
    prompts = [random_tokens(length, seed=length) for length, _ in requests]
    params = [fields for _, fields in requests]
    expected = [alone(model, *pair, stride=stride) for pair in zip(prompts, params)]
    order = data.draw(st.permutations(range(len(requests))))
    order = order[: data.draw(st.integers(1, len(requests)))]
    shuffled = [prompts[row] for row in order], [params[row] for row in order]
    texts = rows_of(model, *shuffled, stride=stride, use_cache=use_cache)
    assert texts == [expected[row] for row in order]


OTHER = {"seed": 2, "temperature": 3.0, "top_k": 2, "top_p": 0.3, "max_new_tokens": 7}
OTHER |= {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 3.0}
OTHER |= {"ignore_eos": False}


@pytest.mark.parametrize("field, value", OTHER.items())
def test_two_rows_that_differ_in_one_field_alone(tiny, field, value):
    base = {"max_new_tokens": 20, "seed": 1, "temperature": 1.0, "top_k": 30, "top_p": 0.95}
    base |= {"presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1}
    base |= {"ignore_eos": True}
    model = tiny(seed=5)
    end = alone(model, [1, 2], base)[9]
    model = tiny(seed=5, eos_token_id=end)
    params = [base, base | {field: value}]
    expected = [alone(model, [1, 2], fields) for fields in params]
    assert expected[0] != expected[1]
    assert rows_of(model, [[1, 2]] * 2, params) == expected
    assert rows_of(model, [[1, 2]] * 2, params[::-1]) == expected[::-1]


def test_still_the_longest_prompt_wants_no_token(tiny):
    """The cache has room for it all the same."""
    params = [{"max_new_tokens": 0}, {"max_new_tokens": 3, "ignore_eos": True}]
    expected = [[], alone(tiny(), [1, 2], params[1])]
    assert rows_of(tiny(), [random_tokens(12), [1, 2]], params) == expected


def test_still_counts_what_an_empty_prompt_starts_from_as_a_prompt(tiny):
    values = {"frequency_penalty": -2.0, "presence_penalty": -2.0, "repetition_penalty": 0.1}
    for name, value in values.items():
        fields = {"max_new_tokens": 6, "ignore_eos": True, name: value}
        assert alone(tiny(), [], fields) == alone(tiny(), [60], fields)


def test_still_repetition_counts_prompts_and_the_others_do_not():
    """Frequency and presence penalise the output, repetition the prompt as well."""
    logits = torch.ones(3, 4)
    logits[:, 2] = 1.5  # the most likely one, and in the prompts
    texts = [[2, 2, 0, 1], [2, 2, 2, 1], [2, 2, 2, 1]]
    for penalties, chosen in (
        ({"presence_penalty": 2.0}, [2, 2, 0]),
        ({"frequency_penalty": 0.3}, [2, 2, 0]),  # 1.5 - 2 * 0.3 in the last row
        ({"frequency_penalty": 0.2}, [2, 2, 2]),
        ({"repetition_penalty": 2.0}, [3, 0, 0]),
    ):
        params = SamplingParams(**penalties)
        sequences = [Sequence(text, length, params) for text, length in zip(texts, [4, 3, 1])]
        assert sample_batch(logits, sequences) == chosen
    assert logits[:, 2].tolist() == [1.5] * 3  # not changed in place


@torch.inference_mode()
@MODELS
def test_each_draw_is_that_of_the_definition(request, family):
    """By hand: the softmax of logits over the temperature, divided by the number of each token.

    Of seed, id, and the length of all of the text, also where the window has left its beginning.
    """
    model = request.getfixturevalue(family)()
    text = [5, 6, 7]
    fields = {"max_new_tokens": 25, "temperature": 0.8, "seed": 11, "ignore_eos": True}
    for token in alone(model, text, fields, stride=1):
        probs = (model(torch.tensor([text[-16:]]))[0, -1].float() / 0.8).softmax(dim=-1)
        speeds = [prob / number(11, len(text), id) for id, prob in enumerate(probs.tolist())]
        assert token == speeds.index(max(speeds))
        text = text + [token]


def test_still_params_as_many_as_prompts(tiny):
    for count in (0, 1, 3):
        with pytest.raises(ValueError) as error:
            rows_of(tiny(), [[1], [2]], [{}] * count)
        assert str(error.value) == f"{count} params for 2 prompts"


@pytest.mark.parametrize("seed", [-1, LAST + 1, 1.0, True, "1", 10**30])
def test_a_seed_out_of_range_is_refused(seed):
    expected = f"seed {seed!r}: must be None or an integer from 0 to 2**64 - 1"
    with pytest.raises(UserError) as error:
        SamplingParams(seed=seed)
    assert str(error.value) == expected
    assert [SamplingParams(seed=good).seed for good in (None, 0, LAST)] == [None, 0, LAST]


# Rows without a seed


@torch.inference_mode()
def test_still_draws_from_the_generator_without_a_seed(tiny):
    params = SamplingParams(max_new_tokens=8, temperature=1.0, top_p=0.9, ignore_eos=True)
    model = tiny()
    generator = torch.Generator().manual_seed(3)
    tokens = torch.tensor([[1, 2], [3, 4]])
    for step in generate(model, tokens.tolist(), params, torch.Generator().manual_seed(3)):
        drawn = sample(model(tokens)[:, -1].float(), params, generator)
        assert step == drawn.tolist()
        tokens = torch.cat([tokens, drawn[:, None]], dim=1)


def test_a_row_with_a_seed_takes_nothing_from_the_generator(tiny):
    common = {"max_new_tokens": 9, "temperature": 1.0, "ignore_eos": True}
    seeded = common | {"seed": 1}
    model = tiny()
    prompts = [[1, 2], [3], [4, 5, 6]]
    plain = rows_of(model, prompts[1:], [common] * 2, generator=torch.Generator().manual_seed(7))
    for params, order in (
        ([seeded, common, common], [0, 1, 2]),
        ([common, seeded, common], [1, 0, 2]),
    ):
        generator = torch.Generator().manual_seed(7)
        texts = rows_of(model, [prompts[row] for row in order], params, generator=generator)
        assert [texts[order.index(1)], texts[order.index(2)]] == plain
        assert texts[order.index(0)] == alone(model, prompts[0], seeded)


# The numbers


def number(seed: int, position: int, token: int) -> float:
    """The exponential random number of a token, from its definition."""
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
    noise = exponential_noise(torch.zeros(len(rng_keys), size, device=device), rng_keys)
    assert noise.shape == (len(rng_keys), size) and noise.dtype == torch.float32
    for row, (seed, position) in zip(noise.tolist(), rng_keys):
        for token in (0, 1, 8, size - 1):
            assert row[token] == pytest.approx(number(seed, position, token), rel=1e-6)


def test_noise_of_tokens_that_are_out_is_not_computed(torch_numbers):
    """The tokens that are left keep the numbers that they have without the filter."""
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


# The draws


DRAWS = {"seeds": lambda index: (LAST - index, 5), "positions": lambda index: (5, 2**40 + index)}
PROBS = torch.tensor([0.02, 0.3, 0.08, 0.25, 0.05, 0.15, 0.1, 0.05])


@pytest.mark.parametrize("name", DRAWS)
def test_draws_follow_the_probabilities(name):
    rng_keys = [DRAWS[name](index) for index in range(20000)]
    counts = torch.bincount(sampled(PROBS, rng_keys), minlength=8).double()
    assert chi_square(counts, PROBS) < 24.32  # 7 degrees of freedom, p = 0.001
    assert chi_square(counts, PROBS.roll(1)) > 24.32  # the check can fail


@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"top_p": 0.5}])
def test_logits_that_are_no_numbers_give_some_token(fields):
    """A row that broke has mates: what it draws is thrown away, but must not be an error."""
    for value in (math.nan, math.inf):
        (token,) = sampled(torch.tensor([0.5, value, 0.2, 0.3]), [(1, 2)], **fields).tolist()
        assert 0 <= token < 4


# The command line

LINE = "\n" + "-" * 40 + "\n"


@pytest.fixture
def texts(cli, tiny_checkpoint):
    """A function that runs `infer.py` with these arguments: its texts, and what is on stderr."""

    def run(*args):
        common = ("--model", tiny_checkpoint, "--max-new-tokens", 12, "--temperature", 1)
        code, out, err = cli(*common, *args)
        assert code == 0
        return out.removesuffix("\n").split(LINE), err

    return run


@pytest.mark.parametrize("first", [1, LAST - 1])
def test_sample_k_is_the_text_of_seed_plus_k(texts, first):
    """After the largest seed comes 0."""
    several, err = texts("--prompt", "One day", "--num-samples", 3, "--seed", first)
    seeds = [(first + k) % 2**64 for k in range(3)]
    assert several == [texts("--prompt", "One day", "--seed", seed)[0][0] for seed in seeds]
    assert len(set(several)) == 3
    assert err.endswith(f", seed {first}\n")


def test_the_embedded_model_tells_the_same_story(cli):
    """The text of a seed, written down: it is that of each machine and version."""
    draft = CHECKPOINTS / "stories-draft"
    story = "Once upon a time, in a small house, there lived a boy named Tim. Tim loved to\n"
    args = ("--model", draft, "--max-new-tokens", 16, "--temperature", 0.8, "--seed", 1)
    assert cli("--prompt", "Once upon a time", *args)[:2] == (0, story)
