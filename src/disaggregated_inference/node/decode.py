"""The decode node: takes a cache from a prefill node, or reads the prompt itself, and writes the answer.

Memory first: a request waits until admission has promised it room for its prompt and all of its answer. Then its cache
comes (from the prefixes this node kept, over the wire, or from its own engine), the first token is chosen from the
logits, and it joins the batch.
"""

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial

from disaggregated_inference.errors import (
    BadRequest,
    Cancelled,
    ContextTooLong,
    DeadlineExceeded,
    DisaggError,
    KVMemoryFull,
    NodeBusy,
    PeerFailed,
)
from disaggregated_inference.kv_transfer import Paths, keep_waiting, withdraw
from disaggregated_inference.kv_transfer.inline import InlineReader
from disaggregated_inference.models.tokenizer import ModelTokenizer
from disaggregated_inference.node.admission import Claim
from disaggregated_inference.node.batch import DecodeBatch
from disaggregated_inference.node.choice import Choice
from disaggregated_inference.node.context import PrefillContext, prompt_hash
from disaggregated_inference.node.generation import Admitted, DecodeMetrics, Generation, GenerationParams
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.kv_source import DecodeTask, KVSource, said_of_the_request
from disaggregated_inference.node.peer_check import PeerChecks
from disaggregated_inference.node.scheduler import Work
from disaggregated_inference.node.structured_output import GrammarCompiler

log = logging.getLogger(__name__)

_UNKNOWN_LEASE_S = 3.0  # of a prefill node that did not answer


class DecodeNode:
    def __init__(
        self,
        kv_memory: KVMemory,
        tokenizer: ModelTokenizer,
        chunk_tokens: int = 0,
        streams: int = 2,
        codecs: tuple[str, ...] = ("raw",),
    ) -> None:
        self.kv_memory, self.scheduler, self.engine = kv_memory, kv_memory.scheduler, kv_memory.engine
        self.epoch = secrets.token_hex(8)
        self.grammars = GrammarCompiler(tokenizer, self.engine.spec.vocabulary, self.engine.spec.eos_tokens)
        self.batch = DecodeBatch(self.engine, self._choice_over)
        self.scheduler.batch = self.batch
        chunk = chunk_tokens or self.engine.chunk_tokens
        self.intake = KVSource(kv_memory, tokenizer, chunk, streams, codecs)
        self.on_end: Callable[[Generation, BaseException | None], None] = lambda answer, error: None
        self._lock = threading.Lock()
        self._tasks: set[DecodeTask] = set()
        self._written = 0  # tokens of answers that are over
        self._writing: dict[Choice, DecodeTask] = {}
        kv_memory.every_tick(self._end_late)
        kv_memory.every_tick(self._renew_leases)

    @property
    def paths(self) -> Paths:
        return self.intake.paths

    @property
    def proofs(self) -> PeerChecks:
        return self.intake.proofs

    @property
    def healthy(self) -> bool:
        return self.scheduler.alive

    @property
    def open_requests(self) -> int:
        """Requests that are waiting, transferring or being written."""
        return len(self._tasks)

    @property
    def unread_tokens(self) -> int:
        """Of all prompts that this node reads itself, or waits to."""
        return sum(task.unread for task in list(self._tasks))

    @property
    def tokens_written(self) -> int:
        """Of all answers, also of those that are still being written."""
        with self._lock:
            return self._written + sum(task.answer.metrics.completion_tokens for task in self._tasks)

    def close(self, drain_s: float = 0.0) -> None:
        """Let answers be finished for so long; those that still are not are cancelled."""
        deadline = time.monotonic() + drain_s
        while self._tasks and time.monotonic() < deadline:
            time.sleep(0.02)
        for task in list(self._tasks):
            task.answer.cancel()

    def fetch_and_write(
        self,
        context: PrefillContext,
        max_tokens: int = 0,
        request_id: str = "",
        rules: GenerationParams | None = None,
        tokens: list[int] | None = None,
    ) -> Generation:
        """From the cache of a prefill node. `tokens`, where the caller knows the prompt, saves a question."""
        if tokens:
            self.engine.require_vocabulary(tokens)
        if tokens is not None and prompt_hash(tokens) != context.prompt_hash:
            raise BadRequest("these tokens are not the prompt that the context is of; leave them out, or send the same")
        task = self._task(tokens, context.tokens, rules or GenerationParams(max_tokens=max_tokens), request_id)
        hello = self.intake.hello(context, request_id)
        task.withdraw = lambda: withdraw(hello, self.paths.ordered(context.addresses))
        task.renew = lambda: keep_waiting(hello, self.paths.ordered(context.addresses))

        def begin() -> None:
            take, prove = (partial(way, context, hello, task) for way in (self.intake.fetch, self.intake.prove))
            self._in_thread(task, take, prove)

        return self._admit(task, begin)

    def play_and_write(
        self, content: bytes, max_tokens: int = 0, request_id: str = "", rules: GenerationParams | None = None
    ) -> Generation:
        """From a cache that came whole, in the request itself."""
        spec = self.engine.spec
        with said_of_the_request():
            tape = InlineReader(content, self.engine.fingerprint, spec.layout, spec.vocabulary, spec.context_window)
        task = self._task(tape.tokens, len(tape.tokens), rules or GenerationParams(max_tokens=max_tokens), request_id)
        task.answer.metrics.kv_bytes = task.extra_bytes = len(content)
        return self._admit(task, lambda: self._in_thread(task, lambda: self.intake.play(tape, task)))

    def read_and_write(
        self, tokens: list[int], max_tokens: int = 0, request_id: str = "", rules: GenerationParams | None = None
    ) -> Generation:
        """No cache from elsewhere: this node reads the prompt too, in chunks, between the steps of others."""
        if not tokens:
            raise BadRequest("the prompt is empty")
        self.engine.require_vocabulary(tokens)
        task = self._task(tokens, len(tokens), rules or GenerationParams(max_tokens=max_tokens), request_id)
        task.unread = len(tokens)
        self.kv_memory.prefixes.recall(tokens)
        return self._admit(task, lambda: self._at_once(task))

    def _task(
        self, prompt: list[int] | None, prompt_tokens: int, rules: GenerationParams, request_id: str
    ) -> DecodeTask:
        self.kv_memory.require_open()
        rules.require_valid(self.engine.spec.vocabulary)
        capacity = prompt_tokens + rules.max_tokens
        if capacity > self.engine.spec.context_window:
            raise ContextTooLong(capacity, self.engine.spec.context_window, prompt_tokens=prompt_tokens)
        rules = rules.seeded()
        grammars = [self.grammars.start(rules.format) if rules.format else None for _ in range(rules.n)]
        metrics = DecodeMetrics(prompt_tokens, seed=rules.sampling.seed if rules.sampling.temperature else None)
        task = DecodeTask(Generation(rules, metrics, request_id), prompt, capacity, grammars)
        if prompt is not None:
            self.intake.know_prompt(task)
        return task

    def _admit(self, task: DecodeTask, run: Callable[[], None]) -> Generation:
        """`run` is called once the memory is promised; again, if the engine could not take it in one piece."""
        answer, rules = task.answer, task.answer.rules

        def start(claim: Claim) -> None:
            with self._lock:
                task.claim = claim
                if task.finished:  # whoever ended it gives the claim back
                    return
                answer.metrics.admission_time = time.perf_counter() - answer.made_at
                answer.put(Admitted())
            run()

        answer.on_cancel(lambda error: None if task.sequences else self._finish(task, error))
        with self._lock:
            self._tasks.add(task)
        cost = rules.n * self.engine.kv_cost(task.capacity) + task.extra_bytes
        try:  # the deadline is kept elsewhere: who waits in line is late like everyone else
            claim = self.kv_memory.admission.ask(
                cost, rules.n, start, lambda error: self._finish(task, error), rules.queue_s
            )
        except BaseException:
            self._forget(task)
            raise
        with self._lock:
            task.claim = claim
        if task.finished:
            self.kv_memory.admission.release(claim)
        return answer

    def _end_late(self) -> None:
        """Every wait has an end: whatever a request is at, its time is bounded."""
        now = time.monotonic()
        for task in list(self._tasks):
            if task.answer.deadline < now:
                within = f"within {task.answer.rules.timeout_s:g} s"
                within += ", and still in line for KV memory" if task.in_line else ""
                task.answer.cancel(DeadlineExceeded(f"not done {within}; ask for less, or for more time"))

    def _renew_leases(self) -> None:
        """What waits in line keeps the cache that it waits to fetch. On threads of their own: nodes may not answer."""
        now = time.monotonic()
        for task in list(self._tasks):
            if task.renew and task.in_line and task.renew_at < now:
                task.renew_at = math.inf
                threading.Thread(target=self._renew, args=(task, task.renew), name="kv-renew", daemon=True).start()

    def _renew(self, task: DecodeTask, renew: Callable[[], float]) -> None:
        lease_s = _UNKNOWN_LEASE_S
        try:
            lease_s = renew()
        except PeerFailed as error:
            if task.in_line:  # it would wait for nothing
                task.answer.cancel(error)
        except DisaggError as error:
            log.info("a lease was not renewed: %s", error, extra={"request_id": task.answer.request_id})
        task.renew_at = time.monotonic() + max(0.1, lease_s / 3)

    def _in_thread(
        self, task: DecodeTask, take: Callable[[], None], prepare: Callable[[], None] = lambda: None
    ) -> None:
        """`take` fills the first sequence and chooses the first tokens; the rest is the same for all."""

        def run() -> None:
            try:
                prepare()
                if self.scheduler.call(lambda: self._opened(task)):
                    take()
                    self.scheduler.start(self._begin(task), urgent=True).result()
            except BaseException as error:  # where it was stopped, that is the reason, whatever broke
                self._finish(task, task.answer.gave_up or error)

        threading.Thread(target=run, name="decode", daemon=True).start()

    def _at_once(self, task: DecodeTask) -> None:
        try:
            future = self.scheduler.start(self._read(task))
        except BaseException as error:
            return self._finish(task, error)
        future.add_done_callback(
            lambda done: self._finish(task, task.answer.gave_up or done.exception()) if done.exception() else None
        )

    def _read(self, task: DecodeTask) -> Work[None]:
        if self._opened(task):
            yield from self.intake.read(task)
            yield from self._begin(task)

    def _opened(self, task: DecodeTask) -> bool:
        """Memory for every choice. Where it is there but not in one piece, the request waits for others to end."""
        task.answer.require_wanted()
        try:
            for _ in task.grammars:
                task.sequences.append(self.kv_memory.open(task.capacity))
        except KVMemoryFull:
            self._close_sequences(task)
            assert task.claim
            self.kv_memory.admission.again(task.claim)
            return False
        task.answer.require_wanted()  # the model may have been loaded for it, which takes its time
        return True

    def _begin(self, task: DecodeTask) -> Work[None]:
        """The prompt is whole: every choice gets its copy, and joins the batch."""
        task.answer.require_wanted()
        first, *rest = task.sequences
        if rest:
            for piece in self.engine.export(first):
                for sequence in rest:
                    self.engine.place(sequence, piece)
                yield
            for sequence in rest:
                self.engine.commit(sequence, first.length)
        task.writing = len(task.choices)
        for choice, sequence in zip(task.choices, task.sequences, strict=True):
            choice.sequence = sequence
            self._writing[choice] = task
            self.batch.join(choice)

    def _choice_over(self, choice: Choice, error: BaseException | None) -> None:
        task = self._writing.pop(choice)
        task.writing -= 1
        if error and task.writing:
            task.answer.cancel(error if isinstance(error, DisaggError) else DisaggError(str(error)))
        if not task.writing:
            self._finish(task, task.answer.gave_up or error)

    def _finish(self, task: DecodeTask, error: BaseException | None) -> None:
        """Always, and once: give the memory back, then end the answer, with the error if there was one. Who has opened
        nothing yet is told first: memory needs the engine's thread, which may be loading the model."""
        with self._lock:
            if task.finished:
                return
            task.finished = True
        self._measure(task)
        if task.withdraw and isinstance(error, Cancelled | DeadlineExceeded):  # whatever the transfer was at
            threading.Thread(target=task.withdraw, name="withdraw", daemon=True).start()
        try:
            if error and not task.sequences:
                self._tell(task, error)
        finally:
            self._give_back(task, error)

    def _give_back(self, task: DecodeTask, error: BaseException | None) -> None:
        try:
            if error:
                self.scheduler.post(lambda: self._end(task, error))
            else:
                self.scheduler.start(self._keep_and_end(task), urgent=True)
        except NodeBusy as stopped:  # the engine has stopped: nothing to give back, but someone may be waiting
            self._forget(task)
            if not task.answer.ended:
                task.answer.put(error or stopped)

    def _measure(self, task: DecodeTask) -> None:
        metrics, now = task.answer.metrics, time.perf_counter()
        metrics.total_time = now - task.answer.begun_at
        metrics.admission_time = metrics.admission_time or now - task.answer.made_at  # it never had memory
        if task.first_token_at and (later := metrics.completion_tokens - len(task.grammars)) > 0:
            metrics.decode_time = now - task.first_token_at
            metrics.decode_speed = later / metrics.decode_time
        metrics.finish_reason = next((choice.finish for choice in task.choices if choice.finish), "error")

    def _keep_and_end(self, task: DecodeTask) -> Work[None]:
        try:
            yield from self._keep(task)
        except Exception:
            log.exception("an answer's cache was not kept")
        self._end(task, None)

    def _keep(self, task: DecodeTask) -> Work[None]:
        """What was written stays, too: the next turn of a chat begins with it."""
        for choice in task.choices:
            assert choice.sequence
            tokens = [*(task.prompt or []), *choice.tokens][: choice.sequence.length]
            insertion = self.kv_memory.prefixes.insert(tokens) if task.prompt and task.exact else None
            if insertion:
                try:
                    for piece in self.engine.export(choice.sequence, insertion.start):
                        insertion.put(piece)
                    insertion.finish()
                finally:
                    insertion.abandon()
                yield

    def _end(self, task: DecodeTask, error: BaseException | None) -> None:
        """On the engine's thread."""
        task.answer.metrics.prompt_tokens_recomputed = sum(sequence.computed for sequence in task.sequences)
        self._close_sequences(task)
        with self._lock:  # they know the task: memory would wait for a GC
            claim, task.claim, task.withdraw, task.renew = task.claim, None, None, None
        if claim:
            self.kv_memory.admission.release(claim)
        task.answer.forget()
        self._forget(task)
        self._tell(task, error)

    def _tell(self, task: DecodeTask, error: BaseException | None) -> None:
        """Once, whichever comes first."""
        if not task.answer.ended:
            self.on_end(task.answer, error)
            task.answer.put(error)

    def _forget(self, task: DecodeTask) -> None:
        with self._lock:
            self._tasks.discard(task)
            self._written += task.answer.metrics.completion_tokens

    def _close_sequences(self, task: DecodeTask) -> None:
        for sequence in task.sequences:
            self.kv_memory.close(sequence)
        task.sequences.clear()
