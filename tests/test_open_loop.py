"""Requests at moments of their own, on a clock that only waiting moves."""

import errno
import math
import os
import socket

import numpy
import pytest
from loads import URL, check_seeds, in_time_shares, metrics_of, near, steady, timed_completion

from benchmarks import client

BUSY = b"HTTP/1.1 429 Busy\r\nContent-Length: 0\r\n\r\n"


def send(arrival_times, *wanted):
    """What came of requests for these numbers of tokens, at these moments."""
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
    load = send([0.0, 1.0, 5.0], 1, 2, 3)
    assert [moment for moment, _ in fake.requests] == [0, near(3), near(5)]  # the third is not late
    lags = [round(output.send_time - output.arrival_time, 6) for output in load.outputs]
    assert lags == [0, 2, 0]
    assert (load.outputs[1].ttft, load.outputs[1].tpot) == (near(2500), near(250))
    values = metrics_of(load)
    assert values["send lag, ms, p99"] == near(2000 * 0.98)
    assert values["send lag, ms, p100"] == near(2000)


def test_rates_are_those_of_the_seconds_to_the_last_request(fake):
    times = {3: (0.5, 0.7, 1.1), 2: (1.0, 1.25)}
    fake.respond = lambda body: timed_completion(*times[body["max_tokens"]])
    values = metrics_of(send([1.0, 1.6], 3, 2), ttft=600)
    # The first of three tokens comes at 1.5, the others after 1.6.
    assert values["tokens/s"] == near(1 / 1.6)
    assert values["goodput, requests/s"] == near(1 / 3 / 1.6)
    assert (values["ttft, ms, p50"], values["send lag, ms, p100"]) == (near(750), near(0))


def test_a_client_without_sockets_does_not_blame_the_server(fake, monkeypatch):
    """Its request has a send lag, and nothing else."""
    reason = os.strerror(errno.EMFILE)

    def no_more():
        raise OSError(errno.EMFILE, reason)

    def answer(body):
        monkeypatch.setattr(socket, "socketpair", no_more)  # the connections of the fake server
        return [(1, BUSY)]

    fake.respond = answer
    load = send([0.0, 1.0], 1, 1)
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
    check_seeds(fake, table, line)


@pytest.mark.parametrize("rate, seconds, count", [(1.1, 50, 55), (1.24, 10, 12), (0.01, 10, 1)])
def test_a_rate_is_of_so_many_requests(fake, table, rate, seconds, count):
    fake.respond = lambda body: timed_completion(0.5)
    code, values, _ = table("--request-rate", rate, "--seconds", seconds, "--new-tokens", 1, 1)
    assert (code, values["requests"]) == (0, count)  # 1.1 * 50 is above 55, as floats are
    assert fake.requests[-1][0] == near(count / rate)
