"""Several prompts and several texts for each in one request. Oracle: the engine itself."""

import itertools

import pytest
from serving import (
    PATH,
    check_refused,
    engine_alone,
    failing,
    serving,
    small_encoding,
    small_engine,
    texts_by_index,
    token_counts,
)

TEXTS = ["Tom", "a dog and", "", "é😀"]


@pytest.fixture(scope="module")
def client(tiny_llama):
    with serving(lambda: small_engine(tiny_llama, max_num_seqs=3)) as client:
        yield client


def ids_of(prompt: str) -> list[int]:
    return small_encoding().encode(prompt)


def alone(tiny_llama, prompts, seeds, **params) -> list[tuple]:
    pairs = itertools.product(prompts, seeds)
    return [engine_alone(tiny_llama, prompt, seed=seed, **params)[1::2] for prompt, seed in pairs]


def choices_of(client, body: dict) -> list[tuple]:
    """Text and finish reason of each choice, held to be the same whole and in events."""
    status, found = client.post(PATH, body)
    assert status == 200, found
    assert [choice["index"] for choice in found["choices"]] == list(range(len(found["choices"])))
    whole = [(choice["text"], choice["finish_reason"]) for choice in found["choices"]]
    assert texts_by_index(client.events(PATH, body | {"stream": True})) == dict(enumerate(whole))
    return whole


def test_prompts_in_all_four_forms(client, tiny_llama):
    for prompt, texts in (
        (TEXTS, TEXTS),
        ([ids_of(text) for text in TEXTS], TEXTS),
        (ids_of("a dog and"), ["a dog and"]),
        ([[]], [""]),
    ):
        wanted = alone(tiny_llama, texts, [None], temperature=0)
        assert choices_of(client, {"prompt": prompt, "temperature": 0}) == wanted


def test_n_texts_for_each_prompt_with_seeds_of_their_own(client, tiny_llama):
    body = {"prompt": TEXTS[:2], "n": 3, "seed": 2**64 - 1, "best_of": 3}
    wanted = alone(tiny_llama, TEXTS[:2], [2**64 - 1, 0, 1])
    assert choices_of(client, body) == wanted
    assert len(set(wanted)) == 6
    _, unseeded = client.post(PATH, {"prompt": "Tom", "n": 4})
    assert len({choice["text"] for choice in unseeded["choices"]}) > 1


EDGES = [[0], [4095, 0, 4095]]  # the first and the last id
ECHOES = [  # a prompt and its texts
    *(("Tom é😀", ["Tom é😀"]), (ids_of("Tom é😀"), ["Tom é😀"])),
    ([ids_of("Tom"), ids_of("é")], ["Tom", "é"]),
    (EDGES, list(map(small_encoding().decode, EDGES))),
]


@pytest.mark.parametrize("prompt, echoes", ECHOES)
def test_an_echo_is_the_prompt_before_each_text(client, prompt, echoes):
    body = {"prompt": prompt, "n": 2, "seed": 1, "max_tokens": 5}
    plain = choices_of(client, body)
    echoes = [echo for echo in echoes for _ in range(2)]
    wanted = [(echo + text, reason) for echo, (text, reason) in zip(echoes, plain)]
    assert choices_of(client, body | {"echo": True}) == wanted
    alone = [(echo, "length") for echo in echoes]
    assert choices_of(client, body | {"echo": True, "max_tokens": 0}) == alone


def test_usage_counts_each_prompt_once_and_each_text(client):
    options = {"stream_options": {"include_usage": True}}
    body = {"prompt": TEXTS, "n": 2, "max_tokens": 3, "ignore_eos": True, "temperature": 0}
    given = sum(len(ids_of(text)) or 1 for text in TEXTS)
    usage = {"prompt_tokens": given, "completion_tokens": 24, "total_tokens": given + 24}
    assert token_counts(client.post(PATH, body)[1]["usage"]) == usage
    events = client.events(PATH, body | options | {"stream": True})
    assert token_counts(events[-1]["usage"]) == usage


REFUSED = [  # fields, the one that is named, words of the message
    *(
        ({"prompt": prompt}, "prompt", "string strings token ids lists 16384")
        for prompt in ([], 3, ["a", 3], [1, True], [[1], "a"])
    ),
    ({"prompt": [1, 4096]}, None, "4096 0 4095"),
    ({"prompt": [[1], [-1]]}, None, "-1 0 4095"),
    ({"prompt": [2**32]}, None, f"{2**32} 0 4095"),
    ({"n": 0}, "n", "1"),
    ({"n": 129}, "n", "128"),
    *(({"n": n, "best_of": best}, "best_of", "n") for n, best in ((1, 2), (2, 1), (2, 3))),
]


@pytest.mark.parametrize("body, param, said", REFUSED)
def test_what_is_refused(client, body, param, said):
    for more in ({}, {"stream": True}, {"echo": True}):
        check_refused(client.post(PATH, body | more), param, said)


def test_one_text_that_fails_fails_its_request_alone(tiny_llama):
    def make():
        return failing(small_engine(tiny_llama), lambda request: request.tokens[:2] == [7, 8])

    with serving(make) as client:
        assert client.post(PATH, {"prompt": [[1], [7, 8]]})[0] == 500
        assert client.post(PATH, {"prompt": [[1], [7, 9]]})[0] == 200
        assert not client.thread.generations
