"""A server of known times, on a clock that only waiting moves."""

import asyncio
import contextlib
import json
import math
import selectors
import socket
from types import SimpleNamespace

import pytest

from benchmarks import client

STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
URL = "http://127.0.0.1:1"


def raw_chunk(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def chunk(text=" a", reason=None, tokens=None) -> str:
    """An event with a part of a completion. tokens: so far, by its usage; None: it has none."""
    said = {"choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]}
    if tokens is not None:
        said["usage"] = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": 1}
    return f"data: {json.dumps(said)}\n\n"


def counts(tokens: int) -> str:
    usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": 1 + tokens}
    return f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"


def timed_completion(*timestamps: float) -> list[tuple[float, bytes]]:
    events = [chunk(tokens=number) for number, _ in enumerate(timestamps, 1)]
    events[-1] = chunk(reason="length", tokens=len(timestamps))
    chunks = [(timestamp, raw_chunk(event)) for timestamp, event in zip(timestamps, events)]
    end = raw_chunk(counts(len(timestamps)) + "data: [DONE]\n\n") + END
    return [(0, STREAM), *chunks, (timestamps[-1], end)]


def steady(body: dict, first: float = 0.25, gap: float = 0.25) -> list[tuple[float, bytes]]:
    return timed_completion(*[first + gap * at for at in range(body["max_tokens"])])


class Waiting(selectors.DefaultSelector):
    """Has a clock, which jumps to the next moment that a task waits for."""

    now = 0.0

    def select(self, timeout=None):
        found = super().select(0)
        if not found:
            assert timeout is not None, "all tasks wait for ever"
            self.now += timeout
        return found


def fake_server(monkeypatch) -> SimpleNamespace:
    """A server on that clock, instead of the network, and what it was asked: (when, body).

    respond: a function of a request's body that returns what is written, (seconds after the
    request came, bytes), and then the connection is closed.
    """
    state = SimpleNamespace(respond=None, requests=[], clock=Waiting(), open=0, max_open=0)

    async def serve(sock, loop) -> None:
        reader, writer = await asyncio.open_connection(sock=sock)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        body = json.loads(await reader.readexactly(length))
        arrived = loop.time()
        state.requests.append((arrived, body))
        state.open += 1
        state.max_open = max(state.max_open, state.open)
        with contextlib.suppress(ConnectionError):
            for timestamp, data in state.respond(body):
                await asyncio.sleep(arrived + timestamp - loop.time())
                writer.write(data)
            await writer.drain()
        state.open -= 1
        writer.close()

    def make_loop():
        loop = asyncio.SelectorEventLoop(state.clock)
        loop.time = lambda: state.clock.now
        real = loop.create_connection

        async def connect(factory, host=None, port=None, sock=None):
            if sock is not None:
                return await real(factory, sock=sock)
            ours, theirs = socket.socketpair()
            loop.create_task(serve(theirs, loop))
            return await real(factory, sock=ours)

        loop.create_connection = connect
        return loop

    def run(coroutine):
        state.clock = Waiting()
        with asyncio.Runner(loop_factory=make_loop) as runner:
            return runner.run(coroutine)

    monkeypatch.setattr(asyncio, "run", run)
    return state


def client_table(capsys):
    def run(*args):
        code = 0
        try:
            client.main([str(arg) for arg in args])
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code, {line[:32].strip(): float(line[32:]) for line in out.splitlines()}, err

    return run


def metrics_of(load, ttft=math.inf, tpot=math.inf):
    return client.calculate_metrics(load, ttft, tpot)


def in_time_shares(requests, seconds: float) -> list[float]:
    """The share of each text's tokens, one each quarter of a second, that come in that time."""
    shares = []
    for arrived, body in requests:
        timestamps = [arrived + 0.25 * at for at in range(1, body["max_tokens"] + 1)]
        shares.append(sum(timestamp < seconds for timestamp in timestamps) / len(timestamps))
    return shares


def near(value):
    return pytest.approx(value, rel=1e-6, abs=1e-6)
