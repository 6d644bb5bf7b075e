"""Lesson 32: a row with a seed has the text of its own run, whatever its mates; draws depend on seed and position."""

import collections
import hashlib
import itertools
import struct

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from hypothesis import example, given, settings
from hypothesis import strategies as st

LAST = 2**64 - 1  # the largest seed
ALMOST_ONE = 1 - 2**-52  # the largest number that `uniform` gives
MODELS = pytest.mark.parametrize("family", ["tiny", "tiny_llama"])


def rows_of(model, prompts, params, **options) -> list[list[int]]:
    """The text of each row of a batch. params: keyword arguments of SamplingParams, one dictionary for each row."""
    from infer import generate
    from sampling import SamplingParams

    steps = list(generate(model, prompts, [SamplingParams(**its) for its in params], **options))
    for row in range(len(prompts)):  # None after the last token, and nothing but None
        column = [step[row] for step in steps]
        assert None not in column[: len(column) - column.count(None)]
    return [[step[row] for step in steps if step[row] is not None] for row in range(len(prompts))]


def alone(model, prompt, its, **options) -> list[int]:
    """The text of a prompt in a run of its own, with one SamplingParams and no list."""
    from infer import generate
    from sampling import SamplingParams

    return [token for (token,) in generate(model, [prompt], SamplingParams(**its), **options)]


def chi_square(counts, probs) -> float:
    expected = counts.sum() * probs
    return ((counts - expected) ** 2 / expected).sum().item()


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
def test_a_row_has_the_text_of_its_own_run_whatever_its_mates(request, family, requests, data, stride, use_cache):
    model, options = request.getfixturevalue(family)(seed=3, eos_token_id=7), {"stride": stride, "use_cache": use_cache}
    prompts, params = [random_tokens(n, seed=n) for n, _ in requests], [its for _, its in requests]
    expected = [alone(model, *request, stride=stride) for request in zip(prompts, params)]
    order = data.draw(st.permutations(range(len(requests))))[: data.draw(st.integers(1, len(requests)))]
    texts = rows_of(model, [prompts[row] for row in order], [params[row] for row in order], **options)
    assert texts == [expected[row] for row in order]


def test_the_same_prompt_with_seeds_of_its_own_is_several_texts(tiny):
    params = [{"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True, "seed": seed} for seed in (4, 5, 4)]
    first, second, third = rows_of(tiny(), [[1, 2]] * 3, params)
    assert first == third != second and len(first) == 12


def test_each_row_has_its_own_length_and_its_own_end_of_text(tiny):
    eos = alone(tiny(seed=5), [1], {"max_new_tokens": 3})[2]
    model = tiny(seed=5, eos_token_id=eos)  # greedy, the third token ends a text
    params = [{"max_new_tokens": count, "ignore_eos": ignore} for count, ignore in ((2, False), (9, False), (9, True))]
    params.append({"max_new_tokens": 0})
    rows = rows_of(model, [[1]] * 4, params)
    assert [len(row) for row in rows] == [2, 3, 9, 0] and rows[0] == rows[2][:2] and rows[1] == rows[2][:3]


def test_no_row_wants_a_token(tiny):
    assert rows_of(tiny(), [[1], [2, 3]], [{"max_new_tokens": 0}] * 2) == [[], []]


def test_the_longest_prompt_wants_no_token(tiny):
    """The cache has room for it all the same."""
    params = [{"max_new_tokens": 0}, {"max_new_tokens": 3, "ignore_eos": True}]
    assert rows_of(tiny(), [random_tokens(12), [1, 2]], params) == [[], alone(tiny(), [1, 2], params[1])]


def test_each_row_has_its_own_penalties(tiny):
    """The same prompt and seed: where the texts part, the penalties did it."""
    names = ({}, {"repetition_penalty": 3.0}, {"frequency_penalty": 0.3}, {"presence_penalty": 2.0})
    params = [{"max_new_tokens": 25, "temperature": 0.3, "seed": 1, "ignore_eos": True} | its for its in names]
    model, prompt = tiny(seed=5), [1, 2, 3, 3, 3]
    rows = rows_of(model, [prompt] * 4, params)
    assert rows == [alone(model, prompt, its) for its in params]
    assert len({tuple(row) for row in rows}) == 4


def test_still_counts_what_an_empty_prompt_starts_from_as_a_prompt(tiny):
    for name, value in (("frequency_penalty", -2.0), ("presence_penalty", -2.0), ("repetition_penalty", 0.1)):
        its = {"max_new_tokens": 6, "ignore_eos": True, name: value}
        assert alone(tiny(), [], its) == alone(tiny(), [60], its)


def test_repetition_counts_prompts_and_the_others_do_not(tiny):
    """A frequency or presence penalty of 2 on all tokens but those of the prompt; a repetition penalty on these."""
    from sampling import SamplingParams, choose

    logits = torch.zeros(3, 4) + 1.0
    logits[:, 2] = 1.5  # the most likely one, and in the prompts
    texts, lengths = [[2, 2, 0, 1], [2, 2, 2, 1], [2, 2, 2, 1]], [4, 3, 1]
    for penalties, chosen in (
        ({"presence_penalty": 2.0}, [2, 2, 0]),
        ({"frequency_penalty": 0.3}, [2, 2, 0]),  # 1.5 - 2 * 0.3 in the last row
        ({"frequency_penalty": 0.2}, [2, 2, 2]),
        ({"repetition_penalty": 2.0}, [3, 0, 0]),
    ):
        assert choose(logits, [SamplingParams(**penalties)] * 3, texts, lengths) == chosen
    assert logits[:, 2].tolist() == [1.5] * 3  # not changed in place


@torch.inference_mode()
@MODELS
def test_each_draw_is_that_of_the_definition(request, family):
    """By hand: softmax of the logits over the temperature, a cumulative sum, a number of seed and length of the text.

    Of all of it, also where the window has left its beginning.
    """
    from sampling import uniform

    model, text = request.getfixturevalue(family)(), [5, 6, 7]
    its = {"max_new_tokens": 25, "temperature": 0.8, "seed": 11, "ignore_eos": True}
    for token in alone(model, text, its, stride=1):
        probs = (model(torch.tensor([text[-16:]]))[0, -1].float() / 0.8).softmax(dim=-1).double()
        assert token == sum(total <= uniform(11, len(text)) for total in itertools.accumulate(probs.tolist()))
        text = text + [token]


@pytest.mark.parametrize("stride", [None, 1, 16])
def test_a_text_that_stops_and_goes_on_as_a_prompt_has_the_same_draws(tiny, stride):
    """The position in the text counts, not that in the output. Without penalties, which tell the two apart."""
    its = {"max_new_tokens": 30, "temperature": 1.0, "seed": 8, "ignore_eos": True}
    whole = alone(tiny(), [1, 2], its, stride=stride)
    for cut in (1, 13, 29):
        rest = alone(tiny(), [1, 2] + whole[:cut], its | {"max_new_tokens": 30 - cut}, stride=stride)
        assert rest == whole[cut:]


def test_params_as_many_as_prompts(tiny):
    for count in (0, 1, 3):
        with pytest.raises(ValueError) as error:
            rows_of(tiny(), [[1], [2]], [{}] * count)
        assert str(error.value) == f"{count} params for 2 prompts"


@pytest.mark.parametrize("seed", [-1, LAST + 1, 1.0, True, "1", 10**30])
def test_a_seed_out_of_range_is_refused(seed):
    from checkpoint import UserError
    from sampling import SamplingParams

    with pytest.raises(UserError) as error:
        SamplingParams(seed=seed)
    assert str(error.value) == f"seed is {seed!r}; it must be None or an integer from 0 to 2**64 - 1"
    assert [SamplingParams(seed=good).seed for good in (None, 0, LAST)] == [None, 0, LAST]


# Rows without a seed


@torch.inference_mode()
def test_still_draws_from_the_generator_without_a_seed(tiny):
    from infer import generate
    from sampling import SamplingParams, sample

    params = SamplingParams(max_new_tokens=8, temperature=1.0, top_p=0.9, repetition_penalty=1.0, ignore_eos=True)
    model, generator = tiny(), torch.Generator().manual_seed(3)
    tokens = torch.tensor([[1, 2], [3, 4]])
    for step in generate(model, tokens.tolist(), params, torch.Generator().manual_seed(3)):
        drawn = sample(model(tokens)[:, -1].float(), params, generator)
        assert step == drawn.tolist()
        tokens = torch.cat([tokens, drawn[:, None]], dim=1)


def test_a_row_with_a_seed_takes_nothing_from_the_generator(tiny):
    common = {"max_new_tokens": 9, "temperature": 1.0, "ignore_eos": True}
    model, prompts, seeded = tiny(), [[1, 2], [3], [4, 5, 6]], common | {"seed": 1}
    plain = rows_of(model, prompts[1:], [common] * 2, generator=torch.Generator().manual_seed(7))
    for params, order in (([seeded, common, common], [0, 1, 2]), ([common, seeded, common], [1, 0, 2])):
        texts = rows_of(model, [prompts[row] for row in order], params, generator=torch.Generator().manual_seed(7))
        assert [texts[order.index(1)], texts[order.index(2)]] == plain
        assert texts[order.index(0)] == alone(model, prompts[0], seeded)


def test_seeds_leave_all_generators_alone(tiny):
    its = {"max_new_tokens": 5, "temperature": 1.0, "top_p": 0.9, "seed": 2}
    model, generator = tiny(), torch.Generator().manual_seed(5)
    state, torch_state = generator.get_state(), torch.get_rng_state()
    rows_of(model, [[1], [2]], [its, its | {"top_p": 1.0}], generator=generator)
    assert torch.equal(generator.get_state(), state) and torch.equal(torch.get_rng_state(), torch_state)


# The numbers


@given(seed=st.integers(0, LAST), position=st.integers(0, LAST))
@example(0, 0)
@example(LAST, LAST)
def test_numbers_are_52_bits_of_a_hash(seed, position):
    from sampling import uniform

    (number,) = struct.unpack("<Q", hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8).digest())
    value = uniform(seed, position)
    assert 0 <= value < 1 and value * 2**52 == number // 4096


def test_numbers_never_change():
    """A text that somebody noted with its seed comes again with each later version."""
    from sampling import uniform

    known = [0.0564663990004608, 0.6487508310490744, 0.44008326622012284, 0.9317733573190132]
    assert [uniform(0, 0), uniform(1, 0), uniform(0, 1), uniform(LAST, 1023)] == known


@pytest.mark.parametrize("byte, number", [(b"\xff", ALMOST_ONE), (b"\0", 0.0)])
def test_numbers_are_below_one_whatever_the_hash(monkeypatch, byte, number):
    from sampling import uniform

    class Hash:
        def digest(self):
            return byte * 8

    monkeypatch.setattr(hashlib, "blake2b", lambda *args, **options: Hash())
    assert uniform(1, 2) == number


NUMBERS = {
    "seeds": lambda index: (index, 5),
    "positions": lambda index: (5, index),
    "both": lambda index: (index, index),
    "large seeds": lambda index: (LAST - index, 5),
}


@pytest.mark.parametrize("numbers", NUMBERS)
def test_draws_follow_the_probabilities(numbers):
    from sampling import draw, uniform

    probs = torch.tensor([0.02, 0.3, 0.08, 0.25, 0.05, 0.15, 0.1, 0.05])
    uniforms = [uniform(*NUMBERS[numbers](index)) for index in range(20000)]
    counts = torch.bincount(draw(probs.expand(20000, 8), uniforms), minlength=8).double()
    assert chi_square(counts, probs) < 24.32  # 7 degrees of freedom, p = 0.001
    assert chi_square(counts, probs.roll(1)) > 24.32  # the check can fail


def test_neighbours_are_independent():
    """The number of a seed and a position says nothing about that of the next seed, or of the next position."""
    from sampling import uniform

    grid = torch.tensor([[uniform(seed, position) for position in range(120)] for seed in range(120)])
    quarter, even = (4 * grid).long(), torch.full((16,), 1 / 16)
    for one, other in (
        (quarter[:, :-1], quarter[:, 1:]),
        (quarter[:-1], quarter[1:]),
        (quarter[:-1, :-1], quarter[1:, 1:]),
        (quarter[:-1, 1:], quarter[1:, :-1]),
    ):
        pairs = torch.bincount((4 * one + other).flatten(), minlength=16).double()
        assert chi_square(pairs, even) < 37.70  # 15 degrees of freedom, p = 0.001


@torch.inference_mode()
def test_texts_follow_the_softmax(tiny):
    """Frequencies of the first two tokens over 8,000 seeds, against the product of two conditional probabilities."""
    model = tiny(seed=2, vocab_size=4, eos_token_id=3)
    common = {"max_new_tokens": 2, "temperature": 1.0, "ignore_eos": True}
    rows = torch.tensor(rows_of(model, [[0]] * 8000, [common | {"seed": seed} for seed in range(8000)]))
    counts = torch.bincount(rows[:, 0] * 4 + rows[:, 1], minlength=16).double()
    one = model(torch.tensor([[0]]))[0, -1].softmax(dim=-1)
    two = model(torch.tensor([[0, token] for token in range(4)]))[:, -1].softmax(dim=-1)
    assert chi_square(counts, (one[:, None] * two).flatten()) < 37.70  # 15 degrees of freedom, p = 0.001


weights = st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-7, 0.1, 0.5, 1.0, 3.0]), min_size=1, max_size=9).filter(any)
numbers = st.sampled_from([0.0, 2**-52, 0.5, ALMOST_ONE]) | st.integers(0, 2**52 - 1).map(lambda n: n / 2**52)


@given(weights=weights, u=numbers, scale=st.sampled_from([1.0, 1 - 1e-6, 1 + 1e-6, 1 - 1e-7, 1 + 1e-7]))
@example([0.0, 1.0, 0.0], ALMOST_ONE, 1 - 1e-6)
@example([0.0, 1.0, 0.0], 0.0, 1.0)
@example([0.5, 0.5, 0.0, 0.0], ALMOST_ONE, 1 + 1e-6)
@settings(max_examples=100)
def test_a_token_without_mass_is_never_drawn(weights, u, scale):
    """Also where the probabilities sum to less or more than 1 by rounding; and the token is the one at that number."""
    from sampling import draw

    probs = torch.tensor(weights) / sum(weights) * scale
    (token,) = draw(probs[None], [u]).tolist()
    masses = probs.tolist()
    assert masses[token] > 0
    below = sum(masses[:token])
    assert below - 1e-12 <= u * sum(masses) <= below + masses[token] + 1e-12


def test_ends_of_an_interval_belong_to_the_next_token():
    from sampling import draw

    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]]).expand(6, 6)
    uniforms = [0.0, 0.25 - 2**-52, 0.25, 0.75 - 2**-52, 0.75, ALMOST_ONE]
    assert draw(probs, uniforms).tolist() == [1, 1, 3, 3, 4, 4]


def test_sums_are_float64():
    """In float32, a token of little mass behind half of it all would never be drawn."""
    from sampling import draw

    probs = torch.tensor([[0.5, 1e-9, 0.5]]).expand(3, 3)
    assert draw(probs, [0.5 - 1e-9, 0.5, 0.5 + 1e-9]).tolist() == [0, 1, 2]


# What penalties count


@given(texts=st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=30), st.integers(0, 30)), min_size=1, max_size=4))
def test_tokens_are_counted_in_the_output_and_marked_in_the_prompt(texts):
    from sampling import count_tokens

    texts = [(text, min(length, len(text))) for text, length in texts]
    counts, in_prompt = count_tokens(torch.empty(len(texts), 10, dtype=torch.bfloat16), texts)
    for row, (text, length) in enumerate(texts):
        output = collections.Counter(text[length:])
        assert counts[row].tolist() == [output[token] for token in range(10)]
        assert in_prompt[row].tolist() == [token in text[:length] for token in range(10)]


def test_counts_are_integers_also_for_bfloat16():
    from sampling import count_tokens

    counts, in_prompt = count_tokens(torch.empty(1, 3, dtype=torch.bfloat16), [([1] + [2] * 1000, 1)])
    assert counts.tolist() == [[0, 0, 1000]] and not counts.is_floating_point() and in_prompt.dtype == torch.bool


# The command line

LINE = "\n" + "-" * 40 + "\n"


@pytest.fixture
def texts(cli, tiny_checkpoint):
    """A function that runs `infer.py` with these arguments: its texts, and what it wrote to stderr."""

    def run(*args):
        code, out, err = cli("--model", tiny_checkpoint, "--max-new-tokens", 12, "--temperature", 1, *args)
        assert code == 0
        return out.removesuffix("\n").split(LINE), err

    return run


@pytest.mark.parametrize("first", [1, LAST - 1])
def test_sample_k_is_the_text_of_seed_plus_k(texts, first):
    """After the largest seed comes 0."""
    several, err = texts("--prompt", "One day", "--num-samples", 3, "--seed", first)
    assert several == [texts("--prompt", "One day", "--seed", (first + k) % 2**64)[0][0] for k in range(3)]
    assert len(set(several)) == 3 and err.endswith(f", seed {first}\n")


def test_prompts_and_samples_count_together(texts):
    several, _ = texts("--prompt", "One", "--prompt", "A big dog", "--num-samples", 2, "--seed", 5)
    prompts = ("One", "One", "A big dog", "A big dog")
    assert several == [texts("--prompt", prompt, "--seed", 5 + k)[0][0] for k, prompt in enumerate(prompts)]


def test_filters_and_penalties_do_not_move_the_seeds(texts):
    args = "--prompt", "One day", "--top-p", 0.8, "--top-k", 50, "--repetition-penalty", 1.2
    several, _ = texts(*args, "--num-samples", 2, "--seed", 3)
    assert several == [texts(*args, "--seed", seed)[0][0] for seed in (3, 4)]


def test_a_text_without_the_cache_has_the_same_draws(texts):
    args = "--prompt", "One day", "--num-samples", 2, "--seed", 3
    several, _ = texts(*args)
    assert several == texts(*args, "--no-cache")[0] == [texts(*args[:2], "--seed", seed)[0][0] for seed in (3, 4)]


def test_the_embedded_model_tells_the_same_story(cli):
    """The text of a seed, written down: it is that of each machine and version."""
    args = "--model", CHECKPOINTS / "stories-draft", "--max-new-tokens", 16, "--temperature", 0.8, "--seed", 1
    story = "Once upon a time, there was a kind and kind man. He lived near a big tree and\n"
    assert cli("--prompt", "Once upon a time", *args)[:2] == (0, story)
