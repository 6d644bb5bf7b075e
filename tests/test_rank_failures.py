"""A process that cannot go on: all end, and one line says why."""

import json
import os
import signal
import socket
import time
from asyncio.selector_events import BaseSelectorEventLoop
from datetime import timedelta

import pytest
from ranks import SMALL, script, serving, start, wait, wait_for_output, written

import infer_engine
from engine import options
from model import TorchRunner
from parallel.ranks import TensorParallelGroup, TensorParallelRunner

ARGUMENTS = [*SMALL, "--prompt", "Tom", "--ignore-eos"]
ENDLESS = [*ARGUMENTS, "--max-new-tokens", 10**9]
STREAM = {"prompt": "Tom", "ignore_eos": True, "stream": True}
RANK_LOST = "another process has ended or does not respond"
NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"


def begin(directory) -> list:
    """Two processes that write a text without an end, once it has begun."""
    processes = start(2, script, directory, infer_engine.main, ENDLESS)
    wait_for_output(directory, processes[0], "Tom ")
    return processes


def data_of(event: bytes) -> dict:
    return json.loads(event.strip().removeprefix(b"data: "))


def check_line(directory, *ends: str) -> None:
    """The two have written a line for each of these ends to stderr, and three of statistics."""
    lines = "".join(err for _, err in written(directory, 2)).splitlines()
    counts = "tokens/s", " positions computed", " collectives a step"
    told = [line for line in lines if not any(count in line for count in counts)]
    assert len(told) == len(ends), told
    assert all(line.endswith(f"error: {end}") for line, end in zip(told, ends))


@pytest.mark.parametrize("victim", [0, 1])
def test_one_is_killed(tmp_path, victim):
    processes = begin(tmp_path)
    processes[victim].kill()
    codes = wait(processes)
    assert (codes[victim], codes[1 - victim]) == (-signal.SIGKILL, 2)
    check_line(tmp_path, RANK_LOST if victim else f"rank 1: {RANK_LOST}")


def test_a_worker_stands_still(tmp_path, monkeypatch):
    """In a broadcast, and in a collective of a pass; both pairs of ranks run together."""
    monkeypatch.setattr("parallel.ranks.TIMEOUT", timedelta(seconds=3))
    pairs = {}
    for place in ("broadcast", "all_gather"):
        real = getattr(TensorParallelGroup, place)
        calls = []

        def stopping(self, *arguments, real=real, calls=calls):
            calls.append(1)
            if self.rank and len(calls) == 5:
                os.kill(os.getpid(), signal.SIGSTOP)
            return real(self, *arguments)

        (tmp_path / place).mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(TensorParallelGroup, place, stopping)
            pairs[place] = start(2, script, tmp_path / place, infer_engine.main, ENDLESS)
    for place, processes in pairs.items():
        processes[0].join(100)
        assert wait(processes, 0) == [2, None]
        check_line(tmp_path / place, RANK_LOST)


def test_ctrl_c(tmp_path):
    processes = begin(tmp_path)
    for process in processes:
        os.kill(process.pid, signal.SIGINT)
    code, other = wait(processes)
    assert code == 130 and other in (-signal.SIGINT, 2)  # 2: rank 0 has ended before it hears
    (out, err), other = written(tmp_path, 2)
    assert out.startswith("Tom") and out.endswith("\n") and "tokens/s" in err
    assert other == ("", "")
    check_line(tmp_path)


@pytest.mark.parametrize("place, victim", [("load_shard", 1), ("forward", 0), ("forward", 1)])
def test_one_has_no_memory(tmp_path, monkeypatch, victim, place):
    owner = options if place == "load_shard" else TorchRunner
    real = getattr(owner, place)
    calls = []

    def failing(*arguments, **named):
        calls.append(1)
        if os.environ["RANK"] == str(victim) and len(calls) == (3 if owner is TorchRunner else 1):
            raise RuntimeError(NO_MEMORY)
        return real(*arguments, **named)

    monkeypatch.setattr(owner, place, failing)
    processes = start(2, script, tmp_path, infer_engine.main, [*ARGUMENTS, "--max-new-tokens", 9])
    assert wait(processes) == [2, 2]
    what = "sequences of this step" if owner is TorchRunner else "model and its sequences"
    name = "rank 1: " if victim else ""
    check_line(tmp_path, f"{name}the {what} do not fit in memory")


def test_one_that_fails_when_the_other_is_done_ends_both():
    def end():
        with TensorParallelGroup() as tp_group:
            if tp_group.rank:
                raise ZeroDivisionError("a mistake")

    assert wait(start(2, end)) == [2, 1]


def test_without_a_store_each_says_why():
    class Gone:
        def add(self, *_):
            raise RuntimeError("it was in a process that has ended")

    tp_group = object.__new__(TensorParallelGroup)
    tp_group.store = Gone()
    assert tp_group.is_first_failure()


def test_who_has_to_wait_has_no_limit(tmp_path, monkeypatch):
    real = options.load_shard

    def slow(*arguments, **named):
        time.sleep(4 if os.environ["RANK"] == "1" else 0)
        return real(*arguments, **named)

    def idle():
        with TensorParallelGroup() as group:
            time.sleep(0 if group.rank else 4)
            group.broadcast()

    monkeypatch.setattr(options, "load_shard", slow)
    monkeypatch.setattr("parallel.ranks.TIMEOUT", timedelta(seconds=3))
    loading = start(2, script, tmp_path, infer_engine.main, [*ARGUMENTS, "--max-new-tokens", 3])
    assert [wait(processes) for processes in (start(2, idle), loading)] == [[0, 0]] * 2


def test_a_mistake_has_its_traceback(tmp_path, monkeypatch):
    def run_worker_loop(*arguments):
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(TensorParallelRunner, "run_worker_loop", run_worker_loop)
    processes = start(2, script, tmp_path, infer_engine.main, ARGUMENTS)
    assert wait(processes) == [2, 1]
    (_, err), (_, other) = written(tmp_path, 2)
    assert "ZeroDivisionError: a mistake" in other and "error" not in err


def test_a_mistake_in_a_collective_is_no_lost_rank():
    def collective():
        raise RuntimeError("shape '[2]' is invalid for input of size 3")

    with pytest.raises(RuntimeError) as raised:
        object.__new__(TensorParallelGroup).run_collective(collective)
    assert type(raised.value) is RuntimeError


@pytest.mark.parametrize("number, codes", [("SIGTERM", [0, 0]), ("SIGINT", [130, 2])])
def test_a_server_drains(tmp_path, number, codes):
    with serving(tmp_path) as (processes, client):
        with client.send("POST", "/v1/completions", STREAM | {"max_tokens": 50}) as answer:
            answer.readline()
            for process in processes:
                os.kill(process.pid, getattr(signal, number))
            *_, last, done, end = answer.read().split(b"\n\n")
        assert data_of(last)["choices"][0]["finish_reason"] == "length"
        assert (done, end, wait(processes)) == (b"data: [DONE]", b"", codes)
    check_line(tmp_path)


def test_a_server_loses_a_process(tmp_path):
    with serving(tmp_path) as (processes, client):
        with client.send("POST", "/v1/completions", STREAM | {"max_tokens": 2**18}) as answer:
            answer.readline()
            processes[1].kill()
            *_, error, done, end = answer.read().split(b"\n\n")
        assert data_of(error)["error"]["message"] == RANK_LOST
        assert (done, end, wait(processes)) == (b"data: [DONE]", b"", [2, -signal.SIGKILL])
    check_line(tmp_path, RANK_LOST)


def test_a_server_whose_socket_fails_ends_with_a_note(tmp_path, monkeypatch):
    real = BaseSelectorEventLoop.sock_accept

    async def failing(self, sock):
        await real(self, sock)
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(BaseSelectorEventLoop, "sock_accept", failing)
    with serving(tmp_path) as (processes, client):
        socket.create_connection(("127.0.0.1", client.port)).close()
        assert wait(processes) == [0, 0]
    (_, err), other = written(tmp_path, 2)
    assert err == "note: the server accepts no more connections: [Errno 22] Invalid argument\n"
    assert other == ("", "")


def test_a_server_has_no_memory(tmp_path, monkeypatch):
    real = TorchRunner.forward

    def failing(*arguments):
        if os.environ["RANK"] == "0":
            raise RuntimeError(NO_MEMORY)
        return real(*arguments)

    monkeypatch.setattr(TorchRunner, "forward", failing)
    with serving(tmp_path) as (processes, client):
        status, answer = client.post("/v1/completions", {"prompt": "Tom"})
        error = "the sequences of this step do not fit in memory"
        assert (status, answer["error"]["message"]) == (503, error)
        assert wait(processes) == [2, 2]
    check_line(tmp_path, error)
