"""Prometheus metrics of an engine, with vLLM's names."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from server.engine_thread import EngineThread


class Metrics:
    """Counters and gauges of an engine, in a registry of their own.

    Each time series has the label model_name. Counts that the engine keeps are read on each scrape.
    """

    def __init__(self, thread: EngineThread, model_name: str):
        self.thread = thread
        self.model_name = model_name
        self.registry = CollectorRegistry()
        self.registry.register(self)

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
