"""A replica that is killed, and one whose engine fails: who hears of it, and how."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from replicas import make_engine, parse, save_small, serving_replicas, streamed_texts
from serving import ENDLESS, PATH, server_error, serving, until

GONE = "the process that wrote this text has ended, or cannot be reached: RuntimeError"
ENDED = server_error(GONE)


@pytest.fixture
def servers(tiny_llama, tmp_path):
    """A Door to two engines, these, and a Door to one."""
    args = parse(save_small(tiny_llama, tmp_path))
    with serving_replicas(args, 2) as (door, replicas), serving(lambda: make_engine(args)) as one:
        yield door, replicas, one


def test_of_a_killed_replica_texts_end_with_an_error_and_others_go_on(servers):
    door, replicas, one = servers
    body = {"prompt": "Tom", "seed": 5, "max_tokens": 500, "ignore_eos": True}
    with door.send("POST", PATH, ENDLESS | {"stream": True}) as killed:
        killed.readline()
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(streamed_texts, door, body)
            until(lambda: replicas[1].thread.calls)
            replicas[0].killed = True
            *_, error, done, empty = killed.read().split(b"\n\n")
            assert other.result() == streamed_texts(one, body)
    assert json.loads(error.strip().removeprefix(b"data: ")) == ENDED
    assert (done, empty) == (b"data: [DONE]", b"")


def test_a_text_that_is_awaited_is_503(servers):
    door, replicas, _ = servers
    replicas[0].killed = True
    assert door.post(PATH, ENDLESS) == (503, ENDED)
    assert door.post(PATH, {"prompt": "Tom"})[0] == 200


def test_a_replica_is_well_until_its_engine_fails(servers, capfd):
    door, (first, second), _ = servers
    assert hasattr(first, "check_health")
    first.check_health()

    def fail():
        raise ValueError("a bug")

    first.thread.engine.step = fail
    status, answer = door.post(PATH, ENDLESS)
    assert status == 503
    assert answer["error"]["message"] == "the engine has failed: ValueError: a bug"
    with pytest.raises(Exception, match="the engine has failed: ValueError: a bug"):
        first.check_health()
    second.check_health()
    assert "ValueError: a bug" in capfd.readouterr().err
