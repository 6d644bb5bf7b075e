"""Engine replicas in Ray actors, and their client and metrics for the app."""

import contextlib
import functools
import uuid
from collections.abc import AsyncIterator, Iterable

from fastapi import FastAPI
from prometheus_client import generate_latest
from prometheus_client.core import Metric

from command_line.models import pick_device
from constraints.matcher import Matcher
from engine.options import load_engine, parse_adapters
from loading.load import load_config, resolve_source
from server.app import allowed_hosts, make_app
from server.backend import EngineDead, GenerateInput, Update
from server.engine_thread import EngineThread
from server.memory import freeze
from server.metrics import Metrics
from server.served import ServedModel, budget_defaults, find_chat, served_name, server_defaults
from server.structured_output import stall_reason
from text.tokenizer import load_encoding


class Replica:
    """An engine in a process that Ray starts. args: of the command line."""

    async def __init__(self, args):
        make = functools.partial(
            load_engine, args, resolve_source(args.model), pick_device(args.device)
        )
        self.thread = EngineThread(make, args.max_waiting, args.max_waiting_tokens)
        self.metrics = Metrics(self.thread, served_name(resolve_source(args.model)))
        self.name = uuid.uuid4().hex[:8]
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

    def check_health(self) -> None:
        """Raise EngineDead if the engine has ended, so that Ray replaces this replica."""
        if self.thread.error:  # not if it stalls: a long step is no reason to abort its requests
            raise EngineDead(self.thread.error)

    def read_metrics(self) -> list[Metric]:
        """Return the engine's metrics, each sample with the label engine, as in vLLM."""
        families = list(self.metrics.registry.collect())
        for family in families:
            family.samples = [
                sample._replace(labels=sample.labels | {"engine": self.name})
                for sample in family.samples
            ]
        return families


class AggregatedMetrics:
    """The metrics of all replicas, read on demand. handle: Ray's."""

    def __init__(self, handle):
        self.handle = handle

    async def read(self) -> bytes:
        """Return the merged metrics in Prometheus' text format, without replicas that just ended.

        Raises TimeoutError if a replica does not answer within 10 s, Prometheus' own timeout.
        """
        responses = self.handle.broadcast("read_metrics")
        merged = MetricFamilies()
        for families in await responses.results_async(timeout_s=10, return_exceptions=True):
            for family in families if isinstance(families, list) else ():
                merged_family = merged.setdefault(family.name, family)
                if merged_family is not family:
                    merged_family.samples += family.samples
        return generate_latest(merged)


class MetricFamilies(dict[str, Metric]):
    """Metric families by name, with the interface of a registry."""

    def collect(self) -> Iterable[Metric]:
        return self.values()


class ReplicaClient:
    """Backend that sends each call to one engine replica.

    handle: Ray's handle of a Replica deployment.
    """

    error = None  # never set: calls wait until a replica is available

    def __init__(self, handle, model):
        self.handle = handle.options(stream=True)
        self.config = load_config(model)
        self.encoding = load_encoding(model, self.config.vocab_size)

    @property
    def stall_reason(self) -> str | None:
        """Return the stall reason of only this process, because Ray checks the replicas itself."""
        return stall_reason()

    def admit(self, num_requests: int, num_tokens: int = 0) -> None:
        """Do nothing, because the replica that gets the call checks its own limits."""

    async def generate(
        self, inputs: GenerateInput, matcher: Matcher | None = None
    ) -> AsyncIterator[dict[int, Update]]:
        """Yield what `EngineThread.generate` yields; one replica computes the whole call.

        The replica compiles the constraint again, because `matcher` exists only in this process.
        """
        updates = self.handle.generate.remote(inputs)
        try:
            while True:
                try:
                    update = await anext(updates)
                except StopAsyncIteration:
                    return
                except Exception as error:  # Ray raises many types
                    reason = "the replica of this request has ended, or cannot be reached"
                    raise EngineDead(f"{reason}: {type(error).__name__}") from None
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
            find_chat(source, self.args.chat_template),
            parse_adapters(self.args.lora_modules),
            server_defaults(self.args, source) | budget_defaults(self.args, source),
            metrics=AggregatedMetrics(self.replicas),
        )
        freeze()
        hosts = allowed_hosts(self.args.host, self.args.allowed_host)
        return make_app(served, self.args.api_key, self.args.allow_origin, hosts)
