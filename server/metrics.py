"""What Prometheus reads of an engine, by the names that vLLM gives it."""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.request import Event, Request
from server.engine_thread import EngineThread

# Seconds. A step of a small model takes a millisecond or two on a CPU, of a large one a second.
GAPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
WAITS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)


class Metrics:
    """What an engine has done since it was made, and what it does now.

    Each time series has the label model_name. They are in a registry of their own. What the engine
    counts itself is read when somebody asks; the rest is noted after each step, in its thread.
    """

    def __init__(self, thread: EngineThread, model_name: str):
        self.thread = thread
        thread.observers.append(self)
        self.model_name = model_name
        self.last: dict[Request, float] = {}  # when each had its last tokens
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.first_gap = self.histogram(
            "time_to_first_token_seconds", "From when a text is asked for to its first token.", GAPS
        )
        self.gap = self.histogram(
            "inter_token_latency_seconds",
            "From one step that brings tokens of a text to the next; drafts make that several.",
            GAPS,
        )
        self.latency = self.histogram(
            "e2e_request_latency_seconds",
            "From when a text is asked for to its end, if it is neither aborted nor an error.",
            WAITS,
        )
        self.prompt = self.histogram("request_prompt_tokens", "Tokens of a prompt.", COUNTS)
        self.output = self.histogram("request_generation_tokens", "Tokens of an output.", COUNTS)
        self.prompts = self.counter("prompt_tokens", "Tokens of prompts, once each is computed.")
        self.outputs = self.counter("generation_tokens", "Tokens generated.")
        name = "vllm:request_success"
        labels = ("model_name", "finished_reason")
        ends = Counter(name, "Requests that are over.", labels, registry=self.registry)
        self.ends = {
            reason: ends.labels(model_name, reason)
            for reason in ("stop", "length", "abort", "error")
        }

    def counter(self, name: str, says: str) -> Counter:
        family = Counter(f"vllm:{name}", says, ("model_name",), registry=self.registry)
        return family.labels(self.model_name)

    def histogram(self, name: str, says: str, buckets: tuple[float, ...]) -> Histogram:
        labels = ("model_name",)
        family = Histogram(f"vllm:{name}", says, labels, registry=self.registry, buckets=buckets)
        return family.labels(self.model_name)

    async def read(self) -> bytes:
        """What Prometheus gets."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """What the engine counts itself; the registry calls this."""
        engine = self.thread.engine
        scheduler = engine.scheduler
        pool = scheduler.pool
        gauges = {
            "num_requests_running": (len(scheduler.running), "Requests that run."),
            "num_requests_waiting": (len(scheduler.waiting), "Requests that wait."),
            "kv_cache_usage_perc": (
                len(pool.ref_counts) / pool.num_pages,
                "Pages in use; 1 is all.",
            ),
        }
        counters = {
            "num_preemptions": (scheduler.num_preemptions, "Times that a request lost its pages."),
            "prefix_cache_queries": (
                scheduler.prefix_cache_queries,
                "Tokens looked for in the cache.",
            ),
            "prefix_cache_hits": (scheduler.prefix_cache_hits, "Tokens found in the cache."),
            "spec_decode_num_draft_tokens": (engine.num_draft_tokens, "Tokens drafted."),
            "spec_decode_num_accepted_tokens": (
                engine.num_accepted_tokens,
                "Tokens drafted and accepted.",
            ),
        }
        for family, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (value, says) in values.items():
                metric = family(f"vllm:{name}", says, labels=("model_name",))
                metric.add_metric((self.model_name,), value)
                yield metric

    def stepped(self, events: list[Event]) -> None:
        """Note what a step has brought."""
        now = time.perf_counter()
        self.outputs.inc(sum(len(event.tokens) for event in events))
        for request, tokens, reason, *_ in events:
            asked = self.thread.texts[request].call.asked
            if tokens:
                if request in self.last:
                    self.gap.observe(now - self.last[request])
                else:
                    self.prompts.inc(request.prompt_length)
                    self.first_gap.observe(now - asked)
                self.last[request] = now
            if reason in ("stop", "length"):
                self.latency.observe(now - asked)
                self.prompt.observe(request.prompt_length)
                self.output.observe(len(request.output))
            if reason:
                self.end(request, reason)

    def aborted(self, request: Request) -> None:
        """Note that a client has left."""
        self.end(request, "abort")

    def end(self, request: Request, reason: str) -> None:
        self.ends[reason].inc()
        self.last.pop(request, None)
