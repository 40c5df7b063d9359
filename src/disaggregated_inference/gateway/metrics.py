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
_LONG_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)  # vLLM's
_TOKENS = tuple(4**step for step in range(14))
_TRANSFER_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_SHARE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)

_PROVIDER = "disaggregated_inference"
_OPERATIONS = ("chat", "text_completion")
_BREAKER = {"closed": 0, "half_open": 1, "open": 2}
_WAITING = ("queue", "admission", "prefill queue")  # phases in which nobody works for the request
_LEG_CODES = ("unreachable", "unauthorized", "stuck", "stream_ended", "bad_answer", "internal_error", "failed")


def _status_of() -> dict[str, int]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DisaggError)]
    return {kind.__new__(kind).code: kind.status for kind in kinds} | dict.fromkeys(_LEG_CODES, 500)


STATUS_OF = _status_of()  # every code there is


class GatewayMetrics:
    """Registers itself with the orchestrator. `core` is asked for each time: a new config brings another one."""

    def __init__(self, core: Callable[[], DisaggregatedInference]) -> None:
        self.registry = CollectorRegistry()
        self._core, self._live = core, _GatewayGauges()
        self._make_standard()
        self._make_own()
        self.registry.register(self._live)
        core().on_end.append(self.ended)

    def _make_standard(self) -> None:
        genai = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_response_model")
        self._usage = self._histogram("gen_ai_client_token_usage", _TOKENS, *genai, "gen_ai_token_type")
        self._duration = self._histogram("gen_ai_server_request_duration_seconds", _WHOLE_S, *genai, "error_type")
        self._first = (
            self._histogram("gen_ai_server_time_to_first_token_seconds", _FIRST_TOKEN_S, *genai),
            self._histogram("vllm:time_to_first_token_seconds", _FIRST_TOKEN_S, "model_name"),
        )
        self._each = (
            self._histogram("gen_ai_server_time_per_output_token_seconds", _EACH_TOKEN_S, *genai),
            self._histogram("vllm:inter_token_latency_seconds", _EACH_TOKEN_S, "model_name"),
            self._histogram("vllm:request_time_per_output_token_seconds", _EACH_TOKEN_S, "model_name"),
        )
        self._make_vllm()

    def _make_vllm(self) -> None:
        latencies = ("e2e_request_latency", *(f"request_{name}_time" for name in ("queue", "prefill", "decode")))
        self._whole, self._queue, self._prefill, self._decode = (
            self._histogram(f"vllm:{name}_seconds", _LONG_S, "model_name") for name in latencies
        )
        self._inference = self._histogram("vllm:request_inference_time_seconds", _LONG_S, "model_name")
        self._prompts, self._answers = (
            self._histogram(f"vllm:request_{name}_tokens", _TOKENS, "model_name") for name in ("prompt", "generation")
        )
        self._read, self._written, self._asked_for, self._found = (
            self._counter(f"vllm:{name}", "model_name")
            for name in ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")
        )
        self._success = self._counter("vllm:request_success", "model_name", "finished_reason")

    def _make_own(self) -> None:
        self._outcomes = self._counter("disagg_requests", "model", "outcome")
        self._refused = self._counter("disagg_refused", "reason")
        self._transfer = self._histogram("disagg_kv_transfer_seconds", _TRANSFER_S, "model")
        self._moved = self._counter("disagg_kv_transfer_bytes", "model")
        self._exposed = self._histogram("disagg_exposed_transfer_seconds", _TRANSFER_S, "model")
        self._overlap = self._histogram("disagg_overlap_ratio", _SHARE, "model")
        self._inject = self._histogram("disagg_kv_inject_seconds", _TRANSFER_S, "model")
        self._fallbacks = self._counter("disagg_fallback", "reason")
        self._failovers = self._counter("disagg_failover", "code")
        self._energy = self._counter("disagg_energy_wh", "model")
        self._cost = self._counter("disagg_cost", "model")
        self._node_tokens = self._counter("disagg_node_tokens", "node", "phase")
        self._node_energy = self._counter("disagg_node_energy_joules", "node", "phase")

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

    def refused(self, error: Exception) -> None:
        """By the gateway or a node, for what the request is or whose it is; a fault of ours is no refusal."""
        if isinstance(error, DisaggError) and 400 <= error.status < 499:
            self._refused.labels(_one_of(error.code, STATUS_OF)).inc()

    def _count(self, record: Record) -> None:
        model = record["model"] if record.get("model") in self._core().config.names else "other"
        self._outcomes.labels(model, record["outcome"]).inc()
        self._count_times(model, record)
        self._count_tokens(model, record)
        self._count_transfer(model, record)
        self._count_trouble(record)
        self._count_nodes(record)
        for name, counter in (("energy_wh", self._energy), ("cost", self._cost)):
            if record.get(name) is not None:  # where it is not known there is no series: 0 would be a claim
                counter.labels(model).inc(record[name])

    def _count_times(self, model: str, record: Record) -> None:
        genai, whole_s = _genai(model, record), record["total_time"]
        self._duration.labels(*genai, _error_type(record)).observe(whole_s)
        self._whole.labels(model).observe(whole_s)
        phases = record.get("waterfall") or ()
        waited_s = sum(each["seconds"] for each in phases if each["name"] in _WAITING)
        self._queue.labels(model).observe(waited_s)
        if record.get("first_token_time"):
            _observe(self._first, genai, model, record["first_token_time"])
            self._prefill.labels(model).observe(record["prefill_time"])
            self._decode.labels(model).observe(record["decode_time"])
            self._inference.labels(model).observe(max(0.0, whole_s - waited_s))
        if record.get("decode_speed"):  # of all choices together; each of them was so many times slower
            _observe(self._each, genai, model, (record.get("n") or 1) / record["decode_speed"])

    def _count_tokens(self, model: str, record: Record) -> None:
        read, written = record.get("prompt_tokens") or 0, record.get("completion_tokens") or 0
        for kind, tokens, vllm in (("input", read, self._prompts), ("output", written, self._answers)):
            if tokens:
                self._usage.labels(*_genai(model, record), kind).observe(tokens)
                vllm.labels(model).observe(tokens)
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

    def _count_nodes(self, record: Record) -> None:
        """Energy over tokens is joules per token, read or written, on each machine."""
        power_w = {server.name: server.power_w for server in self._core().config.servers}
        read = round((record.get("prefill_speed") or 0) * (record.get("prefill_time") or 0))
        for phase, tokens in (("prefill", read), ("decode", record.get("completion_tokens") or 0)):
            node = record.get(f"{phase}_server")
            if node in power_w:
                self._node_tokens.labels(node, phase).inc(tokens)
                if (watts := power_w[node]) is not None:
                    self._node_energy.labels(node, phase).inc(watts * record[f"{phase}_time"])


def _genai(model: str, record: Record) -> tuple[str, ...]:
    """An alias is told by the name behind it: whoever asks may write it in many ways."""
    return _one_of(record.get("operation"), _OPERATIONS), _PROVIDER, model, model


def _observe(both: tuple[Histogram, ...], genai: tuple[str, ...], model: str, value: float) -> None:
    """The first by OpenTelemetry's labels, the others by vLLM's."""
    both[0].labels(*genai).observe(value)
    for other in both[1:]:
        other.labels(model).observe(value)


def _one_of(value: Any, known: Any) -> str:
    return value if isinstance(value, str) and value in known else "other"


def _error_type(record: Record) -> str:
    """Empty, which is no label at all to Prometheus, where all went well."""
    return _one_of(record["error"].get("code"), STATUS_OF) if record.get("error") else ""


class _GatewayGauges(Collector):
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
            ("disagg_node_kv_reserved_bytes", lambda node: node["kv"]["reserved_bytes"]),
            ("disagg_node_kv_limit_bytes", lambda node: node["kv"]["total_limit_bytes"] or node["kv"]["limit_bytes"]),
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
    "vllm:request_time_per_output_token_seconds": "Of one answer, after its first token, on average",
    "vllm:e2e_request_latency_seconds": "From the request to its end",
    "vllm:request_queue_time_seconds": "Waiting, here and on nodes, of the attempt that came through",
    "vllm:request_prefill_time_seconds": "Reading of the prompt",
    "vllm:request_decode_time_seconds": "From the first token to the end",
    "vllm:request_inference_time_seconds": "All of it but the waiting",
    "vllm:request_prompt_tokens": "Tokens of one prompt",
    "vllm:request_generation_tokens": "Tokens of one request's answers",
    "vllm:prompt_tokens": "Tokens of prompts",
    "vllm:generation_tokens": "Tokens of answers",
    "vllm:prefix_cache_queries": "Tokens of prompts that were looked for in caches",
    "vllm:prefix_cache_hits": "Tokens of prompts that the decode or the prefill node held already",
    "vllm:request_success": "Requests that were answered, by why the answer ended",
    "vllm:num_requests_waiting": "Requests that wait for a place",
    "vllm:num_requests_running": "Requests that have one",
    "vllm:kv_cache_usage_perc": "KV memory of decode nodes promised to requests, 0 to 1",
    "disagg_requests": "Requests that ended: ok, failed, refused or cancelled",
    "disagg_refused": "Requests that were answered with a refusal (4xx), by its code",
    "disagg_kv_transfer_seconds": "From the first to the last byte of a cache that moved",
    "disagg_kv_transfer_bytes": "KV that moved between nodes",
    "disagg_exposed_transfer_seconds": "Of a transfer, what came after the prompt was read",
    "disagg_overlap_ratio": "Of a transfer, the share that was hidden behind the reading",
    "disagg_kv_inject_seconds": "Placing a received cache into the engine",
    "disagg_fallback": "Answers whose decode node had to read the prompt, by the failure before it",
    "disagg_failover": "Legs that failed while another node went on, by code",
    "disagg_energy_wh": "Energy of requests, where the config has the servers' power",
    "disagg_cost": "Cost of requests, where the config has prices",
    "disagg_node_tokens": "Tokens of prompts that the node read, and of answers that it wrote",
    "disagg_node_energy_joules": "Of requests, where the config has the node's power: as if each had it to itself",
    "disagg_link_goodput_bytes_per_second": "Measured where it was, else as the config says",
    "disagg_queue_waiting": "Requests that wait for a place",
    "disagg_node_usable": "Whether requests go there",
    "disagg_breaker_state": "Of the node's circuit: 0 closed, 1 half open, 2 open",
    "disagg_node_kv_held_bytes": "KV memory that the node's engine holds",
    "disagg_node_kv_reserved_bytes": "KV memory that is promised to requests",
    "disagg_node_kv_limit_bytes": "KV memory that the node may use",
}
