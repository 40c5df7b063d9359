"""Records what happens to a request: which nodes served it, how long every phase took, what failed."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from disaggregated_inference.api import (
    FALLBACK_WARNING,
    ErrorDetail,
    Failover,
    GeneratedChoice,
    Outcome,
    Phase,
    Progress,
    PromptLogprobs,
    RequestKind,
    RequestRecord,
    StreamEvent,
    TokenLogprob,
)
from disaggregated_inference.cluster import Policies, Server
from disaggregated_inference.orchestrator.attempt import Attempt
from disaggregated_inference.orchestrator.cluster_view import Route
from disaggregated_inference.orchestrator.energy import Meters, PowerLog, with_energy
from disaggregated_inference.orchestrator.machine_time import RatesOf, no_rates, with_machine_times
from disaggregated_inference.orchestrator.waterfall import phases_of, waterfall

OnPlan = Callable[[Route, str, tuple[str, ...]], None]  # route, reason, warnings
_SAME_WAIT_S = 0.02  # between two waits there is time for a plan


@dataclass(slots=True)
class ChoiceState:
    """One of a request's choices, so far."""

    written: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def tokens(self) -> int:
        return len(self.written)

    def take(self, event: StreamEvent) -> None:
        assert event.token is not None
        self.written.append(event.token)
        self.text.append(event.text)
        self.finish_reason = event.finish_reason
        if event.logprob is not None:
            found = TokenLogprob(token=event.token, logprob=event.logprob, top_logprobs=event.top_logprobs)
            self.logprobs.append(found)

    def take_back(self, tokens: int) -> None:
        """All but the first `tokens`."""
        for kept in (self.written, self.text, self.logprobs):
            del kept[tokens:]
        self.finish_reason = None

    def result(self, index: int) -> GeneratedChoice:
        return GeneratedChoice(
            index=index,
            text="".join(self.text),
            tokens=tuple(self.written),
            finish_reason=self.finish_reason,
            logprobs=tuple(self.logprobs),
        )


class RequestRecorder:
    """Records one request from its arrival on."""

    def __init__(
        self,
        request_id: str,
        model: str,
        operation: str = "",
        clock: Callable[[], float] = time.perf_counter,
        caller: str = "",
    ) -> None:
        self.request_id, self.model, self.operation, self.caller = request_id, model, operation, caller
        self._clock, self.came_at, self.time = clock, clock(), time.time()
        self.prompt_tokens = 0
        self.phases: list[Phase] = []
        self.attempts: list[Attempt] = []
        self.failovers: list[Failover] = []
        self.choice_states: list[ChoiceState] = []
        self.on_plan: OnPlan = lambda route, reason, warnings: None  # called for every attempt
        self.on_progress: Callable[[Progress], None] = lambda progress: None
        self.on_waiting: Callable[[str], None] = lambda reason: None  # no node is there; called once per outage
        self.on_prompt_logprobs: Callable[[PromptLogprobs], None] = lambda piece: None
        self.fallback = self.prefill_down = False
        self.keeps_seed = False  # a sampled answer, whose seed the client gave
        self._warnings: dict[str, None] = {}  # in order, each once
        self.warning_reason = ""  # of a fallback
        self.first_token_s = self.total_s = 0.0
        self._stalled: list[tuple[int, float]] = []  # which failovers wait for a token, and since when

    def phase(self, name: str, began_at: float, node: str = "") -> None:
        """A phase has ended now."""
        now = self._clock()
        self.phases.append(Phase(name, began_at - self.came_at, now - began_at, node))

    def waited(self, since: float) -> None:
        """For a node, until now. Waits that follow each other are one phase."""
        start_s, last = since - self.came_at, self.phases[-1] if self.phases else None
        if last and last.name == "queue" and start_s < last.start_s + last.seconds + _SAME_WAIT_S:
            since = self.came_at + self.phases.pop().start_s
        self.phase("queue", since)

    def begin(
        self,
        route: Route,
        reason: str,
        engine: str,
        *,
        node_model: str = "",
        text_only: bool = False,
        whole: bool = False,
    ) -> Attempt:
        attempt = Attempt(route, reason, engine, self._clock(), node_model, whole, text_only)
        self.attempts.append(attempt)
        self.on_plan(route, reason, self.warnings)
        return attempt

    def warn(self, text: str | None) -> None:
        if text:
            self._warnings[text] = None

    @property
    def warnings(self) -> tuple[str, ...]:
        fallback = (FALLBACK_WARNING,) if self.fallback or self.prefill_down else ()
        return (*fallback, *self._warnings)

    def first_token(self, at: float) -> None:
        """An attempt brought its first token."""
        self.first_token_s = self.first_token_s or at - self.came_at
        for index, since in self._stalled:
            self.failovers[index] = msgspec.structs.replace(self.failovers[index], stall_s=at - since)
        self._stalled.clear()

    def failed(self, failover: Failover, attempt: Attempt) -> None:
        now, since = self._clock(), attempt.last_at or attempt.began_at
        attempt.ended_at, attempt.failed_node = now, failover.node
        self._stalled.append((len(self.failovers), since))
        timed = msgspec.structs.replace(failover, at_s=now - self.came_at, detected_s=now - since)
        self.failovers.append(timed)

    def choices(self) -> tuple[GeneratedChoice, ...]:
        return tuple(state.result(index) for index, state in enumerate(self.choice_states))

    def finish(
        self,
        servers: dict[str, Server],
        policies: Policies,
        outcome: Outcome = "ok",
        error: ErrorDetail | None = None,
        power: Mapping[str, PowerLog] | None = None,
        rates: RatesOf = no_rates,
    ) -> RequestRecord:
        """`power` and `rates`: of the nodes, by name."""
        self.total_s = self._clock() - self.came_at
        bars, last, states = self._bars(), self._last_attempt(), self.choice_states
        completion = sum(state.tokens for state in states)
        prefill_s = self._prefill_s(last)
        decode_s = sum(bar.seconds for bar in bars if bar.name == "decode")
        record = RequestRecord(
            prefill_time=prefill_s,
            decode_time=decode_s,
            total_time=self.total_s,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=completion,
            total_tokens=self.prompt_tokens + completion,
            prefill_speed=self._prefill_speed(last, prefill_s),
            decode_speed=(completion - len(states)) / decode_s if decode_s and completion > len(states) else 0.0,
            kind=self._kind(last),
            method=self._method(last),
            prefill_server=servers[last.prefill_name].address if last else None,
            decode_server=servers[last.route.decode].address if last else None,
            prefill_node=last.prefill_name if last else None,
            decode_node=last.route.decode if last else None,
            tokens_per_sec=completion / self.total_s if self.total_s else 0.0,
            warning=next(iter(self.warnings), None),
            warnings=self.warnings,
            warning_reason=(self.warning_reason or None) if self.fallback or self.prefill_down else None,
            request_id=self.request_id,
            model=self.model,
            node_model=(last.node_model or None) if last else None,
            first_token_time=self.first_token_s,
            output_token_time=self._output_token_s(completion / len(states) if states else 0.0),
            plan=last.reason if last else None,
            predicted_first_token_time=last.route.first_token_s if last else None,
            predicted_total_time=last.route.total_s if last else None,
            attempts=len(self.attempts),
            failovers=tuple(self.failovers),
            cached_tokens=self._cached_tokens(last),
            seed=last.metrics.seed if last and last.metrics else None,
            waterfall=bars,
            ok=outcome == "ok",
            outcome=outcome,
            error=error,
            time=self.time,
            finish_reason=states[0].finish_reason if states else None,
            operation=self.operation,
            n=len(states),
            caller=self.caller,
            **_reported(last),
        )
        shares = Meters(servers.values(), power or {}).shares(bars, time.monotonic() - self.total_s)
        return with_machine_times(with_energy(record, shares, policies), shares, rates)

    def _bars(self) -> tuple[Phase, ...]:
        """The waterfall of all attempts."""
        known = (phase for attempt in self.attempts for phase in phases_of(attempt, self.came_at, self.total_s))
        return waterfall([*self.phases, *known], self.total_s)

    def _last_attempt(self) -> Attempt | None:
        """The last of which a node reported, else the last one."""
        reported = next((attempt for attempt in reversed(self.attempts) if attempt.metrics), None)
        return reported or (self.attempts[-1] if self.attempts else None)

    def _output_token_s(self, tokens: float) -> float | None:
        """As the client sees it: the time after the first token over the tokens of a choice after the first. What of
        the transfer is exposed after the first token is part of it."""
        return (self.total_s - self.first_token_s) / (tokens - 1) if self.first_token_s and tokens > 1 else None

    def _prefill_s(self, attempt: Attempt | None) -> float:
        """The prefill time that the node reported; without a report, the time to the first token."""
        if attempt is None or not self.first_token_s:
            return 0.0
        reported_s = attempt.metrics.prefill_time if attempt.metrics else 0.0
        return reported_s or max(0.0, attempt.first_token_at - attempt.began_at)

    def _prefill_speed(self, attempt: Attempt | None, prefill_s: float) -> float:
        """A text node reports its own speed: only it can tell cached tokens from computed ones."""
        if attempt and attempt.text_only and attempt.metrics:
            return attempt.metrics.prefill_speed or 0.0
        return self._computed_tokens(attempt) / prefill_s if prefill_s else 0.0

    def _computed_tokens(self, attempt: Attempt | None) -> int:
        """Of the attempt's prompt (after a failure, the written tokens are part of it), what was not cached."""
        if attempt is None:
            return 0
        reported = attempt.metrics.prompt_tokens if attempt.metrics else None
        return max(0, (reported or self.prompt_tokens) - attempt.cached[attempt.prefill_name])

    def _cached_tokens(self, attempt: Attempt | None) -> int:
        """Prompt tokens that the node which prefilled had cached before the request came: the least of all attempts,
        since a failed attempt leaves its own tokens in the cache."""
        if attempt is None:
            return 0
        name = attempt.prefill_name
        return min(self.prompt_tokens, *(other.cached.get(name, self.prompt_tokens) for other in self.attempts))

    def _kind(self, attempt: Attempt | None) -> RequestKind | None:
        """A local prefill as planned is a fallback, too, while no prefill node is there."""
        if attempt is None:
            return None
        if self.fallback or self.prefill_down:
            return "fallback"
        if attempt.whole:
            return "whole"
        return "disaggregated" if attempt.route.prefill else "local"

    def _method(self, attempt: Attempt | None) -> str | None:
        """How the prompt was prefilled; None if no node was contacted."""
        if attempt is None:
            return None
        if self.fallback:
            return "fallback"
        if attempt.whole:
            return f"whole_{attempt.engine}"
        return f"disaggregated_{attempt.engine}" if attempt.route.prefill else "local"


_TEXT_REPORTED = ("queue_time", "load_time")
_REPORTED = (
    "queue_time",
    "admission_time",
    "canary_time",
    "fetch_time",
    "first_slice_time",
    "transfer_time",
    "hidden_transfer_time",
    "exposed_transfer_time",
    "inject_time",
    "batch_size",
    "kv_bytes",
    "kv_codec",
    "kv_paths",
    "resumed",
    "prompt_tokens_recomputed",
)


def _reported(attempt: Attempt | None) -> dict[str, Any]:
    """What a decode node reported of its part. A text node knows little."""
    if attempt is None or attempt.metrics is None:
        return {}
    names = _TEXT_REPORTED if attempt.text_only else _REPORTED
    return {name: getattr(attempt.metrics, name) for name in names}
