"""What a node tells Prometheus: counters and histograms of what ended, gauges read from the node when asked."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from disaggregated_inference.errors import DisaggError
from disaggregated_inference.kv_transfer.paths import spoken
from disaggregated_inference.node.generation import Generation
from disaggregated_inference.node.node import Node
from disaggregated_inference.node.prefill_job import PrefillMetrics

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0)


class NodeMetrics:
    """Registers itself with the nodes it watches."""

    def __init__(self, served: Node) -> None:
        self.registry = CollectorRegistry()
        self._ended = self._counter("requests", "Requests that ended, by outcome", "role", "outcome")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts, by where their cache came from", "source")
        self._written = self._counter("generation_tokens", "Tokens of answers")
        self._moved = self._counter("transfer_bytes", "KV received from prefill nodes")
        self._resumed = self._counter("transfer_resumed", "Connections that took over from broken ones")
        self._first = self._histogram("time_to_first_token_seconds", "From the request to its first token")
        self._total = self._histogram("request_seconds", "From the request to its end", "role")
        self._queue = self._histogram("queue_seconds", "Waiting for KV memory", "role")
        self._exposed = self._histogram("transfer_exposed_seconds", "Transfer after the prefill's end")
        self._token = self._histogram("time_per_output_token_seconds", "Of one answer, after its first token")
        self.registry.register(_NodeGauges(served))
        if served.decode:
            served.decode.on_end = self.answered
        if served.prefill:
            served.prefill.on_end = self.read

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def refused(self, role: str, error: DisaggError) -> None:
        """Before it was begun."""
        self._ended.labels(role, error.code).inc()

    def answered(self, answer: Generation, error: BaseException | None) -> None:
        metrics = answer.metrics
        self._ended.labels("decode", _outcome(error) if error else metrics.finish_reason).inc()
        self._written.inc(metrics.completion_tokens)
        self._total.labels("decode").observe(metrics.total_time)
        self._queue.labels("decode").observe(metrics.admission_time)
        if metrics.completion_tokens:
            self._first.observe(metrics.first_token_time)
            self._count_prompt(answer)
        if metrics.decode_speed:
            self._token.observe(1 / metrics.decode_speed)

    def _count_prompt(self, answer: Generation) -> None:
        metrics = answer.metrics
        received = metrics.prompt_tokens - metrics.cached_tokens - metrics.prompt_tokens_recomputed
        for source, tokens in (
            ("computed", metrics.prompt_tokens_recomputed),
            ("prefix_cache", metrics.cached_tokens),
            ("received", received),
        ):
            self._prompt.labels(source).inc(max(tokens, 0))
        if metrics.kv_paths:
            self._moved.inc(metrics.kv_bytes)
            self._resumed.inc(metrics.resumed)
            self._exposed.observe(metrics.exposed_transfer_time)

    def read(self, metrics: PrefillMetrics | None, error: BaseException | None) -> None:
        self._ended.labels("prefill", _outcome(error) if error else "read").inc()
        if metrics:
            self._prompt.labels("computed").inc(metrics.prompt_tokens - metrics.cached_tokens)
            self._prompt.labels("prefix_cache").inc(metrics.cached_tokens)
            self._total.labels("prefill").observe(metrics.queue_time + metrics.prefill_time)
            self._queue.labels("prefill").observe(metrics.queue_time)

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(f"disagg_{name}", words, labels, registry=self.registry)

    def _histogram(self, name: str, words: str, *labels: str) -> Histogram:
        return Histogram(f"disagg_{name}", words, labels, buckets=SECONDS, registry=self.registry)


def _outcome(error: BaseException | None) -> str:
    """One of errors.py's codes: there are only so many."""
    return error.code if isinstance(error, DisaggError) else "internal_error"


class _NodeGauges(Collector):
    """Read when asked: nothing is counted twice, and nothing can drift from the truth."""

    def __init__(self, served: Node) -> None:
        self._served = served

    def collect(self) -> Iterator[Metric]:
        served, kv_memory = self._served, self._served.kv_memory
        admissions, prefixes = kv_memory.admissions, kv_memory.prefixes.seen()
        yield _gauge("model_loaded", "Whether the model is in memory", kv_memory.engine.loaded)
        yield _gauge("draining", "Whether the node takes no new work", kv_memory.draining)
        yield _gauge("kv_limit_bytes", "KV memory for requests", sum(each.limit_bytes for each in admissions))
        yield _gauge("kv_reserved_bytes", "KV memory promised to requests", kv_memory.promised_bytes)
        yield _gauge("kv_held_bytes", "KV memory that the engine holds, measured", kv_memory.held_bytes)
        yield _gauge("slots_used", "Sequences that may be open", kv_memory.held_slots)
        yield _gauge("requests_waiting", "Requests that wait for KV memory", sum(each.waiting for each in admissions))
        yield _gauge("prefix_bytes", "Kept prefixes in memory", prefixes.size_bytes)
        yield _gauge("prefix_disk_bytes", "Kept prefixes on disk", prefixes.disk_bytes)
        yield _count("prefix_hits", "Prompts whose beginning was here", prefixes.hits)
        yield _count("prefix_misses", "Prompts of which nothing was here", prefixes.misses)
        yield _count("prefix_hit_tokens", "Tokens that need not be computed or sent", prefixes.hit_tokens)
        yield _count("integrity_faults", "Times the KV memory did not add up", kv_memory.faults)
        if served.decode:
            yield _gauge("requests_running", "Answers that are being written", len(served.decode.batch.members))
            yield _count("decode_steps", "Steps of the batch", served.decode.batch.steps)
            yield self._paths()
        if served.prefill:
            yield _gauge("tickets", "Caches being read or waiting to be fetched", len(served.prefill.book))
            yield self._endings()

    def _paths(self) -> Metric:
        assert self._served.decode
        family = GaugeMetricFamily("disagg_path_goodput_bytes_per_second", "Lately, while receiving", labels=["path"])
        for path in self._served.decode.paths.seen():
            family.add_metric([spoken((path.host, path.port))], path.goodput_bytes_s or 0.0)
        return family

    def _endings(self) -> Metric:
        assert self._served.prefill
        endings = self._served.prefill.book.endings
        family = CounterMetricFamily("disagg_tickets_ended", "How tickets ended", labels=["how"])
        for how in ("fetched", "cancelled", "expired"):
            family.add_metric([how], getattr(endings, how))
        return family


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(f"disagg_{name}", words, value=float(value))


def _count(name: str, words: str, value: float) -> Metric:
    return CounterMetricFamily(f"disagg_{name}", words, value=float(value))
