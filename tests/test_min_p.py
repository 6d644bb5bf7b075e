"""Min-p: tokens far less likely than the most likely one are out, against transformers."""

import math

import pytest
import torch
from conftest import is_one_line, random_tokens
from drafting import knowing
from draws import random_logits
from engines import finish, make_engine, own_texts
from natives import check_strange_logits, in_c, in_torch, params_of, threads
from serving import engine_alone, refusal

import infer_speculative
import sampling
from native import use_native
from sampling import SamplingParams, min_p_filter, sample, sampling_probs

LAST = 2**64 - 1
FIELDS = [
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 2.0, "min_p": 0.02},
    {"temperature": 1.5, "min_p": 0.05, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.2, "top_k": 20},
    {"temperature": 3.0, "min_p": 0.3, "top_k": 40, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "min_p": 1e-300},
    {"temperature": 1.0, "min_p": 1.0, "top_p": 0.9},  # ties with the threshold
]
KINDS = ["random", "peaked", "flat", "infinite"]
SIZES = [1, 7, 255, 256, 257, 2000]


def warped(logits, temperature, min_p, top_k=0, top_p=1.0):
    """What transformers leaves of logits, in its order."""
    from transformers import generation

    warpers = [generation.TemperatureLogitsWarper(temperature)]
    if top_k:
        warpers.append(generation.TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(generation.TopPLogitsWarper(top_p))
    warpers.append(generation.MinPLogitsWarper(min_p))
    return generation.LogitsProcessorList(warpers)(None, logits)


def drawn(logits, fields, rng_keys):
    """The race of those that transformers leaves."""
    noise = sampling.exponential_noise(torch.zeros_like(logits), rng_keys)
    return (warped(logits.double(), **fields).softmax(dim=-1) / noise).argmax(dim=-1)


def kept(probs, min_p):
    """The ids that the filter leaves of these probabilities."""
    return min_p_filter(torch.tensor(probs).log(), min_p).isfinite().nonzero().flatten().tolist()


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_the_distribution_is_that_of_transformers(fields):
    for kind in KINDS:
        logits = random_logits(kind, 50, 300).double()
        ours = sampling_probs(logits, SamplingParams(**fields))
        theirs = warped(logits, **fields).softmax(dim=-1)
        assert torch.equal(ours > 0, theirs > 0) and (ours - theirs).abs().max() < 1e-14, kind


def test_the_boundary_is_a_share_of_the_largest():
    probs = [0.1, 0.4, 0.2, 0.05, 0.25]
    assert kept(probs, 0.6) == [1, 4]
    assert kept(probs, 0.51) == [1, 4]
    assert kept(probs, 0.49) == [1, 2, 4]
    assert kept([0.5, 0.25, 0.125, 0.125], 0.25) == [0, 1, 2, 3]  # equal to it is not below it
    assert kept([0.2, 0.3, 0.3, 0.2], 1.0) == [1, 2]
    assert kept(probs, 0.0) == kept(probs, 1e-300) == [0, 1, 2, 3, 4]


def test_logits_that_are_not_shifted_and_any_shape():
    logits = random_logits("random", 24, 30)
    expected = min_p_filter(logits, 0.1)
    assert torch.equal(min_p_filter(logits.view(2, 12, 30), 0.1).view(24, 30), expected)
    assert torch.equal(min_p_filter(logits + 64, 0.1).isfinite(), expected.isfinite())
    assert min_p_filter(logits, 0.0) is logits


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_draws_with_a_seed_are_those_of_the_race_that_transformers_leaves(fields):
    params = SamplingParams(**fields)
    for kind in KINDS:
        for size in SIZES:
            logits = random_logits(kind, 30, size, seed=size)
            rng_keys = [(LAST - row, row) for row in range(30)]
            ours = sample(logits, params, rng_keys=rng_keys)
            assert torch.equal(ours, drawn(logits, fields, rng_keys)), (kind, size)


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_c_draws_the_same_tokens_as_torch(library, fields):
    """Also of ties, and with any number of threads."""
    for kind in [*KINDS, "ties", "equal"]:
        for size, rows in [(1, 5), (7, 300), (63, 300), (257, 50), (4096, 40)]:
            logits = random_logits(kind, rows, size, seed=size)
            params = params_of(fields, rows, first=LAST - 50)
            expected = in_torch(logits, params)
            for count in (1, 3):
                with threads(count):
                    assert in_c(library, logits, params) == expected, (kind, size)


@pytest.mark.parametrize("fields", FIELDS[:3], ids=str)
def test_a_large_vocabulary(library, fields):
    for kind in ("random", "flat"):
        logits = random_logits(kind, 10, 50257)
        assert in_c(library, logits, params_of(fields, 10)) == in_torch(
            logits, params_of(fields, 10)
        )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fields", FIELDS[:5], ids=str)
def test_any_logits_give_an_id(library, fields, value):
    check_strange_logits(library, fields, value)
    logits = random_logits("random", 3, 400)
    logits[0, 7] = value
    logits[1] = value
    for rng_keys in ([(1, 1)] * 3, None):
        tokens = sample(logits, SamplingParams(**fields), rng_keys=rng_keys)
        assert all(0 <= token < 400 for token in tokens.tolist())


def test_few_tokens_settle_a_draw(monkeypatch):
    """A threshold says more than a mass: those below it need not be known."""
    wide = []
    old = sampling.sample_from_vocabulary
    monkeypatch.setattr(
        sampling,
        "sample_from_vocabulary",
        lambda logits, *args: wide.append(len(logits)) or old(logits, *args),
    )
    # Its first 256 tokens hold 0.986, and the next one has 0.014 of the largest probability.
    steep = torch.arange(1000.0) / -60
    flat = torch.zeros(1000)
    rng_keys = [(7, row) for row in range(3)]
    logits = torch.stack([steep, flat, steep])
    fields = {"temperature": 1.0, "min_p": 0.015}
    ours = sampling.sample(logits, sampling.SamplingParams(**fields), rng_keys=rng_keys)
    assert torch.equal(ours, drawn(logits, fields, rng_keys))
    assert wide == [1]


def test_tokens_below_the_threshold_take_no_random_numbers(torch_numbers):
    """Of 3,000 tokens 600 may win, more than those that are tried first."""
    logits = torch.full((2, 3000), -20.0)
    logits[:, ::5] = 0
    params = SamplingParams(temperature=1.0, min_p=0.1)
    tokens = sample(logits, params, rng_keys=[(7, 1), (7, 2)])
    assert torch_numbers == [2 * 256, 2 * 600]
    assert (tokens % 5 == 0).all()


@pytest.mark.parametrize("compiled_draws", [False, True])
def test_the_engine_writes_the_texts_of_own_runs(tiny, compiled, compiled_draws):
    """Rows of several filters, drafts and few pages; in C too."""
    model = tiny(dtype=torch.float32) if compiled_draws else tiny()
    if compiled_draws:
        use_native(model)
    prompts = [random_tokens(length, seed=length) for length in (3, 9, 1, 14, 5)]
    filters = [FIELDS[0], FIELDS[2], {"temperature": 1.0}, FIELDS[4], {"min_p": 0.5}]
    params = [
        params_of({"max_new_tokens": 20, "ignore_eos": True} | own, 5)[row]
        for row, own in enumerate(filters)
    ]
    expected = own_texts(model, prompts, params)
    options = {"drafter": knowing(model, wrong=(4, 9)), "page_size": 4, "num_pages": 12}
    engine, requests = make_engine(model, prompts, params, **options)
    finish(engine)
    assert [request.output for request in requests] == expected and engine.num_accepted_tokens > 10
    plain = [params_of({"max_new_tokens": 20, "ignore_eos": True, "temperature": 1.0}, 5)[0]]
    assert own_texts(model, prompts[:1], plain) != expected[:1]


ARGS = ("--prompt", "One day", "--max-new-tokens", 9, "--ignore-eos")


def test_the_command_line(cli, engine_cli, run_main, tiny_checkpoint):
    args = ("--model", tiny_checkpoint, *ARGS)
    greedy = cli(*args)
    hot = ("--temperature", 1e3, "--seed", 1)
    code, out, err = cli(*args, *hot, "--min-p", 1)
    assert (code, out) == (0, greedy[1]), err
    assert engine_cli(*args, *hot, "--min-p", 1)[:2] == (0, greedy[1])
    models = ("--target", tiny_checkpoint, "--draft", "lookup")
    speculative = run_main(infer_speculative.main, *models, *ARGS, *hot, "--min-p", 1)
    assert speculative[:2] == (0, greedy[1])
    warm = ("--temperature", 1, "--seed", 1)
    drawn = cli(*args, *warm, "--min-p", 0.8)[1]
    assert drawn != cli(*args, *warm)[1]
    assert engine_cli(*args, *warm, "--min-p", 0.8)[1] == drawn
    code, out, err = cli(*args, "--min-p", 0.5)
    assert (code, out) == greedy[:2] and "have no effect: --min-p\n" in err


@pytest.mark.parametrize("value", ["-0.1", "1.01", "nan"])
def test_bad_values_are_one_line(cli, value):
    result = cli(*ARGS, f"--min-p={value}")
    assert is_one_line(result, f"min_p {value}", "a number in [0, 1]")


def test_the_server(client, tiny_llama):
    fields = {"seed": 3, "temperature": 2.0, "min_p": 0.6}
    body = {"prompt": "Tom saw", "max_tokens": 30} | fields
    status, found = client.post("/v1/completions", body)
    assert status == 200, found
    expected = engine_alone(tiny_llama, "Tom saw", max_new_tokens=30, **fields)
    assert found["choices"][0]["text"] == expected[1]
    assert expected != engine_alone(
        tiny_llama, "Tom saw", max_new_tokens=30, seed=3, temperature=2.0
    )
    for value in (None, 0, 1, 0.5):
        assert client.post("/v1/completions", {"max_tokens": 1, "min_p": value})[0] == 200
    for value in (-0.5, 1.5):
        what = f"min_p {value}: must be a number in [0, 1]"
        found = client.post("/v1/completions", {"max_tokens": 1, "min_p": value})
        assert found == (400, refusal(what, "min_p"))
    messages = [{"role": "user", "content": "dog"}]
    asked = {"messages": messages, "max_tokens": 2, "min_p": 2}
    assert client.post("/v1/chat/completions", asked)[1]["error"]["param"] == "min_p"
