"""Lesson 24: without sorting, against lesson 07's filter and multinomial."""

import itertools
from fractions import Fraction

import pytest
import torch
from conftest import run_rows
from draws import seeded

import sampling


@pytest.fixture
def module():
    """The file that draws."""
    return sampling


def assert_same(module, logits, p, seed=0):
    """The tokens that lesson 07 draws from the same random numbers."""
    noise = torch.empty_like(logits).exponential_(generator=seeded(seed))
    probs = module.top_p_filter(logits, p).softmax(dim=-1)
    sorted_first = torch.multinomial(probs, 1, generator=seeded(seed))[:, 0]
    assert torch.equal(module.exponential_race(logits, noise, p), sorted_first), (p, seed)


@pytest.fixture
def sorted_rows(monkeypatch, module):
    """A list to which each call of `top_p_filter` adds the shape of its logits."""
    calls = []
    sorting = module.top_p_filter

    def counting(logits, p):
        calls.append(tuple(logits.shape))
        return sorting(logits, p)

    monkeypatch.setattr(module, "top_p_filter", counting)
    return calls


PARAMS = [
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.8, "top_k": 10},
    {"temperature": 2.0, "top_p": 0.3, "top_k": 40},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 10},
]


def test_generating_does_not_sort(tiny, sorted_rows):
    params = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 20}
    run_rows(tiny(), [[1], [2, 3]], generator=seeded(0), **params)
    assert sorted_rows == []


@pytest.mark.parametrize("params", PARAMS)
def test_still_draws_from_sampling_probs(module, params):
    """The global generator's numbers, as many as lesson 07 takes."""
    params = module.SamplingParams(**params)
    logits = 3 * torch.randn(500, 60, generator=seeded(1))
    torch.manual_seed(5)
    ours = module.sample(logits, params)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    expected = torch.multinomial(module.sampling_probs(logits, params), 1)[:, 0]
    assert torch.equal(ours, expected)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["random", "ties", "infinite", "flat", "peaked"])
def test_the_same_token_as_with_the_sort_seed_by_seed(module, kind, dtype):
    # In float64, whether 25 of 50 equal tokens reach 0.5 depends on the order of the sum.
    size = 50 if dtype == torch.float32 else 53
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
        assert_same(module, logits, p, seed)


def test_a_large_vocabulary(module):
    logits = 3 * torch.randn(4, 50257, generator=seeded(0))
    for seed, p in itertools.product(range(2), (0.1, 0.9)):
        assert_same(module, logits, p, seed)


@pytest.mark.parametrize(
    "weights", [(1, 2, 4, 1), (3, 3, 1, 1), (2, 2, 2, 2), (1, 1, 5, 1), (0, 1, 7, 0)]
)
def test_a_token_can_win_if_and_only_if_it_is_in_the_nucleus(module, weights):
    """Each order in which four tokens may arrive, each p between two sixteenths."""
    logits = torch.tensor([weights], dtype=torch.float64).log()
    probs = [Fraction(weight, 8) for weight in weights]
    order = sorted(range(4), key=lambda token: (-probs[token], token))
    before = {token: sum(probs[other] for other in order[:n]) for n, token in enumerate(order)}
    for p in (Fraction(n, 16) for n in range(1, 16, 2)):
        nucleus = [token for token in order if before[token] < p and probs[token] > 0]
        for arrival in itertools.permutations(range(4)):
            noise = [10.0 ** (2 * arrival.index(token)) for token in range(4)]
            first = next(token for token in arrival if token in nucleus)
            drawn = module.exponential_race(
                logits, torch.tensor([noise], dtype=torch.float64), float(p)
            )
            assert drawn.tolist() == [first], (p, arrival)


def test_the_boundary_is_where_the_filter_has_it(module):
    """Equal tokens have exact probabilities: 2 of 4 hold 0.5, and 24 of 64 hold 0.375."""

    def winners(probs, p):
        size = len(probs)
        noise = torch.ones(size, size) + 1e-6 - torch.eye(size)  # token n is the first in row n
        logits = torch.tensor(probs).log().expand(size, -1)
        return set(module.exponential_race(logits, noise, p).tolist())

    assert winners([0.25] * 4, 0.5) == {0, 1}
    assert winners([0.25] * 4, 0.75) == {0, 1, 2}
    assert winners([1 / 64] * 64, 0.375) == set(range(24))


def test_logits_that_differ_are_in_order_where_their_probabilities_do_not(module):
    logits = torch.tensor([[0.0, 1e-8, 2e-8]])
    assert logits.softmax(dim=-1).unique().numel() == 1
    for numbers in itertools.permutations((1.0, 1e-3, 1e-6)):
        noise = torch.tensor([numbers])
        assert module.exponential_race(logits, noise, 0.3).tolist() == [2]
        expected = 2 if numbers[2] < numbers[1] else 1
        assert module.exponential_race(logits, noise, 0.5).tolist() == [expected]


@pytest.mark.parametrize("rounds", [0, 1, 8])
@pytest.mark.parametrize("top_p", [0.5, 1 - 1e-9, 1.0])
def test_never_a_token_without_mass(module, monkeypatch, top_p, rounds):
    """Not even where the random number is 0, and 0 / 0 is NaN, the largest for argmax."""
    monkeypatch.setattr(module, "MAX_REJECTION_ROUNDS", rounds)
    logits = torch.randn(100, 8, generator=seeded(0))
    logits[:, [0, 5]] = -torch.inf
    logits[:, 2] = -200
    probs = logits.softmax(dim=-1)
    # The mass before a token without any may be too little.
    assert (probs.double().sum(dim=-1).float() < 1).any()
    for number in (0.0, 1e-45):
        monkeypatch.setattr(
            torch.Tensor, "exponential_", lambda self, number=number, **kwargs: self.fill_(number)
        )
        drawn = module.sample(logits, module.SamplingParams(temperature=1.0, top_p=top_p))
        assert (probs[torch.arange(100), drawn] > 0).all()


@pytest.mark.parametrize("rounds", [0, 1, 2, 1000])
def test_any_number_of_rounds_gives_the_same_tokens(module, monkeypatch, rounds):
    monkeypatch.setattr(module, "MAX_REJECTION_ROUNDS", rounds)
    for p in (0.05, 0.5, 0.9):
        assert_same(module, 2 * torch.randn(300, 60, generator=seeded(2)), p)


def test_rounds_are_few_and_bounded(module, sorted_rows):
    """Only rows that are refused again and again are sorted: a few, of equal tokens."""

    def drawn(logits, p):
        noise = torch.empty_like(logits).exponential_(generator=seeded(1))
        return module.exponential_race(logits, noise, p).tolist()

    for p in (0.1, 0.9):
        drawn(3 * torch.randn(500, 100, generator=seeded(0)), p)
    assert sorted_rows == []
    assert drawn(torch.zeros(100, 4000), 1e-6) == [0] * 100
    assert 0 < len(sorted_rows) < 100
    assert set(sorted_rows) == {(4000,)}
