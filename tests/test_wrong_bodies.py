"""What is wrong with a body is one sentence, however long the body is."""

import pytest
from serving import PATH, refusal

NO_OBJECT = "the body must be a JSON object, with Content-Type: application/json"
INTEGER = "max_tokens: Input should be a valid integer"
NEGATIVE = "max_tokens: Input should be greater than or equal to -1"
FINITE = "temperature: temperature is {}; it must be a finite number >= 0"


@pytest.mark.parametrize(
    "body, message, param",
    [
        (b"", NO_OBJECT, None),
        (b"[1]", NO_OBJECT, None),
        (b'{"prompt', "the body is not JSON: Unterminated string starting at", None),
        ({"max_tokens": 1.5}, INTEGER, "max_tokens"),
        ({"max_tokens": "3"}, INTEGER, "max_tokens"),
        ({"max_tokens": -2}, NEGATIVE, "max_tokens"),
        ({"temperature": -1}, FINITE.format("-1.0"), "temperature"),
        (b'{"temperature": NaN}', FINITE.format("nan"), "temperature"),
    ],
)
def test_a_wrong_body_is_one_sentence(client, body, message, param):
    assert client.post(PATH, body) == (400, refusal(message, param))


def test_another_type_of_body_is_refused(client):
    """A page of another origin could send it unasked."""
    found = client.post(PATH, {}, {"Content-Type": "text/plain"})
    assert found == (400, refusal(NO_OBJECT))


def test_a_malformed_body_of_a_megabyte_has_a_short_answer(client):
    for body in (b"[" * 10**6, {"prompt": [["x"] * 200_000]}, {"prompt": {"x" * 10**6: 1}}):
        with client.send("POST", PATH, body) as answer:
            assert answer.status == 400 and len(answer.read()) < 300


def test_half_a_letter_is_no_text(client):
    status, answer = client.post(PATH, {"prompt": "\ud800", "echo": True, "stream": True})
    assert status == 400 and answer["error"]["message"].startswith("prompt: not UTF-8 text")


@pytest.mark.parametrize(
    "body, place",
    [
        (b'{"prompt": "caf\xe9"}', 15),
        (b"\x1f\x8b\x08\x00", 1),  # compressed
        (b"\xff\xfe{\x00}\x00\x01", 6),  # half a letter of UTF-16
    ],
)
def test_a_body_that_is_not_utf_8_is_named(client, body, place):
    message = f"the body is not UTF-8: byte {place} cannot be decoded"
    assert client.post(PATH, body) == (400, refusal(message))


def test_a_body_may_begin_with_a_mark_of_byte_order(client):
    body = b'{"prompt": "Tom", "max_tokens": 3, "seed": 1}'
    status, marked = client.post(PATH, b"\xef\xbb\xbf" + body)
    assert status == 200 and marked["choices"] == client.post(PATH, body)[1]["choices"]
