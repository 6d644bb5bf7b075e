"""What Prometheus reads of an engine, by the names that vLLM gives it."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from server.engine_thread import EngineThread


class Metrics:
    """What an engine has done since it was made, and what it does now.

    Each time series has the label model_name. They are in a registry of their own. What the engine
    counts itself is read when somebody asks.
    """

    def __init__(self, thread: EngineThread, model_name: str):
        self.thread = thread
        self.model_name = model_name
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """What the engine counts itself; the registry calls this."""
        engine = self.thread.engine
        scheduler = engine.scheduler
        pool = scheduler.pool
        gauges = {
            "num_requests_running": (len(scheduler.running), "Requests that run."),
            "num_requests_waiting": (len(scheduler.waiting), "Requests that wait."),
            "kv_cache_usage_perc": (len(pool.holders) / pool.num_pages, "Pages in use; 1 is all."),
        }
        counters = {
            "num_preemptions": (scheduler.preemptions, "Times that a request lost its pages."),
            "prefix_cache_hits": (scheduler.shared, "Tokens found in the cache."),
            "spec_decode_num_draft_tokens": (engine.drafted, "Tokens drafted."),
            "spec_decode_num_accepted_tokens": (engine.accepted, "Tokens drafted and accepted."),
        }
        for family, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (value, says) in values.items():
                metric = family(f"vllm:{name}", says, labels=("model_name",))
                metric.add_metric((self.model_name,), value)
                yield metric
