"""Engine replicas in Ray actors, and their client and metrics for the app."""

import contextlib
import functools
from collections.abc import AsyncIterator

from fastapi import FastAPI

from command_line.models import pick_device
from engine.options import load_engine
from loading.load import load_config, resolve_source
from server.app import allowed_hosts, make_app
from server.backend import GenerateInput, Update
from server.engine_thread import EngineThread
from server.memory import freeze
from server.served import ServedModel, find_chat, served_name
from text.tokenizer import load_encoding


class Replica:
    """An engine in a process that Ray starts. args: of the command line."""

    async def __init__(self, args):
        make = functools.partial(
            load_engine, args, resolve_source(args.model), pick_device(args.device)
        )
        self.thread = EngineThread(make, args.max_waiting, args.max_waiting_tokens)
        self.thread.start()
        await self.thread.ready

    async def generate(self, inputs: GenerateInput) -> AsyncIterator[dict[int, Update] | Exception]:
        """Yield what `EngineThread.generate` yields, then any error, which Ray would wrap."""
        try:
            async with contextlib.aclosing(self.thread.generate(inputs)) as updates:
                async for update in updates:
                    yield update
        except Exception as error:
            yield error


class ReplicaClient:
    """Backend that sends each call to one engine replica.

    handle: Ray's handle of a Replica deployment.
    """

    error = None  # never set: calls wait until a replica is available

    def __init__(self, handle, model):
        self.handle = handle.options(stream=True)
        self.config = load_config(model)
        self.encoding = load_encoding(model, self.config.vocab_size)

    def admit(self, num_requests: int, num_tokens: int = 0) -> None:
        """Do nothing, because the replica that gets the call checks its own limits."""

    async def generate(self, inputs: GenerateInput) -> AsyncIterator[dict[int, Update]]:
        """Yield what `EngineThread.generate` yields; one replica computes the whole call."""
        updates = self.handle.generate.remote(inputs)
        try:
            async for update in updates:
                if isinstance(update, Exception):
                    raise update
                yield update
        finally:
            updates.cancel()


class Ingress:
    """Ray ingress deployment with the HTTP app, without an engine. replicas: Ray's handle."""

    def __init__(self, args, replicas):
        self.args = args
        self.replicas = replicas

    def __serve_build_asgi_app__(self) -> FastAPI:
        source = resolve_source(self.args.model)
        served = ServedModel(
            ReplicaClient(self.replicas, source),
            served_name(source),
            source.label,
            find_chat(source),
        )
        freeze()
        hosts = allowed_hosts(self.args.host, self.args.allowed_host)
        return make_app(served, self.args.api_key, self.args.allow_origin, hosts)
