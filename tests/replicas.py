"""Several engines behind one app, in this process: what Ray's handle does, without Ray."""

import asyncio
import contextlib
import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor

from conftest import save_speaking
from serving import PATH, serving_app, texts_by_index

from command_line.parser import Parser
from engine.options import load_engine
from loading.load import resolve_source
from serve import add_server_options
from server.replicas import Ingress, Replica

OPTIONS = ["--device", "cpu", "--backend", "torch", "--page-size", "4"]


def save_small(build, directory):
    return save_speaking(build, directory, eos_token_id=4095)


def parse(model, *options):
    parser = Parser()
    add_server_options(parser)
    return parser.parse_args([str(word) for word in ["--model", model, *OPTIONS, *options]])


def make_engine(args):
    return load_engine(args, resolve_source(args.model), "cpu")


class Response:
    """What a replica's generator gives, sent from process to process.

    The replica goes on until it is told to end, whatever becomes of who asked.
    """

    def __init__(self, updates, replica):
        self.updates = updates
        self.replica = replica

    def __aiter__(self):
        return self

    async def __anext__(self):
        self.coming = asyncio.ensure_future(anext(self.updates))
        update = await asyncio.shield(self.coming)
        if hasattr(self.replica, "killed"):
            raise RuntimeError("The actor died unexpectedly before finishing this task.")
        return pickle.loads(pickle.dumps(update))

    def cancel(self):
        self.coming.cancel()
        self.closing = asyncio.ensure_future(self.close())

    async def close(self):
        await asyncio.wait([self.coming])
        await self.updates.aclose()


class Handle:
    """Calls go to these replicas in turn."""

    def __init__(self, replicas):
        self.replicas = replicas
        self.turns = itertools.cycle(replicas)
        self.generate = self

    def options(self, stream):
        assert stream
        return self

    def broadcast(self, name):
        self.calls = [getattr(replica, name) for replica in self.replicas]
        return self

    async def results_async(self, timeout_s, return_exceptions):
        assert timeout_s == 10 and return_exceptions
        found = [pickle.loads(pickle.dumps(call())) for call in self.calls]
        return [*found, RuntimeError("it has ended")]

    def remote(self, *call):
        replica = next(self.turns)
        return Response(replica.generate(*pickle.loads(pickle.dumps(call))), replica)


@contextlib.contextmanager
def serving_replicas(args, count: int):
    """A Client to an app, and its replicas, `count` of them."""
    replicas = [object.__new__(Replica) for _ in range(count)]

    @contextlib.asynccontextmanager
    async def enter():
        for replica in replicas:
            await replica.__init__(args)
        app = Ingress(args, Handle(replicas)).__serve_build_asgi_app__()
        try:
            yield app, replicas[0].thread
        finally:
            for replica in replicas:
                await replica.thread.close()

    with serving_app(enter) as client:
        yield client, replicas


KINDS = [
    {"temperature": 0},
    {"seed": 7, "top_p": 0.9},
    {"seed": 8, "n": 3, "stop": ["a", "th"]},
    {"temperature": 0, "logprobs": 2, "echo": False},
]
BODIES = [  # each has the same answer, whoever writes it
    {"prompt": prompt, "max_tokens": 4 + 3 * row, "ignore_eos": True} | kind
    for row, (prompt, kind) in enumerate(itertools.product(["Tom", ["cat", "dog"], [5, 6]], KINDS))
]


def same(answer: tuple) -> tuple:
    status, body = answer
    own = ("id", "created", "model")
    return status, {key: value for key, value in body.items() if key not in own}


def streamed_texts(client, body: dict) -> dict:
    texts = texts_by_index(client.events(PATH, body | {"stream": True}))
    return {index: text for index, (text, _) in texts.items()}


def check_texts(client, one, clients: int) -> None:
    own = [same(one.post(PATH, body)) for body in BODIES]
    assert [same(client.post(PATH, body)) for body in BODIES] == own
    with ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(lambda body: streamed_texts(client, body), BODIES))
    choices = [answer["choices"] for _, answer in own]
    assert found == [{choice["index"]: choice["text"] for choice in some} for some in choices]
