"""A row with a seed has the text of its own run."""

import itertools
import math

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from draws import chi_square
from engines import alone as own_text
from hypothesis import example, given, settings
from hypothesis import strategies as st

LAST = 2**64 - 1  # the largest seed
MODELS = pytest.mark.parametrize("family", ["tiny", "tiny_llama"])


def rows_of(model, prompts, params, **options) -> list[list[int]]:
    """The text of each row of a batch. params: for each row, arguments of SamplingParams."""
    from infer import generate
    from sampling import SamplingParams

    each = [SamplingParams(**fields) for fields in params]
    steps = list(generate(model, prompts, each, **options))
    for row in range(len(prompts)):  # None after the last token, and nothing but None
        column = [step[row] for step in steps]
        assert None not in column[: len(column) - column.count(None)]
    return [[step[row] for step in steps if step[row] is not None] for row in range(len(prompts))]


def alone(model, prompt, fields, **options) -> list[int]:
    """The text of a prompt in a run of its own, with one SamplingParams and no list."""
    return own_text(model, prompt, **options, **fields)


def sampled(probs, draws, **fields) -> torch.Tensor:
    """What `sample` draws from these probabilities for each seed and position."""
    from sampling import SamplingParams, sample

    params = SamplingParams(**{"temperature": 1.0} | fields)
    return sample(probs.log().expand(len(draws), -1), params, draws=draws)


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


def test_the_same_prompt_with_seeds_of_its_own_is_several_texts(tiny):
    common = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    params = [common | {"seed": seed} for seed in (4, 5, 4)]
    first, second, third = rows_of(tiny(), [[1, 2]] * 3, params)
    assert first == third != second
    assert len(first) == 12


def test_each_row_has_its_own_length_and_its_own_end_of_text(tiny):
    eos = alone(tiny(seed=5), [1], {"max_new_tokens": 3})[2]
    model = tiny(seed=5, eos_token_id=eos)  # greedy, the third token ends a text
    params = [
        {"max_new_tokens": count, "ignore_eos": ignore}
        for count, ignore in ((2, False), (9, False), (9, True), (0, False))
    ]
    rows = rows_of(model, [[1]] * 4, params)
    assert [len(row) for row in rows] == [2, 3, 9, 0]
    assert rows[0] == rows[2][:2]
    assert rows[1] == rows[2][:3]


def test_no_row_wants_a_token(tiny):
    assert rows_of(tiny(), [[1], [2, 3]], [{"max_new_tokens": 0}] * 2) == [[], []]


def test_the_longest_prompt_wants_no_token(tiny):
    """The cache has room for it all the same."""
    params = [{"max_new_tokens": 0}, {"max_new_tokens": 3, "ignore_eos": True}]
    expected = [[], alone(tiny(), [1, 2], params[1])]
    assert rows_of(tiny(), [random_tokens(12), [1, 2]], params) == expected


def test_each_row_has_its_own_penalties(tiny):
    """The same prompt and seed: where the texts part, the penalties did it."""
    penalties = [{}, {"repetition_penalty": 3.0}, {"frequency_penalty": 0.3}]
    penalties.append({"presence_penalty": 2.0})
    common = {"max_new_tokens": 25, "temperature": 0.3, "seed": 1, "ignore_eos": True}
    params = [common | fields for fields in penalties]
    model = tiny(seed=5)
    prompt = [1, 2, 3, 3, 3]
    rows = rows_of(model, [prompt] * 4, params)
    assert rows == [alone(model, prompt, fields) for fields in params]
    assert len({tuple(row) for row in rows}) == 4


def test_still_counts_what_an_empty_prompt_starts_from_as_a_prompt(tiny):
    for name, value in (
        ("frequency_penalty", -2.0),
        ("presence_penalty", -2.0),
        ("repetition_penalty", 0.1),
    ):
        fields = {"max_new_tokens": 6, "ignore_eos": True, name: value}
        assert alone(tiny(), [], fields) == alone(tiny(), [60], fields)


def test_repetition_counts_prompts_and_the_others_do_not():
    """Frequency and presence penalise the output, repetition the prompt as well."""
    from sampling import SamplingParams, choose

    logits = torch.ones(3, 4)
    logits[:, 2] = 1.5  # the most likely one, and in the prompts
    texts = [[2, 2, 0, 1], [2, 2, 2, 1], [2, 2, 2, 1]]
    for penalties, chosen in (
        ({"presence_penalty": 2.0}, [2, 2, 0]),
        ({"frequency_penalty": 0.3}, [2, 2, 0]),  # 1.5 - 2 * 0.3 in the last row
        ({"frequency_penalty": 0.2}, [2, 2, 2]),
        ({"repetition_penalty": 2.0}, [3, 0, 0]),
    ):
        assert choose(logits, [SamplingParams(**penalties)] * 3, texts, [4, 3, 1]) == chosen
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


@pytest.mark.parametrize("stride", [None, 1, 16])
def test_a_text_that_stops_and_goes_on_as_a_prompt_has_the_same_draws(tiny, stride):
    """The position in the text counts, not that in the output. (Penalties tell the two apart.)"""
    fields = {"max_new_tokens": 30, "temperature": 1.0, "seed": 8, "ignore_eos": True}
    whole = alone(tiny(), [1, 2], fields, stride=stride)
    for cut in (1, 13, 29):
        rest = fields | {"max_new_tokens": 30 - cut}
        assert alone(tiny(), [1, 2] + whole[:cut], rest, stride=stride) == whole[cut:]


def test_params_as_many_as_prompts(tiny):
    for count in (0, 1, 3):
        with pytest.raises(ValueError) as error:
            rows_of(tiny(), [[1], [2]], [{}] * count)
        assert str(error.value) == f"{count} params for 2 prompts"


@pytest.mark.parametrize("seed", [-1, LAST + 1, 1.0, True, "1", 10**30])
def test_a_seed_out_of_range_is_refused(seed):
    from errors import UserError
    from sampling import SamplingParams

    expected = f"seed is {seed!r}; it must be None or an integer from 0 to 2**64 - 1"
    with pytest.raises(UserError) as error:
        SamplingParams(seed=seed)
    assert str(error.value) == expected
    assert [SamplingParams(seed=good).seed for good in (None, 0, LAST)] == [None, 0, LAST]


# Rows without a seed


@torch.inference_mode()
def test_still_draws_from_the_generator_without_a_seed(tiny):
    from infer import generate
    from sampling import SamplingParams, sample

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


def test_seeds_leave_all_generators_alone(tiny):
    fields = {"max_new_tokens": 5, "temperature": 1.0, "top_p": 0.9, "seed": 2}
    model = tiny()
    generator = torch.Generator().manual_seed(5)
    state = generator.get_state()
    torch_state = torch.get_rng_state()
    rows_of(model, [[1], [2]], [fields, fields | {"top_p": 1.0}], generator=generator)
    assert torch.equal(generator.get_state(), state)
    assert torch.equal(torch.get_rng_state(), torch_state)


# The numbers


def bits(state: int, index: int) -> int:
    """SplitMix64 in Python's integers."""
    number = (state + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
    return number ^ number >> 31


def number(seed: int, position: int, token: int) -> float:
    """The exponential random number of a token, from its definition."""
    return -math.log(((bits(bits(seed, position), token) >> 12) + 0.5) / 2**52)


def signed(value: int) -> torch.Tensor:
    """The int64 with the bits of this unsigned integer."""
    return torch.tensor(value - 2**64 if value >= 2**63 else value)


def test_the_generator_is_splitmix64():
    """Numbers that others publish for the state 1234567."""
    from sampling import splitmix

    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    ours = splitmix(torch.tensor(1234567), torch.arange(4))
    assert [value % 2**64 for value in ours.tolist()] == known


@given(state=st.integers(0, LAST), index=st.integers(0, LAST))
@example(0, 0)
@example(LAST, LAST)
@example(2**63, 2**63 - 1)
@settings(max_examples=200)
def test_bits_of_any_state_and_index(state, index):
    from sampling import splitmix

    assert splitmix(signed(state), signed(index)).item() % 2**64 == bits(state, index)


DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [9, 70_000])
def test_noise_of_each_seed_position_and_token(device, size):
    from sampling import keyed_noise

    draws = list(itertools.product([0, 1, 2**63, LAST], [0, 7, 2**31 + 5, 2**40, 2**63 - 1]))
    noise = keyed_noise(torch.zeros(len(draws), size, device=device), draws)
    assert noise.shape == (len(draws), size) and noise.dtype == torch.float32
    for row, (seed, position) in zip(noise.tolist(), draws):
        for token in (0, 1, 8, size - 1):
            assert row[token] == pytest.approx(number(seed, position, token), rel=1e-6)


def test_noise_of_tokens_that_are_out_is_not_computed(torch_numbers):
    """Those that are left have the numbers that they have anyway."""
    import sampling

    logits = torch.randn(3, 1000)
    draws = [(1, 5), (LAST, 6), (7, 2**40)]
    whole = sampling.keyed_noise(logits, draws)
    filtered = sampling.top_k_filter(logits, 20)
    noise = sampling.keyed_noise(filtered, draws)
    assert torch_numbers == [3000, 60]
    assert torch.equal(noise, torch.where(filtered > -torch.inf, whole, 1.0))


def test_noise_is_finite_and_above_zero_whatever_the_bits():
    from sampling import exponential

    least, most, half = exponential(torch.tensor([-1, 0, -(2**63)])).tolist()  # all ones, all zeros
    assert least == pytest.approx(2**-53, rel=1e-9)
    assert most == pytest.approx(53 * math.log(2), rel=1e-9)
    assert half == pytest.approx(math.log(2), rel=1e-9)
    assert exponential(torch.tensor([-1])).float().item() > 0


def test_numbers_never_change():
    """A text that somebody noted with its seed comes again with each later version."""
    from sampling import keyed_noise

    noise = keyed_noise(torch.zeros(3, 2), [(0, 0), (1, 0), (LAST, 1023)])
    known = [0.42702309, 0.35494486, 0.99915749, 0.058090839, 0.017027837, 1.3516961]
    assert noise.flatten().tolist() == pytest.approx(known, rel=1e-6)


@pytest.mark.parametrize("argument", ["seed", "position", "token"])
def test_each_bit_of_an_argument_changes_each_bit_of_the_number_half_of_the_time(argument):
    from sampling import splitmix

    generator = torch.Generator().manual_seed(0)
    arguments = {
        name: torch.randint(-(2**63), 2**63 - 1, (2000,), generator=generator)
        for name in ("seed", "position", "token")
    }

    def numbers(seed, position, token):
        return splitmix(splitmix(seed, position), token)

    before = numbers(**arguments)
    places = torch.arange(64)
    for place in range(64):
        changed = arguments | {argument: arguments[argument] ^ (torch.tensor(1) << place)}
        different = before ^ numbers(**changed)
        shares = (different[:, None] >> places & 1).double().mean(dim=0)
        assert (shares - 0.5).abs().max() < 5.5 * 0.5 / 2000**0.5  # 5.5 standard deviations


NEIGHBOURS = [step for step in itertools.product((-1, 0, 1), repeat=3) if step > (0, 0, 0)]


@pytest.mark.parametrize("first", [0, 2**31, LAST - 40])
def test_neighbours_are_independent(first):
    """A number says nothing about that of the next seed, position or token, or all of these."""
    from sampling import keyed_noise

    size = 36
    draws = list(itertools.product(range(first, first + size), range(size)))
    noise = keyed_noise(torch.zeros(len(draws), size), draws).view(size, size, size)
    quarter = (4 * torch.exp(-noise.double())).long()  # seeds, positions, tokens
    even = torch.full((16,), 1 / 16)
    for step in NEIGHBOURS:
        one = quarter
        other = quarter
        for axis, offset in enumerate(step):
            one = one.narrow(axis, max(0, -offset), size - abs(offset))
            other = other.narrow(axis, max(0, offset), size - abs(offset))
        pairs = torch.bincount((4 * one + other).flatten(), minlength=16).double()
        assert chi_square(pairs, even) < 44.26, step  # 15 degrees of freedom, p = 0.0001


# The draws


DRAWS = {
    "seeds": lambda index: (index, 5),
    "positions": lambda index: (5, index),
    "both": lambda index: (index, index),
    "large seeds": lambda index: (LAST - index, 5),
    "large positions": lambda index: (5, 2**40 + index),
}
PROBS = torch.tensor([0.02, 0.3, 0.08, 0.25, 0.05, 0.15, 0.1, 0.05])


@pytest.mark.parametrize("name", DRAWS)
def test_draws_follow_the_probabilities(name):
    draws = [DRAWS[name](index) for index in range(20000)]
    counts = torch.bincount(sampled(PROBS, draws), minlength=8).double()
    assert chi_square(counts, PROBS) < 24.32  # 7 degrees of freedom, p = 0.001
    assert chi_square(counts, PROBS.roll(1)) > 24.32  # the check can fail


@pytest.mark.parametrize(
    "fields, inside", [({"top_k": 3}, [1, 3, 5]), ({"top_p": 0.75}, [1, 3, 5, 6])]
)
def test_draws_follow_the_probabilities_of_what_a_filter_keeps(fields, inside):
    drawn = sampled(PROBS, [(seed, 9) for seed in range(6000)], **fields)
    counts = torch.bincount(drawn, minlength=8)[inside].double()
    assert counts.sum() == 6000
    assert chi_square(counts, PROBS[inside] / PROBS[inside].sum()) < 16.27  # p = 0.001 for 3


@torch.inference_mode()
def test_texts_follow_the_softmax(tiny):
    """The first two tokens over 8,000 seeds, against the product of their two probabilities."""
    model = tiny(seed=2, vocab_size=4, eos_token_id=3)
    common = {"max_new_tokens": 2, "temperature": 1.0, "ignore_eos": True}
    params = [common | {"seed": seed} for seed in range(8000)]
    rows = torch.tensor(rows_of(model, [[0]] * 8000, params))
    counts = torch.bincount(rows[:, 0] * 4 + rows[:, 1], minlength=16).double()
    one = model(torch.tensor([[0]]))[0, -1].softmax(dim=-1)
    two = model(torch.tensor([[0, token] for token in range(4)]))[:, -1].softmax(dim=-1)
    expected = (one[:, None] * two).flatten()
    assert chi_square(counts, expected) < 37.70  # 15 degrees of freedom, p = 0.001


def test_two_distributions_draw_the_same_token_as_often_as_the_race_says():
    """x wins both races with chance 1 / (sum over y of max(p(y) / p(x), q(y) / q(x)))."""
    others = torch.tensor([0.1, 0.25, 0.05, 0.15, 0.05, 0.1, 0.2, 0.1])
    draws = [(seed, 3) for seed in range(20000)]
    same = (sampled(PROBS, draws) == sampled(others, draws)).double().mean().item()
    ratios = torch.maximum(PROBS[:, None] / PROBS, others[:, None] / others)  # (y, x)
    chance = (1 / ratios.sum(dim=0)).sum().item()
    distance = (PROBS - others).abs().sum().item() / 2  # total variation
    assert (1 - distance) / (1 + distance) < chance < 1 - distance
    assert abs(same - chance) < 3.3 * (chance * (1 - chance) / 20000) ** 0.5


@torch.inference_mode()
def test_a_smaller_model_with_the_same_numbers_draws_the_same_tokens(stories):
    """Far more often than with others: 75 of 100, and 48."""
    from loading.load import load_model
    from sampling import SamplingParams, sample

    draft = load_model(CHECKPOINTS / "stories-draft")
    params = SamplingParams(max_new_tokens=60, temperature=0.8, ignore_eos=True)
    text = alone(draft, [], vars(params) | {"seed": 1})
    ours, theirs = (model(torch.tensor([text]))[0] for model in (stories, draft))

    def drawn(logits, seed):
        draws = [(seed, position) for position in range(len(text))]
        return sample(logits, params, draws=draws)

    chosen = torch.stack([drawn(ours, seed) for seed in range(10)])
    same = torch.stack([drawn(theirs, seed) for seed in range(10)])
    others = torch.stack([drawn(theirs, seed) for seed in range(10, 20)])
    assert (chosen == same).double().mean() > 0.7
    assert (chosen == others).double().mean() < 0.6


weights = st.lists(
    st.sampled_from([0.0, 0.0, 1e-30, 1e-7, 0.1, 0.5, 1.0, 3.0]), min_size=1, max_size=9
)


@given(
    weights=weights.filter(any),
    seed=st.integers(0, LAST),
    top_k=st.integers(0, 9),
    top_p=st.sampled_from([1.0, 0.9, 0.3, 1e-9]),
)
@settings(max_examples=100)
def test_a_token_without_mass_is_never_drawn(weights, seed, top_k, top_p):
    probs = torch.tensor(weights) / sum(weights)
    draws = [(seed, position) for position in range(50)]
    tokens = sampled(probs, draws, top_k=top_k, top_p=top_p)
    assert (probs[tokens] > 0).all()


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


def test_prompts_and_samples_count_together(texts):
    several, _ = texts("--prompt", "One", "--prompt", "A big dog", "--num-samples", 2, "--seed", 5)
    pairs = zip(("One", "One", "A big dog", "A big dog"), range(5, 9))
    assert several == [texts("--prompt", text, "--seed", seed)[0][0] for text, seed in pairs]


def test_filters_and_penalties_do_not_move_the_seeds(texts):
    args = "--prompt", "One day", "--top-p", 0.8, "--top-k", 50, "--repetition-penalty", 1.2
    several, _ = texts(*args, "--num-samples", 2, "--seed", 3)
    assert several == [texts(*args, "--seed", seed)[0][0] for seed in (3, 4)]


def test_a_text_without_the_cache_has_the_same_draws(texts):
    args = "--prompt", "One day", "--num-samples", 2, "--seed", 3
    several, _ = texts(*args)
    assert several == texts(*args, "--no-cache")[0]
    assert several == [texts(*args[:2], "--seed", seed)[0][0] for seed in (3, 4)]


def test_the_embedded_model_tells_the_same_story(cli):
    """The text of a seed, written down: it is that of each machine and version."""
    draft = CHECKPOINTS / "stories-draft"
    story = "Once upon a time, in a small house, there lived a boy named Tim. Tim loved to\n"
    args = ("--model", draft, "--max-new-tokens", 16, "--temperature", 0.8, "--seed", 1)
    assert cli("--prompt", "Once upon a time", *args)[:2] == (0, story)
