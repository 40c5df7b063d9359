"""What the gateway tells Prometheus: counters and histograms of requests that ended, gauges read when asked.

The names of OpenTelemetry's GenAI conventions and of vLLM, which dashboards know, and our own for what neither has.
Labels are bounded: models and nodes are the config's, codes those of errors.py and the orchestrator's; anything else
is "other", whatever a node or a client may call itself.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from disaggregated_inference import errors
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.orchestrator import DisaggregatedInference

log = logging.getLogger(__name__)

Record = dict[str, Any]

# What the conventions ask for; long prompts need the last three of the first.
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_EACH_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_WHOLE_S = tuple(0.01 * 2**step for step in range(14))
_TOKENS = tuple(4**step for step in range(14))
_TRANSFER_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_SHARE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)

_PROVIDER = "disaggregated_inference"
_BREAKER = {"closed": 0, "half_open": 1, "open": 2}
_WAITING = ("queue", "admission", "prefill queue")  # phases in which nobody works for the request
_LEG_CODES = ("unreachable", "stuck", "stream_ended", "bad_answer", "internal_error", "failed")


def _status_of() -> dict[str, int]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DisaggError)]
    return {kind.__new__(kind).code: kind.status for kind in kinds} | dict.fromkeys(_LEG_CODES, 500)


STATUS_OF = _status_of()  # every code there is


class GatewayMetrics:
    """Registers itself with the orchestrator. `core` is asked for each time: a new config brings another one."""

    def __init__(self, core: Callable[[], DisaggregatedInference]) -> None:
        self.registry = CollectorRegistry()
        self._core, self._live = core, _Live()
        self._make_standard()
        self._make_own()
        self.registry.register(self._live)
        core().on_end.append(self.ended)

    def _make_standard(self) -> None:
        genai = ("gen_ai_provider_name", "gen_ai_request_model")
        self._usage = self._histogram("gen_ai_client_token_usage", _TOKENS, *genai, "gen_ai_token_type")
        self._duration = self._histogram("gen_ai_server_request_duration_seconds", _WHOLE_S, *genai, "error_type")
        self._first = (
            self._histogram("gen_ai_server_time_to_first_token_seconds", _FIRST_TOKEN_S, *genai),
            self._histogram("vllm:time_to_first_token_seconds", _FIRST_TOKEN_S, "model_name"),
        )
        self._each = (
            self._histogram("gen_ai_server_time_per_output_token_seconds", _EACH_TOKEN_S, *genai),
            self._histogram("vllm:inter_token_latency_seconds", _EACH_TOKEN_S, "model_name"),
        )
        self._whole, self._queue, self._prefill, self._decode = (
            self._histogram(f"vllm:{name}_seconds", _WHOLE_S, "model_name")
            for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time")
        )
        self._read, self._written, self._asked_for, self._found = (
            self._counter(f"vllm:{name}", "model_name")
            for name in ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")
        )
        self._success = self._counter("vllm:request_success", "model_name", "finished_reason")

    def _make_own(self) -> None:
        self._outcomes = self._counter("disagg_requests", "model", "outcome")
        self._transfer = self._histogram("disagg_kv_transfer_seconds", _TRANSFER_S, "model")
        self._moved = self._counter("disagg_kv_transfer_bytes", "model")
        self._exposed = self._histogram("disagg_exposed_transfer_seconds", _TRANSFER_S, "model")
        self._overlap = self._histogram("disagg_overlap_ratio", _SHARE, "model")
        self._inject = self._histogram("disagg_kv_inject_seconds", _TRANSFER_S, "model")
        self._fallbacks = self._counter("disagg_fallback", "reason")
        self._failovers = self._counter("disagg_failover", "code")
        self._energy = self._counter("disagg_energy_wh", "model")
        self._cost = self._counter("disagg_cost", "model")

    def _histogram(self, name: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, _WORDS[name], labels, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, *labels: str) -> Counter:
        return Counter(name, _WORDS[name], labels, registry=self.registry)

    async def text(self) -> bytes:
        core = self._core()
        self._live.status, self._live.nodes = await core.status(), [server.name for server in core.config.servers]
        self._live.models = list(core.config.names)
        return generate_latest(self.registry)

    def ended(self, record: Record) -> None:
        """A record of the history. No answer is lost because it could not be counted."""
        try:
            self._count(record)
        except Exception:
            log.exception("a request was not counted", extra={"request_id": record.get("request_id")})

    def _count(self, record: Record) -> None:
        model = record["model"] if record.get("model") in self._core().config.names else "other"
        self._outcomes.labels(model, record["outcome"]).inc()
        self._count_times(model, record)
        self._count_tokens(model, record)
        self._count_transfer(model, record)
        self._count_trouble(record)
        for name, counter in (("energy_wh", self._energy), ("cost", self._cost)):
            if record.get(name) is not None:  # where it is not known there is no series: 0 would be a claim
                counter.labels(model).inc(record[name])

    def _count_times(self, model: str, record: Record) -> None:
        self._duration.labels(_PROVIDER, model, _error_type(record)).observe(record["total_time"])
        self._whole.labels(model).observe(record["total_time"])
        phases = record.get("waterfall") or ()
        self._queue.labels(model).observe(sum(each["seconds"] for each in phases if each["name"] in _WAITING))
        if record.get("first_token_time"):
            self._first[0].labels(_PROVIDER, model).observe(record["first_token_time"])
            self._first[1].labels(model).observe(record["first_token_time"])
            self._prefill.labels(model).observe(record["prefill_time"])
            self._decode.labels(model).observe(record["decode_time"])
        if record.get("decode_speed"):
            self._each[0].labels(_PROVIDER, model).observe(1 / record["decode_speed"])
            self._each[1].labels(model).observe(1 / record["decode_speed"])

    def _count_tokens(self, model: str, record: Record) -> None:
        read, written = record.get("prompt_tokens") or 0, record.get("completion_tokens") or 0
        for kind, tokens in (("input", read), ("output", written)):
            if tokens:
                self._usage.labels(_PROVIDER, model, kind).observe(tokens)
        self._read.labels(model).inc(read)
        self._written.labels(model).inc(written)
        if written:
            self._asked_for.labels(model).inc(read)
            self._found.labels(model).inc(min(read, record.get("cached_tokens") or 0))
        if record.get("ok"):
            self._success.labels(model, _one_of(record.get("finish_reason"), ("stop", "length"))).inc()

    def _count_transfer(self, model: str, record: Record) -> None:
        fetch_s = record.get("fetch_time")
        if not record.get("kv_paths") or not fetch_s:
            return
        exposed_s = record.get("exposed_transfer_time") or 0.0
        self._transfer.labels(model).observe(fetch_s)
        self._moved.labels(model).inc(record.get("kv_bytes") or 0)
        self._exposed.labels(model).observe(exposed_s)
        self._overlap.labels(model).observe(max(0.0, 1 - exposed_s / fetch_s))
        self._inject.labels(model).observe(record.get("inject_time") or 0.0)

    def _count_trouble(self, record: Record) -> None:
        codes = [_one_of(failover.get("code"), STATUS_OF) for failover in record.get("failovers") or ()]
        for code in codes:
            self._failovers.labels(code).inc()
        if record.get("warning"):
            self._fallbacks.labels(codes[-1] if codes else "no_prefill_node").inc()


def _one_of(value: Any, known: Any) -> str:
    return value if isinstance(value, str) and value in known else "other"


def _error_type(record: Record) -> str:
    """Empty, which is no label at all to Prometheus, where all went well."""
    return _one_of(record["error"].get("code"), STATUS_OF) if record.get("error") else ""


class _Live(Collector):
    """The orchestrator's status at the last look. Before the first there is nothing."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = {}
        self.models: list[str] = []
        self.nodes: list[str] = []

    def collect(self) -> Iterator[Metric]:
        if self.status:
            yield from self._of_models()
            yield from self._of_nodes()
            links = [([link["prefill"], link["decode"]], link["bytes_per_s"]) for link in self.status["links"]]
            yield _gauges("disagg_link_goodput_bytes_per_second", ["prefill", "decode"], links)

    def _of_models(self) -> Iterator[Metric]:
        lines = [([model], self.status["queue"].get(model, {})) for model in self.models]
        waiting = [(labels, line.get("waiting", 0)) for labels, line in lines]
        yield _gauges("disagg_queue_waiting", ["model"], waiting)
        yield _gauges("vllm:num_requests_waiting", ["model_name"], waiting)
        running = [(labels, line.get("running", 0)) for labels, line in lines]
        yield _gauges("vllm:num_requests_running", ["model_name"], running)
        used = [([model], self._kv_share(model)) for model in self.models]
        yield _gauges("vllm:kv_cache_usage_perc", ["model_name"], used)

    def _kv_share(self, model: str) -> float:
        """Promised to requests, of the memory for it, on the nodes that write."""
        writers = [node["kv"] for node in self._shown if node["model"] == model and node["role"] != "prefill"]
        limit = sum(kv["limit_bytes"] for kv in writers)
        return sum(kv["reserved_bytes"] for kv in writers) / limit if limit else 0.0

    def _of_nodes(self) -> Iterator[Metric]:
        for name, value in (
            ("disagg_node_usable", lambda node: node["usable"]),
            ("disagg_breaker_state", lambda node: _BREAKER[node["breaker"]]),
            ("disagg_node_kv_held_bytes", lambda node: node["kv"]["held_bytes"]),
        ):
            yield _gauges(name, ["node"], [([node["name"]], value(node)) for node in self._shown])

    @property
    def _shown(self) -> list[dict[str, Any]]:
        return [node for node in self.status["nodes"] if node["name"] in self.nodes]


def _gauges(name: str, labels: list[str], values: list[tuple[list[str], float]]) -> Metric:
    family = GaugeMetricFamily(name, _WORDS[name], labels=labels)
    for each, value in values:
        family.add_metric(each, float(value))
    return family


_WORDS = {
    "gen_ai_client_token_usage": "Tokens of a request",
    "gen_ai_server_request_duration_seconds": "From the request to its end",
    "gen_ai_server_time_to_first_token_seconds": "From the request to its first token",
    "gen_ai_server_time_per_output_token_seconds": "Of one answer, after its first token",
    "vllm:time_to_first_token_seconds": "From the request to its first token",
    "vllm:inter_token_latency_seconds": "Of one answer, after its first token, on average",
    "vllm:e2e_request_latency_seconds": "From the request to its end",
    "vllm:request_queue_time_seconds": "Waiting, here and on nodes, of the attempt that came through",
    "vllm:request_prefill_time_seconds": "Reading of the prompt",
    "vllm:request_decode_time_seconds": "From the first token to the end",
    "vllm:prompt_tokens": "Tokens of prompts",
    "vllm:generation_tokens": "Tokens of answers",
    "vllm:prefix_cache_queries": "Tokens of prompts that were looked for in caches",
    "vllm:prefix_cache_hits": "Tokens of prompts that the decode or the prefill node held already",
    "vllm:request_success": "Requests that were answered, by why the answer ended",
    "vllm:num_requests_waiting": "Requests that wait for a place",
    "vllm:num_requests_running": "Requests that have one",
    "vllm:kv_cache_usage_perc": "KV memory of decode nodes promised to requests, 0 to 1",
    "disagg_requests": "Requests that ended: ok, failed or cancelled",
    "disagg_kv_transfer_seconds": "From the first to the last byte of a cache that moved",
    "disagg_kv_transfer_bytes": "KV that moved between nodes",
    "disagg_exposed_transfer_seconds": "Of a transfer, what came after the prompt was read",
    "disagg_overlap_ratio": "Of a transfer, the share that was hidden behind the reading",
    "disagg_kv_inject_seconds": "Placing a received cache into the engine",
    "disagg_fallback": "Answers whose decode node had to read the prompt, by the failure before it",
    "disagg_failover": "Legs that failed while another node went on, by code",
    "disagg_energy_wh": "Energy of requests, where the config has the servers' power",
    "disagg_cost": "Cost of requests, where the config has prices",
    "disagg_link_goodput_bytes_per_second": "Measured where it was, else as the config says",
    "disagg_queue_waiting": "Requests that wait for a place",
    "disagg_node_usable": "Whether requests go there",
    "disagg_breaker_state": "Of the node's circuit: 0 closed, 1 half open, 2 open",
    "disagg_node_kv_held_bytes": "KV memory that the node's engine holds",
}
