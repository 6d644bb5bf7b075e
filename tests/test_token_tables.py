"""Log-probabilities of completions. Oracle: the engine itself."""

import pytest
from serving import PATH, check_refused, results_of, serving, small_encoding, small_engine, writing

from sampling import SamplingParams


def name(token: int) -> str:
    data = small_encoding().decode_single_token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + repr(data)[2:-1] if len(repr(data)) == 4 * len(data) + 3 else "mixed"


@pytest.mark.parametrize("count", [0, 1, 20])
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
    for token, own, entry, shown in zip(
        tokens, found["tokens"], logprobs, found["top_logprobs"], strict=True
    ):
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
    """What a server answers that writes this text, whatever its model thinks, and its tokens."""
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


def test_each_choice_has_its_own(client):
    body = {"prompt": ["Tom", "a dog"], "n": 2, "seed": 1, "max_tokens": 5, "logprobs": 0}
    for choice in client.post(PATH, body | {"ignore_eos": True})[1]["choices"]:
        assert choice["logprobs"]["text_offset"][0] == 0 and len(choice["logprobs"]["tokens"]) == 5


def test_without_asking_there_are_none(client):
    assert client.post(PATH, {"logprobs": None})[1]["choices"][0]["logprobs"] is None
    (choice,) = client.post(PATH, {"logprobs": 0, "max_tokens": 0})[1]["choices"]
    columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    assert choice["logprobs"] == {column: [] for column in columns}


@pytest.mark.parametrize(
    "body, said",
    [
        ({"logprobs": 21}, "20"),
        ({"logprobs": True}, "integer"),
        ({"logprobs": 0, "echo": True}, "echo"),
    ],
)
def test_what_is_refused(client, body, said):
    check_refused(client.post(PATH, body), "logprobs", said)
