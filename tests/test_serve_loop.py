"""serve.py from its first line to its last, over a real socket."""

import os
import signal
import socket

import pytest
from conftest import ROOT
from serving import SMALL, Client, Script, start

import serve
from command_line.parser import Parser
from errors import UserError
from serve import add_server_options, listen


def test_the_script_prints_its_address_and_answers_there():
    with start() as server:
        line = server.stdout.readline()
        assert line.startswith("stories-llama at http://127.0.0.1:")
        client = Client(int(line.rsplit(":", 1)[1]), None, server)
        (model,) = client.get("/v1/models")[1]["data"]
        assert (model["id"], model["max_model_len"]) == ("stories-llama", 256)
        assert model["root"] == SMALL.relative_to(ROOT).as_posix()
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 130


def test_an_address_that_is_taken(run_main, monkeypatch):
    monkeypatch.setattr(serve, "load_engine", None)  # that is before the model is loaded
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = run_main(serve.main, "--port", port)
    assert (code, out) == (2, "")
    assert err.endswith(f"error: --host 127.0.0.1 --port {port}: Address already in use\n")


def test_what_is_sent_does_not_wait_for_an_acknowledgement():
    with listen("127.0.0.1", 0) as sock, socket.create_connection(sock.getsockname()):
        accepted, _ = sock.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has /dev/full")
def test_an_address_that_cannot_be_printed_is_one_line(tmp_path):
    script = Script(tmp_path)
    script.out = "/dev/full"
    with script:
        line = "error: standard output: No space left on device\n"
        code, err = script.end()
    assert code == 2 and err.endswith(line) and err.count("\n") == 1


def test_the_address_is_that_of_the_readme():
    parser = Parser()
    add_server_options(parser)
    found = parser.parse_args([])
    assert (found.host, found.port) == ("127.0.0.1", 8000)


@pytest.mark.parametrize("installed", [True, False])
def test_the_model_is_one_that_takes_system_messages_where_it_is_installed(monkeypatch, installed):
    def find_package_file(name):
        assert name == "smollm2"
        if not installed:
            raise UserError("smollm2 is not installed")
        return "x.gguf"

    monkeypatch.setattr(serve, "find_package_file", find_package_file)
    parser = Parser()
    serve.add_server_options(parser)
    expected = "smollm2" if installed else serve.LLAMA
    assert parser.parse_args([]).model == expected
    assert parser.parse_args(["--model", "gpt2"]).model == "gpt2"
