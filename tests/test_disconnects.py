"""Clients that leave, over a real socket: what they held is free, and other texts go on."""

import asyncio
import threading
from unittest.mock import Mock

import pytest
import uvicorn
from serving import ENDLESS, connect, is_free, request_of, serving, small_engine, until

from serve import UVICORN, Protocol

STREAM = {"ignore_eos": True}
CHAT = STREAM | {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2**18}
RESPONSE = STREAM | {"input": "x", "max_output_tokens": 2**18}
PATHS = {"/v1/completions": ENDLESS, "/v1/chat/completions": CHAT, "/v1/responses": RESPONSE}
TEXT, REPLY, RESPONDED = PATHS


def settle(client) -> None:
    for _ in range(20):
        client.get("/health")


@pytest.mark.parametrize(
    "path, state, stream",
    [
        *((TEXT, "decoding", False), (TEXT, "queued", False), (TEXT, "queued", True)),
        *((TEXT, "prefill", False), (REPLY, "decoding", False), (REPLY, "decoding", True)),
        *((RESPONDED, "decoding", False), (RESPONDED, "decoding", True)),
    ],
)
def test_a_client_that_leaves_frees_what_it_held(tiny_llama, path, state, stream):
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


def speaking(app, talk) -> Mock:
    transport = Mock(spec=asyncio.Transport)
    transport.get_extra_info = {}.get
    transport.is_closing.return_value = False

    async def main():
        config = uvicorn.Config(app, log_level="critical", **UVICORN)
        config.load()
        state = uvicorn.server.ServerState()
        protocol = Protocol(config=config, server_state=state, app_state={})
        protocol.connection_made(transport)
        await talk(protocol)

    asyncio.run(main())
    return transport


def test_a_client_is_read_on_while_it_waits_whatever_it_says():
    heard = []

    async def app(scope, receive, send):
        await receive()
        heard.append((await receive())["type"])

    async def talk(protocol):
        transport = protocol.transport
        protocol.data_received(request_of("/", {}))
        await asyncio.sleep(0)
        for _ in range(16):
            protocol.data_received(b"x" * 2**16)
            await asyncio.sleep(0)
            paused = transport.pause_reading.call_count - transport.resume_reading.call_count
            assert not paused and not transport.abort.called
        protocol.data_received(b"x")
        assert transport.abort.called
        protocol.connection_lost(None)
        while protocol.tasks:
            await asyncio.sleep(0)

    speaking(app, talk)
    assert heard == ["http.disconnect"]


def test_many_requests_at_once_are_answered_one_after_the_other():

    async def app(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def talk(protocol):
        request = request_of("/", {"a": "x" * 10_000})
        for _ in range(60):  # 1.2 million bytes
            protocol.data_received(request + request)
            while protocol.tasks:
                await asyncio.sleep(0)

    transport = speaking(app, talk)
    written = b"".join(call.args[0] for call in transport.write.call_args_list)
    assert not transport.abort.called and written.count(b" 204 ") == 120
