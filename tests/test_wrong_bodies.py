"""What is wrong with a body is one sentence, however long the body is."""

import pytest
from serving import PATH, check_refused

OBJECT = "JSON object Content-Type: application/json"
WRONG = [  # body, the field that is named, words of the message
    (b"", None, OBJECT),
    (b"[1]", None, OBJECT),
    (b'{"prompt', None, "JSON Unterminated string"),
    ({"max_tokens": 1.5}, "max_tokens", "integer"),
    ({"max_tokens": "3"}, "max_tokens", "integer"),
    ({"max_tokens": -2}, "max_tokens", "-1"),
    ({"temperature": -1}, "temperature", "-1.0 0"),
    (b'{"temperature": NaN}', "temperature", "nan 0"),
    (b'{"prompt": "caf\xe9"}', None, "UTF-8 15"),
    (b"\x1f\x8b\x08\x00", None, "UTF-8 1"),  # compressed
    (b"\xff\xfe{\x00}\x00\x01", None, "UTF-8 6"),  # half a letter of UTF-16
]


@pytest.mark.parametrize("body, param, said", WRONG)
def test_a_wrong_body_is_one_sentence(client, body, param, said):
    check_refused(client.post(PATH, body), param, said)


def test_another_type_of_body_is_refused(client):
    """A page of another origin could send it unasked."""
    check_refused(client.post(PATH, {}, {"Content-Type": "text/plain"}), None, OBJECT)


def test_a_malformed_body_of_a_megabyte_has_a_short_answer(client):
    for body in (b"[" * 10**6, {"prompt": [["x"] * 200_000]}, {"prompt": {"x" * 10**6: 1}}):
        with client.send("POST", PATH, body) as answer:
            assert answer.status == 400 and len(answer.read()) < 300


def test_a_body_may_begin_with_a_mark_of_byte_order(client):
    body = b'{"prompt": "Tom", "max_tokens": 3, "seed": 1}'
    status, marked = client.post(PATH, b"\xef\xbb\xbf" + body)
    assert status == 200 and marked["choices"] == client.post(PATH, body)[1]["choices"]
