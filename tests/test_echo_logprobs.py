"""Log-probabilities of echoed prompts in /v1/completions. Oracle: the engine, and whole passes."""

from types import SimpleNamespace

import pytest
import torch
from conftest import CHECKPOINTS
from replicas import make_engine, parse, same, save_small, serving_replicas
from serving import (
    PATH,
    check_refused,
    failing,
    official_client,
    server_error,
    serving,
    small_encoding,
    small_engine,
)

from loading.load import load_model
from sampling import NOT_FINITE

LLAMA = CHECKPOINTS / "stories-llama"
ASKED = {"echo": True, "logprobs": 1, "seed": 1}
COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def ids_of(text: str) -> list[int]:
    return small_encoding().encode(text, allowed_special="all") or [4095]


def asked(client, **fields) -> list[dict]:
    status, body = client.post(PATH, ASKED | fields)
    assert status == 200, body
    return body["choices"]


# What lm-eval 0.4.13 sends for model_args tokenized_requests=True: the first ids are a context, the
# last ones a continuation. The third item is lm-eval's result.
LM_EVAL = [
    (  # loglikelihood_rolling; the context is the EOS token
        "4095 746 834 282 423 669 13 325 582 760 265 262 3660 11 266 372 1083 313 262 1919 13 1458 "
        "262 1960 282 349 262 937 13 834 547 265 1006 13 316 40 759 768 11 1719 3989 592 372 326 "
        "13 316 40 449 371 1023 397",
        1,
        -131.92173558801127,
    ),
    (  # loglikelihood, of a choice
        "746 834 282 423 669 13 325 582 760 265 262 3660 11 266 372 1083 313 262 1919 13 1458 262 "
        "1960 282 349 262 937 13 834 547 265 1006 13 316 40 759 768 11 1719 3989 592 372 326 13 316"
        " 40 449 371 1023 397",
        44,
        -14.591785312685616,
    ),
]


def log_likelihood(choice: dict, context_length: int) -> float:
    """The sum that lm-eval makes; the last token is the one that it asked for."""
    return sum(choice["logprobs"]["token_logprobs"][context_length:-1])


@pytest.mark.step(2)
def test_requests_of_lm_eval_have_the_perplexity_of_a_whole_pass(compiled):
    """As ids, one prompt in a request, and as texts, several in a request."""
    model = load_model(LLAMA, torch.float64, "cpu")
    prompts = [[int(token) for token in ids.split()] for ids, *_ in LM_EVAL]
    body = {"model": "small", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    body["echo"] = True
    args = parse(LLAMA, "--backend", "native", "--dtype", "float32")
    with serving(lambda: make_engine(args)) as client:
        answers = [client.post(PATH, body | {"prompt": [ids]}) for ids in prompts]
        texts = [small_encoding().decode(ids) for ids in prompts]
        together = client.post(PATH, body | {"prompt": texts})
    assert [status for status, _ in (*answers, together)] == [200] * 3
    choices = [choice for _, answer in answers for choice in answer["choices"]]
    again = together[1]["choices"]
    for choice, other, ids, (_, context_length, theirs) in zip(choices, again, prompts, LM_EVAL):
        with torch.inference_mode():
            rows = model(torch.tensor([ids]))[0].log_softmax(dim=-1)
        scored = range(context_length, len(ids))
        wanted = sum(rows[index - 1, ids[index]].item() for index in scored)
        assert log_likelihood(choice, context_length) == pytest.approx(wanted, abs=1e-4)
        assert wanted == pytest.approx(theirs, abs=1e-4)
        # lm-eval compares these two to see whether greedy decoding would write the continuation.
        table = choice["logprobs"]
        for index in scored:
            is_best = max(table["top_logprobs"][index].values()) == table["token_logprobs"][index]
            assert is_best == (rows[index - 1].argmax().item() == ids[index])
        assert other["logprobs"] == table


PROMPTS = ["", "Tom", "é😀 <|endoftext|> and", "word " * 30]


@pytest.mark.step(2)
@pytest.mark.parametrize("count", [0, 20])
@pytest.mark.parametrize("max_tokens", [0, 1, 9])
def test_columns_are_of_prompt_and_output(client, tiny_llama, count, max_tokens):
    fields = {"max_tokens": max_tokens, "logprobs": count, "n": 2, "prompt": PROMPTS}
    found = asked(client, **fields)
    made = small_engine(tiny_llama)
    plain = client.post(PATH, ASKED | fields | {"echo": False})[1]["choices"]
    for choice, own, text in zip(found, plain, [text for text in PROMPTS for _ in range(2)]):
        ids = ids_of(text)
        table = choice["logprobs"]
        with torch.inference_mode():
            rows = made.model(torch.tensor([ids]))[0].log_softmax(dim=-1)
        wanted = [row[token].item() for row, token in zip(rows, ids[1:])]
        first, *others = table["token_logprobs"][: len(ids)]
        assert first is None and table["top_logprobs"][0] is None
        assert others == pytest.approx(wanted, abs=2e-6)
        for row, top, value in zip(rows, table["top_logprobs"][1 : len(ids)], others):
            best = row.topk(max(count, 1)).values
            assert value in top.values() and len(top) <= count + 1
            assert max(top.values()) == pytest.approx(best[0].item() if count else value, abs=2e-6)
        assert choice["text"] == text + own["text"]
        assert choice["finish_reason"] == own["finish_reason"]
        for name in COLUMNS[:3]:  # the output's are those without the echo
            assert table[name][len(ids) :] == own["logprobs"][name]
        offsets = own["logprobs"]["text_offset"]
        assert table["text_offset"][len(ids) :] == [len(text) + offset for offset in offsets]
        for name, offset in zip(table["tokens"][: len(ids)], table["text_offset"]):
            assert not text or name.startswith("bytes:") or text[offset:].startswith(name)


@pytest.mark.step(2)
def test_a_stream_has_the_prompt_in_the_first_event_of_each_choice(client):
    for max_tokens in (0, 5):
        fields = {"prompt": PROMPTS, "n": 2, "max_tokens": max_tokens, "logprobs": 2}
        wanted = asked(client, **fields)
        parts = {}
        for event in client.events(PATH, ASKED | fields | {"stream": True}):
            (choice,) = event["choices"]
            parts.setdefault(choice["index"], []).append(choice)
        for whole in wanted:
            own = parts[whole["index"]]
            length = len(ids_of(PROMPTS[whole["index"] // 2]))
            assert len(own[0]["logprobs"]["tokens"]) >= length
            assert "".join(choice["text"] for choice in own) == whole["text"]
            for name in COLUMNS:
                assert (
                    sum((choice["logprobs"][name] for choice in own), []) == whole["logprobs"][name]
                )


@pytest.mark.step(2)
def test_offsets_where_the_echo_lacks_text_of_its_tokens():
    """A BOS token that the tokenizer adds, and the space before a text of SentencePiece."""
    from server.completions import LogprobTable

    pieces = [b"<s>", b" Once", b" upon", b"\xf0\x9f", b"\x98\x80", b"!"]
    encoding = SimpleNamespace(decode_single_token_bytes=pieces.__getitem__)
    backend = SimpleNamespace(encoding=encoding)
    served = SimpleNamespace(backend=backend, token_bytes=pieces.__getitem__)
    entries = [None] + [(-1.0, [])] * 5
    entries = [entry and SimpleNamespace(logprob=entry[0], top=entry[1]) for entry in entries]
    for echo, wanted in (
        ("Once upon😀!", [0, 0, 4, 9, 9, 10]),
        (" Once upon😀!", [0, 0, 5, 10, 10, 11]),
        ("<s> Once upon😀!", [0, 3, 8, 13, 13, 14]),
    ):
        table = LogprobTable(served, ())
        assert hasattr(table, "add_prompt"), "prompts have no columns"
        assert table.add_prompt(range(6), entries, echo)["text_offset"] == wanted
        assert table.offset == len(echo)


@pytest.mark.step(2)
def test_allowed_tokens_begin_after_the_prompt(client):
    fields = {"structured_outputs": {"choice": ["cat", "dog"]}, "show_allowed": 2}
    (choice,) = asked(client, prompt="Tom saw a", **fields)
    table = choice["logprobs"]
    length = len(ids_of("Tom saw a"))
    assert len(table["allowed"]) == len(table["tokens"]) > length
    assert table["allowed"][:length] == [None] * length and None not in table["allowed"][length:]


@pytest.mark.step(2)
def test_replicas_send_them(tiny_llama, tmp_path):
    args = parse(save_small(tiny_llama, tmp_path))
    bodies = [ASKED | {"prompt": ["cat", "a dog"], "max_tokens": count} for count in (0, 3)]
    with serving_replicas(args, 1) as (client, _), serving(lambda: make_engine(args)) as one:
        for body in bodies:
            status, found = same(client.post(PATH, body))
            assert status == 200 and (status, found) == same(one.post(PATH, body))
            assert found["choices"][1]["logprobs"]["token_logprobs"][1] < 0


@pytest.mark.step(2)
def test_the_official_client(client):
    completions = official_client(client).completions
    fields = {"model": "small", "prompt": "a dog", "echo": True, "logprobs": 0, "max_tokens": 0}
    (choice,) = completions.create(**fields).choices
    assert choice.text == "a dog" and choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.tokens) == len(ids_of("a dog"))


@pytest.mark.step(3)
def test_a_response_is_limited(client):
    """By prompts times choices, before any is computed."""
    body = ASKED | {"n": 64, "prompt": ["word " * 9] * 8, "max_tokens": 0, "logprobs": 20}
    tokens = len(ids_of("word " * 9)) * 64 * 8
    limit = 2**22 // (16 + 21 * 64)
    check_refused(client.post(PATH, body), "echo", f"{tokens} {limit}")
    body = ASKED | {"prompt": "a", "max_tokens": limit - 1, "logprobs": 20, "stop": ["a"]}
    check_refused(client.post(PATH, body | {"prompt": [1, 2]}), "echo", str(limit))
    assert len(asked(client, **body)[0]["logprobs"]["tokens"]) > 1
    check_refused(client.post(PATH, body | {"prompt_logprobs": 1}), "prompt_logprobs")


@pytest.mark.step(2)
def test_a_request_that_fails_in_its_prompt_shows_no_part_of_it(tiny_llama):
    def make():
        made = small_engine(tiny_llama, max_num_batched_tokens=4)
        return failing(made, lambda request: len(request.prompt_logprobs) > 4)

    body = ASKED | {"prompt": "word " * 9}
    with serving(make) as client:
        assert client.post(PATH, body) == (500, server_error(NOT_FINITE))
        *events, last = client.events(PATH, body | {"stream": True})
    assert last == server_error(NOT_FINITE)
    assert [event["choices"][0]["logprobs"]["tokens"] for event in events] == [[]]
