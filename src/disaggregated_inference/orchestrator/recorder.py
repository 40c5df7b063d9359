"""What happened to a request: who served it, how long every phase took, what failed. Plain numbers at the end."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from disaggregated_inference.cluster.config import Policies, Server
from disaggregated_inference.orchestrator.cluster_view import Route
from disaggregated_inference.orchestrator.node_client import Progress, TokenEvent

FALLBACK = "Using fallback mode - slower performance"


class Phase(msgspec.Struct, frozen=True):
    """One bar of the waterfall."""

    name: str
    start_s: float
    seconds: float
    node: str = ""


class Failover(msgspec.Struct, kw_only=True):
    """A leg that failed. `stall_s`: from the last sign of life before it to the next token after it."""

    node: str
    code: str
    message: str
    at_s: float = 0.0
    detected_s: float = 0.0  # from the last sign of life to the verdict
    stall_s: float | None = None


@dataclass(slots=True)
class ChoiceState:
    """One of a request's choices, so far."""

    written: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None

    @property
    def tokens(self) -> int:
        return len(self.written)

    def take(self, event: TokenEvent) -> None:
        assert event.token is not None
        self.written.append(event.token)
        self.text.append(event.text)
        self.finish = event.finish_reason
        if event.logprob is not None:
            likely = {"token": event.token, "logprob": event.logprob, "top_logprobs": list(event.top_logprobs)}
            self.logprobs.append(likely)

    def told(self) -> dict[str, Any]:
        found = {"text": "".join(self.text), "tokens": self.written, "finish_reason": self.finish}
        return found | ({"logprobs": self.logprobs} if self.logprobs else {})


@dataclass(slots=True)
class Attempt:
    """One way that was tried."""

    option: Route
    reason: str
    engine: str  # that writes
    began_at: float
    epochs: dict[str, str] = field(default_factory=dict)  # of the nodes, when it began
    sent_at: float = 0.0  # on the monotonic clock
    first_token_at: float = 0.0
    last_at: float = 0.0
    failed_at: float = 0.0  # when that was known
    failed_node: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def held(self) -> dict[str, int]:
        """Tokens that its nodes held already, as they told at its end. One that came to none told nothing."""
        found = {self.option.decode: self.metrics.get("cached_tokens") or 0}
        if self.option.prefill:
            found[self.option.prefill] = self.metrics.get("prefill_cached_tokens") or 0
        return found


class RequestRecorder:
    """Of one request, from the moment it came."""

    def __init__(self, request_id: str, model: str) -> None:
        self.request_id, self.model = request_id, model
        self.operation = ""  # by OpenTelemetry's names: chat, text_completion
        self.came_at, self.time = time.perf_counter(), time.time()
        self.prompt_tokens = 0
        self.phases: list[Phase] = []
        self.attempts: list[Attempt] = []
        self.failovers: list[Failover] = []
        self.choice_states: list[ChoiceState] = []
        self.answer: dict[str, Any] = {}  # what a client gets, once it ended
        self.on_plan: Callable[[Route, str], None] = lambda option, reason: None  # told of every attempt
        self.on_progress: Callable[[Progress], None] = lambda progress: None  # before the first token, where asked for
        self.fallback = False
        self.warning: str | None = None
        self.first_token_s = self.total_s = 0.0
        self._stalled: list[tuple[Failover, float]] = []

    def phase(self, name: str, began_at: float, node: str = "") -> None:
        """It is over now."""
        now = time.perf_counter()
        self.phases.append(Phase(name, began_at - self.came_at, now - began_at, node))

    def begin(self, option: Route, reason: str, engine: str) -> Attempt:
        attempt = Attempt(option, reason, engine, time.perf_counter())
        self.attempts.append(attempt)
        self.on_plan(option, reason)
        return attempt

    def token_came(self, at: float) -> None:
        """The first one of an attempt."""
        self.first_token_s = self.first_token_s or at - self.came_at
        for failover, since in self._stalled:
            failover.stall_s = at - since
        self._stalled.clear()

    def failed(self, failover: Failover, attempt: Attempt) -> None:
        now, since = time.perf_counter(), attempt.last_at or attempt.began_at
        failover.at_s, failover.detected_s = now - self.came_at, now - since
        attempt.failed_at, attempt.failed_node = now, failover.node
        self.failovers.append(failover)
        self._stalled.append((failover, since))

    def end(self) -> None:
        self.total_s = time.perf_counter() - self.came_at
        for attempt in self.attempts:
            self.phases += _phases(attempt, self.came_at, self.total_s)

    def metrics(self, servers: dict[str, Server], policies: Policies) -> dict[str, Any]:
        """The names of SPEC, then what else is known. Times are seconds, speeds tokens per second."""
        last = next((attempt for attempt in reversed(self.attempts) if attempt.metrics), None)
        last = last or (self.attempts[-1] if self.attempts else None)
        told = last.metrics if last else {}
        choice_states = self.choice_states
        completion = sum(choice_state.tokens for choice_state in choice_states)
        prefill_s = self._prefill_s(last)
        decode_s = max(0.0, self.total_s - self.first_token_s) if self.first_token_s else 0.0
        readers = last.option.prefill or last.option.decode if last else None
        found: dict[str, Any] = {
            "prefill_time": prefill_s,
            "decode_time": decode_s,
            "total_time": self.total_s,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prefill_speed": self._prefill_speed(last, prefill_s),
            "decode_speed": (completion - len(choice_states)) / decode_s
            if decode_s and completion > len(choice_states)
            else 0.0,
            "method": self._method(last),
            "prefill_server": readers,
            "decode_server": last.option.decode if last else None,
            "tokens_per_sec": completion / self.total_s if self.total_s else 0.0,
            "warning": FALLBACK if self.fallback else self.warning,
            "request_id": self.request_id,
            "model": self.model,
            "first_token_time": self.first_token_s,
            "plan": last.reason if last else None,
            "predicted_first_token_time": last.option.first_token_s if last else None,
            "attempts": len(self.attempts),
            "failovers": msgspec.to_builtins(self.failovers),
            "cached_tokens": self._cached_tokens(last),
            "seed": told.get("seed"),
            "waterfall": msgspec.to_builtins(sorted(self.phases, key=lambda phase: phase.start_s)),
        }
        for name in _TOLD:
            found[name] = told.get(name)
        return found | self._spent(last, servers, prefill_s, decode_s, policies)

    def told(self) -> dict[str, Any]:
        """The answer itself."""
        if not self.choice_states:
            return {"response": None}
        choices = [choice_state.told() for choice_state in self.choice_states]
        first = {"response": choices[0]["text"], **{k: v for k, v in choices[0].items() if k != "text"}}
        return first if len(choices) == 1 else first | {"choices": choices}

    def _prefill_s(self, attempt: Attempt | None) -> float:
        """The reading itself, as the node that read says; where it never came to say so, until the first token."""
        if attempt is None or not self.first_token_s:
            return 0.0
        told: float = attempt.metrics.get("prefill_time") or 0.0
        return told or max(0.0, attempt.first_token_at - attempt.began_at)

    def _prefill_speed(self, attempt: Attempt | None, prefill_s: float) -> float:
        """A node that cannot tell what it held from what it read says so itself, or that it does not know."""
        if attempt and "prefill_speed" in attempt.metrics:
            return attempt.metrics["prefill_speed"] or 0.0
        return self._read_tokens(attempt) / prefill_s if prefill_s else 0.0

    def _read_tokens(self, attempt: Attempt | None) -> int:
        """Of the attempt's own prompt (after a failure, what was written is part of it), what its reader did not hold
        already."""
        if attempt is None:
            return 0
        prompt_tokens: int = attempt.metrics.get("prompt_tokens") or self.prompt_tokens
        return max(0, prompt_tokens - attempt.held[attempt.option.prefill or attempt.option.decode])

    def _cached_tokens(self, attempt: Attempt | None) -> int:
        """Of the prompt, what the node that read it held before the request came, and did not compute: the least that
        it had in any attempt. What a failed one left there was not held before, and how much was, nobody told."""
        if attempt is None:
            return 0
        reader = attempt.option.prefill or attempt.option.decode
        return min(self.prompt_tokens, *(other.held.get(reader, self.prompt_tokens) for other in self.attempts))

    def _method(self, attempt: Attempt | None) -> str | None:
        """True to fact: by whose reading the answer came. None where nobody was asked."""
        if attempt is None:
            return None
        if self.fallback:
            return "fallback"
        if attempt.option.prefill is None:
            return "local"
        return f"disaggregated_{attempt.engine}"

    def _spent(
        self, attempt: Attempt | None, servers: dict[str, Server], prefill_s: float, decode_s: float, policies: Policies
    ) -> dict[str, Any]:
        """Energy and cost where the config knows power and prices: each machine for the time it worked for this
        request, as if it worked for nobody else meanwhile."""
        if attempt is None:
            return {}
        reader = servers[attempt.option.prefill or attempt.option.decode]
        times = [(reader, prefill_s), (servers[attempt.option.decode], decode_s)]
        found: dict[str, Any] = {}
        if all(server.power_w is not None for server, _ in times):
            found["energy_wh"] = sum((server.power_w or 0.0) * seconds for server, seconds in times) / 3600
        cost = _cost(times, found.get("energy_wh"), policies.electricity_price_per_kwh)
        return found | ({} if cost is None else {"cost": cost})


_TOLD = (
    "queue_time",
    "admission_time",
    "canary_time",
    "fetch_time",
    "exposed_transfer_time",
    "inject_time",
    "kv_bytes",
    "kv_codec",
    "kv_paths",
    "resumed",
    "prompt_tokens_recomputed",
)


def _cost(times: list[tuple[Server, float]], energy_wh: float | None, price_per_kwh: float | None) -> float | None:
    parts: list[float] = []
    if all(server.price_per_hour is not None for server, _ in times):
        parts.append(sum((server.price_per_hour or 0.0) * seconds for server, seconds in times) / 3600)
    if energy_wh is not None and price_per_kwh is not None:
        parts.append(energy_wh / 1000 * price_per_kwh)
    return sum(parts) if parts else None


def _phases(attempt: Attempt, came_at: float, total_s: float) -> list[Phase]:
    """An attempt's bars, from what the decode node told; of one that failed, its whole time, until that was known."""
    option, start_s = attempt.option, attempt.began_at - came_at
    if not attempt.metrics:
        end_s = attempt.failed_at - came_at if attempt.failed_at else total_s
        return [Phase("failed", start_s, max(0.0, end_s - start_s), attempt.failed_node or option.decode)]
    told = {name: attempt.metrics.get(f"{name}_time") or 0.0 for name in _BARS}
    found = _row(start_s, option.decode, {"admission": told["admission"], "canary": told["canary"]})
    # Another machine reads while this one makes ready; one that does both makes ready first.
    read_s = start_s if option.prefill else _end_s(found, start_s)
    reading = {"prefill queue": told["queue"], "load": told["load"], "prefill": told["prefill"]}
    found += _row(read_s, option.prefill or option.decode, reading)
    # The node counts both from its first token on, which it wrote before it was seen here.
    exposed_s, decode_s = told["exposed_transfer"], told["decode"]
    seen_s = attempt.first_token_at - came_at if attempt.first_token_at else _end_s(found, start_s)
    first_s = min(seen_s, total_s - max(exposed_s, decode_s))
    return found + _row(first_s, option.decode, {"exposed transfer": exposed_s, "decode": decode_s - exposed_s})


_BARS = ("admission", "canary", "queue", "load", "prefill", "exposed_transfer", "decode")


def _row(start_s: float, node: str, times: dict[str, float]) -> list[Phase]:
    """Bars of one machine, one after the other."""
    found: list[Phase] = []
    for name, seconds in times.items():
        if seconds > 0:
            found.append(Phase(name, _end_s(found, start_s), seconds, node))
    return found


def _end_s(phases: list[Phase], start_s: float) -> float:
    return max((phase.start_s + phase.seconds for phase in phases), default=start_s)
