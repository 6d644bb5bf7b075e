"""Clients that leave, over a real socket: what they held is free, and other texts go on."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import uvicorn
from serving import ENDLESS, connect, is_free, request_of, serving, small_engine, until

from serve import UVICORN, Protocol

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2**18, "ignore_eos": True}
RESPONSE = {"input": "x", "max_output_tokens": 2**18, "ignore_eos": True}
PATHS = {"/v1/completions": ENDLESS, "/v1/chat/completions": CHAT, "/v1/responses": RESPONSE}
TEXT, REPLY, RESPONDED = PATHS


def settle(client) -> None:
    """Let the event loop see what has come before: it answers these, one after the other."""
    for _ in range(20):
        client.get("/health")


def check_noticed(client) -> None:
    """A client that leaves is noticed at all, however long its text would be."""
    connection = connect(client, request_of("/v1/completions", ENDLESS))
    until(lambda: client.thread.generations)
    connection.close()
    settle(client)
    assert not client.thread.generations
    until(lambda: is_free(client))


@pytest.mark.parametrize(
    "path, state, stream",
    [
        *((TEXT, "decoding", False), (TEXT, "queued", False), (TEXT, "queued", True)),
        *((TEXT, "prefill", False), (REPLY, "decoding", False), (REPLY, "decoding", True)),
        *((RESPONDED, "decoding", False), (RESPONDED, "decoding", True)),
    ],
)
def test_a_client_that_leaves_frees_what_it_held(tiny_llama, path, state, stream):
    """Within two steps; the text beside it goes on."""
    gate = threading.Event()
    gate.set()
    victims, steps = [], []  # steps: while the request of the client that left is unfinished

    def make():
        size = 1 if state == "queued" else 4
        engine = small_engine(tiny_llama, max_num_seqs=size, max_num_batched_tokens=8)
        step = engine.step

        def gated():
            assert gate.wait(60)
            if any(victim.finish_reason is None for victim in victims):
                steps.append(1)
            return step()

        engine.step = gated
        return engine

    with serving(make) as client:
        scheduler = client.thread.engine.scheduler
        other = connect(client, request_of("/v1/completions", ENDLESS | {"stream": True}))
        until(lambda: scheduler.running and scheduler.running[0].output)
        if state == "prefill":
            gate.clear()  # one step may be under way
        long = {"prompt": "word " * 60} if state == "prefill" else {}
        connection = connect(client, request_of(path, PATHS[path] | {"stream": stream} | long))
        if state == "queued":
            until(lambda: len(scheduler.waiting) == 1)
        elif state == "decoding":
            until(lambda: len(scheduler.running) == 2 and scheduler.running[1].output)
        else:
            until(lambda: len(client.thread.generations) == 2)
            gate.set()
            until(lambda: len(scheduler.running) == 2)
        victim = scheduler.waiting[0] if state == "queued" else scheduler.running[-1]
        victims.append(victim)
        connection.close()
        settle(client)
        assert len(client.thread.generations) == 1
        before = len(steps)
        until(lambda: victim.finish_reason)
        assert len(steps) <= before + 2
        assert victim.finish_reason == "abort" and not victim.pages
        assert len(scheduler.running) == 1 and not scheduler.waiting
        other.close()
        until(lambda: is_free(client))


def test_60_clients_of_which_some_vanish(tiny_llama):
    """The others have the texts they have alone, and afterwards nothing is held."""
    path = "/v1/completions"
    body = {"prompt": "Tom and", "max_tokens": 12}
    with (
        serving(lambda: small_engine(tiny_llama, max_num_seqs=8, num_pages=16)) as client,
        ThreadPoolExecutor(20) as pool,
    ):
        check_noticed(client)
        bodies = [body | {"seed": seed} for seed in range(8)]
        alone = [client.post(path, each)[1]["choices"] for each in bodies]

        def ask(row):
            if row % 5:
                return client.post(path, bodies[row % 8])[1]["choices"] == alone[row % 8]
            stream = row % 2 == 0
            connection = connect(client, request_of(path, ENDLESS | {"stream": stream}))
            if stream:
                connection.recv(1)
            connection.close()
            return True

        assert all(pool.map(ask, range(60)))
        until(lambda: is_free(client))


def test_a_client_that_says_more_and_leaves_frees_what_it_held(tiny_llama):
    """uvicorn stops reading where bytes come after a body, and does not see the end by itself."""
    with serving(lambda: small_engine(tiny_llama)) as client:
        check_noticed(client)
        connection = connect(client, request_of("/v1/completions", ENDLESS))
        until(lambda: client.thread.engine.scheduler.running)
        connection.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        time.sleep(0.1)  # it comes in a segment of its own
        connection.close()
        until(lambda: is_free(client))


class Transport(asyncio.Transport):
    """Notes whether reading is paused, how often it was, and whether it was cut off."""

    def __init__(self):
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.paused = self.aborted = False
        self.written = []

    def pause_reading(self):
        self.paused = True

    def resume_reading(self):
        self.paused = False

    def is_closing(self):
        return self.aborted

    def abort(self):
        self.aborted = True

    close = abort

    def write(self, data):
        self.written.append(data)

    def set_write_buffer_limits(self, *_):
        pass


def speaking(app, talk) -> Transport:
    """Let a client talk to an app. talk: an async function of what hears its bytes."""

    async def main():
        config = uvicorn.Config(app, log_level="critical", **UVICORN)
        config.load()
        state = uvicorn.server.ServerState()
        protocol = Protocol(config=config, server_state=state, app_state={})
        transport = Transport()
        protocol.connection_made(transport)
        await talk(protocol, transport)
        return transport

    return asyncio.run(main())


PIECE = 2**16  # bytes


def test_a_client_is_read_on_while_it_waits_whatever_it_says():
    """So its end is seen at once; one that says a megabyte is cut off."""
    heard = []

    async def app(scope, receive, send):
        await receive()
        heard.append((await receive())["type"])

    async def talk(protocol, transport):
        protocol.data_received(request_of("/", {}))
        await asyncio.sleep(0)
        for _ in range(16):
            protocol.data_received(b"x" * PIECE)
            await asyncio.sleep(0)
            assert not transport.paused and not transport.aborted
        protocol.data_received(b"x")
        assert transport.aborted
        protocol.connection_lost(None)
        while protocol.tasks:
            await asyncio.sleep(0)

    speaking(app, talk)
    assert heard == ["http.disconnect"]


def test_many_requests_at_once_are_answered_one_after_the_other():
    """What is answered does not count any more, however much it is in all."""

    async def app(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def talk(protocol, transport):
        request = request_of("/", {"a": "x" * 10_000})
        for _ in range(60):  # 1.2 million bytes
            protocol.data_received(request + request)
            while protocol.tasks:
                await asyncio.sleep(0)

    transport = speaking(app, talk)
    assert not transport.aborted and b"".join(transport.written).count(b" 204 ") == 120
