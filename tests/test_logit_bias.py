"""Biases: numbers that are added to logits of single tokens, against transformers."""

import itertools
import json
import pickle

import pytest
import torch
from conftest import CHECKPOINTS, is_one_line, random_tokens, run, run_rows, slide
from drafting import knowing
from draws import random_logits, seeded
from engines import finish, make_engine, outputs_of, own_texts
from natives import params_of
from serving import engine_alone, refusal

import infer_speculative
import sampling
from engine.engine import Engine
from infer_speculative import generate_speculative, propose_prompt_lookup
from native import use_native
from sampling import SamplingParams

BIASES = {5: 3.0, 17: -100.0, 0: -2.5, 60: 1.0}
PAIRS = tuple(sorted(BIASES.items()))
DRAFT = CHECKPOINTS / "stories-draft"


def biased(logits, biases):
    """What transformers makes of logits."""
    from transformers import SequenceBiasLogitsProcessor

    processor = SequenceBiasLogitsProcessor({(token,): bias for token, bias in biases.items()})
    return processor(torch.zeros(len(logits), 1, dtype=torch.int64), logits)


@torch.inference_mode()
def by_hand(model, prompt, count, biases, presence=0.0):
    """A greedy text: biases come first, then a penalty."""
    text = list(prompt)
    for _ in range(count):
        logits = biased(model(torch.tensor([text[-model.config.block_size :]]))[:, -1], biases)[0]
        for token in set(text[len(prompt) :]):
            logits[token] -= presence
        text.append(logits.argmax().item())
    return text[len(prompt) :]


def test_greedy_texts_are_those_of_transformers_past_the_window(tiny):
    model = tiny(seed=6)
    params = {"max_new_tokens": 40, "ignore_eos": True}
    plain = slide(model, [[1, 2, 3]], **params)
    found = slide(model, [[1, 2, 3]], logit_bias=BIASES, **params)
    assert found == [by_hand(model, [1, 2, 3], 40, BIASES)] != plain
    found = slide(model, [[1, 2, 3]], logit_bias=BIASES, presence_penalty=1.5, **params)
    assert found == [by_hand(model, [1, 2, 3], 40, BIASES, 1.5)]


def test_a_repetition_penalty_sees_the_logit_with_its_bias(tiny):
    """It divides what is positive and multiplies what is negative."""
    params = sampling.SamplingParams(repetition_penalty=2.0, logit_bias={1: -3.0, 2: 5.0})
    logits = torch.tensor([[1.0, 1.0, -1.0, 4.0]])
    adjusted = sampling.apply_logits_processors(logits, [sampling.Sequence([1, 2], 1, params)])
    assert adjusted.tolist() == [[1.0, -4.0, 2.0, 4.0]]
    assert logits.tolist() == [[1.0, 1.0, -1.0, 4.0]]
    plain = sampling.Sequence([1, 2], 1, sampling.SamplingParams())
    assert sampling.apply_logits_processors(logits, [plain]) is logits


def test_minus_100_bans_and_100_forces(tiny):
    model = tiny(seed=1)
    params = {"max_new_tokens": 30, "temperature": 2.0, "ignore_eos": True}
    banned = {token: -100 for token in range(61) if token not in (7, 9)}
    rows = run_rows(model, [[1], [2, 3]], generator=seeded(0), logit_bias=banned, **params)
    assert set(rows[0]) == set(rows[1]) == {7, 9}
    assert run_rows(model, [[1]], generator=seeded(0), logit_bias={9: 100}, **params) == [[9] * 30]


def test_an_eos_that_is_banned_or_forced(tiny):
    model = tiny(seed=1)
    forced = {"temperature": 1.0, "seed": 3, "max_new_tokens": 5, "logit_bias": {60: 100}}
    assert run_rows(model, [[1]], **forced) == [[60]]
    flat = {"temperature": 50.0, "max_new_tokens": 100, "logit_bias": {60: -100}}
    rows = run_rows(model, [[1]] * 20, generator=seeded(0), **flat)
    assert {len(row) for row in rows} > {100}  # at such a temperature nothing is certain


def test_rows_of_several_biases_are_each_their_own():
    each = [{}, BIASES, {3: 1.0}, BIASES, {}, {60: -1.0}]
    params = [sampling.SamplingParams(logit_bias=own) for own in each]
    sequences = [sampling.Sequence([1], 1, own) for own in params]
    logits = random_logits("random", 6, 61)
    before = logits.clone()
    found = sampling.apply_logits_processors(logits, sequences)
    for row, own in enumerate(each):
        expected = biased(before[row : row + 1], own)[0] if own else before[row]
        assert torch.equal(found[row], expected)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("draft", ["model", "lookup", "itself"])
def test_greedy_speculation_writes_the_same_text(tiny, draft):
    """Drafts have the biases, too: a model that drafts for itself is never refused."""
    target = tiny(seed=12)
    drafter = {"model": tiny(seed=6), "lookup": propose_prompt_lookup, "itself": target}[draft]
    params = {"max_new_tokens": 40, "ignore_eos": True, "logit_bias": PAIRS}
    steps = list(generate_speculative(target, drafter, [1, 2], SamplingParams(**params), 3))
    tokens = [token for step in steps for token in step.tokens]
    assert [tokens] == run_rows(target, [[1, 2]], **params)
    if draft == "itself":
        assert all(step.accepted == len(step.drafts) for step in steps)


@pytest.mark.parametrize("in_c", [False, True])
def test_the_engine_writes_the_texts_of_own_runs(tiny, compiled, in_c):
    """Rows with and without biases, drafts and few pages; in C too. Log-probabilities stay."""
    model = tiny(dtype=torch.float32) if in_c else tiny()
    if in_c:
        use_native(model)
    prompts = [random_tokens(length, seed=length) for length in (3, 9, 1, 14, 5)]
    fields = [{"logit_bias": PAIRS}, {}, {"logit_bias": ((3, 2.0),), "presence_penalty": 1.0}]
    fields += [{"logit_bias": PAIRS, "temperature": 1.0}, {"temperature": 1.0, "top_k": 20}]
    params = [
        params_of({"max_new_tokens": 20, "ignore_eos": True} | own, 5)[row]
        for row, own in enumerate(fields)
    ]
    expected = own_texts(model, prompts, params)
    options = {"drafter": knowing(model, wrong=(4, 9)), "page_size": 4, "num_pages": 12}
    engine, requests = make_engine(model, prompts, params, **options)
    finish(engine)
    assert [request.output for request in requests] == expected and engine.num_accepted_tokens > 10


def test_reported_log_probabilities_are_the_models_own(tiny):
    model = tiny()
    engine = Engine(model)
    params = SamplingParams(3, True, logit_bias={9: 100}, logprobs=2)
    request = engine.add([1, 2], params)
    finish(engine)
    assert request.output == [9, 9, 9]
    with torch.inference_mode():
        logprobs = model(torch.tensor([[1, 2, 9, 9]]))[0, 1:].log_softmax(dim=-1)
    for row, (logprob, top) in zip(logprobs, request.logprobs):
        assert logprob == pytest.approx(row[9].item(), abs=1e-6)
        assert [token for token, _ in top] == row.topk(2).indices.tolist()


def test_params_stay_plain_data():
    params = SamplingParams(logit_bias={7: 1, 3: -2})
    assert params.logit_bias == ((3, -2.0), (7, 1.0))
    assert params == SamplingParams(logit_bias=((7, 1), (3, -2)))
    assert hash(params) == hash(pickle.loads(pickle.dumps(params)))
    assert {type(bias) for _, bias in params.logit_bias} == {float}


ALLOWED = "must be pairs of a distinct token id >= 0 and a bias in [-100, 100]"


BAD = [None, [(1, 2.0)], (1, 2.0), ((1,),), ((1, 2.0, 3.0),), ((1, 2.0), (1, 3.0))]
BAD += [((token, 2.0),) for token in (-1, True, 1.0, "1", [1])]
BAD += [((1, bias),) for bias in (True, "2", 100.5, float("nan"), 10**400)]


@pytest.mark.parametrize("value", BAD, ids=lambda value: str(value)[:20])
def test_bad_biases_are_named_with_what_is_allowed(value):
    with pytest.raises(ValueError) as error:
        SamplingParams(logit_bias=value)
    assert str(error.value) == f"logit_bias {value!r}: {ALLOWED}"[: len(str(error.value))]


IDS = "logit_bias has the id {}: must be an integer from 0 to {}"


def test_ids_that_the_model_lacks(tiny):
    model = tiny()
    good = SamplingParams(2, True, logit_bias={60: 1.0})
    bad = SamplingParams(2, True, logit_bias={3: 1.0, 61: 1.0})
    calls = [
        lambda params: run(model, [[1]], max_new_tokens=1, logit_bias=params.logit_bias),
        lambda params: list(generate_speculative(model, model, [1], params)),
        lambda params: outputs_of(Engine(model), [[1]], params),
    ]
    for call in calls:
        assert call(good)
        with pytest.raises(ValueError) as error:
            call(bad)
        assert str(error.value) == IDS.format(61, 60)


ARGS = ("--prompt", "One day", "--max-new-tokens", 9, "--ignore-eos")
NOT_ID_BIAS = ("5", "=5", "-1=5", "1_0=5", "5=much", "\u0665=1")


def test_the_command_line(cli, engine_cli, run_main, tiny_checkpoint):
    args = ("--model", tiny_checkpoint, *ARGS)
    plain = cli(*args)[1]
    options = ("--logit-bias", "300=100", "--logit-bias=17=-1.5")
    code, out, err = cli(*args, *options)
    assert (code, out != plain) == (0, True), err
    assert engine_cli(*args, *options)[:2] == (0, out)
    models = ("--target", tiny_checkpoint, "--draft", "lookup")
    assert run_main(infer_speculative.main, *models, *ARGS, *options)[:2] == (0, out)


@pytest.mark.parametrize(
    "options, message",
    [
        *(([text], f"{text!a} is not ID=BIAS") for text in NOT_ID_BIAS),
        (["5=101"], f"logit_bias ((5, 101.0),): {ALLOWED}"),
        (["5=nan"], f"logit_bias ((5, nan),): {ALLOWED}"),
        (["5=1", "5=1"], f"logit_bias ((5, 1.0), (5, 1.0)): {ALLOWED}"),
        (["4096=1"], IDS.format(4096, 4095)),
    ],
)
def test_bad_options_are_one_line(cli, tiny_checkpoint, options, message):
    args = [f"--logit-bias={option}" for option in options]
    assert is_one_line(cli("--model", tiny_checkpoint, *ARGS, *args), message)


def test_the_server(client, tiny_llama):
    body = {"prompt": "Tom saw", "max_tokens": 30, "seed": 3, "ignore_eos": True}
    status, found = client.post("/v1/completions", body | {"logit_bias": {"11": -100, "300": 4.5}})
    assert status == 200, found
    fields = {"max_new_tokens": 30, "seed": 3, "ignore_eos": True}
    expected = engine_alone(tiny_llama, "Tom saw", logit_bias={11: -100, 300: 4.5}, **fields)
    assert found["choices"][0]["text"] == expected[1]
    assert expected != engine_alone(tiny_llama, "Tom saw", **fields)
    most = {str(token): 1 for token in range(1024)}
    for value in (None, {}, most):
        assert client.post("/v1/completions", {"max_tokens": 1, "logit_bias": value})[0] == 200


NO_BIASES = "must be an object of up to 1024 token ids, each with a number in [-100, 100]"
WRONG = [{"05": 1}, {"-5": 1}, {"5.0": 1}, {"five": 1}, {"": 1}, {"\u0665": 1}, {"9" * 5000: 1}]
WRONG += [{"5": 100.1}, {"5": "1"}, {"5": None}, {"5": True}, {"5": float("nan")}, [5], 5, "5"]
WRONG += [{str(token): 1 for token in range(1025)}]


@pytest.mark.parametrize("value", WRONG, ids=lambda value: ascii(value)[:20])
def test_the_server_names_the_field(client, value):
    body = json.dumps({"max_tokens": 1, "logit_bias": value}).encode()
    found = client.post("/v1/completions", body)
    assert found == (400, refusal(f"logit_bias: {NO_BIASES}", "logit_bias"))


@pytest.mark.parametrize("stream", [False, True])
def test_the_server_refuses_ids_that_the_model_lacks(client, stream):
    messages = [{"role": "user", "content": "dog"}]
    asked = {"/v1/completions": {"prompt": "Tom"}, "/v1/chat/completions": {"messages": messages}}
    for (path, body), token in itertools.product(asked.items(), ("4096", "9999999999")):
        body = body | {"max_tokens": 2, "stream": stream, "logit_bias": {token: 1}}
        found = client.post(path, body)
        assert found == (400, refusal(IDS.format(token, 4095), "logit_bias"))
