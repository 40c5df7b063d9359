"""One request's life: a plan, two legs, and what to do when one of them fails.

The tokens that came are kept. Whatever fails, the next attempt asks for what is missing: before the first token the
whole answer, after it the prompt and what was written as a new prompt. So a client's stream goes on without a gap, a
repetition or, under one seed, a different token.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec

from disaggregated_inference.cluster.config import Policies
from disaggregated_inference.errors import ClusterError, NoDecodeNode
from disaggregated_inference.orchestrator.cluster_view import Plan, Route, RouteRequest
from disaggregated_inference.orchestrator.failover import FailoverState
from disaggregated_inference.orchestrator.node_client import LegBusy, LegFailed, Progress, TokenEvent, refused
from disaggregated_inference.orchestrator.node_state import ModelInfo, NodeState
from disaggregated_inference.orchestrator.recorder import Attempt, ChoiceState, Failover, RequestRecorder
from disaggregated_inference.orchestrator.registry import NodeRegistry
from disaggregated_inference.orchestrator.request import GenerateRequest
from disaggregated_inference.orchestrator.router import plan

log = logging.getLogger(__name__)

Put = Callable[[list[TokenEvent]], None]

_LONGEST_WAIT_S = 2.0  # for a busy node, before looking again who is free
_LOOK_S = 0.05
_LOOK_AGAIN_S = 60.0
_WORTH_A_LOOK = 4.0  # times the best, at most
_PATIENCE_S = 10.0  # with nodes that are there and do not take requests at the moment
_COME_BACK_S = 0.5  # that a node which was there a moment ago gets, once


class RequestRunner:
    """`run` tells the answer as it is written; `record` has become whole when it ends."""

    def __init__(
        self,
        registry: NodeRegistry,
        ask: GenerateRequest,
        model: str,
        tokens: list[int],
        record: RequestRecorder,
        deadline: float,
    ) -> None:
        self._registry, self._ask, self._model, self._tokens = registry, ask, model, tokens
        self._policies: Policies = registry.config.policies
        self._sampling = ask.sampling()
        self.record, self._deadline = record, deadline
        self.choice_states = record.choice_states = [ChoiceState() for _ in range(ask.n)]
        self._failover = FailoverState(registry, model, self._policies)
        self._about: ModelInfo | None = None  # the model that it began with
        self._gave_second_chance = False
        self._waiting_since: float | None = None
        self._cache = len(tokens)  # of the prompt, at most: see `_read_on`
        self._put: Put = lambda events: None

    async def run(self, put: Put) -> None:
        """Until the answer is over. `put` gets it as it comes: a call, since every token passes here."""
        self._put = put
        await self._write(tuple(range(self._ask.n)))

    async def _write(self, numbers: tuple[int, ...]) -> None:
        await self._persist(numbers)

    async def _persist(self, numbers: tuple[int, ...]) -> None:
        """Attempt after attempt, until these choices are over."""
        while not all(self.choice_states[number].finish for number in numbers):
            attempt: Attempt | None = None
            try:
                option, reason = self._choose(numbers)
                attempt = self._begun(option, reason)
                await self._attempt(attempt, option, numbers)
            except LegBusy as busy:
                if attempt:
                    self.record.attempts.remove(attempt)  # nothing was tried
                await self._wait_for(busy)
            except NoDecodeNode as error:
                await self._wait_for_anyone(error)
            except LegFailed as failure:
                assert attempt
                if not self._learn(failure, attempt):
                    raise ClusterError(str(failure)) from failure
                if self._failover.wants_a_look(failure):
                    await self._registry.look([failure.node])
                if len(numbers) > 1 and any(self.choice_states[number].written for number in numbers):
                    await self._apart(numbers)

    def _choose(self, numbers: tuple[int, ...]) -> tuple[Route, str]:
        """The best way that the policies and this request's own past allow."""
        planned = plan(self._question(numbers), self._registry.view(self._model))
        options = list(filter(self._failover.allows, planned.options))
        for allowed in (self._keeps_both, self._keeps_policy):
            if wanted := [option for option in options if allowed(option) and self._may(option)]:
                option = wanted[0] if self.record.failovers else self._looked_at_again(wanted)
                return option, _reason(planned, option)
        if not self._policies.fallback:
            raise ClusterError("no prefill node can read this prompt, and the config allows no fallback")
        option = next(filter(self._keeps_place, options), options[0])
        return option, _reason(planned, option)

    def _question(self, numbers: tuple[int, ...]) -> RouteRequest:
        prompt, epochs = self._prompt(numbers), self._registry.epochs(self._model)
        return RouteRequest(
            model=self._model,
            prompt_tokens=len(prompt),
            max_tokens=self._left(numbers),
            choices=len(numbers),
            held=self._registry.prefix_index.held(prompt, epochs),
            avoid=frozenset(name for name, epoch in self._failover.avoid if epochs.get(name) == epoch)
            | self._strangers(),
        )

    def _strangers(self) -> frozenset[str]:
        """Nodes that hold another model than the one this request began with, whatever its name means by now."""
        about, nodes = self._about, self._registry.of(self._model)
        return frozenset(node.name for node in nodes if about and node.about and about.differences(node.about))

    def _looked_at_again(self, options: list[Route]) -> Route:
        """The best, but for one request in a while: a node that was slow once is asked again, or nobody would ever know
        that it no longer is."""
        now, nodes = time.monotonic(), self._registry.nodes
        for option in options[1:]:
            names = [name for name in (option.prefill, option.decode) if name]
            forgotten = any(now - nodes[name].used_at > _LOOK_AGAIN_S for name in names)
            if forgotten and option.total_s < _WORTH_A_LOOK * options[0].total_s:
                return option
        return options[0]

    def _begun(self, option: Route, reason: str) -> Attempt:
        self.record.fallback = self._falls_back(option)
        writer = self._registry.nodes[option.decode]
        self._about, status = self._about or writer.about, writer.status
        attempt = self.record.begin(option, reason, status.backend if status else "")
        attempt.epochs = self._registry.epochs(self._model)
        return attempt

    def _may(self, option: Route) -> bool:
        return self._policies.fallback or not self._falls_back(option)

    def _falls_back(self, option: Route) -> bool:
        if option.prefill is not None or self._policies.local == "always":
            return False
        return self._failover.prefill_failures > 0 or not self._failover.has_readers(option.decode)

    def _keeps_place(self, option: Route) -> bool:
        return option.decode == self._failover.pinned

    def _keeps_both(self, option: Route) -> bool:
        return self._keeps_place(option) and self._keeps_policy(option)

    def _keeps_policy(self, option: Route) -> bool:
        local = self._policies.local
        if self._failover.fell_back or local == "always":
            return option.prefill is None
        return option.prefill is not None or (local == "auto" and not self._failover.prefill_failures)

    def _prompt(self, numbers: tuple[int, ...]) -> list[int]:
        written = self.choice_states[numbers[0]].written if len(numbers) == 1 else []
        return self._tokens + written

    def _left(self, numbers: tuple[int, ...]) -> int:
        assert self._ask.max_tokens is not None
        return self._ask.max_tokens - (len(self.choice_states[numbers[0]].written) if len(numbers) == 1 else 0)

    async def _attempt(self, attempt: Attempt, option: Route, numbers: tuple[int, ...]) -> None:
        nodes = self._registry.nodes
        decode, prefill = nodes[option.decode], nodes[option.prefill] if option.prefill else None
        for node in (decode, prefill):  # they were ready a moment ago, when the plan was made
            if node and not node.breaker.allows():
                raise LegBusy(node.name, "another request is trying it out", _COME_BACK_S)
        prompt, ticket = self._prompt(numbers), secrets.token_urlsafe(16)
        reader, done = prefill or decode, False
        for node in {decode, reader}:
            node.open += 1
            node.used_at = time.monotonic()
        reader.unread_tokens += len(prompt)
        attempt.sent_at = time.monotonic()
        try:
            async with _PrefillGate(prefill) as gate:
                body = self._body(numbers, prompt)
                if prefill:
                    body["context"] = await prefill.client.prefill(
                        self._prefill_body(prefill, prompt, ticket), self._id
                    )
                path = "/decode" if prefill else "/generate"
                async with aclosing(decode.client.write(path, body, self._id)) as events:
                    async for some in events:
                        if kept := self._took(some, attempt, numbers, prompt):
                            gate.leave()  # the first of them: the prompt was read
                            self._put(kept)
            done = True
        finally:
            for node in {decode, reader}:
                node.open -= 1
                node.breaker.released()
            if prefill and not done:
                prefill.client.cancel_soon(ticket)
        self._succeeded(attempt, decode, prefill, prompt, numbers)

    @property
    def _id(self) -> str:
        return self._ask.request_id

    def _left_s(self) -> float:
        if (left := self._deadline - time.monotonic()) <= 0:
            raise TimeoutError
        return left

    def _body(self, numbers: tuple[int, ...], prompt: list[int]) -> dict[str, Any]:
        body = self._sampling | {"tokens": prompt, "max_tokens": self._left(numbers), "timeout_s": self._left_s()}
        if len(numbers) == 1 and (written := self.choice_states[numbers[0]].written):
            body |= {"written": written}
        if len(numbers) < self._ask.n:
            body |= {"n": 1, "choice": numbers[0]}
        if self._ask.progress and not any(choice_state.written for choice_state in self.choice_states):
            body["progress"] = True
        return body

    def _prefill_body(self, prefill: NodeState, prompt: list[int], ticket: str) -> dict[str, Any]:
        limit_s = min(self._left_s(), self._prefill_timeout_s())
        body: dict[str, Any] = {"tokens": prompt, "ticket": ticket, "wait": False, "timeout_s": limit_s}
        if prefill.server.kv_addresses:
            body["kv_addresses"] = prefill.server.kv_addresses
        return body

    def _prefill_timeout_s(self) -> float:
        return self._registry.config.options_of(self._model).prefill_timeout_s or self._policies.prefill_timeout_s

    def _took(
        self, events: list[TokenEvent], attempt: Attempt, numbers: tuple[int, ...], prompt: list[int]
    ) -> list[TokenEvent]:
        """Keep what came; the numbers of choices are this request's, whatever the node counted."""
        alone = len(numbers) == 1 and numbers[0]
        kept: list[TokenEvent] = []
        for event in events:
            if self._is_piece(event):
                number = numbers[event.choice]
                self.choice_states[number].take(event)
                kept.append(msgspec.structs.replace(event, choice=number) if alone else event)
            elif event.done:
                attempt.metrics = event.metrics or {}
            elif event.progress:
                self._read_on(event.progress, attempt)
        if kept:
            attempt.last_at = time.perf_counter()
            if not attempt.first_token_at:
                self._began(attempt, len(prompt))
        return kept

    def _is_piece(self, event: TokenEvent) -> bool:
        return event.token is not None

    def _read_on(self, progress: Progress, attempt: Attempt) -> None:
        """What an earlier attempt had read was not held before the request came, wherever it is held now; and the time
        is this request's, not the attempt's. Another node may have less: then it goes back."""
        self._cache = min(self._cache, progress.cache)
        earlier_ms = round(1000 * (attempt.began_at - self.record.attempts[0].began_at))
        told = msgspec.structs.replace(progress, cache=self._cache, time_ms=progress.time_ms + earlier_ms)
        self.record.on_progress(told)

    def _began(self, attempt: Attempt, prompt_tokens: int) -> None:
        """The first token is here: both legs work."""
        attempt.first_token_at = attempt.last_at
        self.record.token_came(attempt.first_token_at)
        nodes = self._registry.nodes
        reader = nodes[attempt.option.prefill or attempt.option.decode]
        reader.was_read(prompt_tokens, attempt.sent_at)
        for node in {reader, nodes[attempt.option.decode]}:
            node.breaker.succeeded()

    def _succeeded(
        self,
        attempt: Attempt,
        decode: NodeState,
        prefill: NodeState | None,
        prompt: list[int],
        numbers: tuple[int, ...],
    ) -> None:
        remembered = self._registry.prefix_index
        remembered.note(decode.name, decode.epoch, [*self._tokens, *self.choice_states[numbers[0]].written])
        if prefill:
            remembered.note(prefill.name, prefill.epoch, prompt)

    def _learn(self, failure: LegFailed, attempt: Attempt) -> bool:
        blamed = self._failover.blamed(failure, attempt.option)
        again = self._failover.learn(failure, attempt)
        self.record.failed(Failover(node=blamed.name, code=failure.code, message=str(failure)), attempt)
        log.warning("a leg failed: %s", failure, extra={"request_id": self._id, "code": failure.code})
        return again

    async def _wait_for(self, busy: LegBusy) -> None:
        await asyncio.sleep(min(busy.retry_after_s, _LONGEST_WAIT_S, self._left_s()))

    async def _wait_for_anyone(self, error: NoDecodeNode) -> None:
        """No decode node takes this request now. Those that are there and did not fail it are waited for: as long as
        another request tries them out, and a while longer; those that did get one second chance. So is one that was
        not heard yet, or went quiet a moment ago."""
        strangers = self._strangers()
        writers = [n for n in self._registry.of(self._model) if n.role != "prefill" and n.name not in strangers]
        there = [node for node in writers if node.reachable and not node.mismatch and not node.trouble]
        untried = [node for node in there if (node.name, node.epoch) not in self._failover.avoid]
        if not self._policies.retries:
            raise error
        if untried:
            return await self._wait_a_while(error, tried_out=any(node.open for node in untried))
        if too_large := self._failover.too_large:  # whoever is left is too small
            raise refused(413, too_large.code, too_large.message) from too_large
        if not there and any(node.may_come_back for node in writers):
            return await asyncio.sleep(min(_LOOK_S, self._left_s()))
        if not there or self._gave_second_chance:
            raise error
        self._gave_second_chance = True
        self._failover.avoid.clear()
        await asyncio.sleep(min(_COME_BACK_S, self._left_s()))

    async def _wait_a_while(self, error: NoDecodeNode, tried_out: bool) -> None:
        """The while begins when nobody tries them out any more."""
        now = time.monotonic()
        self._waiting_since = now if tried_out else self._waiting_since or now
        if now - self._waiting_since > _PATIENCE_S:
            raise error
        await asyncio.sleep(min(_LOOK_S, self._left_s()))

    async def _apart(self, numbers: tuple[int, ...]) -> None:
        """Several choices were under way together: each goes on by itself, all at once."""
        tasks = [asyncio.create_task(self._persist((number,))) for number in numbers]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _PrefillGate:
    """Before a prefill node, until one of its places is free; not for one that is gone by then."""

    def __init__(self, prefill: NodeState | None) -> None:
        self._node, self._inside = prefill, False

    async def __aenter__(self) -> "_PrefillGate":
        if self._node:
            await self._node.gate.acquire()
            self._inside = True
            if not self._node.reachable:
                self.leave()
                raise LegBusy(self._node.name, "it is gone", 0.0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        if self._inside and self._node:
            self._inside = False
            self._node.gate.release()


def _reason(planned: Plan, option: Route) -> str:
    if option is planned.options[0]:
        return planned.reason
    way = f"{option.prefill} -> {option.decode}" if option.prefill else f"local on {option.decode}"
    best_s = planned.options[0].first_token_s
    return f"{way}: by policy, after a failure or to look again; {option.first_token_s:.2f} s, best {best_s:.2f} s"
