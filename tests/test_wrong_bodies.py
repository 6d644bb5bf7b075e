"""What is wrong with a body is one sentence, however long the body is."""

import pytest
from serving import PATH, check_refused

OBJECT = "JSON object Content-Type: application/json"


@pytest.mark.parametrize(
    "body, param, said",
    [
        (b"", None, OBJECT),
        (b"[1]", None, OBJECT),
        (b'{"prompt', None, "JSON Unterminated string"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"max_tokens": "3"}, "max_tokens", "integer"),
        ({"max_tokens": -2}, "max_tokens", "max_tokens"),
        ({"temperature": -1}, "temperature", "-1.0 0"),
        (b'{"temperature": NaN}', "temperature", "nan 0"),
    ],
)
def test_a_wrong_body_is_one_sentence(client, body, param, said):
    check_refused(client.post(PATH, body), param, said)


def test_another_type_of_body_is_refused(client):
    """A page of another origin could send it unasked."""
    check_refused(client.post(PATH, {}, {"Content-Type": "text/plain"}), None, OBJECT)


def test_a_malformed_body_of_a_megabyte_has_a_short_answer(client):
    for body in (b"[" * 10**6, {"prompt": [["x"] * 200_000]}, {"prompt": {"x" * 10**6: 1}}):
        with client.send("POST", PATH, body) as answer:
            assert answer.status == 400 and len(answer.read()) < 300


def test_half_a_letter_is_no_text(client):
    status, answer = client.post(PATH, {"prompt": "\ud800", "echo": True, "stream": True})
    assert status == 400 and answer["error"]["message"].startswith("prompt: not UTF-8 text")
