"""What the tests of the server share."""

import asyncio
import contextlib
import functools
import http.client
import json
import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import uvicorn
from conftest import CHECKPOINTS, ROOT
from prometheus_client.parser import text_string_to_metric_families

import serve
from engine.engine import Engine
from sampling import SamplingParams
from serve import UVICORN, listen
from server.app import make_app
from server.engine_thread import EngineThread
from server.live import EngineMonitor
from server.metrics import Metrics
from server.served import ServedModel
from text.chat import Chat
from text.tokenizer import load_encoding

SMALL = CHECKPOINTS / "stories-llama"
PATH = "/v1/completions"
ENDLESS = {"prompt": "Tom", "max_tokens": 2**18, "ignore_eos": True}


IGNORED_FIELDS = {  # field -> what asks for nothing, and for something
    **dict.fromkeys(["guided_decoding_backend", "keep_alive", "moderation"], (None, "a")),
    **dict.fromkeys(["store", "timings_per_token"], (False, True)),
    **dict.fromkeys(["enable_thinking", "request_id", "think"], (None, True)),
    **dict.fromkeys(["media_io_kwargs", "mm_processor_kwargs"], ({}, {"a": {}})),
    "cache_prompt": (True, False),
    "id_slot": (-1, 0),
    "priority": (0, 1),
    "service_tier": ("auto", "flex"),
}


@functools.cache
def small_encoding():
    return load_encoding(SMALL, 4096)


def small_engine(tiny_llama, **options):
    model = tiny_llama(vocab_size=4096, block_size=64, eos_token_id=4095, bos_token_id=4095)
    return Engine(model, encoding=small_encoding(), **options)


def results_of(engine, prompts, params) -> list[tuple]:
    """What an engine writes: tokens, text, log-probabilities and finish reason of each."""
    requests = [engine.add(*pair) for pair in zip(prompts, params, strict=True)]
    while engine.busy:
        engine.step()
    return [
        (tuple(request.output), request.text, tuple(request.logprobs), request.finish_reason)
        for request in requests
    ]


def engine_alone(tiny_llama, prompt, **fields) -> tuple:
    """What the engine alone writes to a prompt, text or ids, with the defaults of the API."""
    if isinstance(prompt, str):
        prompt = small_encoding().encode(prompt, allowed_special="all") or [4095]
    stop = fields.get("stop", ())
    own = {"max_new_tokens": 16, "temperature": 1.0} | fields
    own["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    own["top_k"] = max(own.get("top_k", 0), 0)
    (found,) = results_of(small_engine(tiny_llama), [prompt], [SamplingParams(**own)])
    return found


async def collect(updates) -> dict:
    outputs = {}
    async for step in updates:
        assert step
        for index, (tokens, text, logprobs, reason, *_) in step.items():
            known = outputs.get(index, ((), "", ()))
            outputs[index] = (known[0] + tokens, known[1] + text, known[2] + logprobs, reason)
    return outputs


def in_turns(engine, turn):
    """Let each step of an engine wait for its turn, a semaphore; returns the engine."""
    step = engine.step
    engine.step = lambda: turn.acquire(timeout=60) and step()
    return engine


def changed(engine, change):
    """Change each result of an engine; returns the engine. change: (work, result) to result."""
    compute = engine.compute

    def computed(scheduled):
        return [change(*pair) for pair in zip(scheduled, compute(scheduled), strict=True)]

    engine.compute = computed
    return engine


def failing(engine, fails):
    """Let texts of an engine fail; returns the engine. fails: whether a request's text does."""
    return changed(engine, lambda work, own: None if fails(work.request) else own)


def writing(engine, ids: list[int]):
    """Let an engine write these ids, whatever its model thinks; returns the engine."""
    return changed(engine, lambda work, own: own._replace(tokens=[ids[len(work.request.output)]]))


@contextlib.asynccontextmanager
async def started(make, **options):
    thread = EngineThread(make, **options)
    thread.start()
    await thread.ready
    try:
        yield thread
    finally:
        await thread.close()


def run_calls(make, use, **options):
    async def main():
        async with started(make, **options) as thread:
            return await asyncio.wait_for(use(thread), 60)

    return asyncio.run(main())


def refusal(message: str, param: str | None = None, code: str | None = None) -> dict:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return {"error": error}


def server_error(message: str) -> dict:
    return {"error": refusal(message)["error"] | {"type": "server_error"}}


def check_refused(answer: tuple, param: str | None, said: str = "", status=400, code=None) -> None:
    """Check that an answer refuses a request for this field. said: words of its short message."""
    found, body = answer
    error = body["error"]
    expected = (status, "invalid_request_error", param, code)
    assert (found, error["type"], error["param"], error["code"]) == expected, body
    message = error["message"]
    assert 0 < len(message) < 700 and all(word in message for word in said.split()), message


def token_counts(usage: dict) -> dict:
    """Usage without cached_tokens, which depends on earlier requests, after a check of it."""
    details = usage["prompt_tokens_details"]
    assert details.keys() == {"cached_tokens"}
    assert 0 <= details["cached_tokens"] < usage["prompt_tokens"]
    return {name: count for name, count in usage.items() if not name.endswith("_details")}


def metric_families(client) -> list:
    with client.send("GET", "/metrics") as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        return list(text_string_to_metric_families(answer.read().decode()))


def texts_by_index(events) -> dict[int, tuple]:
    """Text and finish reason of each choice: the last of its events alone has a reason."""
    outputs = {}
    for event in events:
        (choice,) = event["choices"]
        text, reason = outputs.get(choice["index"], ("", None))
        assert reason is None
        outputs[choice["index"]] = (text + choice["text"], choice["finish_reason"])
    return outputs


def until(condition, seconds: float = 120) -> None:
    """Wait for what happens in other threads or processes; fail where it never does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def is_free(owner) -> bool:
    scheduler = owner.thread.engine.scheduler
    idle = not scheduler.running and not scheduler.waiting and not owner.thread.generations
    return idle and scheduler.pool.num_free_pages == scheduler.pool.num_pages


def request_of(path: str, body: dict) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def connect(client, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", client.port), timeout=60)
    connection.sendall(data)
    return connection


class Client:
    def __init__(self, port: int, thread, server):
        self.port = port
        self.thread = thread
        self.server = server

    def send(self, method: str, path: str, body=None, headers=()) -> http.client.HTTPResponse:
        """The answer to a request, of which only the head has been read.

        body: bytes, an iterator over them, sent in chunks, or what is made JSON.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, bytes | Iterator | None) else json.dumps(body).encode()
        known = {"Content-Type": "application/json", "Connection": "close"}
        connection.request(method, path, data, known | dict(headers))
        return connection.getresponse()

    def get(self, path: str) -> tuple:
        return self.ask("GET", path)

    def post(self, path: str, body, headers=()) -> tuple:
        return self.ask("POST", path, body, headers)

    def events(self, path: str, body: dict) -> list:
        """The events of a streamed answer, as JSON; after them comes "[DONE]", and nothing else."""
        with self.send("POST", path, body) as answer:
            assert answer.status == 200, answer.read()
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            *events, empty = answer.read().decode().split("\n\n")
        assert empty == "" and all(event.startswith("data: ") for event in events)
        data = [event.removeprefix("data: ") for event in events]
        assert data[-1] == "[DONE]" and "[DONE]" not in data[:-1]
        return [json.loads(event) for event in data[:-1]]

    def ask(self, *request) -> tuple:
        with self.send(*request) as answer:
            data = answer.read()
            return answer.status, json.loads(data) if data else None


def official_client(client):
    import openai

    url = f"http://127.0.0.1:{client.port}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def stop_engine(client) -> None:
    client.thread.commands.put(lambda: 1 / 0)
    client.thread.thread.join(60)


@contextlib.contextmanager
def serving(make, chat=None, app_options=None, adapters=None, defaults=None, **options):
    """A Client to an engine. chat: the model's template, or an error. options: of EngineThread."""

    @contextlib.asynccontextmanager
    async def enter():
        async with started(make, **options) as thread:
            views = {"metrics": Metrics(thread, "small"), "monitor": EngineMonitor(thread, "small")}
            names = "small", "somewhere/small"
            served = ServedModel(thread, *names, chat or Chat(SMALL), adapters, defaults, **views)
            yield make_app(served, **(app_options or {})), thread

    with serving_app(enter) as client:
        yield client


@contextlib.contextmanager
def serving_app(enter):
    started = queue.SimpleQueue()

    async def main():
        async with enter() as (app, thread):
            server = uvicorn.Server(uvicorn.Config(app, log_level="critical", **UVICORN))
            sock = listen("127.0.0.1", 0)
            started.put(Client(sock.getsockname()[1], thread, server))
            await server.serve([sock])

    def work():
        try:
            asyncio.run(main())
        except BaseException as error:
            started.put(error)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    client = started.get(timeout=60)
    if isinstance(client, BaseException):
        raise client
    try:
        yield client
    finally:
        client.thread.commands.put(None)  # texts that are not over end with an error
        client.server.config.timeout_graceful_shutdown = 1  # second for answers that do not end
        client.server.should_exit = True
        worker.join(60)
        assert not worker.is_alive()


@contextlib.contextmanager
def start(*arguments, program=None) -> Iterator[subprocess.Popen]:
    """A process of serve.py, which is no more after the block. program: what it runs instead."""
    options = ["--model", str(SMALL), "--port", "0", "--device", "cpu", "--backend", "torch"]
    command = [sys.executable, "serve.py", *options, *arguments]
    if program:
        command = [sys.executable, "-c", program.format(arguments=options)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    pipes["env"] = os.environ | {"OMP_NUM_THREADS": "1"}  # more would only wait for each other
    # What is started in the background of a shell ignores Ctrl-C.
    pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as server:
        try:
            yield server
        finally:
            server.kill()


def client_of(server: subprocess.Popen) -> Client:
    return Client(int(server.stdout.readline().rsplit(":", 1)[1]), None, server)


class Script:
    """serve.py in a process forked from this one, because an import of torch takes seconds."""

    def __init__(self, directory, *options):
        self.out = directory / "stdout"
        self.err = directory / "stderr"
        words = ["--model", SMALL, "--port", 0, "--device", "cpu", "--backend", "torch", *options]

        def work():
            for number, file in ((1, self.out), (2, self.err)):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
            sys.stdout = open(1, "w", closefd=False)
            sys.stderr = open(2, "w", closefd=False)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            serve.main([str(word) for word in words])

        self.process = multiprocessing.get_context("fork").Process(target=work)

    def __enter__(self) -> "Script":
        self.process.start()
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.join()

    def client(self) -> Client:
        until(lambda: self.written(self.out).endswith("\n") or not self.process.is_alive())
        return Client(int(self.written(self.out).rsplit(":", 1)[1]), None, None)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> tuple[int | None, str]:
        """Its exit code, and all that it has written to stderr."""
        self.process.join(60)
        return self.process.exitcode, self.written(self.err)

    @staticmethod
    def written(file) -> str:
        return file.read_text() if file.exists() else ""
