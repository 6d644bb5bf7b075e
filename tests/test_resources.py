"""What hostile clients can take from a server: the event loop's time."""

import signal
import time

import pytest
from test_draining import door_of, start

MANY = 2**18  # elements, as a body of 1 MiB can have


def completion(**fields):
    from server.protocol import CompletionRequest

    return CompletionRequest.model_validate(fields)


def chat(content):
    from server.protocol import ChatRequest

    return ChatRequest.model_validate({"messages": [{"role": "user", "content": content}]})


def messages(value):
    from server.protocol import ChatRequest

    return ChatRequest.model_validate({"messages": value})


@pytest.mark.parametrize(
    "make, value",
    [
        (lambda value: completion(prompt=value), [{}] * MANY),
        (lambda value: completion(prompt=value), [[]] * MANY),
        (lambda value: completion(prompt=value), [[1]] * MANY),
        (lambda value: completion(prompt=value), [[{}] * MANY]),
        (lambda value: completion(prompt=value), ["a"] + [[]] * MANY),
        (lambda value: completion(prompt=value), [1] + [[]] * MANY),
        (lambda value: completion(stop=value), [[]] * MANY),
        (chat, [{}] * MANY),
        (chat, [{"type": "text", "text": ""}] * MANY),
        (messages, [{"role": "user", "content": ""}] * MANY),
    ],
)
def test_a_long_list_is_refused_at_its_first_error(make, value):
    """Within 50 ms: all streams stand still meanwhile."""
    from pydantic import ValidationError

    times = []
    for _ in range(3):
        began = time.thread_time()
        with pytest.raises(ValidationError) as refused:
            make(value)
        times.append(time.thread_time() - began)
        assert refused.value.error_count() == 1
    assert min(times) < 0.05


def test_the_longest_lists():
    """As many prompts, messages or parts as there may be; one more is refused by name."""
    from pydantic import ValidationError

    most = 2**14
    message = {"role": "user", "content": ""}
    part = {"type": "text", "text": ""}
    for make, item in (
        (lambda value: completion(prompt=value), "a"),
        (lambda value: completion(prompt=value), [1]),
        (chat, part),
        (messages, message),
    ):
        make([item] * most)
        with pytest.raises(ValidationError, match=str(most)):
            make([item] * (most + 1))
    assert completion(prompt=[1] * MANY).prompts == [[1] * MANY]


COUNTS = """
import atexit
import gc
import serve

atexit.register(lambda: print(gc.get_freeze_count(), gc.get_threshold()[0]))
serve.main({arguments})
"""


def test_garbage_is_not_looked_for_among_what_stays():
    """A body of half a million lists would have it looked through several times."""
    with start(program=COUNTS) as server:
        door_of(server)
        server.send_signal(signal.SIGTERM)
        frozen, threshold = map(int, server.stdout.read().split())
    assert frozen > 100_000 and threshold >= 10_000
