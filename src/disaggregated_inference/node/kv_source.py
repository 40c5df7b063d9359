"""Where a decode node gets the KV of a prompt: a prefill node, the request itself, or its own engine. In each case the
node's prefix cache comes first."""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import msgspec

from disaggregated_inference.errors import BadRequest, PeerRefused, ProtocolError, SliceRefused, WireError
from disaggregated_inference.kv import Array, KVSlice, reusable_tokens
from disaggregated_inference.kv.prefix_cache import Insertion
from disaggregated_inference.kv_transfer import Hello, InlineReader, KVFetch, NetworkPath, Paths, Sink, fetch_prompt
from disaggregated_inference.models import ModelTokenizer
from disaggregated_inference.node.choice import Choice
from disaggregated_inference.node.context import PrefillContext, prompt_hash
from disaggregated_inference.node.decode_task import DecodeTask
from disaggregated_inference.node.generation import Generation
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.peer_check import PeerChecks
from disaggregated_inference.node.prompt_logprobs import (
    asking_for_logprobs,
    put_first,
    put_rows,
    scored_tokens,
    scoring_of,
)
from disaggregated_inference.node.rates import RateMeter
from disaggregated_inference.node.scheduler import Work
from disaggregated_inference.node.trust import Trust
from disaggregated_inference.timeouts import NodeTimeouts

log = logging.getLogger(__name__)

_SMALL_KV_BYTES = 4 << 20


class KVSource:
    """`fetch`, `receive_inline` and `compute` fill a task's first sequence and sample its first tokens."""

    def __init__(
        self,
        kv_memory: KVMemory,
        tokenizer: ModelTokenizer,
        chunk_tokens: int,
        streams: int,
        codecs: tuple[str, ...],
        timeouts: NodeTimeouts,
        trust: Trust = Trust(),
    ) -> None:
        self.trust = trust
        self.kv_memory, self.scheduler = kv_memory, kv_memory.scheduler
        self.tokenizer, self.chunk_tokens, self.streams, self.codecs = tokenizer, chunk_tokens, streams, codecs
        self.paths = Paths(timeouts.transfer)
        self.peer_checks = PeerChecks(kv_memory, self.paths_to, timeouts, trust=trust)
        self.prefill_rates = RateMeter()
        self._shared_rate = 0.0  # recent prompt tokens per second while the decode batch was running
        self._slow_transfer_s = timeouts.slow_transfer_s

    def create_choices(self, task: DecodeTask) -> None:
        """As soon as the prompt is known."""
        prompt, written = task.prompt or [], task.generation.params.written
        before = prompt[: len(prompt) - len(written)]
        if prompt[len(before) :] != list(written):
            raise BadRequest("the prompt must end with the tokens in written")
        eos = self.kv_memory.engine.spec.eos_tokens
        task.choices = [
            Choice(task.generation, number, before, self.tokenizer, eos, grammar)
            for number, grammar in enumerate(task.grammars)
        ]

    def check_peer(self, context: PrefillContext, hello: Hello, task: DecodeTask) -> None:
        """Before the request opens its sequences: the peer check may need the memory. A refused prefill node is told
        to free the KV, else it would hold it for the whole lease."""
        try:
            task.generation.metrics.canary_time += self.peer_checks.require(context, hello, task.generation)
        except PeerRefused:
            if withdraw := task.withdraw:
                threading.Thread(target=withdraw, name="withdraw", daemon=True).start()
            raise
        task.generation.raise_if_cancelled()

    def paths_to(self, context: PrefillContext) -> list[NetworkPath]:
        return self.paths.ordered(context.addresses, self.trust.tls_peer(context))

    def hello(self, context: PrefillContext, request_id: str) -> Hello:
        """The same for all connections of a request: the ticket is good for one fetch."""
        return Hello(
            ticket=context.ticket,
            secret=context.secret,
            fetch=secrets.token_hex(8),
            fingerprint=self.kv_memory.engine.fingerprint,
            epoch=context.epoch,
            request_id=request_id,
            codecs=self.codecs,
            keyed=True if context.security == "authenticated" else msgspec.UNSET,
        )

    def fetch(self, context: PrefillContext, hello: Hello, task: DecodeTask) -> None:
        """From a prefill node. The first tokens are sampled when the logits arrive, before the last slices do."""
        generation, metrics = task.generation, task.generation.metrics
        spec, paths = self.kv_memory.engine.spec, self.paths_to(context)
        if task.prompt is None:
            task.prompt = fetch_prompt(hello, context.tokens, spec.vocabulary, paths, generation.on_cancel)
            self.create_choices(task)
            paths = self.paths_to(context)  # a path that has just failed goes last
        self.kv_memory.prefixes.recall(task.prompt, task.salt)
        started = time.perf_counter()
        metrics.cached_tokens = self.scheduler.submit(self._reuse_prefix(task, context.tokens), urgent=True).result()
        generation.report_progress(metrics.cached_tokens)
        held = {"held_tokens": metrics.cached_tokens, "prompt_hash": prompt_hash(task.prompt)}
        hello = asking_for_logprobs(msgspec.structs.replace(hello, **held), task)
        put_first(task)
        task.cacheable = self.codecs[0] == "raw" and self.trust.may_keep(context)
        with self._saving(task) as insertion:
            sink = self._sink(task, insertion)
            streams = self._streams_for(context, context.tokens - metrics.cached_tokens)
            fetch = KVFetch(hello, spec.layout, spec.vocabulary, context.tokens, paths, sink, streams)
            generation.on_cancel(fetch.stop)
            with self.scheduler.receiving():
                result = fetch.run()
        task.kv_ready_at = time.perf_counter()
        metrics.fetch_time = task.kv_ready_at - started
        # Computing ended before the logits arrived. Waiting for memory and for the peer check is no transfer.
        free_at = generation.created_at + metrics.admission_time + metrics.canary_time
        computed_at = min(max(result.computed_at, free_at), task.first_token_at)
        metrics.exposed_transfer_time = task.kv_ready_at - computed_at
        metrics.transfer_time = result.arrivals.seconds()
        metrics.hidden_transfer_time = result.arrivals.seconds(until=computed_at)
        metrics.first_slice_time = (result.arrivals.began_at or started) - started
        metrics.kv_bytes, metrics.kv_codec = result.payload_bytes, result.codec
        metrics.kv_paths, metrics.resumed = result.paths, result.resumed
        metrics.queue_time, metrics.prefill_time = result.end.queue_s, result.end.prefill_s
        metrics.prefill_cached_tokens = result.end.cached_tokens
        self._warn_if_slow(generation)

    def _streams_for(self, context: PrefillContext, tokens: int) -> int:
        """A TLS handshake takes longer than a second connection saves for little KV."""
        engine = self.kv_memory.engine
        small = tokens * engine.spec.kv_token_bytes(engine.dtype) < _SMALL_KV_BYTES
        return 1 if small and context.security == "tls" else self.streams

    def receive_inline(self, reader: InlineReader, task: DecodeTask) -> None:
        """From the request itself."""
        task.cacheable = False
        with as_bad_request():
            reader.read_into(self._sink(task, None))
            if task.sequences[0].length != reader.welcome.prompt_tokens or not task.first_token_at:
                raise ProtocolError("it ends before its prompt does")
        task.kv_ready_at = time.perf_counter()

    def compute(self, task: DecodeTask) -> Work[None]:
        """On this node's engine, chunk by chunk, from the end of the cached prefix."""
        started, prompt, metrics = time.perf_counter(), task.prompt or [], task.generation.metrics
        sequence = task.sequences[0]
        metrics.queue_time = started - task.generation.created_at - metrics.admission_time  # for the engine
        limit = reusable_tokens(len(prompt), scored_tokens(task))
        at = metrics.cached_tokens = yield from self._reuse_prefix(task, limit)
        put_first(task)
        new = task.waiting_tokens = len(prompt) - at
        task.generation.report_progress(at)
        with self._saving(task) as insertion:
            spent = 0.0
            while at < len(prompt):
                task.generation.raise_if_cancelled()
                rate = self._shared_rate if self.scheduler.batch.running else self.prefill_rates.estimate(new)
                chunk = prompt[at : at + self.scheduler.chunk_tokens(rate, self.chunk_tokens)]
                chunk_started = time.perf_counter()
                emit, scoring = insertion.put if insertion else None, scoring_of(task, at, len(chunk))
                logits = self.kv_memory.engine.prefill(sequence, chunk, emit, scoring)
                row = logits.numpy()[0] if at + len(chunk) == len(prompt) else None
                seconds = time.perf_counter() - chunk_started
                if self.scheduler.batch.running:
                    self._shared_rate = (self._shared_rate or len(chunk) / seconds) * 0.7 + len(chunk) / seconds * 0.3
                at, spent = at + len(chunk), spent + seconds
                task.waiting_tokens = len(prompt) - at
                if task.waiting_tokens:  # after the last chunk, the first token goes out without a pause
                    task.generation.report_progress(at)
                    yield
        if scored_tokens(task) is None:  # scoring takes time that other prompts do not need
            self.prefill_rates.record(new, new, spent)
        metrics.prefill_time = time.perf_counter() - started
        assert row is not None
        self._sample_first(task, row)
        task.kv_ready_at = task.first_token_at

    def _sink(self, task: DecodeTask, insertion: Insertion | None) -> Sink:
        """Places slices into the first sequence, on the scheduler's thread, and saves them in the prefix cache."""
        metrics, sequence, lock = task.generation.metrics, task.sequences[0], threading.Lock()

        def timed(work: Callable[[], None]) -> None:
            """On the scheduler's thread: the engine's own time, not that of waiting for a turn."""
            started = time.perf_counter()
            work()
            metrics.inject_time += time.perf_counter() - started

        def place(piece: KVSlice) -> None:
            try:
                self.scheduler.call(lambda: timed(lambda: self.kv_memory.engine.place(sequence, piece)))
            except SliceRefused as error:
                raise ProtocolError(f"a slice does not fit: {error}") from error
            if insertion:
                with lock:
                    insertion.put(piece)

        def commit(length: int) -> None:
            self.scheduler.call(lambda: timed(lambda: self.kv_memory.engine.commit(sequence, length)))
            if length < (metrics.prompt_tokens or 0):  # the end of the prompt is reported with the logits
                task.generation.report_progress(length)

        return Sink(place, commit, partial(self._sample_first, task), partial(put_rows, task))

    def _sample_first(self, task: DecodeTask, row: Array) -> None:
        task.first_token_at = time.perf_counter()
        task.generation.metrics.first_token_time = task.first_token_at - task.generation.arrived_at
        task.generation.report_progress(task.generation.metrics.prompt_tokens or 0)  # slices may come after the logits
        for choice in task.choices:
            choice.sample(row)

    def _warn_if_slow(self, generation: Generation) -> None:
        exposed = generation.metrics.exposed_transfer_time
        if exposed > self._slow_transfer_s:
            extra = {"request_id": generation.request_id, "paths": generation.metrics.kv_paths}
            log.warning("the KV transfer took %.1f s longer than the prefill", exposed, extra=extra)

    def _reuse_prefix(self, task: DecodeTask, limit: int) -> Work[int]:
        """Place the longest cached prefix of the prompt, up to `limit` tokens; returns its length."""
        match = self.kv_memory.prefixes.match(task.prompt or [], limit, task.salt)
        if not match.tokens:
            return 0
        sequence = task.sequences[0]
        for piece in match.slices(self.chunk_tokens):
            task.generation.raise_if_cancelled()
            self.kv_memory.engine.place(sequence, piece)
            if piece.layer == len(sequence.placed) - 1:
                yield
        self.kv_memory.engine.commit(sequence, match.tokens)
        return match.tokens

    @contextmanager
    def _saving(self, task: DecodeTask) -> Iterator[Insertion | None]:
        """Save arriving KV in the prefix cache; after a failure, the chunks that are complete."""
        wanted = task.prompt and task.cacheable
        insertion = self.kv_memory.prefixes.insert(task.prompt or [], task.salt) if wanted else None
        try:
            yield insertion
        finally:
            if insertion:
                insertion.finish()


@contextmanager
def as_bad_request() -> Iterator[None]:
    """Malformed KV in a request is the client's error, not another node's."""
    try:
        yield
    except WireError as error:
        raise BadRequest(f"kv_cache: {error}") from error
