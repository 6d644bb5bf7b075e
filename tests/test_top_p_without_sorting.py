"""Lesson 21: top-p without sorting, against lesson 07's filter and torch.multinomial, token by token."""

import itertools
from fractions import Fraction

import pytest
import torch
from conftest import run_rows


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def by_sorting(logits, p, generator=None):
    """What lesson 07 draws."""
    from sampling import top_p_filter

    return torch.multinomial(top_p_filter(logits, p).softmax(dim=-1), 1, generator=generator)[:, 0]


def assert_same(logits, p, seed=0):
    """The tokens of lesson 07, and the generator where lesson 07 leaves it."""
    from sampling import sample_top_p

    ours, theirs = seeded(seed), seeded(seed)
    assert torch.equal(sample_top_p(logits, p, ours), by_sorting(logits, p, theirs)), (p, seed)
    assert torch.equal(ours.get_state(), theirs.get_state())


@pytest.fixture
def sorted_rows(monkeypatch):
    """A list to which each call of `top_p_filter` by sampling.py adds its number of rows."""
    import sampling

    calls, sorting = [], sampling.top_p_filter
    monkeypatch.setattr(sampling, "top_p_filter", lambda logits, p: calls.append(len(logits)) or sorting(logits, p))
    return calls


@pytest.fixture
def draw(monkeypatch):
    """A function that calls `sample_top_p` with these numbers in place of the random ones."""
    from sampling import sample_top_p

    def draw(logits, p, numbers):
        monkeypatch.setattr(torch.Tensor, "exponential_", lambda self, *args, **kwargs: self.copy_(numbers))
        return sample_top_p(logits, p).tolist()

    return draw


PARAMS = [
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.8, "top_k": 10},
    {"temperature": 2.0, "top_p": 0.3, "top_k": 40},
]


def test_generating_does_not_sort(tiny, sorted_rows):
    run_rows(tiny(), [[1], [2, 3]], generator=seeded(0), temperature=1.0, top_p=0.9, max_new_tokens=20)
    assert sorted_rows == []


@pytest.mark.parametrize("params", PARAMS)
def test_still_the_texts_of_lesson_07(tiny, monkeypatch, params):
    import sampling

    arguments = params | {"max_new_tokens": 20, "ignore_eos": True}
    ours = run_rows(tiny(), [[1], [2, 3]], generator=seeded(3), **arguments)

    def sample(logits, params, generator):
        return torch.multinomial(sampling.sampling_probs(logits, params), 1, generator=generator)[:, 0]

    monkeypatch.setattr(sampling, "sample", sample)
    assert run_rows(tiny(), [[1], [2, 3]], generator=seeded(3), **arguments) == ours


@pytest.mark.parametrize("params", PARAMS)
def test_still_draws_from_sampling_probs(params):
    from sampling import SamplingParams, sample, sampling_probs

    params, logits = SamplingParams(**params), 3 * torch.randn(500, 60, generator=seeded(1))
    torch.manual_seed(5)
    ours = sample(logits, params)  # from the global generator
    torch.manual_seed(5)
    assert torch.equal(ours, torch.multinomial(sampling_probs(logits, params), 1)[:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["random", "ties", "infinite", "flat", "peaked"])
def test_the_same_token_as_with_the_sort_seed_by_seed(kind, dtype):
    size = (
        50 if dtype == torch.float32 else 53
    )  # in float64, whether 25 of 50 reach 0.5 depends on the order of the sum
    for seed, p in itertools.product(range(8), (1e-300, 0.01, 0.1, 0.5, 0.75, 0.9, 0.99, 1 - 1e-7)):
        logits = 3 * torch.randn(40, size, generator=seeded(seed), dtype=dtype)
        if kind == "ties":
            logits = logits.round()
        elif kind == "infinite":
            logits[torch.rand(40, size, generator=seeded(seed + 100)) < 0.5] = -torch.inf
            logits[:, 7] = 0
        elif kind == "flat":
            logits = logits * 0
        elif kind == "peaked":
            logits = logits * 30  # most probabilities round to 0
        assert_same(logits, p, seed)


def test_a_large_vocabulary():
    logits = 3 * torch.randn(4, 50257, generator=seeded(0))
    for seed, p in itertools.product(range(2), (0.1, 0.9)):
        assert_same(logits, p, seed)


@pytest.mark.parametrize("weights", [(1, 2, 4, 1), (3, 3, 1, 1), (2, 2, 2, 2), (1, 1, 5, 1), (0, 1, 7, 0)])
def test_a_token_can_win_if_and_only_if_it_is_in_the_nucleus(draw, weights):
    """Each order in which four tokens may arrive, each p between two sixteenths, in whole numbers."""
    logits = torch.tensor([weights], dtype=torch.float64).log()
    probs = [Fraction(weight, 8) for weight in weights]
    order = sorted(range(4), key=lambda token: (-probs[token], token))
    for p in (Fraction(n, 16) for n in range(1, 16, 2)):
        nucleus = {token for n, token in enumerate(order) if sum(probs[before] for before in order[:n]) < p}
        for arrival in itertools.permutations(range(4)):
            numbers = torch.tensor([[10.0 ** (2 * arrival.index(token)) for token in range(4)]])
            first = next(token for token in arrival if token in nucleus and probs[token] > 0)
            assert draw(logits, float(p), numbers) == [first], (p, arrival)


def test_the_boundary_is_where_the_filter_has_it(draw):
    """0.5 and 0.3 reach 0.8, whatever rounding says of it; 24 of 40 equal tokens reach 0.6."""

    def winners(probs, p):
        best = torch.eye(len(probs)).mul(-1).add(1.0 + 1e-6)  # row n: token n is the first to arrive
        return set(draw(torch.tensor(probs).log().expand(len(probs), -1), p, best))

    assert winners([0.3, 0.1, 0.1, 0.5], 0.8) == {0, 3}
    assert winners([0.15, 0.3, 0.3, 0.25], 0.8) == {1, 2, 3}
    assert winners([1 / 40] * 40, 0.6) == set(range(24))


def test_logits_that_differ_are_in_order_where_their_probabilities_do_not(draw):
    logits = torch.tensor([[0.0, 1e-8, 2e-8]])
    assert logits.softmax(dim=-1).unique().numel() == 1
    for numbers in itertools.permutations((1.0, 1e-3, 1e-6)):
        assert draw(logits, 0.3, torch.tensor([numbers])) == [2]
        assert draw(logits, 0.5, torch.tensor([numbers])) == [2 if numbers[2] < numbers[1] else 1]


@pytest.mark.parametrize("rounds", [0, 1, 8])
@pytest.mark.parametrize("p", [0.5, 1 - 1e-9])
def test_never_a_token_without_mass(draw, monkeypatch, p, rounds):
    """Not even where the random number is 0, and 0 / 0 is NaN, which argmax takes for the largest."""
    import sampling

    monkeypatch.setattr(sampling, "MAX_ROUNDS", rounds)
    logits = torch.randn(100, 8, generator=seeded(0))
    logits[:, [0, 5]] = -torch.inf
    logits[:, 2] = -200
    probs = logits.softmax(dim=-1)
    assert (probs.double().sum(dim=-1).float() < 1).any()  # the mass before a token without any may be too little
    for number in (0.0, 1e-45):
        drawn = draw(logits, p, torch.full((100, 8), number))
        assert (probs[torch.arange(100), drawn] > 0).all()
    assert draw(torch.zeros(1, 4), 0.9, torch.full((4,), 1e-45)) == [0]  # of several infinite ones the first


@pytest.mark.parametrize("rounds", [0, 1, 2, 1000])
def test_any_number_of_rounds_gives_the_same_tokens(monkeypatch, rounds):
    import sampling

    monkeypatch.setattr(sampling, "MAX_ROUNDS", rounds)
    for p in (0.05, 0.5, 0.9):
        assert_same(2 * torch.randn(300, 60, generator=seeded(2)), p)


def test_rounds_are_few_and_bounded(sorted_rows):
    """Only rows that are refused again and again are sorted: with a tiny p for equal tokens, some of them."""
    from sampling import sample_top_p

    for p in (0.1, 0.9):
        sample_top_p(3 * torch.randn(500, 100, generator=seeded(0)), p, seeded(1))
    assert sorted_rows == []
    assert sample_top_p(torch.zeros(100, 4000), 1e-6, seeded(0)).tolist() == [0] * 100
    assert len(sorted_rows) == 1 and 0 < sorted_rows[0] < 100


def test_draws_follow_the_nucleus():
    from sampling import sample_top_p

    probs = torch.tensor([0.05, 0.3, 0.02, 0.2, 0.15, 0.03, 0.15, 0.1], dtype=torch.float64)
    counts = torch.bincount(sample_top_p(probs.log().expand(20000, -1), 0.85, seeded(0)), minlength=8)
    inside = torch.tensor([1, 3, 4, 6, 7])
    expected = counts.sum() * probs[inside] / probs[inside].sum()
    assert counts[inside].sum() == 20000
    assert ((counts[inside] - expected) ** 2 / expected).sum() < 18.47  # 4 degrees of freedom, p = 0.001
