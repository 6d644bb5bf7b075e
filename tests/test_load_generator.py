"""What clients see of a server, closed and open loop, on a clock that only waiting moves."""

import errno
import itertools
import math
import os
import socket

import numpy
import pytest
from conftest import CHECKPOINTS
from loads import (
    END,
    STREAM,
    URL,
    chunk,
    counts,
    in_time_shares,
    metrics_of,
    near,
    raw_chunk,
    steady,
    timed_completion,
)
from serving import serving, small_engine

from benchmarks import client
from text.tokenizer import load_encoding

DONE = "data: [DONE]\n\n"


def send(*wanted, seconds=10.0):
    """What came of requests for these numbers of tokens, each by its own client, all sent at 0."""
    exchanges = [client.Exchange(URL, {"prompt": "x", "max_tokens": count}) for count in wanted]
    return client.run(client.closed_loop(iter(exchanges), len(wanted), seconds))


def test_known_times_give_exactly_these_figures(fake):
    times = {3: (0.5, 0.7, 1.1), 2: (1.0, 1.25)}
    fake.respond = lambda body: timed_completion(*times[body["max_tokens"]])
    load = send(3, 2, seconds=0.8)
    values = metrics_of(load, ttft=600, tpot=301)
    # Of the five tokens two come in those 0.8 seconds, both of the first text.
    expected = {"requests": 2, "failed": 0, "tokens/s": 2 / 0.8, "goodput, requests/s": 2 / 3 / 0.8}
    expected |= {"ttft, ms, p50": 750, "ttft, ms, p99": 995}
    expected |= {"tpot, ms, p50": 275, "tpot, ms, p99": 299.5}
    expected |= {"itl, ms, p50": 250, "itl, ms, p99": 397, "itl, ms, p100": 400}
    for name, value in expected.items():
        assert values[name] == near(value), name
    assert values["client CPU, us per token"] > 0
    assert metrics_of(load, ttft=400)["goodput, requests/s"] == 0
    assert metrics_of(load)["goodput, requests/s"] == near(2 / 3 / 0.8)
    assert metrics_of(send(3, 2, seconds=1.2))["goodput, requests/s"] == near(1.5 / 1.2)


def test_a_text_of_one_token_has_no_time_per_token(fake):
    fake.respond = lambda body: steady(body, 0.5)
    values = metrics_of(send(1, 1, 3), tpot=1)
    assert (values["tpot, ms, p50"], values["tpot, ms, p99"]) == (near(250), near(250))
    assert values["goodput, requests/s"] == near(2 / 10)  # one token is within any limit
    values = metrics_of(send(1, 1))
    assert values["ttft, ms, p50"] == near(500)
    assert not [name for name in values if name.startswith(("tpot", "itl", "chunk gap"))]


def test_clients_wait_for_their_answers(fake):
    fake.respond = lambda body: steady(body, 1.0, 1.0)
    request_bodies = itertools.repeat({"prompt": "x", "max_tokens": 2})
    endless = (client.Exchange(URL, body) for body in request_bodies)
    load = client.run(client.closed_loop(endless, 3, 5.0))
    arrived = [moment for moment, _ in fake.requests]
    assert arrived == [near(at) for at in (0, 0, 0, 2, 2, 2, 4, 4, 4)]
    assert fake.max_open == 3
    assert [output.send_time for output in load.outputs] == arrived
    assert [output.ttft for output in load.outputs] == [near(1000)] * 9
    # Tokens at 1, 2, 3, 4, then 5 and 6: those come when no client is to ask any more.
    assert metrics_of(load)["tokens/s"] == near(3 * 4 / 5)
    three = [client.Exchange(URL, {"prompt": "x", "max_tokens": 1}) for _ in range(3)]
    assert len(client.run(client.closed_loop(iter(three), 2, math.inf)).outputs) == 3


def test_tokens_of_one_chunk_came_together(fake):
    first, second = chunk(" a b", tokens=2), chunk(" c d e", "length", tokens=5)
    end = raw_chunk(second + DONE) + END
    fake.respond = lambda body: [(1, STREAM + raw_chunk(first)), (3, end)]
    load = send(5)
    (output,) = load.outputs
    assert (output.times, output.text) == ([1, 1, 3, 3, 3], " a b c d e")
    values = metrics_of(load)
    assert (values["itl, ms, p50"], values["itl, ms, p100"]) == (0, near(2000))
    assert values["tpot, ms, p50"] == near(500)


def test_without_counts_a_chunk_is_a_token_if_the_sum_agrees(fake):
    """Otherwise gaps between chunks are not called gaps between tokens."""
    in_an_event = [chunk("", "length"), counts(2) + DONE]
    in_the_last_chunk = [chunk("", "length", tokens=2)]  # as transformers
    no_usage = [chunk("", "length") + DONE]  # as llama_cpp.server
    for end in (in_an_event, in_the_last_chunk, no_usage, [chunk("", "length"), counts(4) + DONE]):
        chunks = list(enumerate(map(raw_chunk, [chunk(" a"), chunk(" b"), *end]), 1))
        fake.respond = lambda body, chunks=chunks: [(0, STREAM), *chunks, (4, END)]
        count = 4 if end[-1] == counts(4) + DONE else 2
        load = send(count)
        assert load.outputs[0].times == [1, 2]
        name = "itl, ms, p50" if count == 2 else "chunk gap, ms, p50"
        values = metrics_of(load)
        assert values[name] == near(1000) and ("itl, ms, p50" in values) == (count == 2)
        assert values["tpot, ms, p50"] == near(1000 / (count - 1))


def test_however_the_bytes_come(fake):
    text = "é 🙂"
    events = (chunk(text, tokens=1) + ": ping\n\n" + chunk(" b", "length", 2) + DONE).encode()
    windows = events.replace(b"\n", b"\r\n")
    plain = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(windows)
    until_close = b"HTTP/1.0 200 OK\r\n\r\n"
    for data in (STREAM + raw_chunk(events) + END, plain + windows, until_close + events):
        fake.respond = lambda body, data=data: [(0, data[i : i + 1]) for i in range(len(data))]
        (output,) = send(2).outputs
        assert (output.failure, output.text, output.tokens) == ("", f"{text} b", 2)
    first, second = events[:40], events[40:]  # it counts from when all of an event was there
    fake.respond = lambda body: [(0, STREAM + raw_chunk(first)), (2, raw_chunk(second) + END)]
    assert send(2).outputs[0].times == [2, 2]


def stream(*events: str, end: bytes = END) -> list[tuple[float, bytes]]:
    return [(1, STREAM), *((2, raw_chunk(event)) for event in events), (3, end)]


def test_a_load_is_an_error_only_if_all_requests_failed(fake, table):
    answers = itertools.cycle([timed_completion(0.5), stream(chunk(), ERROR, DONE)])
    fake.respond = lambda body: next(answers)
    code, values, err = table("--clients", 2, "--seconds", 1e-9, "--new-tokens", 1, 1)
    assert (code, values["requests"], values["failed"], err) == (0, 2, 1, "")


def test_nobody_listens(table):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, so no one else has it, and no one listens
        where = ("--url", f"http://127.0.0.1:{taken.getsockname()[1]}")
        code, values, err = table(*where, "--clients", 2, "--seconds", 1e-9)
    assert (code, err) == ("client.py: all 2 requests failed", "")  # the interpreter prints it
    assert (values["failed"], values["failed: no connection"]) == (2, 2)  # each asks once
    code, values, _ = table("--url", "http://a..b:80", "--clients", 1, "--seconds", 1e-9)
    assert (bool(code), values["failed: no connection"]) == (True, 1)  # no host's name


ERROR = 'data: {"error": {"message": "no memory", "type": "server_error"}}\n\n'
CUT = "cut off"
COUNT = "wrong number of tokens"
FAILURES = [  # what is written, and why it does not count
    ([(1, b"HTTP/1.1 429 Busy\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n")], "HTTP 429"),
    (stream(chunk(), ERROR, DONE), "error event"),
    (stream(chunk(), end=raw_chunk(chunk())[:20]), CUT),
    (stream(chunk(), chunk(reason="length"), end=b""), CUT),
    ([], CUT),
    (stream(), CUT),
    (stream(chunk(), chunk(reason="stop")), COUNT),
    (stream(chunk(tokens=2), chunk(reason="length", tokens=4)), COUNT),
    (stream(chunk(), chunk(reason="length"), counts(2)), COUNT),
    (stream(chunk(tokens=1), chunk(reason="length", tokens=2), counts(2)), COUNT),
    (stream(chunk("", "length"), counts(3)), COUNT),
    (stream("data: {\n\n"), "no completion"),
    (stream(f"data: {'[' * 10**5}\n\n"), "no completion"),
    (stream('data: {"object": "x"}\n\n'), "no completion"),
    (stream(chunk(reason="length", tokens="3")), "no completion"),
    ([(1, STREAM), (10_000, b"")], "timeout after 120 s"),
]


@pytest.mark.parametrize("written, why", FAILURES)
def test_failures_are_counted_and_nothing_else_of_them_is(fake, written, why):
    fake.respond = lambda body: written if body["max_tokens"] == 3 else timed_completion(0.5, 0.75)
    load = send(2, 3, 2)
    assert [output.failure for output in load.outputs] == ["", why, ""]
    values = metrics_of(load, ttft=1000)
    assert (values["requests"], values["failed"], values[f"failed: {why}"]) == (3, 1, 1)
    assert (values["tokens/s"], values["goodput, requests/s"]) == (near(0.4), near(0.2))
    assert values["ttft, ms, p99"] == near(500)
    alone = metrics_of(send(3))
    assert (alone["requests"], alone["failed"], alone["tokens/s"]) == (1, 1, 0)
    assert "ttft, ms, p50" not in alone


def test_words_are_tokens():
    words = client.WORDS
    assert len(set(words)) == len(words) > 50
    for name in ("stories", "stories-llama"):
        encoding = load_encoding(CHECKPOINTS / name, 4096)
        assert all(len(encoding.encode(f" {word}")) == 1 for word in words)

    def bodies(seed, *first):
        return list(itertools.islice(client.request_bodies(seed, (2, 4), (3, 5), *first), 50))

    some = bodies("seed")
    assert bodies("seed") == some != bodies("other")
    assert {body["max_tokens"] for body in some} == {3, 4, 5}
    assert {len(body["prompt"].split()) for body in some} == {2, 3, 4}
    assert bodies("seed", " Once upon")[0]["prompt"] == " Once upon" + some[0]["prompt"]


def test_the_command_line_asks_what_it_says(fake, table):
    fake.respond = steady
    sizes = ("--prompt-words", 2, 6, "--new-tokens", 4, 8, "--goodput", 251, 251)
    line = ("--clients", 3, *sizes, "--extra-body", '{"model": "x", "ignore_eos": null}')
    code, values, err = table(*line)
    assert (code, err) == (0, "")
    assert values["requests"] == len(fake.requests) and values["failed"] == 0
    assert 4 < fake.requests[-1][0] < 5 and fake.max_open == 3
    assert (values["ttft, ms, p99"], values["itl, ms, p50"]) == (250, 250)
    # 12 a second, without those that come after the five seconds.
    assert values["tokens/s"] == pytest.approx(12, abs=0.7)
    goodput = sum(in_time_shares(fake.requests, 5)) / 5
    assert values["goodput, requests/s"] == pytest.approx(goodput, rel=1e-3)
    for _, body in fake.requests:
        assert 2 <= len(body["prompt"].split()) <= 6 and 4 <= body["max_tokens"] <= 8
        assert body["stream"] is True
        assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
        assert (body["model"], body["ignore_eos"], body["temperature"]) == ("x", None, 0)
    fake.requests.clear()
    table("--clients", 2, "--seconds", 10)
    assert all(body["ignore_eos"] is True for _, body in fake.requests)


def test_a_real_server(table, tiny_llama):
    with serving(lambda: small_engine(tiny_llama, max_num_seqs=2, page_size=8)) as server:
        few = ("--prompt-words", 2, 4, "--new-tokens", 3, 6, "--seconds", 0.3)
        code, values, err = table("--url", f"http://127.0.0.1:{server.port}", *few, "--clients", 3)
    assert (code, err, values["failed"]) == (0, "", 0)
    assert values["requests"] >= 3
    assert 0 < values["ttft, ms, p50"] <= values["ttft, ms, p99"]
    assert "itl, ms, p50" in values  # it counts its tokens


# Requests at moments of their own.

BUSY = b"HTTP/1.1 429 Busy\r\nContent-Length: 0\r\n\r\n"


def send_at(arrival_times, *wanted):
    exchanges = [client.Exchange(URL, {"prompt": "x", "max_tokens": count}) for count in wanted]
    return client.run(client.open_loop(exchanges, arrival_times))


def test_a_stall_is_one_late_answer_in_a_closed_loop_and_many_in_an_open_one(fake, table):
    waits = []

    def answer(body):
        moment = fake.clock.now + 0.1
        waits.append((20.0 if 10.0 < moment < 20.0 else moment) - fake.clock.now)  # it stalls
        return timed_completion(waits[-1])

    fake.respond = answer
    found = []
    for how in (("--clients", 1), ("--request-rate", 10)):  # the same load without a stall
        waits.clear()
        code, values, _ = table(*how, "--seconds", 30, "--new-tokens", 1, 1)
        assert (code, values["failed"], values["ttft, ms, p50"]) == (0, 0, 100)
        found.append((sum(wait > 0.11 for wait in waits), values["ttft, ms, p99"]))
    # One answer in 200 is late: the client asked for nothing while it waited for that.
    assert found[0] == (1, 100)
    # All that were due in ten of the thirty seconds.
    assert 80 < found[1][0] < 120 and 9000 < found[1][1] <= 10_000


def test_clocks_start_when_a_request_was_due_however_late_it_was_sent(fake):
    def answer(body):
        if body["max_tokens"] == 1:
            fake.clock.now += 3  # the client cannot run meanwhile
        return steady(body, 0.5)

    fake.respond = answer
    load = send_at([0.0, 1.0, 5.0], 1, 2, 3)
    assert [moment for moment, _ in fake.requests] == [0, near(3), near(5)]  # the third is not late
    lags = [round(output.send_time - output.arrival_time, 6) for output in load.outputs]
    assert lags == [0, 2, 0]
    assert (load.outputs[1].ttft, load.outputs[1].tpot) == (near(2500), near(250))
    values = metrics_of(load)
    assert values["send lag, ms, p99"] == near(2000 * 0.98)
    assert values["send lag, ms, p100"] == near(2000)


def test_a_client_without_sockets_does_not_blame_the_server(fake, monkeypatch):
    reason = os.strerror(errno.EMFILE)

    def no_more():
        raise OSError(errno.EMFILE, reason)

    def answer(body):
        monkeypatch.setattr(socket, "socketpair", no_more)  # the connections of the fake server
        return [(1, BUSY)]

    fake.respond = answer
    load = send_at([0.0, 1.0], 1, 1)
    failures = ["HTTP 429", f"client: {reason}"]
    assert [output.failure for output in load.outputs] == failures
    values = metrics_of(load)
    assert [values[f"failed: {failure}"] for failure in failures] == [1, 1]
    assert (values["requests"], values["tokens/s"]) == (2, 0)
    assert values["send lag, ms, p100"] == near(0) and "ttft, ms, p50" not in values


def test_arrivals_are_poissons_and_seeded():
    arrival_times = client.poisson_arrivals(20_000, 8.0, "seed")
    assert arrival_times == client.poisson_arrivals(20_000, 8.0, "seed")
    assert arrival_times != client.poisson_arrivals(20_000, 8.0, "other")
    assert arrival_times[-1] == near(20_000 / 8)
    gaps = numpy.diff([0.0, *arrival_times])
    assert gaps.min() > 0 and gaps.std() == pytest.approx(1 / 8, rel=0.03)
    assert numpy.mean(gaps > 1 / 8) == pytest.approx(math.exp(-1), abs=0.01)
    in_each_second = numpy.bincount(numpy.array(arrival_times, dtype=int))
    assert in_each_second.var() == pytest.approx(8, rel=0.1)


def test_the_command_line_asks_at_random_moments(fake, table):
    fake.respond = steady
    line = ("--request-rate", 10, "--new-tokens", 4, 8, "--goodput", 251, 251)
    code, values, err = table(*line)
    assert (code, err) == (0, "")
    assert values["requests"] == len(fake.requests) == 50  # in five seconds
    assert (values["ttft, ms, p99"], values["itl, ms, p50"]) == (250, 250)
    goodput = sum(in_time_shares(fake.requests, 5)) / 5
    assert values["goodput, requests/s"] == pytest.approx(goodput, rel=1e-3)
    gaps = numpy.diff([arrived for arrived, _ in fake.requests])
    assert fake.requests[-1][0] == near(5) and 0.05 < gaps.std() < 0.15
    first = list(fake.requests)
    for seed, same in ((0, True), (1, False)):
        fake.requests.clear()
        table(*line, "--seed", seed)
        assert (fake.requests == first) is same
