"""Servers under load, fake ones on a clock that only waiting moves."""

import contextlib
import importlib.metadata
import itertools
import subprocess
from types import SimpleNamespace

import pytest
from benches import Bench, save_endless
from loads import near, timed_completion

import serve
from benchmarks import serving as script
from command_line.parser import Parser
from errors import UserError
from loading.load import load_model

BUSY = b"HTTP/1.1 429 Busy\r\nContent-Length: 0\r\n\r\n"
SHARE = "share equal to the first server"


@pytest.fixture(scope="module")
def speaking(tiny, tmp_path_factory):
    return save_endless(tiny, tmp_path_factory.mktemp("model"))


@pytest.fixture
def simulated(request, speaking, fake, monkeypatch):
    """A Bench of few requests, whose servers write a token each 50 ms, the first after 200 ms.

    The engine alone writes 56 a second.
    """
    small = ["--model", speaking, "--clients", 2, "--seconds", 10, "--long-prompt", 20]
    bench = Bench(request, script, *small, "--prompt-words", 2, 6, "--new-tokens", 3, 8)

    @contextlib.contextmanager
    def server(line):
        bench.started.append([str(part) for part in line])
        bench.beside.append(bench.running)
        bench.running += 1
        try:
            yield "http://127.0.0.1:1"
        finally:
            bench.running -= 1

    def engine_process(name, *_):
        def work(function, args, max_num_seqs, seed):
            assert function is script.engine_alone
            bench.engines.append((name, max_num_seqs, seed))
            return bench.baseline

        work.close = lambda: None
        return work

    bench.started = []
    bench.running = 0
    bench.beside = []  # how many ran when each one started
    bench.engines = []
    bench.baseline = {"tokens/s": 56.0, "plain step, ms": 25.0}
    monkeypatch.setattr(script, "server", server)
    monkeypatch.setattr(script, "EngineProcess", engine_process)
    monkeypatch.setattr(script, "unavailable_reason", lambda name, device: "")
    fake.respond = lambda body: timed_completion(
        *[0.2 + 0.05 * at for at in range(body["max_tokens"])]
    )
    return bench


def values(rows, mode, load, repeat=0):
    found = rows[(rows["mode"] == mode) & (rows["load"] == load) & (rows["repeat"] == repeat)]
    return dict(zip(found["measure"], found["value"]))


def test_all_loads_in_turns_with_summary_and_plot(simulated, fake):
    simulated.draws = True
    modes = ["one at a time", "engine native int8"]
    rows = simulated.rows("--modes", *modes, "--shares", 0.5, 2, "--repeats", 2)
    assert list(rows) == list(script.COLUMNS)
    loads = ["engine alone", "2 clients", "0.5 of capacity", "2 of capacity"]
    loads += ["long prompts", "long prompts, shared"]
    expected = [[0, mode, "warm-up"] for mode in modes]
    expected += [list(run) for run in itertools.product((0, 1), modes, loads)]
    assert rows[["repeat", "mode", "load"]].drop_duplicates().values.tolist() == expected
    assert rows.groupby("mode", sort=False)["dtype"].first().to_list() == ["float32", "int8"]
    asked = [("cache", 1), ("native int8", 2)]
    expected = [(*mode, f"2 clients {repeat}") for repeat in (0, 1) for mode in asked]
    assert simulated.engines == expected
    assert len(simulated.figures[0].axes) == 4
    for mode in modes:
        busy = values(rows, mode, "2 clients", 1)
        assert (busy["ttft, ms, p50"], busy["itl, ms, p99"]) == (near(200), near(50))
        assert busy["x engine alone"] == pytest.approx(busy["tokens/s"] / 56, rel=1e-3)
        for share in (0.5, 2):
            random = values(rows, mode, f"{share:g} of capacity", 1)
            assert random["failed"] == 0 == random["send lag, ms, p100"]
            assert (random["ttft, plain steps, p99"], random["itl, plain steps, p50"]) == (8, 2)
            # In ten seconds, without the tokens of the last answers.
            assert random["tokens/s"] == pytest.approx(share * busy["tokens/s"], rel=0.12)


def test_servers_get_the_same_requests_and_new_ones_in_each_repeat(simulated, fake):
    simulated.rows("--modes", "engine", "engine native", "--shares", 0.5, "--repeats", 2)
    longest = []
    prompts = []
    for _, body in fake.requests:
        assert body["temperature"] == 0 and body["stream"] is True and body["ignore_eos"] is True
        assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
        words = len(body["prompt"].split())
        assert body["max_tokens"] == 8 if words == 28 else 3 <= body["max_tokens"] <= 8
        assert 2 <= words <= 6 or words == 28
        (longest if words == 28 else prompts).append(body["prompt"])
    assert len(set(prompts)) < 0.7 * len(prompts)  # two servers, so twice each
    first, second, third, fourth = (longest[at : at + 18] for at in range(0, 72, 18))
    assert (first, third) == (second, fourth) and len(set(first + third)) == 36
    beginnings = [" ".join(text.split()[:20]) for text in first]
    assert (len(set(beginnings[:9])), len(set(beginnings[9:]))) == (9, 1)
    assert not third[9].startswith(f" {beginnings[9]}")


def test_each_server_is_told_in_its_own_words(simulated, fake, speaking, monkeypatch):
    fake.respond = lambda body: timed_completion(*range(1, body["max_tokens"] + 1))
    written = []
    monkeypatch.setattr(script, "write_gguf", lambda model, *rest: written.append(rest))
    have = importlib.metadata.version
    name = "llama-cpp-python"
    monkeypatch.setattr(importlib.metadata, "version", lambda of: "9" if of == name else have(of))
    code, rows, err = simulated("--shares", 0.5)
    assert (code, err.count("without")) == (0, 0)
    ((file, dtype, tokenizer),) = written
    assert (dtype, tokenizer) == ("float32", speaking / "tokenizer.json")
    words = [  # of each command
        ("serve.py", f"--model {speaking} ", "--max-num-seqs 1 ", "--backend torch"),
        ("--max-num-seqs 2 ", "--backend torch", "float32", "--device cpu"),
        ("--backend native", "--dtype float32"),
        ("--backend native", "--dtype int8"),
        (f"transformers serve {speaking} ", "--cb-num-blocks 8"),
        ("llama_cpp.server", "--n_ctx 64", f"--model {file} "),
    ]
    parser = Parser()
    serve.add_server_options(parser)
    for line, some in zip(simulated.started, words, strict=True):
        assert [word for word in some if word not in " ".join(line)] == []
        if line[0].endswith("serve.py"):
            assert parser.parse_args(line[1:]).model == str(speaking)
    common = {"prompt", "max_tokens", "temperature", "stream"}
    own = frozenset({"ignore_eos", "stream_options"})
    assert {frozenset(body) - common for _, body in fake.requests} == {
        own,
        frozenset({"generation_config"}),
        frozenset({"min_tokens"}),
    }
    libraries = rows.groupby("mode", sort=False)["library"].first()
    assert libraries["llama.cpp"] == "llama-cpp-python 9"
    assert libraries["transformers"].startswith("transformers 5")
    assert "engine alone" not in set(rows[rows["mode"] == "llama.cpp"]["load"])


def test_a_server_that_cannot_run_or_fails_at_first_is_left_out(
    simulated, fake, monkeypatch, tmp_path
):
    reasons = {"llama.cpp": "pip install llama-cpp-python"}
    monkeypatch.setattr(script, "unavailable_reason", lambda name, device: reasons.get(name, ""))
    good = fake.respond
    fake.respond = lambda body: [(1, BUSY)] if len(simulated.started) == 1 else good(body)
    code, _, err = simulated("--modes", "engine")
    assert "without engine: the warm-up failed: HTTP 429\n" in err
    assert (code, list(tmp_path.glob("run*"))) == (2, [])
    assert err.endswith("error: --modes engine: no server could be started\n")
    simulated.started.clear()
    modes = ("engine native int8", "engine", "engine native", "llama.cpp")
    code, rows, err = simulated("--modes", *modes, "--shares", 0.5)
    assert (code, err.count("without")) == (0, 2)
    assert "without llama.cpp: pip install llama-cpp-python\n" in err
    assert list(rows["mode"].unique()) == ["engine", "engine native"]
    assert SHARE in values(rows, "engine native", "warm-up")
    assert (simulated.beside, simulated.running) == ([0, 0, 0, 1], 0)  # it ended before the next


def test_other_texts_are_not_timed(simulated, fake):
    right = fake.respond

    def answer(body):
        changed = len(simulated.started) == 2 and len(fake.requests) % 2
        return [(at, data.replace(b" a", b" b") if changed else data) for at, data in right(body)]

    def run(*modes):
        simulated.started.clear()
        return simulated("--modes", *modes, "--shares", 0.5)

    fake.respond = answer
    # int8 is first, and may write others than the two that must agree; and so may transformers.
    for modes in (("engine native int8", "engine native"), ("engine", "transformers")):
        code, rows, _ = run(*modes)
        assert code == 0 and values(rows, modes[1], "warm-up") == {SHARE: 0.5}
    code, rows, _ = run("engine", "engine native")
    assert code == "engine native: outputs differ from engine; wrong results are not timed"
    assert "2 clients" not in set(rows["load"])


def test_the_engine_alone_is_busy_as_the_clients_are(speaking, clock, monkeypatch):
    engines = []
    make = script.Engine

    def note(*args, **options):
        engines.append(make(*args, **options))
        return engines[-1]

    def alone(max_num_seqs):
        return script.engine_alone("cache", model, args, max_num_seqs, "seed")

    monkeypatch.setattr(script, "Engine", note)
    sizes = {"prompt_words": [5, 5], "new_tokens": [8, 8]}
    args = SimpleNamespace(model=speaking, clients=1, seconds=120.0, **sizes)
    model = load_model(speaking)
    # A second for each position: 5 + 7 of them make 8 tokens.
    assert alone(1) == {"tokens/s": near(8 / 12), "plain step, ms": 1000}
    (engine,) = engines
    assert engine.encoding is not None  # it makes text, as a server does
    assert engine.num_computed_tokens > 120  # and was warm before
    args.clients = 3
    assert alone(3)["plain step, ms"] == 3000
    args.new_tokens = [1, 1]
    assert alone(1) == {"tokens/s": near(1 / 5)}


SCRIPT = """
import http.server, sys
statuses = [200, 404, 503, None]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if not (status := statuses.pop()):
            return self.wfile.write(b"no HTTP")
        self.send_response(status)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


def test_a_server_is_waited_for_and_ended(monkeypatch):
    processes = []

    class Process(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            processes.append(self)

    monkeypatch.setattr(subprocess, "Popen", Process)
    with script.server(["-c", SCRIPT]) as url:
        assert url.startswith("http://127.0.0.1:")
        assert processes[0].poll() is None
        assert not script.is_ready(1)
        assert not script.is_ready(int(url.rpartition(":")[2]))  # it has said 200, and says no more
    assert processes[0].poll() is not None


def test_a_server_that_ends_says_why():
    for said in ("no such model", "first\\nno such model"):
        with pytest.raises(UserError, match="the server did not start: no such model"):
            with script.server(["-c", f"import sys; sys.exit('{said}')"]):
                pass
