"""serve.py over a real socket: what it serves, whether it is well, and what it does not know."""

import os
import signal
import socket
from types import SimpleNamespace

import pytest
from conftest import ROOT
from serving import ENDLESS, PATH, SMALL, Door, Script, refusal, serving, small_engine, start


def test_the_script_prints_its_address_and_answers_there():
    with start() as server:
        line = server.stdout.readline()
        assert line.startswith("stories-llama at http://127.0.0.1:")
        door = Door(int(line.rsplit(":", 1)[1]), None, server)
        (model,) = door.get("/v1/models")[1]["data"]
        assert (model["id"], model["max_model_len"]) == ("stories-llama", 256)
        assert model["root"] == SMALL.relative_to(ROOT).as_posix()
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 130


def test_models(door):
    status, found = door.get("/v1/models")
    assert status == 200 and found["object"] == "list"
    (model,) = found["data"]
    created = model.pop("created")
    assert isinstance(created, int)
    known = {"id": "small", "object": "model", "owned_by": "serve.py", "root": "somewhere/small"}
    assert model == known | {"parent": None, "max_model_len": 64}
    assert door.get("/v1/models/small") == (200, model | {"created": created})


@pytest.mark.parametrize("name", ["other", "org/other", "x" * 5000])
def test_another_model_is_not_found(door, name):
    message = f"the model {name[:100]!r} does not exist; this server has 'small'"
    error = refusal(message, "model", "model_not_found")
    assert door.get(f"/v1/models/{name}") == (404, error)


def test_unknown_paths_and_methods(door):
    for path in ("/v1/nothing", "/docs", "/redoc"):
        assert door.get(path) == (404, refusal("Not Found"))
    assert door.get("/openapi.json")[1]["info"]["title"] == "serve.py"
    assert door.post("/v1/models", {}) == (405, refusal("Method Not Allowed"))
    with door.send("POST", "/v1/models", {}) as answer:
        assert answer.headers["Allow"] == "GET"


def test_health_of_a_dead_engine(tiny_llama):
    with serving(lambda: small_engine(tiny_llama)) as door:
        assert door.get("/health") == (200, None)

        def die():
            raise MemoryError("no more")

        door.thread.commands.put(die)
        door.thread.thread.join(60)
        assert door.get("/health") == (503, None)
        status, found = door.get("/v1/models")
        message = "the engine has failed: MemoryError: no more"
        assert (status, found["error"]["message"]) == (503, message)


def test_a_full_queue_still_has_its_model(tiny_llama):
    with serving(lambda: small_engine(tiny_llama, max_rows=1), max_waiting=0) as door:
        with door.send("POST", PATH, ENDLESS | {"stream": True}) as answer:
            assert answer.status == 200
            assert door.post(PATH, {})[0] == 429
            assert door.get("/v1/models")[0] == door.get("/health")[0] == 200


def test_an_address_that_is_taken(run_main, monkeypatch):
    import serve

    monkeypatch.setattr(serve, "load_engine", None)  # that is before the model is loaded
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = run_main(serve.main, "--port", port)
    assert (code, out) == (2, "")
    assert err.endswith(f"error: --host 127.0.0.1 --port {port}: Address already in use\n")


def test_what_is_sent_does_not_wait_for_an_acknowledgement():
    from serve import listen

    with listen("127.0.0.1", 0) as sock, socket.create_connection(sock.getsockname()):
        accepted, _ = sock.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_server_reads_with_h11_whatever_is_installed():
    from uvicorn.protocols.http.h11_impl import H11Protocol

    import serve

    state = SimpleNamespace(served=SimpleNamespace(live=None))
    config = serve.Server(SimpleNamespace(state=state), None, 1).config
    config.load()
    assert config.http_protocol_class is serve.Protocol and issubclass(serve.Protocol, H11Protocol)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has /dev/full")
def test_an_address_that_cannot_be_printed_is_one_line(tmp_path):
    script = Script(tmp_path)
    script.out = "/dev/full"
    with script:
        line = "error: standard output: No space left on device\n"
        code, err = script.end()
    assert code == 2 and err.endswith(line) and err.count("\n") == 1


def test_the_address_is_that_of_the_readme():
    from command_line import Parser
    from serve import add_server_options

    parser = Parser()
    add_server_options(parser)
    found = parser.parse_args([])
    assert (found.host, found.port) == ("127.0.0.1", 8000)
