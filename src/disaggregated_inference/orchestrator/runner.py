"""Runs one request: picks a route, opens the two legs, and tries again when one of them fails.

The tokens that came are kept, and the next attempt asks for what is missing. So a client's stream goes on without a
gap, a repetition or, under one seed, a different token.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import aclosing
from types import TracebackType

import msgspec

from disaggregated_inference.api import Failover, GenerateRequest, PrefillRequest, Progress, StreamEvent, seal_for
from disaggregated_inference.errors import ClusterError, NoDecodeNode
from disaggregated_inference.orchestrator.attempt import Attempt
from disaggregated_inference.orchestrator.continuation import Continuation, Numbers
from disaggregated_inference.orchestrator.failover import FailoverState
from disaggregated_inference.orchestrator.leg_errors import LegBusy, LegFailed, NodeRefused, refusal
from disaggregated_inference.orchestrator.node_state import KVPromise, NodeState
from disaggregated_inference.orchestrator.recorder import RequestRecorder
from disaggregated_inference.orchestrator.registry import NodeRegistry
from disaggregated_inference.orchestrator.route_picker import RoutePicker
from disaggregated_inference.orchestrator.unavailable_nodes import no_decode_node, prefill_causes

log = logging.getLogger(__name__)

Put = Callable[[list[StreamEvent]], None]


class RequestRunner:
    """`run` passes the answer on as it is generated; `recorder` is complete when it returns."""

    def __init__(
        self,
        registry: NodeRegistry,
        request: GenerateRequest,
        continuation: Continuation,
        recorder: RequestRecorder,
        deadline: float,
    ) -> None:
        self._registry, self._request, self._continuation = registry, request, continuation
        self._recorder, self._deadline, self._model = recorder, deadline, recorder.model
        self._policies, self._timeouts = registry.config.policies, registry.timeouts
        self._choice_states = recorder.choice_states = continuation.choice_states
        self._failover = FailoverState(registry, self._model, self._policies)
        can_transfer_kv = continuation.can_transfer_kv
        self._picker = RoutePicker(
            registry, self._model, self._failover, can_transfer_kv=can_transfer_kv, local=request.local
        )
        self._gave_second_chance = False
        self._waiting_since: float | None = None
        self._waits_for_node = False
        self._cached_tokens: int | None = None  # of the prompt, at most: see `_report_progress`
        self._put: Put = lambda events: None
        self._streams = False  # a reader has what came so far

    async def run(self, put: Put | None) -> None:
        """Until the answer is complete. `put` is a plain call, since every token passes through it; None: no one reads
        the answer before it is complete."""
        self._put, self._streams = put or self._put, put is not None
        numbers = tuple(range(self._request.n))
        run = self._run_separately if self._continuation.separate_choices else self._attempt_until_done
        await run(numbers)

    async def _attempt_until_done(self, numbers: Numbers) -> None:
        """Attempt after attempt, until these choices are complete."""
        while not all(self._choice_states[number].finish_reason for number in numbers):
            attempt, since = None, time.perf_counter()
            try:
                attempt = self._begin(numbers)
                await self._attempt(attempt, numbers)
            except LegBusy as busy:
                if attempt:
                    self._recorder.attempts.remove(attempt)  # nothing was tried
                await asyncio.sleep(min(busy.retry_after_s, self._timeouts.busy_wait_s, self._left_s()))
                self._recorder.waited(since)
            except NoDecodeNode:
                nodes = self._registry.of(self._model)
                await self._wait_for_node(no_decode_node(self._model, nodes, self._recorder.failovers))
                self._recorder.waited(since)
            except LegFailed as failure:
                assert attempt
                await self._fail_over(failure, attempt)
                if len(numbers) > 1 and any(self._choice_states[number].written for number in numbers):
                    await self._run_separately(numbers)

    def _begin(self, numbers: Numbers) -> Attempt:
        route_request = self._continuation.route_request(numbers, self._picker.excluded())
        route_request = msgspec.structs.replace(route_request, seeded=self._recorder.keeps_seed)
        route, reason = self._picker.pick(route_request, explore=not self._recorder.failovers)
        self._waits_for_node = False
        self._recorder.fallback = self._picker.is_fallback(route)
        self._recorder.prefill_down = self._picker.prefill_is_down(route)
        if self._recorder.fallback or self._recorder.prefill_down:
            causes = prefill_causes(self._registry.of(self._model), route.decode, self._recorder.failovers)
            self._recorder.warning_reason = "; ".join(causes)
        decode = self._registry.nodes[route.decode]
        self._picker.info = self._picker.info or decode.info
        engine, text_only = decode.status.backend if decode.status else "", not self._continuation.can_transfer_kv
        self._recorder.warn(f"{decode.name}: {decode.warning}" if decode.warning else None)
        reason = self._continuation.explain(route, reason)
        if (whole := self._picker.is_whole(route)) and self._picker.decode_is_down():
            self._recorder.warn(f"no decode node: {decode.name} wrote the answer alone")
        attempt = self._recorder.begin(
            route, reason, engine, node_model=decode.own_model, text_only=text_only, whole=whole
        )
        attempt.kv_tokens = route_request.kv_tokens
        attempt.epochs = self._registry.epochs(self._model)
        attempt.written = {number: self._choice_states[number].tokens for number in numbers}
        return attempt

    async def _attempt(self, attempt: Attempt, numbers: Numbers) -> None:
        route, nodes = attempt.route, self._registry.nodes
        decode, prefill = nodes[route.decode], nodes[route.prefill] if route.prefill else None
        for node in (decode, prefill):  # they were ready a moment ago, when the route was picked
            if node and not node.breaker.allows():
                raise LegBusy(node.name, "another request is trying it out", self._timeouts.come_back_s)
        prompt, ticket = self._continuation.prompt(numbers), secrets.token_urlsafe(16)
        reader, done = prefill or decode, False
        self._recorder.warn(self._continuation.warning(numbers))
        promise = decode.promise(attempt.kv_tokens)
        for node in {decode, reader}:
            node.open += 1
            node.used_at = time.monotonic()
        reader.unread_tokens += len(prompt)
        attempt.sent_at = time.monotonic()
        try:
            await self._open_legs(attempt, numbers, decode, prefill, prompt, ticket, promise)
            done = True
        except NodeRefused as error:
            cause = self._recorder.failovers[-1].cause if self._recorder.failovers else ""
            raise self._continuation.refused(error, numbers, cause) from error
        finally:
            for node in {decode, reader}:
                node.open -= 1
                node.breaker.released()
            decode.release(promise)
            if prefill and not done:
                prefill.client.cancel_prefill(ticket)
        self._continuation.finished(attempt, numbers, prompt)

    async def _open_legs(
        self,
        attempt: Attempt,
        numbers: Numbers,
        decode: NodeState,
        prefill: NodeState | None,
        prompt: list[int],
        ticket: str,
        promise: KVPromise,
    ) -> None:
        """The prefill leg first, always: two requests can then never wait for each other's memory."""
        waits = prefill is not None and prefill.prefill_slots.locked()
        async with _PrefillSlot(prefill) as slot:
            if waits:
                self._recorder.waited(attempt.began_at)
            context = None
            if prefill:
                request = self._prefill_request(prefill, decode, prompt, ticket)
                context = await prefill.client.prefill(request, self._request.request_id)
                context = seal_for(context, decode.server.token)  # the prefill node may have another token, or none
            decode_request = self._continuation.decode_request(numbers, self._left_s(), context)
            promise.sent_at = time.monotonic()
            path = "/decode" if prefill else "/generate"
            check = self._continuation.stream_check(numbers, decode_request, decode.info)
            events = decode.client.generate(path, decode_request, self._request.request_id, check)
            async with aclosing(events):
                async for batch in events:
                    if output := self._collect(batch, attempt, numbers, len(prompt)):
                        slot.release()  # the first token: the prompt was prefilled
                        self._put(output)

    def _left_s(self) -> float:
        if (left := self._deadline - time.monotonic()) <= 0:
            raise TimeoutError
        return left

    def _prefill_request(self, prefill: NodeState, decode: NodeState, prompt: list[int], ticket: str) -> PrefillRequest:
        options = self._registry.config.options_of(self._model)
        limit_s = options.prefill_timeout_s or self._policies.prefill_timeout_s
        return PrefillRequest(
            tokens=prompt,
            ticket=ticket,
            wait=False,
            timeout_s=min(self._left_s(), limit_s),
            kv_addresses=tuple(prefill.server.kv_addresses),
            cache_salt=self._continuation.salt.value,
            shared_tokens=self._continuation.salt.shared_tokens,
            kv_security=self._registry.kv_security(prefill.name, decode.name),
            **self._continuation.prompt_logprobs.params(),
        )

    def _collect(
        self, events: list[StreamEvent], attempt: Attempt, numbers: Numbers, prompt_tokens: int
    ) -> list[StreamEvent]:
        """Keep the output; the node numbers its choices from 0, the request has numbers of its own."""
        renumber = len(numbers) == 1 and numbers[0] > 0
        output: list[StreamEvent] = []
        for event in events:
            if event.prompt_logprobs:
                if piece := self._continuation.prompt_logprobs.take(event.prompt_logprobs, attempt.route.decode):
                    self._recorder.on_prompt_logprobs(piece)
            elif self._continuation.is_output(event):
                if not attempt.first_token_at and not output:
                    self._continuation.prompt_logprobs.require_complete(attempt.route.decode)
                number = numbers[event.choice]
                self._choice_states[number].take(event)
                output.append(msgspec.structs.replace(event, choice=number) if renumber else event)
            elif event.done:
                attempt.metrics, attempt.ended_at = event.node_metrics, time.perf_counter()
            elif event.progress:
                self._report_progress(event.progress, attempt)
        if output:
            attempt.last_at = time.perf_counter()
            if not attempt.first_token_at:
                self._first_token(attempt, prompt_tokens)
        return output

    def _report_progress(self, progress: Progress, attempt: Attempt) -> None:
        """Tokens that an earlier attempt computed do not count as cached, and the time is the request's, not the
        attempt's. Another node may have less: then progress goes back."""
        known = progress.total if self._cached_tokens is None else self._cached_tokens
        self._cached_tokens = min(known, progress.cache)
        earlier_ms = round(1000 * (attempt.began_at - self._recorder.attempts[0].began_at))
        time_ms = progress.time_ms + earlier_ms
        self._recorder.on_progress(msgspec.structs.replace(progress, cache=self._cached_tokens, time_ms=time_ms))

    def _first_token(self, attempt: Attempt, prompt_tokens: int) -> None:
        """Both legs work."""
        attempt.first_token_at = attempt.last_at
        self._recorder.first_token(attempt.first_token_at)
        nodes = self._registry.nodes
        reader = nodes[attempt.prefill_name]
        reader.prompt_was_read(prompt_tokens, attempt.sent_at)
        for node in {reader, nodes[attempt.route.decode]}:
            node.breaker.succeeded()

    async def _fail_over(self, failure: LegFailed, attempt: Attempt) -> None:
        blamed = self._failover.blamed(failure, attempt.route)
        again = self._failover.learn(failure, attempt)
        message = failure.reason_for(blamed.name)
        self._recorder.failed(Failover(node=blamed.name, code=failure.code, message=message), attempt)
        extra = {"request_id": self._request.request_id, "code": failure.code}
        log.warning("a leg failed: %s", failure, extra=extra)
        if not again or not self._continuation.can_continue() or (failure.tainted and self._streams):
            raise ClusterError(str(failure)) from failure
        if failure.tainted:
            for number, tokens in attempt.written.items():
                self._choice_states[number].take_back(tokens)
        if self._failover.wants_refresh(failure):
            await self._registry.refresh([failure.node])

    async def _wait_for_node(self, error: NoDecodeNode) -> None:
        """No decode node takes this request now. Nodes that are there and did not fail it are waited for, as long as
        another request tries them out and a while longer; nodes that failed it get one second chance. Nodes that may
        come back are waited for as long as the request has time."""
        others = self._picker.other_models()
        nodes = [node for node in self._registry.of(self._model) if node.can_decode and node.name not in others]
        present = [node for node in nodes if node.reachable and not node.mismatch and not node.trouble]
        untried = [node for node in present if (node.name, node.epoch) not in self._failover.avoid]
        if not self._policies.retries:
            raise error
        if untried:
            return await self._wait_a_while(error, tried_out=any(node.open for node in untried))
        if too_large := self._failover.too_large:  # all other nodes are too small
            raise refusal(413, too_large.code, too_large.message) from too_large
        away = [node for node in nodes if node not in present and node.may_come_back]
        if away and (not present or self._gave_second_chance):
            return await self._wait_for_any_node(error)
        if not present or self._gave_second_chance:
            raise error
        self._gave_second_chance = True
        self._failover.avoid.clear()
        await asyncio.sleep(min(self._timeouts.come_back_s, self._left_s()))

    async def _wait_for_any_node(self, error: NoDecodeNode) -> None:
        """The client is told once per outage."""
        if self._left_s() < 2 * self._timeouts.poll_s:  # its time is over: this is the better reason
            raise error
        if not self._waits_for_node:
            self._waits_for_node = True
            extra = {"request_id": self._request.request_id, "model": self._model}
            log.warning("no decode node is there: the request waits for one", extra=extra)
            self._recorder.on_waiting(f"waiting for a decode node of {self._model}")
        await asyncio.sleep(min(self._timeouts.poll_s, self._left_s()))

    async def _wait_a_while(self, error: NoDecodeNode, tried_out: bool) -> None:
        """The time limit starts when no other request is trying the nodes out."""
        now = time.monotonic()
        self._waiting_since = now if tried_out else self._waiting_since or now
        if now - self._waiting_since > self._timeouts.no_node_s:
            raise error
        await asyncio.sleep(min(self._timeouts.poll_s, self._left_s()))

    async def _run_separately(self, numbers: Numbers) -> None:
        """Each choice in attempts of its own, all at once."""
        tasks = [asyncio.create_task(self._attempt_until_done((number,))) for number in numbers]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _PrefillSlot:
    """One of a prefill node's places for our prompts; released at the first token, or at the end."""

    def __init__(self, prefill: NodeState | None) -> None:
        self._node, self._held = prefill, False

    async def __aenter__(self) -> "_PrefillSlot":
        if self._node:
            await self._node.prefill_slots.acquire()
            self._held = True
            if not self._node.reachable:
                self.release()
                raise LegBusy(self._node.name, "it is gone", 0.0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        if self._held and self._node:
            self._held = False
            self._node.prefill_slots.release()
