"""Prometheus metrics of an engine, with vLLM's names."""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.request import Event, Request
from server.engine_thread import EngineThread

# Seconds. On a CPU, a step of a small model takes 1 to 2 ms, of a large one a second.
STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
LATENCY_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)


class Metrics:
    """Counters, gauges and histograms of an engine, in a registry of their own.

    Each time series has the label model_name. Counts that the engine keeps are read on each scrape.
    The others are recorded after each step, in the engine's thread.
    """

    def __init__(self, thread: EngineThread, model_name: str):
        self.thread = thread
        thread.observers.append(self)
        self.model_name = model_name
        self.last_token_time: dict[Request, float] = {}  # time of the last tokens
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.time_to_first_token = self.histogram(
            "time_to_first_token_seconds",
            "Seconds from the arrival of a request to its first token.",
            STEP_BUCKETS,
        )
        self.inter_token_latency = self.histogram(
            "inter_token_latency_seconds",
            "Seconds between steps that emit tokens of a request; accepted drafts share a step.",
            STEP_BUCKETS,
        )
        self.e2e_request_latency = self.histogram(
            "e2e_request_latency_seconds",
            "Seconds from the arrival of a request to its end, unless it is aborted or fails.",
            LATENCY_BUCKETS,
        )
        self.request_prompt_tokens = self.histogram(
            "request_prompt_tokens", "Prompt tokens of a finished request.", TOKEN_BUCKETS
        )
        self.request_generation_tokens = self.histogram(
            "request_generation_tokens", "Generated tokens of a finished request.", TOKEN_BUCKETS
        )
        self.prompt_tokens = self.counter(
            "prompt_tokens", "Prompt tokens of requests that have their first token."
        )
        self.generation_tokens = self.counter("generation_tokens", "Generated tokens.")
        name = "vllm:request_success"
        labels = ("model_name", "finished_reason")
        request_success = Counter(name, "Finished requests.", labels, registry=self.registry)
        self.request_success = {
            reason: request_success.labels(model_name, reason)
            for reason in ("stop", "length", "abort", "error")
        }

    def counter(self, name: str, documentation: str) -> Counter:
        family = Counter(f"vllm:{name}", documentation, ("model_name",), registry=self.registry)
        return family.labels(self.model_name)

    def histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        labels = ("model_name",)
        family = Histogram(
            f"vllm:{name}", documentation, labels, registry=self.registry, buckets=buckets
        )
        return family.labels(self.model_name)

    async def read(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the counts that the engine keeps; the registry calls this."""
        engine = self.thread.engine
        scheduler = engine.scheduler
        pool = scheduler.pool
        gauges = {
            "num_requests_running": (len(scheduler.running), "Running requests."),
            "num_requests_waiting": (len(scheduler.waiting), "Waiting requests."),
            "kv_cache_usage_perc": (
                len(pool.ref_counts) / pool.num_pages,
                "Fraction of the KV cache pages in use, 0 to 1.",
            ),
        }
        counters = {
            "num_preemptions": (scheduler.num_preemptions, "Preemptions of requests."),
            "prefix_cache_queries": (
                scheduler.prefix_cache_queries,
                "Tokens looked up in the prefix cache.",
            ),
            "prefix_cache_hits": (scheduler.prefix_cache_hits, "Tokens found in the prefix cache."),
            "spec_decode_num_draft_tokens": (engine.num_draft_tokens, "Draft tokens proposed."),
            "spec_decode_num_accepted_tokens": (
                engine.num_accepted_tokens,
                "Draft tokens accepted.",
            ),
        }
        for family, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (value, documentation) in values.items():
                metric = family(f"vllm:{name}", documentation, labels=("model_name",))
                metric.add_metric((self.model_name,), value)
                yield metric

    def on_step(self, events: list[Event]) -> None:
        """Record the events of a step."""
        now = time.perf_counter()
        self.generation_tokens.inc(sum(len(event.tokens) for event in events))
        for request, tokens, reason, *_ in events:
            arrival_time = self.thread.request_states[request].generation.arrival_time
            if tokens:
                if request in self.last_token_time:
                    self.inter_token_latency.observe(now - self.last_token_time[request])
                else:
                    self.prompt_tokens.inc(request.prompt_length)
                    self.time_to_first_token.observe(now - arrival_time)
                self.last_token_time[request] = now
            if reason in ("stop", "length"):
                self.e2e_request_latency.observe(now - arrival_time)
                self.request_prompt_tokens.observe(request.prompt_length)
                self.request_generation_tokens.observe(len(request.output))
            if reason:
                self.count_finished(request, reason)

    def on_abort(self, request: Request) -> None:
        """Record an aborted request."""
        self.count_finished(request, "abort")

    def count_finished(self, request: Request, reason: str) -> None:
        self.request_success[reason].inc()
        self.last_token_time.pop(request, None)
