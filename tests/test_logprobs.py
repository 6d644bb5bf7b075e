"""The log-probability of each token and of the most likely ones, in the engine and the APIs."""

import itertools
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from engines import check_texts, finish, make_engine, request_params
from serving import PATH, check_refused, results_of, serving, small_encoding, small_engine, writing

from cache import ContextWindow
from engine.request import Request
from infer import next_logits
from infer_engine import print_logprobs
from loading.load import load_model
from sampling import SamplingParams, TokenLogprob, token_logprob
from text.tokenizer import load_encoding

DRAFT = CHECKPOINTS / "stories-draft"
STORY = ["--model", DRAFT, "--prompt", "Once upon a time"]


def by_hand(model, tokens, prompt_length) -> list[torch.Tensor]:
    context_window = ContextWindow(model.config.block_size)
    found = []
    for length in range(prompt_length, len(tokens)):
        window = context_window.crop(tokens[:length])
        found.append(next_logits(model, [window], None)[0, 0].double().log_softmax(dim=-1))
    return found


def check(model, request, count):
    """The log-probabilities of a request are those by hand; no two of a random model are equal."""
    wanted = by_hand(model, request.tokens, request.prompt_length)
    assert len(request.logprobs) == len(request.output) == len(wanted)
    for token, (logprob, top), row in zip(request.output, request.logprobs, wanted):
        assert logprob == pytest.approx(row[token].item(), abs=2e-6)
        best = row.topk(count)
        assert [other for other, _ in top] == best.indices.tolist()
        assert [value for _, value in top] == pytest.approx(best.values.tolist(), abs=2e-6)


def test_logprobs_are_of_unprocessed_logits(build):
    model = build(seed=3)
    prompts = [random_tokens(length, seed=length) for length in (1, 14, 30)]
    fields = {"temperature": 0.7, "top_k": 3, "repetition_penalty": 1.5, "logit_bias": ((9, 5.0),)}
    params = request_params(3, max_new_tokens=20, logprobs=20, **fields)
    engine, requests = make_engine(model, prompts, params)
    finish(engine)
    check_texts(model, requests)
    for request in requests:
        check(model, request, 20)


@pytest.mark.parametrize("count", range(1, 8))
def test_ties_are_broken_by_token_id(count):
    for logits in itertools.permutations([5.0, 2.0, 2.0, 2.0, 0.0]):
        _, top = token_logprob(torch.tensor(logits), 0, count)
        order = sorted(range(5), key=lambda token: (-logits[token], token))
        assert [token for token, _ in top] == order[:count]


def test_the_first_is_the_greedy_token_where_logarithms_round_to_one():
    logits = torch.tensor([1e-20, 2e-20], dtype=torch.float64)
    assert [token for token, _ in token_logprob(logits, 0, 2).top] == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_extreme_logits(dtype):
    logits = torch.tensor([60_000, -60_000, 59_000], dtype=dtype)
    gap = (logits[0].double() - logits[1].double()).item()
    logprob, top = token_logprob(logits, 1, 3)
    assert logprob == -gap and top[0] == (0, 0.0) and top[2] == (1, -gap)


def test_the_command_line_shows_each_token_with_the_best(engine_cli):
    model = load_model(DRAFT, torch.float32, "cpu")
    encoding = load_encoding(DRAFT, 4096)
    args = [*STORY, "--max-new-tokens", 300, "--temperature", 1, "--seed", 3]
    code, out, err = engine_cli(*args, "--logprobs", 2)
    assert code == 0 and out == engine_cli(*args)[1]
    prompt = encoding.encode("Once upon a time")
    ends = list(model.config.eos_token_ids)
    tokens = encoding.encode(out[:-1]) + ends
    lines = err.splitlines()[2:]
    assert tokens[: len(prompt)] == prompt and len(lines) == len(tokens) - len(prompt) > 20
    rows = by_hand(model, tokens, len(prompt))
    for token, row, line in zip(tokens[len(prompt) :], rows, lines):
        best = [repr(encoding.decode([other])) for other in row.topk(2).indices.tolist()]
        cells = [cell.strip() for cell in re.split(r"  +(?=['\"])", line)]
        texts = [cells[1]]
        values = [cells[0]]
        for cell in cells[2:]:
            texts = [*texts, cell.rpartition(" ")[0]]
            values = [*values, cell.rpartition(" ")[2]]
        assert texts == [repr(encoding.decode([token])), *best]
        assert all(re.fullmatch(r"-\d+\.\d{3}", value) for value in values)
        wanted = [row[token].item(), *row.topk(2).values.tolist()]
        assert [float(value) for value in values] == pytest.approx(wanted, abs=1e-3)
    assert "'<|endoftext|>'" in lines[-1]


def test_a_token_is_one_line_whatever_it_prints(capsys):
    pieces = [text.encode() for text in ("\n", "\u2028", "\x85", "\x9b", "\x7f", "'", "é")]
    pieces.append(pieces[-1][:1])
    encoding = SimpleNamespace(decode_single_token_bytes=dict(enumerate(pieces)).__getitem__)
    logprobs = [TokenLogprob(-1.5, [(6, -0.25)])] * 9
    request = Request(list(range(9)), 0, SamplingParams(), logprobs=logprobs)
    print_logprobs(encoding, [request, Request([], 0, SamplingParams())])
    shown = [line.split("  ") for line in capsys.readouterr().err.splitlines()]
    texts = [r"'\n'", r"'\u2028'", r"'\x85'", r"'\x9b'", r"'\x7f'", '"\'"', "'é'", r"b'\xc3'"]
    texts.append("id 8")
    expected = [["-1.500", text, "'é' -0.250"] for text in texts]
    expected = [["sequence 1"], *expected, ["sequence 2"]]
    assert [[cell.strip() for cell in line if cell] for line in shown] == expected


def name(token: int) -> str:
    data = small_encoding().decode_single_token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + repr(data)[2:-1] if len(repr(data)) == 4 * len(data) + 3 else "mixed"


@pytest.mark.parametrize("count", [0, 20])
def test_log_probabilities_are_those_of_the_engine(client, tiny_llama, count):
    params = SamplingParams(max_new_tokens=40, temperature=1.0, seed=3, logprobs=count)
    ids = small_encoding().encode("Tom")
    ((tokens, text, logprobs, _),) = results_of(small_engine(tiny_llama), [ids], [params])
    body = {"prompt": "Tom", "max_tokens": 40, "seed": 3, "logprobs": count}
    (choice,) = client.post(PATH, body)[1]["choices"]
    found = choice["logprobs"]
    assert choice["text"] == text
    assert found["token_logprobs"] == [entry.logprob for entry in logprobs]
    for token, shown in zip(tokens, found["tokens"], strict=True):
        assert shown == name(token) or name(token) == "mixed"
    sizes = set()
    columns = found["tokens"], logprobs, found["top_logprobs"]
    for token, own, entry, shown in zip(tokens, *columns, strict=True):
        best = dict(entry.top)
        assert list(shown.values()) == list((best | {token: entry.logprob}).values())
        assert shown[own] == entry.logprob
        sizes.add(len(shown))
    assert sizes <= {count, count + 1} and count + 1 in sizes
    events = client.events(PATH, body | {"stream": True})
    for column, values in found.items():
        parts = [event["choices"][0]["logprobs"][column] for event in events]
        assert sum(parts, []) == values


def choice_of(tiny_llama, text: str, **fields) -> tuple[dict, int]:
    ids = small_encoding().encode(text, allowed_special="all")
    with serving(lambda: writing(small_engine(tiny_llama), ids)) as client:
        body = {"prompt": "x", "max_tokens": len(ids)} | fields
        (choice,) = client.post(PATH, body)[1]["choices"]
    return choice, len(ids)


def test_tokens_that_are_parts_of_letters(tiny_llama):
    """They are shown as bytes, and begin where their letter does; EOS begins at the end."""
    text = "a😀é😀"
    choice, count = choice_of(tiny_llama, f"{text}<|endoftext|>", max_tokens=99, logprobs=0)
    found = choice["logprobs"]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    assert len(found["tokens"]) == len(found["token_logprobs"]) == count
    own = zip(found["tokens"], found["token_logprobs"])
    assert found["top_logprobs"] == [{name: logprob} for name, logprob in own]
    data = b""
    for shown, offset in zip(found["tokens"][:-1], found["text_offset"]):
        assert offset == len(data.decode(errors="ignore"))
        if shown.startswith("bytes:"):
            data += bytes.fromhex(shown.removeprefix("bytes:").replace("\\x", ""))
        else:
            data += shown.encode()
    assert data == text.encode()
    assert "bytes:\\xf0" in [shown[:10] for shown in found["tokens"]]
    assert (found["tokens"][-1], found["text_offset"][-1]) == ("<|endoftext|>", len(text))


def test_tokens_of_a_stop_string_are_shown(tiny_llama):
    choice, _ = choice_of(tiny_llama, "one two three", logprobs=1, stop=[" two"])
    assert (choice["text"], choice["finish_reason"]) == ("one", "stop")
    assert "".join(choice["logprobs"]["tokens"]).startswith("one two")


def test_without_asking_there_are_none(client):
    assert client.post(PATH, {"logprobs": None})[1]["choices"][0]["logprobs"] is None
    (choice,) = client.post(PATH, {"logprobs": 0, "max_tokens": 0})[1]["choices"]
    columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    assert choice["logprobs"] == {column: [] for column in columns}


@pytest.mark.parametrize("body, said", [({"logprobs": 21}, "20"), ({"logprobs": True}, "integer")])
def test_what_is_refused(client, body, said):
    check_refused(client.post(PATH, body), "logprobs", said)
