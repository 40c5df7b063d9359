"""The record of a finished request: the metrics that a client gets, the history, Prometheus, traces, the dashboard."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from disaggregated_inference.api.responses import ErrorDetail

Outcome = Literal["ok", "failed", "refused", "cancelled"]
# How the prompt was read: by a prefill node, by the decode node as planned, by the decode node because no prefill node
# could, or by the one node that also wrote the answer.
RequestKind = Literal["disaggregated", "local", "fallback", "whole"]
FALLBACK_WARNING = "Using fallback mode - slower performance"
_KINDS: dict[str, RequestKind] = {"disaggregated": "disaggregated", "local": "local", "whole": "whole"}  # of a method


class Phase(msgspec.Struct, frozen=True):
    """One bar of the waterfall."""

    name: str
    start_s: float
    seconds: float
    node: str = ""


class Failover(msgspec.Struct, frozen=True, kw_only=True):
    """A leg that failed, and the node to blame; `message` names the node only if another one says so. `stall_s`: from
    the last sign of life before it to the next token after it."""

    node: str
    code: str
    message: str
    at_s: float = 0.0
    detected_s: float = 0.0  # from the last sign of life to the verdict
    stall_s: float | None = None

    @property
    def cause(self) -> str:
        return f"{self.node}: {self.message}"


EnergySource = Literal["measured", "configured", "mixed"]


class EnergyShare(msgspec.Struct, frozen=True, kw_only=True):
    """What a node used for a phase of a request: by its meter, or by the watts of the cluster file."""

    node: str
    phase: str
    joules: float
    source: Literal["measured", "configured"]


def plain(content: Any) -> Any:
    """As JSON has it: dicts, lists, strings and numbers."""
    return msgspec.json.decode(msgspec.json.encode(content))


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Times are seconds, speeds are tokens per second. None: unknown, or it does not apply."""

    prefill_time: float = 0.0
    decode_time: float = 0.0
    total_time: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prefill_speed: float = 0.0
    decode_speed: float = 0.0
    kind: RequestKind | None = None  # None: no node was contacted
    method: str | None = None  # the kind of the decode node's part, for clients: often with its engine
    prefill_server: str | None = None  # host:port
    decode_server: str | None = None
    prefill_node: str | None = None  # its name
    decode_node: str | None = None
    tokens_per_sec: float = 0.0
    warning: str | None = None  # the first of `warnings`
    warnings: tuple[str, ...] = ()
    warning_reason: str | None = None  # of a fallback: why no prefill node read the prompt
    request_id: str = ""
    model: str = ""
    node_model: str | None = None  # the decode node's own name of it
    first_token_time: float = 0.0
    plan: str | None = None
    predicted_first_token_time: float | None = None
    predicted_total_time: float | None = None
    attempts: int = 0
    failovers: tuple[Failover, ...] = ()
    cached_tokens: int = 0  # of the prompt, from a prefix cache
    seed: int | None = None
    waterfall: tuple[Phase, ...] = ()
    queue_time: float | None = None
    load_time: float | None = None  # of a node that takes text
    admission_time: float | None = None
    canary_time: float | None = None
    fetch_time: float | None = None
    first_slice_time: float | None = None
    transfer_time: float | None = None  # seconds in which KV arrived
    hidden_transfer_time: float | None = None  # the part of it before the end of the prefill
    exposed_transfer_time: float | None = None
    inject_time: float | None = None
    batch_size: float | None = None  # mean of the decode steps
    output_token_time: float | None = (
        None  # seconds per output token of one choice after the first, all waiting included
    )
    sequential_time: float | None = None  # what it would have taken with the cluster to itself
    prefill_machine_time: float | None = (
        None  # of the machines: divided between the requests that they computed at once
    )
    decode_machine_time: float | None = None
    kv_bytes: int | None = None
    kv_codec: str | None = None
    kv_paths: tuple[str, ...] | None = None
    resumed: int | None = None
    prompt_tokens_recomputed: int | None = None
    energy_j: float | None = None  # None: of one of its nodes neither a meter nor the config says it
    energy_wh: float | None = None  # the same in watt-hours
    energy_source: EnergySource | None = None
    energy: tuple[EnergyShare, ...] = ()
    cost: float | None = None
    cost_without: tuple[str, ...] = ()  # what the cost lacks, because the config has no price or the energy is unknown
    number: int | None = None  # in the history: the first request is 1
    ok: bool = True
    outcome: Outcome = "ok"
    error: ErrorDetail | None = None
    time: float = 0.0  # when the request came, in seconds since 1970
    finish_reason: str | None = None
    operation: str = ""  # by OpenTelemetry's names: chat, text_completion
    n: int = 1  # choices
    caller: str = ""  # for budgets, counters and who may see the record; clients do not see it

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> "RequestRecord":
        """Of plain values. Earlier versions have fewer fields, and a file may hold anything: a field that is missing or
        does not fit gets its default."""
        try:
            record = msgspec.convert(row, cls)
        except msgspec.ValidationError:
            fitting = {name: row[name] for name, kind in _TYPES.items() if name in row and _fits(row[name], kind)}
            record = msgspec.convert(fitting, cls)
        if record.kind is None and record.method:
            record = msgspec.structs.replace(record, kind=_kind_of(record.method, record.warning))
        if "output_token_time" in row or record.decode_speed <= 0 or record.n > _MOST_CHOICES:
            return record
        return msgspec.structs.replace(record, output_token_time=record.n / record.decode_speed)

    @property
    def handed_over(self) -> bool:
        """Whether the decode node got the KV from a prefill node."""
        return self.kind == "disaggregated"

    @property
    def is_charged(self) -> bool:
        """Whether its tokens count for its caller. A request that was refused, or failed without output, is free."""
        return self.completion_tokens > 0 or (self.outcome in ("ok", "cancelled") and self.attempts > 0)

    def metrics(self) -> dict[str, Any]:
        """The part that a client gets beside its answer, as plain values."""
        return _without(plain(self), _HISTORY_ONLY, _IF_KNOWN)

    def row(self) -> dict[str, Any]:
        """Nearly all of it as plain values, for the history."""
        return _without(plain(self), ("caller",), (*_IF_KNOWN, "error"))


_MOST_CHOICES = 1e300  # no float holds a larger number
_TYPES = {field.name: field.type for field in msgspec.structs.fields(RequestRecord)}


def _kind_of(method: str, warning: str | None) -> RequestKind | None:
    """Of a row that was written before records had their kind."""
    if method == "fallback" or warning == FALLBACK_WARNING:
        return "fallback"
    return _KINDS.get(method.partition("_")[0])


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


_IF_KNOWN = ("energy_j", "energy_wh", "energy_source", "cost", "number")
_HISTORY_ONLY = (
    *("energy", "ok", "outcome", "error", "time", "finish_reason", "operation", "n", "caller", "number"),
    *("kind", "prefill_machine_time", "decode_machine_time"),
)


def _without(row: dict[str, Any], dropped: tuple[str, ...], if_none: tuple[str, ...]) -> dict[str, Any]:
    """Changes the row itself."""
    for name in dropped:
        row.pop(name, None)
    for name in if_none:
        if row.get(name) is None:
            row.pop(name, None)
    return row
