"""The record of a finished request: the metrics that a client gets, the history, Prometheus, traces, the dashboard."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from disaggregated_inference.api.responses import ErrorDetail, GeneratedChoice, PromptLogprob

Outcome = Literal["ok", "failed", "refused", "cancelled"]
# How the prompt was read: by a prefill node, by the decode node as planned, by the decode node because no prefill node
# could, or by the one node that also wrote the answer.
Kind = Literal["disaggregated", "local", "fallback", "whole"]
FALLBACK_WARNING = "Using fallback mode - slower performance"
HANDED_OVER, WHOLE = "disaggregated_", "whole_"  # what a method begins with, before the engine


class Phase(msgspec.Struct, frozen=True):
    """One bar of the waterfall."""

    name: str
    start_s: float
    seconds: float
    node: str = ""


class Failover(msgspec.Struct, frozen=True, kw_only=True):
    """A leg that failed. `stall_s`: from the last sign of life before it to the next token after it."""

    node: str
    code: str
    message: str
    at_s: float = 0.0
    detected_s: float = 0.0  # from the last sign of life to the verdict
    stall_s: float | None = None


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
    method: str | None = None
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
        if "output_token_time" in row or record.decode_speed <= 0 or record.n > _MOST_CHOICES:
            return record
        return msgspec.structs.replace(record, output_token_time=record.n / record.decode_speed)

    @property
    def handed_over(self) -> bool:
        """Whether the decode node got the KV from a prefill node."""
        return self.method is not None and self.method.startswith(HANDED_OVER)

    @property
    def kind(self) -> Kind | None:
        """None: no node was contacted. The decode node's part of a fallback may be as planned: the warning tells."""
        if self.method == "fallback" or self.warning == FALLBACK_WARNING:
            return "fallback"
        if self.handed_over:
            return "disaggregated"
        if self.method == "local":
            return "local"
        return "whole" if self.method is not None and self.method.startswith(WHOLE) else None

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


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


_IF_KNOWN = ("energy_j", "energy_wh", "energy_source", "cost", "number")
_HISTORY_ONLY = (
    *("energy", "ok", "outcome", "error", "time", "finish_reason", "operation", "n", "caller", "number"),
    *("prefill_machine_time", "decode_machine_time"),
)


def _without(row: dict[str, Any], dropped: tuple[str, ...], if_none: tuple[str, ...]) -> dict[str, Any]:
    """Changes the row itself."""
    for name in dropped:
        row.pop(name, None)
    for name in if_none:
        if row.get(name) is None:
            row.pop(name, None)
    return row


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The typed result of `complete`: the choices, and the record of the request."""

    choices: tuple[GeneratedChoice, ...]
    record: RequestRecord
    prompt_logprobs: tuple[PromptLogprob, ...] = ()  # all of them, or none

    @property
    def text(self) -> str:
        return self.choices[0].text

    def answer(self) -> dict[str, Any]:
        """As plain values: the first choice, all of them if there are several, and the metrics."""
        choices = plain(self.choices)
        if not choices:
            return {"response": None} | self.record.metrics()
        prompt = {"prompt_logprobs": plain(self.prompt_logprobs)} if self.prompt_logprobs else {}
        first = {"response": choices[0]["text"]} | {k: v for k, v in choices[0].items() if k not in ("text", "index")}
        return first | ({"choices": choices} if len(choices) > 1 else {}) | prompt | self.record.metrics()
