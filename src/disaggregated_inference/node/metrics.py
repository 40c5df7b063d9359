"""Prometheus metrics of a node: counters and histograms of finished requests, and gauges read at each scrape."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from disaggregated_inference.api import PrefillMetrics
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.kv import TicketBook
from disaggregated_inference.kv_transfer import format_address
from disaggregated_inference.node.decode import DecodeNode
from disaggregated_inference.node.generation import Generation
from disaggregated_inference.node.node import Node
from disaggregated_inference.observe import memory_in_use, reading_gauges

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0)


class RequestMetrics:
    """Counters and histograms that every node has."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests that ended, by outcome", "role", "outcome")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, by where their KV came from", "source")
        self.generated_tokens = self._counter("generation_tokens", "Generated tokens")
        self.first_token = self._histogram("time_to_first_token_seconds", "From the request to its first token")
        self.total = self._histogram("request_seconds", "From the request to its end", "role")
        self.registry.register(_MemoryGauges())

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def count_refusal(self, role: str, error: DisaggError) -> None:
        """Of a request that was refused before it started."""
        self.requests.labels(role, error.code).inc()

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"disagg_{name}", help, labels, registry=self.registry)

    def _histogram(self, name: str, help: str, *labels: str) -> Histogram:
        return Histogram(f"disagg_{name}", help, labels, buckets=_SECONDS, registry=self.registry)


class NodeMetrics(RequestMetrics):
    """Registers itself with the roles of the node."""

    def __init__(self, served: Node) -> None:
        super().__init__()
        self._moved = self._counter("transfer_bytes", "KV received from prefill nodes")
        self._resumed = self._counter("transfer_resumed", "Connections that took over from broken ones")
        self._queue = self._histogram("queue_seconds", "Waiting for KV memory", "role")
        self._exposed = self._histogram("transfer_exposed_seconds", "Transfer after the end of the prefill")
        self._token = self._histogram("time_per_output_token_seconds", "Of one request, after its first token")
        self.registry.register(_NodeGauges(served))
        if served.decode:
            served.decode.on_end = self.count_decode
        if served.prefill:
            served.prefill.on_end = self.count_prefill

    def count_decode(self, answer: Generation, error: BaseException | None) -> None:
        metrics = answer.metrics
        self.requests.labels("decode", _outcome(error) if error else metrics.finish_reason).inc()
        self.generated_tokens.inc(metrics.completion_tokens)
        self.total.labels("decode").observe(metrics.total_time)
        self._queue.labels("decode").observe(metrics.admission_time)
        if metrics.completion_tokens:
            self.first_token.observe(metrics.first_token_time)
            self._count_prompt(answer)
        if metrics.decode_speed:
            self._token.observe(1 / metrics.decode_speed)

    def _count_prompt(self, answer: Generation) -> None:
        metrics = answer.metrics
        received = (metrics.prompt_tokens or 0) - metrics.cached_tokens - metrics.prompt_tokens_recomputed
        self.prompt_tokens.labels("computed").inc(metrics.prompt_tokens_recomputed)
        self.prompt_tokens.labels("prefix_cache").inc(metrics.cached_tokens)
        self.prompt_tokens.labels("received").inc(max(received, 0))
        if metrics.kv_paths:
            self._moved.inc(metrics.kv_bytes)
            self._resumed.inc(metrics.resumed)
            self._exposed.observe(metrics.exposed_transfer_time)

    def count_prefill(self, metrics: PrefillMetrics | None, error: BaseException | None) -> None:
        self.requests.labels("prefill", _outcome(error) if error else "read").inc()
        if metrics:
            self.prompt_tokens.labels("computed").inc(metrics.prompt_tokens - metrics.cached_tokens)
            self.prompt_tokens.labels("prefix_cache").inc(metrics.cached_tokens)
            self.total.labels("prefill").observe(metrics.queue_time + metrics.prefill_time)
            self._queue.labels("prefill").observe(metrics.queue_time)


def _outcome(error: BaseException | None) -> str:
    """A code of errors.py: a bounded set of labels."""
    return error.code if isinstance(error, DisaggError) else "internal_error"


class _MemoryGauges(Collector):
    """Of this process. Beside a model they are small; what counts is whether they grow."""

    def collect(self) -> Iterator[Metric]:
        in_use = memory_in_use()
        yield _gauge("python_blocks", "Python's memory blocks that the node uses", in_use.python_blocks)
        if in_use.malloc_bytes is not None:
            yield _gauge("malloc_bytes", "What malloc counts as in use in the node", in_use.malloc_bytes)


class _NodeGauges(Collector):
    """Read at each scrape, so no value is kept twice."""

    def __init__(self, served: Node) -> None:
        self._served = served

    def collect(self) -> Iterator[Metric]:
        served, kv_memory = self._served, self._served.kv_memory
        admissions, prefixes = kv_memory.admissions, kv_memory.prefixes.stats()
        yield _gauge("model_loaded", "Whether the model is in memory", kv_memory.engine.loaded)
        yield _gauge("draining", "Whether the node takes no new requests", kv_memory.draining)
        yield _gauge("kv_limit_bytes", "KV memory for requests", sum(each.limit_bytes for each in admissions))
        yield _gauge("kv_reserved_bytes", "KV memory reserved for requests", kv_memory.reserved_bytes)
        yield _gauge("kv_held_bytes", "KV memory that the engine holds, measured", kv_memory.held_bytes)
        yield _gauge("slots_used", "Sequence slots in use", kv_memory.held_slots)
        yield _gauge("requests_waiting", "Requests that wait for KV memory", sum(each.waiting for each in admissions))
        yield _gauge("prefix_bytes", "Prefix cache in memory", prefixes.size_bytes)
        yield _gauge("prefix_disk_bytes", "Prefix cache on disk", prefixes.disk_bytes)
        yield _count("prefix_hits", "Prompts with a cached prefix", prefixes.hits)
        yield _count("prefix_misses", "Prompts without a cached prefix", prefixes.misses)
        yield _count("prefix_hit_tokens", "Prompt tokens found in the prefix cache", prefixes.hit_tokens)
        yield _count("integrity_faults", "Times the KV memory did not add up", kv_memory.faults)
        if served.readings and (readings := served.readings.latest()):
            yield from reading_gauges([([], readings)], [])
        if served.decode:
            yield _gauge("requests_running", "Requests in the decode batch", len(kv_memory.scheduler.batch.running))
            yield _count("decode_steps", "Decode steps of the batch", kv_memory.scheduler.batch.steps)
            yield _paths(served.decode)
        if served.prefill:
            yield _gauge(
                "tickets", "Tickets whose KV is being computed or waits to be fetched", len(served.prefill.tickets)
            )
            yield _endings(served.prefill.tickets)


def _paths(decode: DecodeNode) -> Metric:
    family = GaugeMetricFamily("disagg_path_goodput_bytes_per_second", "Recent receive rate", labels=["path"])
    for path in decode.kv_source.paths.known():
        family.add_metric([format_address((path.host, path.port))], path.goodput_bytes_s or 0.0)
    return family


def _endings(tickets: TicketBook) -> Metric:
    family = CounterMetricFamily("disagg_tickets_ended", "How tickets ended", labels=["how"])
    for how, count in tickets.endings.items():
        family.add_metric([how], count)
    return family


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"disagg_{name}", help, value=float(value))


def _count(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(f"disagg_{name}", help, value=float(value))
