"""Which tokens a constraint allowed, place by place. Oracle: all texts of a small one."""

import functools
import itertools
import json
import threading

import pytest
from serving import (
    PATH,
    connect,
    is_free,
    refusal,
    request_of,
    serving,
    small_encoding,
    small_engine,
    until,
)

from server.allowed import AllowedTokensTracker

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Tom"}]
ASKED = {PATH: {"prompt": "Tom", "logprobs": 3}}
ASKED[CHAT] = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3}
SCHEMA = {
    "type": "object",
    "properties": {"animal": {"enum": ["cat", "dog", "fox"]}, "wild": {"type": "boolean"}},
    "required": ["animal", "wild"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
CHOICES = ("a cat", "a cow", "a cat sat", "\N{SEAL}")
OBJECTS = tuple(
    json.dumps({"animal": animal, "wild": wild}, separators=(",", ":"))
    for animal, wild in itertools.product(["cat", "dog", "fox"], [True, False])
)
STRINGS = ("abd", "abe", "abcd", "abce", "bad", "bae", "bacd", "bace")
CONSTRAINTS = [
    ({"response_format": NAMED}, OBJECTS),
    ({"structured_outputs": {"choice": CHOICES}}, CHOICES),
    ({"structured_outputs": {"regex": "(ab|ba)c?[de]"}}, STRINGS),
]
END = 4095


PIECES = [small_encoding().decode_single_token_bytes(token) for token in range(END + 1)]


@functools.cache
def may_follow(text: bytes, texts: tuple[str, ...]) -> list[bytes]:
    """The pieces after which it begins one of these texts, and the end after a whole one."""
    wanted = [each.encode() for each in texts]
    found = [piece for piece in PIECES[:END] if any(w.startswith(text + piece) for w in wanted)]
    return found + PIECES[END:] * (text in wanted)


def places_of(path: str, choice: dict) -> tuple[list[tuple], tuple | None]:
    """Of each token: its bytes, the most likely ones, how many are allowed, which; what is next."""

    def piece(found) -> bytes:
        if path == CHAT:
            return bytes(found["bytes"])
        if found.startswith("bytes:"):
            return found[6:].encode().decode("unicode-escape").encode("latin-1")
        return found.encode()

    def place(found: dict) -> tuple[int, list[bytes]]:
        return found["count"], list(map(piece, found["tokens"]))

    given = choice["logprobs"]
    after = given["next_allowed"] and place(given["next_allowed"])
    if path == CHAT:
        tokens = given["content"]
        tops = [entry["top_logprobs"] for entry in tokens]
        places = [entry["allowed"] for entry in tokens]
    else:
        tokens, places = given["tokens"], given["allowed"]
        tops = [sorted(top, key=top.get, reverse=True)[:3] for top in given["top_logprobs"]]
    tops = [list(map(piece, top)) for top in tops]
    return list(zip(map(piece, tokens), tops, map(place, places), strict=True)), after


def is_fixed(text: bytes, texts: tuple[str, ...]) -> bool:
    """Whether one byte alone may follow: a grammar then takes the token that the tokenizer does."""
    wanted = [each.encode()[len(text) :][:1] for each in texts if each.encode().startswith(text)]
    return len(set(wanted)) == 1 and wanted[0] != b""


def check_places(places: list[tuple], texts: tuple[str, ...], most: int) -> None:
    text = b""
    for token, top, (count, listed) in places:
        allowed = may_follow(text, texts)
        one = texts is not CHOICES and is_fixed(text, texts)
        assert count == len(allowed) or (one and count == 1 and listed in ([token], []))
        assert token in allowed
        assert len(listed) == min(count, most) and set(listed) <= set(allowed)
        if most == 20 and not one:
            likely = [piece for piece in top if piece in allowed]
            assert [piece for piece in listed if piece in top] == listed[: len(likely)] == likely
        text += token


def text_of(choice: dict) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("path, most", [(PATH, 20), (PATH, 0), (CHAT, 20), (CHAT, 2)])
@pytest.mark.parametrize("constraint, texts", CONSTRAINTS, ids=["schema", "choice", "regex"])
def test_each_place_has_what_all_texts_of_the_constraint_allow(
    client, path, constraint, texts, most
):
    body = ASKED[path] | constraint | {"n": 2, "seed": 1, "max_tokens": 40}
    plain = client.post(path, body)[1]["choices"]
    body["show_allowed"] = most
    status, whole = client.post(path, body)
    assert status == 200, whole
    assert list(map(text_of, whole["choices"])) == list(map(text_of, plain))
    known = {}  # of each text: its places so far, and what the last event said of the next one
    for event in client.events(path, body | {"stream": True}):
        (choice,) = event["choices"]
        places, after = places_of(path, choice)
        before, promised = known.get(choice["index"], ([], None))
        if promised and places:
            count, listed = places[0][2]
            assert count == promised[0] and (count > most or set(listed) == set(promised[1]))
        assert (after is None) == (choice["finish_reason"] is not None)
        known[choice["index"]] = before + places, after
    for choice in whole["choices"]:
        places, after = places_of(path, choice)
        assert after is None and choice["finish_reason"] == "stop"
        check_places(places, texts, most)
        assert known[choice["index"]][0] == places


def test_a_text_that_is_cut_has_its_places(client):
    body = ASKED[PATH] | {"response_format": NAMED, "max_tokens": 3, "show_allowed": 20}
    (choice,) = client.post(PATH, body)[1]["choices"]
    places, after = places_of(PATH, choice)
    assert len(places) == 3 and after is None and choice["finish_reason"] == "length"
    check_places(places, OBJECTS, 20)
    status, answer = client.post(PATH, body | {"max_tokens": 0})  # an empty one has none
    assert status == 200 and answer["choices"][0]["logprobs"]["allowed"] == []
    body = ASKED[CHAT] | {"response_format": NAMED, "show_allowed": None, "max_tokens": 2}
    status, answer = client.post(CHAT, body)  # null asks for nothing
    assert status == 200 and answer["choices"][0]["logprobs"].keys() == {"content"}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"response_format": None}, " requires response_format or structured_outputs"),
        ({"response_format": {"type": "text"}}, " requires response_format or structured_outputs"),
        ({"logprobs": None, "top_logprobs": None}, " requires logprobs"),
        ({"logprobs": False, "top_logprobs": None}, " requires logprobs"),
        ({"show_allowed": 21}, ": Input should be less than or equal to 20"),
        ({"show_allowed": -1}, ": Input should be greater than or equal to 0"),
        ({"show_allowed": True}, ": Input should be a valid integer"),
        ({"show_allowed": [3]}, ": Input should be a valid integer"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said(client, fields, message):
    for path, asked in ASKED.items():
        body = asked | {"response_format": NAMED, "show_allowed": 3} | fields
        if path == PATH:
            body.pop("top_logprobs", None)
        if path == CHAT or fields.get("logprobs") is not False:
            status, found = client.post(path, body)
            assert (status, found["error"]["param"]) == (400, "show_allowed")
            assert found["error"]["message"].startswith(f"show_allowed{message}")


def test_what_is_listed_counts_against_the_answer(client):
    """Each token has its own log-probability, those of 3 others, and a place with 20 names."""
    body = ASKED[PATH] | {"response_format": NAMED, "show_allowed": 20, "max_tokens": 2**18}
    for stream, entries in ((False, 4 + 21), (True, 4 + 42)):
        most = 2**22 // (16 + 64 * entries)
        what = "sequences: 1, log-probabilities per token: 3, allowed tokens: 20"
        message = f"max_tokens {2**18}: must be at most {most} ({what})"
        assert client.post(PATH, body | {"stream": stream}) == (400, refusal(message, "max_tokens"))


def test_masks_are_made_in_another_thread(tiny_llama, monkeypatch):
    gate = threading.Event()
    threads = set()
    read = AllowedTokensTracker.read

    def slow(self, updates):
        threads.add(threading.current_thread())
        assert gate.wait(60)
        read(self, updates)

    body = ASKED[PATH] | {"response_format": NAMED, "show_allowed": 20, "stream": True}
    monkeypatch.setattr(AllowedTokensTracker, "read", slow)
    with serving(lambda: small_engine(tiny_llama)) as client:
        connection = connect(client, request_of(PATH, body))
        until(lambda: threads)
        assert client.get("/health")[0] == 200
        assert client.post(PATH, {"max_tokens": 3})[0] == 200
        gate.set()
        until(lambda: is_free(client))
        connection.close()
        assert client.thread.thread not in threads


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_masks_are_made_holds_nothing(tiny_llama, monkeypatch, stream):
    gate = threading.Event()
    begun = threading.Event()

    def slow(self, updates):
        begun.set()
        assert gate.wait(60)

    asked = {"structured_outputs": {"regex": "a*"}, "show_allowed": 1, "max_tokens": 5000}
    body = ASKED[PATH] | asked | {"stream": stream, "logit_bias": {END: -100}}
    monkeypatch.setattr(AllowedTokensTracker, "read", slow)
    with serving(lambda: small_engine(tiny_llama)) as client:
        connection = connect(client, request_of(PATH, body))
        assert begun.wait(60)
        connection.close()
        try:
            until(lambda: not client.thread.generations)
        finally:
            gate.set()
        until(lambda: is_free(client))
