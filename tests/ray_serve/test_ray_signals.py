"""How engines on Ray end: the last test of those that all tests share."""

import json
import signal

import pytest

pytest_plugins = ["ray_fixtures"]
PATH = "/v1/completions"
BODY = {"prompt": "Tom", "seed": 3, "ignore_eos": True, "stream": True}


def test_a_signal_lets_texts_end_and_a_second_one_does_not(servers):
    client, server, _ = servers
    assert server.pids("Replica")
    with (
        client.send("POST", PATH, BODY | {"max_tokens": 1000}) as answer,
        client.send("POST", PATH, BODY | {"max_tokens": 2**18}) as endless,
    ):
        server.process.send_signal(signal.SIGTERM)
        events = [line for line in answer if line.startswith(b"data: {")]
        assert json.loads(events[-1][6:])["choices"][0]["finish_reason"] == "length"
        assert endless.readline()
        server.process.send_signal(signal.SIGTERM)
        assert server.result() == (130, "")
    with pytest.raises(OSError):
        client.get("/health")
