"""Requests at moments of their own, on a clock that only waiting moves."""

import errno
import math
import os
import socket

import numpy
import pytest
from loads import URL, early, found, near, whole

from benchmarks import client

BUSY = b"HTTP/1.1 429 Busy\r\nContent-Length: 0\r\n\r\n"


def send(moments, *wanted):
    """What came of requests for so many tokens each, at these moments."""
    exchanges = [client.Exchange(URL, {"prompt": "x", "max_tokens": count}) for count in wanted]
    return client.run(client.open_loop(exchanges, moments))


def test_a_stall_is_one_late_answer_in_a_closed_loop_and_many_in_an_open_one(fake, table):
    began, ended = 10.0, 20.0  # nobody is answered between them
    waits = []

    def answer(body):
        moment = fake.clock.now + 0.1
        wait = (ended if began < moment < ended else moment) - fake.clock.now
        waits.append(wait)
        return whole(wait)

    fake.answer = answer
    shown = {}
    late = {}
    for how in ("--clients", 1), ("--rate", 10):  # the same load for a server that never stalls
        code, values, _ = table(*how, "--seconds", 30, "--new-tokens", 1, 1)
        assert (code, values["failed"]) == (0, 0)
        assert values["ttft, ms, p50"] == 100
        shown[how[0]] = values["ttft, ms, p99"]
        late[how[0]] = sum(wait > 0.11 for wait in waits)
        waits.clear()
    # One answer in 200 is late: the client asked for nothing while it waited for that.
    assert (late["--clients"], shown["--clients"]) == (1, 100)
    # Those due in ten of the thirty seconds.
    assert 80 < late["--rate"] < 120
    assert 9000 < shown["--rate"] <= 10_000


def test_clocks_start_when_a_request_was_due_however_late_it_was_sent(fake):
    def answer(body):
        if body["max_tokens"] == 1:
            fake.clock.now += 3  # the client cannot run meanwhile
        return whole(*[0.5 + 0.25 * token for token in range(body["max_tokens"])])

    fake.answer = answer
    load = send([0.0, 1.0, 5.0], 1, 2, 3)
    assert [came for came, _ in fake.asked] == [0, near(3), near(5)]  # the third is not late
    lags = [round(reply.sent - reply.due, 6) for reply in load.answers]
    assert lags == [0, 2, 0]
    assert (load.answers[1].ttft, load.answers[1].tpot) == (near(2500), near(250))
    values = found(load)
    assert values["send lag, ms, p99"] == near(2000 * 0.98)
    assert values["send lag, ms, p100"] == near(2000)


def test_rates_are_those_of_the_seconds_to_the_last_request(fake):
    times = {3: (0.5, 0.7, 1.1), 2: (1.0, 1.25)}
    fake.answer = lambda body: whole(*times[body["max_tokens"]])
    values = found(send([1.0, 1.6], 3, 2), ttft=600)
    # The first of three tokens comes at 1.5, the others after 1.6.
    assert values["tokens/s"] == near(1 / 1.6)
    assert values["goodput, requests/s"] == near(1 / 3 / 1.6)
    assert (values["ttft, ms, p50"], values["send lag, ms, p100"]) == (near(750), near(0))


def test_a_client_without_sockets_does_not_blame_the_server(fake, monkeypatch):
    """Its request has a send lag, and nothing else."""
    number = errno.EMFILE

    def no_more():
        raise OSError(number, os.strerror(number))

    def answer(body):
        monkeypatch.setattr(socket, "socketpair", no_more)  # the connections of the fake server
        return [(1, BUSY)]

    fake.answer = answer
    load = send([0.0, 1.0], 1, 1)
    failures = ["HTTP 429", f"client: {os.strerror(number)}"]
    assert [reply.failure for reply in load.answers] == failures
    values = found(load)
    assert [values[f"failed: {failure}"] for failure in failures] == [1, 1]
    assert (values["requests"], values["tokens/s"]) == (2, 0)
    assert values["send lag, ms, p100"] == near(0)
    assert "ttft, ms, p50" not in values


def test_arrivals_are_poissons_and_seeded():
    moments = client.arrivals(20_000, 8.0, "seed")
    assert moments == client.arrivals(20_000, 8.0, "seed") != client.arrivals(20_000, 8.0, "other")
    assert moments[-1] == near(20_000 / 8)
    gaps = numpy.diff([0.0, *moments])
    assert gaps.min() > 0
    assert gaps.std() == pytest.approx(1 / 8, rel=0.03)
    assert numpy.mean(gaps > 1 / 8) == pytest.approx(math.exp(-1), abs=0.01)
    in_each_second = numpy.bincount(numpy.array(moments, dtype=int))
    assert in_each_second.var() == pytest.approx(8, rel=0.1)
    slower = numpy.array(client.arrivals(20_000, 4.0, "seed"))
    assert numpy.allclose(slower, 2 * numpy.array(moments), rtol=1e-12)


def test_the_command_line_asks_at_random_moments(fake, table):
    fake.answer = lambda body: whole(*[0.25 * at for at in range(1, body["max_tokens"] + 1)])
    line = ("--rate", 10, "--new-tokens", 4, 8, "--goodput", 251, 251)
    code, values, err = table(*line)
    assert (code, err) == (0, "")
    assert values["requests"] == len(fake.asked) == 50  # in five seconds
    assert (values["ttft, ms, p99"], values["itl, ms, p50"]) == (250, 250)
    goodput = sum(early(fake.asked, 5)) / 5
    assert values["goodput, requests/s"] == pytest.approx(goodput, rel=1e-3)
    gaps = numpy.diff([came for came, _ in fake.asked])
    assert fake.asked[-1][0] == near(5) and 0.05 < gaps.std() < 0.15
    first = list(fake.asked)
    for seed, same in ((0, True), (1, False)):
        fake.asked.clear()
        table(*line, "--seed", seed)
        assert (fake.asked == first) is same
    assert len(fake.asked) == 50


@pytest.mark.parametrize("rate, seconds, count", [(1.1, 50, 55), (1.24, 10, 12), (0.01, 10, 1)])
def test_a_rate_is_of_so_many_requests(fake, table, rate, seconds, count):
    fake.answer = lambda body: whole(0.5)
    code, values, _ = table("--rate", rate, "--seconds", seconds, "--new-tokens", 1, 1)
    assert (code, values["requests"]) == (0, count)  # 1.1 * 50 is above 55, as floats are
    assert fake.asked[-1][0] == near(count / rate)
