"""Metrics for Prometheus: counters and histograms of finished requests, and gauges of the cluster's status.

The names are those of OpenTelemetry's GenAI conventions and of vLLM, which dashboards know; `disagg_` where neither has
one. Labels are bounded: models and nodes of the config, names of the key file, error codes of errors.py and the
orchestrator; else "other".
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from disaggregated_inference import errors
from disaggregated_inference.api import ClusterNode, ClusterStatus, QueueStatus, RequestRecord
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.observe import memory_in_use, reading_gauges
from disaggregated_inference.orchestrator import (
    WAITING_PHASES,
    DisaggregatedInference,
    NodeState,
)

log = logging.getLogger(__name__)

_BATCH = 64  # counted one after the other, while the code is in the processor's caches

# Buckets of the conventions; the last three of the first are for long prompts.
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_DURATION_S = tuple(0.01 * 2**step for step in range(14))
_LONG_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)  # vLLM's
_TOKENS = tuple(4**step for step in range(14))
_TRANSFER_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_FAILOVER_S = (0.1, 0.25, 0.5, 1, 2, 3, 4, 5, 7.5, 10, 20, 40, 80)
_SHARE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)

_PROVIDER = "disaggregated_inference"
_OPERATIONS = ("chat", "text_completion")
_BREAKER = {"closed": 0, "half_open": 1, "open": 2}
_NODE_CODES = ("unreachable", "unauthorized", "stuck", "stream_ended", "bad_answer", "internal_error", "failed")


def _status_of() -> dict[str, int]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DisaggError)]
    return {kind.__new__(kind).code: kind.status for kind in kinds} | dict.fromkeys(_NODE_CODES, 500)


STATUS_OF = _status_of()  # of every error code


class GatewayMetrics:
    """Registers with the orchestrator. `core` is called each time: a new config brings another orchestrator."""

    def __init__(
        self, core: Callable[[], DisaggregatedInference], keys: Callable[[], Container[str]] = lambda: ()
    ) -> None:
        self.registry = registry = CollectorRegistry()
        self._core, self._keys, self._gauges = core, keys, _Gauges()
        self._uncounted: list[RequestRecord] = []
        self._sums: defaultdict[tuple[str, tuple[str, ...]], float] = defaultdict(float)  # by counter and labels
        # Labels have few values, and functools finds their series faster.
        self._histograms = {
            name: cache(Histogram(name, text, labels, buckets=buckets, registry=registry).labels)
            for name, (text, labels, buckets) in HISTOGRAMS.items()
        }
        self._counters = {
            name: cache(Counter(name, text, labels, registry=registry).labels)
            for name, (text, labels) in COUNTERS.items()
        }
        registry.register(self._gauges)
        core().on_end.append(self.ended)

    async def text(self) -> bytes:
        core = self._core()
        nodes = (await core.start()).nodes.values()
        self._gauges.families = [*_gauges_of(core, await core.cluster_status()), *_readings_of(nodes)]
        self.count_ended()
        self._add_sums()
        return generate_latest(self.registry)

    def ended(self, record: RequestRecord) -> None:
        """It is counted with the next ones, or when the figures are read."""
        self._uncounted.append(record)
        if len(self._uncounted) >= _BATCH:
            self.count_ended()

    def count_ended(self) -> None:
        """By the present config: also before that changes. A request is answered even if it cannot be counted."""
        records, self._uncounted = self._uncounted, []
        for record in records:
            try:
                self._count(record)
            except Exception:
                log.exception("a request was not counted", extra={"request_id": record.request_id})

    def refused(self, error: Exception, key: str = "") -> None:
        """Counts refusals (4xx) of the gateway or a node; other errors are no refusals. `key`: whose budget it was."""
        if isinstance(error, DisaggError) and 400 <= error.status < 499:
            reason = _one_of(error.code, STATUS_OF)
            self._add("disagg_refused", 1, reason)
            if key:
                self._add("disagg_key_refused", 1, _one_of(key, self._keys()), reason)

    def _add(self, name: str, value: float, *labels: str) -> None:
        """Summed up until the figures are read."""
        self._sums[name, labels] += value

    def _add_sums(self) -> None:
        sums, self._sums = self._sums, defaultdict(float)
        for (name, labels), value in sums.items():
            self._counters[name](*labels).inc(value)

    def _observe(self, name: str, value: float, *labels: str) -> None:
        self._histograms[name](*labels).observe(value)

    def _count(self, record: RequestRecord) -> None:
        model = _one_of(record.model, self._core().config.names)  # its own name, not the alias in the request
        genai = (_one_of(record.operation, _OPERATIONS), _PROVIDER, model, model)
        self._add("disagg_requests", 1, model, record.outcome)
        self._count_times(model, genai, record)
        self._count_tokens(model, genai, record)
        self._count_transfer(model, record)
        self._count_failovers(model, record)
        self._count_nodes(record)
        self._count_key(record)
        if record.ok and record.sequential_time is not None:
            self._add("disagg_sequential_seconds", record.sequential_time, model)
        for name, value in (("disagg_energy_wh", record.energy_wh), ("disagg_cost", record.cost)):
            if value is not None:  # unknown values make no series: 0 would be wrong
                self._add(name, value, model)
        if record.prompt_tokens_recomputed is not None and record.handed_over:
            self._add("disagg_prompt_tokens_recomputed", record.prompt_tokens_recomputed, model)

    def _count_times(self, model: str, genai: tuple[str, ...], record: RequestRecord) -> None:
        total_s, first_s = record.total_time, record.first_token_time
        waited_s = sum(phase.seconds for phase in record.waterfall if phase.name in WAITING_PHASES)
        error = _one_of(record.error.code, STATUS_OF) if record.error else ""  # Prometheus drops empty labels
        self._observe("gen_ai_server_request_duration_seconds", total_s, *genai, error)
        self._observe("vllm:e2e_request_latency_seconds", total_s, model)
        self._observe("vllm:request_queue_time_seconds", waited_s, model)
        if first_s:
            self._observe("gen_ai_server_time_to_first_token_seconds", first_s, *genai)
            self._observe("vllm:time_to_first_token_seconds", first_s, model)
            self._observe("vllm:request_prefill_time_seconds", record.prefill_time, model)
            self._observe("vllm:request_decode_time_seconds", record.decode_time, model)
            self._observe("vllm:request_inference_time_seconds", max(0.0, total_s - waited_s), model)
        if per_token_s := record.output_token_time:
            self._observe("gen_ai_server_time_per_output_token_seconds", per_token_s, *genai)
            self._observe("vllm:inter_token_latency_seconds", per_token_s, model)
            self._observe("vllm:request_time_per_output_token_seconds", per_token_s, model)

    def _count_tokens(self, model: str, genai: tuple[str, ...], record: RequestRecord) -> None:
        prompt, completion = record.prompt_tokens, record.completion_tokens
        for kind, name, tokens in (("input", "prompt", prompt), ("output", "generation", completion)):
            self._add(f"vllm:{name}_tokens", tokens, model)
            if tokens:
                self._observe("gen_ai_client_token_usage", tokens, *genai, kind)
                self._observe(f"vllm:request_{name}_tokens", tokens, model)
        if completion:
            self._add("vllm:prefix_cache_queries", prompt, model)
            self._add("vllm:prefix_cache_hits", min(prompt, record.cached_tokens), model)
        if record.ok:
            self._add("vllm:request_success", 1, model, _one_of(record.finish_reason, ("stop", "length")))

    def _count_transfer(self, model: str, record: RequestRecord) -> None:
        fetch_s, exposed_s = record.fetch_time, record.exposed_transfer_time or 0.0
        if record.kv_paths and fetch_s:
            self._observe("disagg_kv_transfer_seconds", record.transfer_time or fetch_s, model)
            self._add("disagg_kv_transfer_bytes", record.kv_bytes or 0, model)
            self._observe("disagg_exposed_transfer_seconds", exposed_s, model)
            self._observe("disagg_overlap_ratio", _hidden_share(record), model)
            self._observe("disagg_kv_inject_seconds", record.inject_time or 0.0, model)

    def _count_failovers(self, model: str, record: RequestRecord) -> None:
        codes = [_one_of(failover.code, STATUS_OF) for failover in record.failovers]
        for code in codes:
            self._add("disagg_failover", 1, code)
        for failover in record.failovers:
            if failover.stall_s is not None:
                self._observe("disagg_failover_stall_seconds", failover.stall_s, model)
        if record.kind == "fallback":
            self._add("disagg_fallback", 1, codes[-1] if codes else "no_prefill_node")

    def _count_key(self, record: RequestRecord) -> None:
        if record.caller:
            key = _one_of(record.caller, self._keys())
            self._add("disagg_key_requests", 1, key, record.outcome)
            if record.is_charged:
                self._add("disagg_key_tokens", record.prompt_tokens, key, "prompt")
                self._add("disagg_key_tokens", record.completion_tokens, key, "completion")

    def _count_nodes(self, record: RequestRecord) -> None:
        """Energy over tokens is joules per token of a node, for prefill and decode."""
        names = {server.name for server in self._core().config.servers}
        computed = round(record.prefill_speed * record.prefill_time)
        for phase, node, tokens in (
            ("prefill", record.prefill_node, computed),
            ("decode", record.decode_node, record.completion_tokens),
        ):
            if node in names:
                self._add("disagg_node_tokens", tokens, node, phase)
        for share in record.energy:
            if share.node in names:
                self._add("disagg_node_energy_joules", share.joules, share.node, share.phase, share.source)


def _hidden_share(record: RequestRecord) -> float:
    """Of the transfer; an earlier node tells of the whole fetch alone."""
    if record.transfer_time:
        return (record.hidden_transfer_time or 0.0) / record.transfer_time
    return max(0.0, 1 - (record.exposed_transfer_time or 0.0) / record.fetch_time) if record.fetch_time else 0.0


def _one_of(value: str | None, known: Container[str]) -> str:
    return value if value is not None and value in known else "other"


class _Gauges(Collector):
    """From the orchestrator's status at the last scrape."""

    families: Iterable[GaugeMetricFamily | CounterMetricFamily] = ()

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        return self.families


def _gauges_of(
    core: DisaggregatedInference, status: ClusterStatus
) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    names = {server.name for server in core.config.servers}
    nodes = [node for node in status.nodes if node.name in names]
    queues = [(model, status.queue.get(model, QueueStatus())) for model in core.config.names]
    waiting = [([model], queue.waiting) for model, queue in queues]
    yield _gauge("disagg_queue_waiting", waiting)
    yield _gauge("vllm:num_requests_waiting", waiting)
    yield _gauge("vllm:num_requests_running", [([model], queue.running) for model, queue in queues])
    yield _gauge("vllm:kv_cache_usage_perc", [([model], _kv_usage(nodes, model)) for model in core.config.names])
    for name, value in _NODE_GAUGES.items():
        yield _gauge(name, [([node.name], value(node)) for node in nodes])
    yield _gauge("disagg_node_info", [(_node_info(node), 1.0) for node in nodes])
    yield _gauge("disagg_uptime_share", [] if status.uptime is None else [([], status.uptime)])
    yield CounterMetricFamily("disagg_busy_seconds", "Time in which at least one request ran", core.busy_s)
    in_use = memory_in_use()
    yield _gauge("disagg_gateway_python_blocks", [([], in_use.python_blocks)])
    yield _gauge("disagg_gateway_malloc_bytes", [] if in_use.malloc_bytes is None else [([], in_use.malloc_bytes)])
    links = [([link.prefill, link.decode], link.bytes_per_s) for link in status.links]
    yield _gauge("disagg_link_goodput_bytes_per_second", links)


_NODE_GAUGES: dict[str, Callable[[ClusterNode], float]] = {
    "disagg_node_usable": lambda node: node.usable,
    "disagg_node_misnamed": lambda node: node.misnamed,
    "disagg_breaker_state": lambda node: _BREAKER[node.breaker],
    "disagg_node_slots": lambda node: node.slots.most,
    "disagg_node_slots_used": lambda node: node.slots.used,
    "disagg_node_kv_held_bytes": lambda node: node.kv.held_bytes,
    "disagg_node_kv_reserved_bytes": lambda node: node.kv.reserved_bytes,
    "disagg_node_kv_limit_bytes": lambda node: node.kv.total_limit_bytes or node.kv.limit_bytes,
}


def _node_info(node: ClusterNode) -> list[str]:
    """The values of `_INFO_LABELS`."""
    return [node.name, node.role, node.engine, node.model, node.node_model or ""]


def _readings_of(nodes: Iterable[NodeState]) -> Iterator[GaugeMetricFamily]:
    """Of the nodes that answer: an old reading is none."""
    found = [([node.name], node.status.readings) for node in nodes if node.reachable and node.status]
    return reading_gauges([(labels, readings) for labels, readings in found if readings], ["node"])


def _kv_usage(nodes: list[ClusterNode], model: str) -> float:
    """The share of the decode nodes' KV memory that is reserved."""
    memory = [node.kv for node in nodes if node.model == model and node.role != "prefill"]
    limit = sum(kv.limit_bytes for kv in memory)
    return sum(kv.reserved_bytes for kv in memory) / limit if limit else 0.0


def _gauge(name: str, values: Sequence[tuple[list[str], float]]) -> GaugeMetricFamily:
    text, labels = GAUGES[name]
    family = GaugeMetricFamily(name, text, labels=labels)
    for each, value in values:
        family.add_metric(each, float(value))
    return family


_GENAI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_response_model")
_VLLM, _MODEL, _NODE = ("model_name",), ("model",), ("node",)
_INFO_LABELS = ("node", "role", "engine", "model", "node_model")
# Descriptions and labels, and the buckets of histograms.
# fmt: off
HISTOGRAMS: dict[str, tuple[str, tuple[str, ...], tuple[float, ...]]] = {
    "gen_ai_client_token_usage": ("Tokens per request", (*_GENAI, "gen_ai_token_type"), _TOKENS),
    "gen_ai_server_request_duration_seconds": ("Duration of a request", (*_GENAI, "error_type"), _DURATION_S),
    "gen_ai_server_time_to_first_token_seconds": ("Time to first token", _GENAI, _FIRST_TOKEN_S),
    "gen_ai_server_time_per_output_token_seconds":
        ("Time per token of one choice, after the first token", _GENAI, _PER_TOKEN_S),
    "vllm:time_to_first_token_seconds": ("Time to first token", _VLLM, _FIRST_TOKEN_S),
    "vllm:inter_token_latency_seconds":
        ("Mean time per token of one choice, after the first token", _VLLM, _PER_TOKEN_S),
    "vllm:request_time_per_output_token_seconds":
        ("Mean time per token of one choice, after the first token", _VLLM, _PER_TOKEN_S),
    "vllm:e2e_request_latency_seconds": ("Duration of a request", _VLLM, _LONG_S),
    "vllm:request_queue_time_seconds":
        ("Waiting time in the gateway and on nodes, of the successful attempt", _VLLM, _LONG_S),
    "vllm:request_prefill_time_seconds": ("Prefill time", _VLLM, _LONG_S),
    "vllm:request_decode_time_seconds": ("From the first token to the end", _VLLM, _LONG_S),
    "vllm:request_inference_time_seconds": ("Duration of a request without waiting time", _VLLM, _LONG_S),
    "vllm:request_prompt_tokens": ("Prompt tokens per request", _VLLM, _TOKENS),
    "vllm:request_generation_tokens": ("Completion tokens per request", _VLLM, _TOKENS),
    "disagg_kv_transfer_seconds": ("Time in which the KV of a request arrived", _MODEL, _TRANSFER_S),
    "disagg_exposed_transfer_seconds": ("The part of a KV transfer after the prefill", _MODEL, _TRANSFER_S),
    "disagg_overlap_ratio": ("Share of a KV transfer that overlapped with the prefill", _MODEL, _SHARE),
    "disagg_failover_stall_seconds":
        ("From the last sign of life before a failure to the next token after it", _MODEL, _FAILOVER_S),
    "disagg_kv_inject_seconds": ("Time to load a received KV cache into the engine", _MODEL, _TRANSFER_S),
}
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "vllm:prompt_tokens": ("Prompt tokens", _VLLM),
    "vllm:generation_tokens": ("Completion tokens", _VLLM),
    "vllm:prefix_cache_queries": ("Prompt tokens that were looked up in prefix caches", _VLLM),
    "vllm:prefix_cache_hits": ("Prompt tokens that the decode or the prefill node had in its prefix cache", _VLLM),
    "vllm:request_success": ("Successful requests, by finish reason", ("model_name", "finished_reason")),
    "disagg_requests": ("Finished requests: ok, failed, refused or cancelled", ("model", "outcome")),
    "disagg_refused": ("Refused requests (4xx), by error code", ("reason",)),
    "disagg_key_requests": ("Finished requests of an API key", ("key", "outcome")),
    "disagg_key_tokens": ("Tokens of an API key's requests: prompt and completion", ("key", "kind")),
    "disagg_key_refused": ("Requests beyond a budget of their API key, by error code", ("key", "reason")),
    "disagg_kv_transfer_bytes": ("KV bytes that moved between nodes", _MODEL),
    "disagg_fallback": ("Requests whose decode node had to prefill, by the error before", ("reason",)),
    "disagg_failover": ("Failures that another node took over, by error code", ("code",)),
    "disagg_prompt_tokens_recomputed":
        ("Prompt tokens that a decode node computed although the KV was handed over: 0 is right", _MODEL),
    "disagg_energy_wh": ("Energy of requests, where nodes have meters or the config has their power", _MODEL),
    "disagg_cost": ("Cost of requests, as far as the config has prices", _MODEL),
    "disagg_sequential_seconds":
        ("What answered requests would have taken one after the other; over disagg_busy_seconds: speedup", _MODEL),
    "disagg_node_tokens": ("Tokens that a node computed, by phase: prefill or decode", ("node", "phase")),
    "disagg_node_energy_joules":
        ("Energy of requests on a node: measured by its meter, or configured watts", ("node", "phase", "source")),
}
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "vllm:num_requests_waiting": ("Requests in the request queue", _VLLM),
    "vllm:num_requests_running": ("Requests that are running", _VLLM),
    "vllm:kv_cache_usage_perc": ("Share of the decode nodes' KV memory that is reserved, 0 to 1", _VLLM),
    "disagg_link_goodput_bytes_per_second":
        ("Measured goodput of a link; until then the config's value", ("prefill", "decode")),
    "disagg_uptime_share": ("Share of the time in which every model could be served, since the nodes are polled", ()),
    "disagg_queue_waiting": ("Requests in the request queue", _MODEL),
    "disagg_node_info":
        ("1; the labels say what the node is: `node_model` is its own name of its model",
         _INFO_LABELS),
    "disagg_node_misnamed": ("Whether the node's own name of its model is none of the cluster file", _NODE),
    "disagg_node_usable": ("Whether requests go to the node", _NODE),
    "disagg_breaker_state": ("The node's circuit breaker: 0 closed, 1 half open, 2 open", _NODE),
    "disagg_node_slots": ("Answers that a node may write at once", _NODE),
    "disagg_node_slots_used": ("Slots in use", _NODE),
    "disagg_node_kv_held_bytes": ("KV memory that the node's engine holds", _NODE),
    "disagg_node_kv_reserved_bytes": ("KV memory that is reserved for requests", _NODE),
    "disagg_node_kv_limit_bytes": ("KV memory that the node may use", _NODE),
    "disagg_gateway_python_blocks": ("Python's memory blocks that the gateway uses", ()),
    "disagg_gateway_malloc_bytes": ("What malloc counts as in use in the gateway", ()),
}
# fmt: on
