"""Each sampling field through `generate`, speculation, the engine, scripts and the server."""

import json
import pickle

import pytest
import torch
from conftest import edit_json, is_one_line, random_tokens, run, run_rows
from drafting import knowing
from engines import finish, make_engine, outputs_of, own_texts
from natives import params_of
from serving import engine_alone, refusal, small_encoding

import infer_speculative
from engine.drafter import PagedModelDrafter
from engine.engine import Engine
from errors import UserError
from infer import generate
from infer_speculative import generate_speculative, propose_prompt_lookup
from loading.load import load_model
from native import use_native
from sampling import SamplingParams

EOS = 60
FREE = {"max_new_tokens": 40, "ignore_eos": True}
BIASES = ((0, -2.5), (5, 3.0), (17, -100.0), (60, 1.0))


@pytest.fixture
def written(tiny):
    """A random model, and its greedy output after [1], which no EOS ends."""
    model = tiny(seed=12)
    (tokens,) = run_rows(model, [[1]], **FREE)
    assert EOS not in tokens
    return model, tokens


def test_eos_and_stop_tokens_end_a_sequence_and_belong_to_it(tiny, written):
    model, tokens = written
    for stop in (tokens[0], tokens[4], tokens[9]):
        end = tokens.index(stop) + 1
        assert run_rows(model, [[1]], stop_token_ids=(stop,), **FREE) == [tokens[:end]]
        assert run_rows(tiny(seed=12, eos_token_ids=(59, stop)), [[1]]) == [tokens[:end]]
    stop = next(token for token in tokens if token not in tokens[:4])
    end = tokens.index(stop) + 1
    model = tiny(seed=12, eos_token_id=tokens[3])
    fields = {"stop_token_ids": (stop,), "max_new_tokens": 40}
    assert run_rows(model, [[1]], **fields) == [tokens[: tokens.index(tokens[3]) + 1]]
    # ignore_eos is about EOS alone, which min_tokens does not ban then. A prompt may end in either.
    assert run_rows(model, [[1]], ignore_eos=True, min_tokens=4, **fields) == [tokens[:end]]
    assert all(run_rows(model, [[1, tokens[3]], [1, stop]], **fields))


def test_a_finished_sequence_yields_none_and_leaves_the_others_alone(tiny, written):
    model = tiny(seed=12, eos_token_id=written[1][5])
    prompts = [[1], [2], [3], [4]]
    alone = [run_rows(model, [prompt], max_new_tokens=12)[0] for prompt in prompts]
    steps = run(model, prompts, max_new_tokens=12)
    assert len({*map(len, alone)}) > 1 and len(steps) == max(map(len, alone))
    for row, tokens in enumerate(alone):
        assert [step[row] for step in steps] == tokens + [None] * (len(steps) - len(tokens))


SPECULATED = [
    {"logit_bias": BIASES},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 1.0, "min_tokens": 7, "stop_token_ids": tuple(range(0, 60, 2))},
    {"repetition_penalty": 3.0, "stop_token_ids": tuple(range(0, 60, 5))},
]


@pytest.mark.parametrize("fields", SPECULATED, ids=str)
@pytest.mark.parametrize("draft", ["model", "lookup", "itself"])
def test_greedy_speculation_equals_generate(tiny, draft, fields):
    """Drafts are processed, too, so a model that drafts for itself is never rejected."""
    target = tiny(seed=12)
    drafter = {"model": tiny(seed=6), "lookup": propose_prompt_lookup, "itself": target}[draft]
    for prompt in ([1], [1, 2], [3, 4, 3]):
        params = SamplingParams(**FREE, **fields)
        steps = list(generate_speculative(target, drafter, prompt, params, 4))
        tokens = [token for step in steps for token in step.tokens]
        assert [tokens] == run_rows(target, [prompt], **FREE, **fields)
        assert draft != "itself" or all(step.accepted == len(step.drafts) for step in steps)


@pytest.mark.parametrize("in_c", [False, True])
@pytest.mark.parametrize("draft", ["knowing", "itself"])
def test_the_engine_equals_generate_for_rows_of_all_fields(tiny, compiled, in_c, draft):
    """With drafts, some of them wrong, few pages, chunks and windows that move; in C too."""
    model = tiny(seed=12, dtype=torch.float32) if in_c else tiny(seed=12)
    if in_c:
        use_native(model)
    prompts = [random_tokens(length, seed=length) for length in (3, 9, 1, 14, 5, 2)] * 2
    free = own_texts(model, prompts, params_of(FREE, 12))
    fields = [{"stop_token_ids": (text[6], text[11])} for text in free[:5]]
    fields[1] |= {"min_tokens": 15}
    fields[2] |= {"min_tokens": 15, "temperature": 1.0, "ignore_eos": False}
    fields[3] |= {"min_tokens": 40}
    fields[4] |= {"temperature": 1.0, "min_p": 0.1}
    fields += [{"logit_bias": BIASES}, {"logit_bias": ((3, 2.0),), "presence_penalty": 1.0}]
    fields += [{"logit_bias": BIASES, "temperature": 1.0}, {"temperature": 1.0, "top_k": 20}]
    fields += [{"temperature": 1.5, "min_p": 0.05, "top_p": 0.9}, {"repetition_penalty": 1.5}]
    fields += [{"temperature": 3.0, "min_p": 0.3, "top_k": 40, "frequency_penalty": 1.0}]
    params = [params_of(FREE | own, 12)[row] for row, own in enumerate(fields)]
    drafters = {"knowing": knowing(model, wrong=(4, 9)), "itself": PagedModelDrafter(model, model)}
    options = {"max_num_seqs": 4, "page_size": 4, "num_pages": 12, "max_num_batched_tokens": 9}
    options |= {"drafter": drafters[draft], "gamma": 5}
    engine, requests = make_engine(model, prompts, params, **options)
    finish(engine)
    assert [request.output for request in requests] == own_texts(model, prompts, params)
    accepted = engine.num_accepted_tokens
    assert accepted > 10 and (draft == "knowing" or accepted == engine.num_draft_tokens)
    for request in requests:
        ends = request.params.stop_token_ids + (() if request.params.ignore_eos else (EOS,))
        assert request.finish_reason == ("stop" if request.output[-1] in ends else "length")
    assert len(requests[0].output) <= 7 and requests[3].finish_reason == "length"


def test_params_stay_plain_data():
    params = SamplingParams(logit_bias={7: 1, 3: -2})
    assert params.logit_bias == ((3, -2.0), (7, 1.0))
    assert params == SamplingParams(logit_bias=((7, 1), (3, -2)))
    assert hash(params) == hash(pickle.loads(pickle.dumps(params)))
    assert {type(bias) for _, bias in params.logit_bias} == {float}


IDS = "a tuple of token ids >= 0"
PAIRS = "pairs of a distinct token id >= 0 and a bias in [-100, 100]"
BAD_PAIRS = [None, [(1, 2.0)], (1, 2.0), ((1,),), ((1, 2.0, 3.0),), ((1, 2.0), (1, 3.0))]
BAD_PAIRS += [((token, 2.0),) for token in (-1, True, 1.0, "1", [1])]
BAD_PAIRS += [((1, bias),) for bias in (True, "2", 100.5, float("nan"))]
REFUSED = [  # field, bad values, what is allowed
    ("max_new_tokens", [-1, 2.0], "an integer >= 0"),
    ("temperature", [-0.1, float("inf"), float("nan"), True, "1"], "a finite number >= 0"),
    ("top_k", [-1, 1.5], "an integer >= 0"),
    ("top_p", [0, 1.01, -1], "a number in (0, 1]"),
    ("logprobs", [-1, 21, True], "None or an integer from 0 to 20"),
    ("logit_bias", BAD_PAIRS, PAIRS),
    ("seed", [-1, 2**64, 1.0, True, "1"], "None or an integer from 0 to 2**64 - 1"),
    ("stop", ["", "a", ["a"], ("a", ""), (1,), (b"a",)], "a tuple of nonempty strings"),
    ("stop_token_ids", [[3], 3, (-1,), (True,), ("3",)], IDS),
    ("min_tokens", [-1, 1.0, True], "an integer >= 0"),
    ("min_tokens", [6], "at most max_new_tokens (5)"),
    ("presence_penalty", [-2.5, 2.5], "a number in [-2, 2]"),
    ("frequency_penalty", [-2.5, 3.0], "a number in [-2, 2]"),
    ("repetition_penalty", [0.0, float("inf")], "a finite number > 0"),
    ("min_p", [-0.1, 1.5, float("nan")], "a number in [0, 1]"),
]


@pytest.mark.parametrize("name, values, allowed", REFUSED)
def test_bad_values_are_named_with_what_is_allowed(name, values, allowed):
    for value in values:
        with pytest.raises(UserError) as error:
            SamplingParams(**{"max_new_tokens": 5, name: value})
        assert str(error.value) == f"{name} {value!r}: must be {allowed}"
    for seed in (None, 0, 2**64 - 1):  # the largest and smallest that are allowed
        edges = {"temperature": 0, "top_p": 1, "min_p": 1, "presence_penalty": -2, "logprobs": 20}
        assert SamplingParams(0, seed=seed, frequency_penalty=2, **edges).seed == seed


def lacks(name: str, token: int, last: int = 4095) -> str:
    return f"{name} has the id {token}: must be an integer from 0 to {last}"


ALL_END = "min_tokens {}: must be 0, as every token of this model ends the output"


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"stop_token_ids": (3, 61)}, lacks("stop_token_ids", 61, 60)),
        ({"logit_bias": {3: 1.0, 61: 1.0}}, lacks("logit_bias", 61, 60)),
        ({"stop_token_ids": tuple(range(60)), "min_tokens": 1}, ALL_END.format(1)),
        ({"stop_token_ids": (*range(61), 5), "min_tokens": 2} | FREE, ALL_END.format(2)),
    ],
    ids=["stop", "bias", "all", "all twice"],
)
def test_what_a_model_cannot_do_is_refused(tiny, bad, message):
    model = tiny()
    params = SamplingParams(**bad)
    calls = [
        lambda params: list(generate(model, [[1]], params)),
        lambda params: list(generate_speculative(model, model, [1], params)),
        lambda params: outputs_of(Engine(model), [[1]], params),
    ]
    allowed = {"logit_bias": {60: 1.0}, "stop_token_ids": tuple(range(60)), "ignore_eos": True}
    for call in calls:
        with pytest.raises(ValueError) as error:
            call(params)
        assert str(error.value) == message
        assert call(SamplingParams(5, min_tokens=5, **allowed))


ARGS = ("--prompt", "One day", "--max-new-tokens", 20)


@pytest.fixture
def scripts(cli, engine_cli, run_main, tiny_checkpoint):
    """A function that runs all three scripts with these options; they must print the same."""

    def run_all(*options) -> tuple[str, str]:
        args = ("--model", tiny_checkpoint, *ARGS, *options)
        models = ("--target", tiny_checkpoint, "--draft", "lookup", *ARGS)
        code, out, err = cli(*args)
        assert code == 0, err
        assert engine_cli(*args)[:2] == (0, out)
        assert run_main(infer_speculative.main, *models, *options)[:2] == (0, out)
        return out, err

    return run_all


HOT = ("--temperature", 1e3, "--seed", 1)
OPTIONS = [  # options, and fields with which `generate` has the same output
    ((*HOT, "--top-k", 1), {}),
    ((*HOT, "--top-p", 1e-9), {}),
    ((*HOT, "--min-p", 1), {}),
    (("--temperature", 1e-6, "--seed", 1), {}),
    (("--presence-penalty", 2), {"presence_penalty": 2}),
    (("--frequency-penalty", -2), {"frequency_penalty": -2}),
    (("--repetition-penalty", 0.5), {"repetition_penalty": 0.5}),
    (("--logit-bias", "300=100", "--logit-bias=17=-1.5"), {"logit_bias": {300: 100, 17: -1.5}}),
]


def test_scripts_have_the_output_of_generate(scripts, tiny_checkpoint):
    encoding = small_encoding()
    prompt = encoding.encode("One day")
    model = load_model(tiny_checkpoint)
    outputs = set()
    for options, fields in OPTIONS:
        (tokens,) = run_rows(model, [prompt], **FREE | {"max_new_tokens": 20}, **fields)
        out, _ = scripts("--ignore-eos", *options)
        assert out == "One day" + encoding.decode(tokens) + "\n"
        outputs.add(out)
    assert len(outputs) == 4
    # A stop token, like EOS, is counted and not printed.
    (tokens,) = run_rows(model, [prompt], **FREE | {"max_new_tokens": 20})
    end = next(index for index in range(5, 20) if tokens[index] not in tokens[:index])
    ids = ("--stop-token-id", tokens[end], "--stop-token-id", 4000)
    out, err = scripts("--ignore-eos", *ids)
    kept = "One day" + encoding.decode(tokens[:end])
    assert out == kept + "\n" and err.startswith(f"{end + 1} tokens, ")
    assert scripts("--ignore-eos", *ids, "--min-tokens", 20)[1].startswith("20 tokens, ")
    edit_json(tiny_checkpoint / "config.json", {"eos_token_id": [4095, tokens[end]]})
    out, err = scripts()
    assert out == kept + "\n" and err.startswith(f"{end + 1} tokens, ")
    out, err = scripts("--ignore-eos")
    assert out.startswith("One day" + encoding.decode(tokens[: end + 1]))


def test_greedy_runs_report_no_seed_and_name_options_without_effect(cli, tiny_checkpoint):
    args = ("--model", tiny_checkpoint, *ARGS)
    options = ("--seed", 6, "--top-k", 5, "--top-p", 0.5, "--min-p", 0.5)
    _, out, err = cli(*args)
    assert "seed" not in err and err.count("\n") == 1
    note = "note: temperature 0 is greedy, so these options have no effect: "
    code, again, err = cli(*args, *options)
    assert (code, again) == (0, out)
    assert err.splitlines()[0] == note + "--seed, --top-k, --top-p, --min-p"
    assert cli(*args, "--num-samples", 2)[2].splitlines()[0] == note + "--num-samples"
    assert "note" not in cli(*args, *options, "--temperature", 1)[2]


def test_a_run_without_a_seed_can_be_repeated_from_its_report(cli, tiny_checkpoint):
    args = ("--model", tiny_checkpoint, *ARGS, "--temperature", 1)
    _, first, err = cli(*args)
    assert cli(*args, "--seed", err.split()[-1])[1] == first != cli(*args)[1]


@pytest.mark.parametrize(
    "option, words",
    [
        ("--stop-token-id=x", "--stop-token-id: invalid int value"),
        ("--stop-token-id=-1", f"stop_token_ids (-1,): must be {IDS}"),
        ("--stop-token-id=4096", lacks("stop_token_ids", 4096)),
        ("--min-tokens=221", "min_tokens 221: must be at most max_new_tokens (220)"),
        ("--frequency-penalty=-3", "frequency_penalty -3.0: must be a number in [-2, 2]"),
        *(
            (f"--logit-bias={text}", f"{text!a} is not ID=BIAS")
            for text in ("5", "=5", "-1=5", "1_0=5", "5=much", "\u0665=1")
        ),
        ("--logit-bias=5=101", f"logit_bias ((5, 101.0),): must be {PAIRS}"),
        ("--logit-bias=4096=1", lacks("logit_bias", 4096)),
        ("--num-beams=2 --stop-token-id=3 --min-tokens=1", "omit --stop-token-id, --min-tokens\n"),
    ],
)
def test_bad_options_are_one_line(cli, tiny_checkpoint, option, words):
    result = cli("--model", tiny_checkpoint, "--prompt", "a", *option.split())
    assert is_one_line(result, words)


@pytest.mark.parametrize(
    "body",
    [
        {"seed": 3, "temperature": 2.0, "min_p": 0.6},
        {"seed": 3, "logit_bias": {"11": -100, "300": 4.5}},
        {"temperature": 0, "stop_token_ids": True},
        {"temperature": 0, "stop_token_ids": True, "min_tokens": 20},
    ],
    ids=str,
)
def test_the_server_has_the_output_of_the_engine(client, tiny_llama, body):
    plain = {"seed": body.get("seed"), "temperature": body.get("temperature", 1.0)}
    plain |= {"max_new_tokens": 30, "ignore_eos": True}
    without = engine_alone(tiny_llama, "Tom saw", **plain)
    body = body | ({"stop_token_ids": [without[0][9]]} if "stop_token_ids" in body else {})
    fields = plain | body
    fields["stop_token_ids"] = tuple(body.get("stop_token_ids", ()))
    fields["logit_bias"] = {int(id): bias for id, bias in body.get("logit_bias", {}).items()}
    expected = engine_alone(tiny_llama, "Tom saw", **fields)
    body |= {"prompt": "Tom saw", "max_tokens": 30, "ignore_eos": True}
    status, found = client.post("/v1/completions", body)
    assert status == 200, found
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == expected[1::2] != without[1::2]
    assert found["usage"]["completion_tokens"] == len(expected[0])


NO_IDS = "stop_token_ids: must be a list of up to 128 token ids"
NO_BIASES = "logit_bias: must be an object of up to 1024 token ids, each with a number"
NO_BIASES += " in [-100, 100]"
WRONG = [{"05": 1}, {"-5": 1}, {"5.0": 1}, {"": 1}, {"\u0665": 1}, {"9" * 5000: 1}, [5], 5]
WRONG += [{"5": 100.1}, {"5": "1"}, {"5": None}, {"5": True}, {"5": float("nan")}]
WRONG += [{str(token): 1 for token in range(1025)}]


@pytest.mark.parametrize(
    "field, good, bad, message",
    [
        ("stop_token_ids", [[], None], [3, [-1], ["3"], [True], [3] * 129], NO_IDS),
        ("stop_token_ids", [[4095]], [[3, 4096]], lacks("stop_token_ids", 4096)),
        ("min_tokens", [0], [-1], "min_tokens -1: must be an integer >= 0"),
        ("min_tokens", [2], [17], "min_tokens 17: must be at most max_tokens (2)"),
        ("logit_bias", [None, {}, dict.fromkeys(map(str, range(1024)), 1)], WRONG, NO_BIASES),
        ("logit_bias", [], [{"4096": 1}], lacks("logit_bias", 4096)),
        ("min_p", [None, 0, 1, 0.5], [1.5], "min_p 1.5: must be a number in [0, 1]"),
    ],
    ids=["ids", "id", "least", "most", "biases", "bias", "min_p"],
)
def test_the_server_names_the_field(client, field, good, bad, message):
    messages = [{"role": "user", "content": "dog"}]
    asked = {"/v1/completions": {"prompt": "Tom"}, "/v1/chat/completions": {"messages": messages}}
    for path, body in asked.items():
        body = body | {"max_tokens": 2}
        for value in good:
            assert client.post(path, body | {field: value})[0] == 200, value
        for value in bad:
            for stream in (False, True):
                data = json.dumps(body | {field: value, "stream": stream}).encode()
                assert client.post(path, data) == (400, refusal(message, field)), value
