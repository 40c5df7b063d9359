"""How a request's cache comes to a decode node: from a prefill node, from the request itself, or from its own engine;
in each case only what earlier requests did not leave here already."""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from disaggregated_inference.engines import Sequence
from disaggregated_inference.errors import BadRequest, PeerRefused, ProtocolError, SliceRefused, WireError
from disaggregated_inference.kv import KVSlice
from disaggregated_inference.kv.dtype import Array
from disaggregated_inference.kv.prefix_cache.cache import Insertion
from disaggregated_inference.kv_transfer import Hello, KVFetch, Paths, Sink, gather_tokens
from disaggregated_inference.kv_transfer.inline import InlineReader
from disaggregated_inference.models.tokenizer import ModelTokenizer
from disaggregated_inference.node.admission import Claim
from disaggregated_inference.node.choice import Choice
from disaggregated_inference.node.context import PrefillContext, prompt_hash
from disaggregated_inference.node.generation import Generation
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.peer_check import PeerChecks
from disaggregated_inference.node.rates import RateMeter
from disaggregated_inference.node.scheduler import Work
from disaggregated_inference.node.structured_output import GrammarMatcher

log = logging.getLogger(__name__)

_SLOW_TRANSFER_S = 1.0


@dataclass(eq=False, slots=True)
class DecodeTask:
    """A request inside the node."""

    answer: Generation
    prompt: list[int] | None  # None: not known here (yet)
    capacity: int
    grammars: list[GrammarMatcher | None]
    extra_bytes: int = 0  # that it holds beside its sequences
    claim: Claim | None = None
    sequences: list[Sequence] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    unread: int = 0  # tokens of the prompt that this node's own engine has still to read
    writing: int = 0  # choices that are not over
    finished: bool = False
    exact: bool = True  # its rows are what this model computes: not rounded on the wire, not brought by a client
    withdraw: Callable[[], None] | None = None  # tells the prefill node that nobody wants its cache any more
    renew: Callable[[], float] | None = None  # tells it that the cache is wanted; returns for how many seconds
    renew_at: float = 0.0
    first_token_at: float = 0.0

    @property
    def in_line(self) -> bool:
        """Whether it waits for memory."""
        return self.claim is not None and self.claim.state == "waiting"


class KVSource:
    """Each way fills a task's first sequence and chooses its first tokens."""

    def __init__(
        self,
        kv_memory: KVMemory,
        tokenizer: ModelTokenizer,
        chunk_tokens: int,
        streams: int,
        codecs: tuple[str, ...],
    ) -> None:
        self.kv_memory, self.scheduler, self.engine = kv_memory, kv_memory.scheduler, kv_memory.engine
        self.tokenizer, self.chunk_tokens, self.streams, self.codecs = tokenizer, chunk_tokens, streams, codecs
        self.paths = Paths()
        self.proofs = PeerChecks(kv_memory, self.paths)
        self.reading = RateMeter()
        self._pace = 0.0  # tokens of prompt per second, lately, beside answers that are being written

    def know_prompt(self, task: DecodeTask) -> None:
        """Once the prompt is known."""
        prompt, written = task.prompt or [], task.answer.rules.written
        before = prompt[: len(prompt) - len(written)]
        if prompt[len(before) :] != list(written):
            raise BadRequest("the prompt must end with the tokens in written")
        eos = self.engine.spec.eos_tokens
        task.choices = [
            Choice(task.answer, number, before, self.tokenizer, eos, grammar)
            for number, grammar in enumerate(task.grammars)
        ]

    def prove(self, context: PrefillContext, hello: Hello, task: DecodeTask) -> None:
        """Before the request takes the memory that it was promised: the canary may need it. A prefill node that is
        refused is told that its cache is not wanted: else it would keep it for its whole lease."""
        try:
            task.answer.metrics.canary_time += self.proofs.require(context, hello, task.answer)
        except PeerRefused:
            if withdraw := task.withdraw:
                threading.Thread(target=withdraw, name="withdraw", daemon=True).start()
            raise
        task.answer.require_wanted()

    def fetch(self, context: PrefillContext, hello: Hello, task: DecodeTask) -> None:
        """The cache into the sequence. The first token is out as soon as the logits are here, whatever still comes."""
        answer, metrics = task.answer, task.answer.metrics
        spec, paths = self.engine.spec, self.paths.ordered(context.addresses)
        if task.prompt is None:
            task.prompt = gather_tokens(hello, context.tokens, spec.vocabulary, paths, answer.on_cancel)
            self.know_prompt(task)
            paths = self.paths.ordered(context.addresses)  # one that just failed goes last
        self.kv_memory.prefixes.recall(task.prompt)
        started = time.perf_counter()
        metrics.cached_tokens = self.scheduler.start(self._reuse(task, context.tokens), urgent=True).result()
        answer.was_read(metrics.cached_tokens)
        held = {"held_tokens": metrics.cached_tokens, "prompt_hash": prompt_hash(task.prompt)}
        hello = msgspec.structs.replace(hello, **held)
        task.exact = self.codecs[0] == "raw"
        with self._keeping(task) as insertion:
            sink = self._sink(task, insertion)
            gather = KVFetch(hello, spec.layout, spec.vocabulary, context.tokens, paths, sink, self.streams)
            answer.on_cancel(gather.stop)
            with self.scheduler.receiving():
                gathered = gather.run()
        metrics.fetch_time = time.perf_counter() - started
        metrics.exposed_transfer_time = time.perf_counter() - task.first_token_at
        metrics.kv_bytes, metrics.kv_codec = gathered.payload_bytes, gathered.codec
        metrics.kv_paths, metrics.resumed = gathered.paths, gathered.resumed
        metrics.queue_time, metrics.prefill_time = gathered.end.queue_s, gathered.end.prefill_s
        metrics.prefill_cached_tokens = gathered.end.cached_tokens
        self._warn_if_slow(answer)

    def hello(self, context: PrefillContext, request_id: str) -> Hello:
        """One for all connections of a request: the ticket is good for one fetch."""
        return Hello(
            ticket=context.ticket,
            secret=context.secret,
            fetch=secrets.token_hex(8),
            fingerprint=self.engine.fingerprint,
            epoch=context.epoch,
            request_id=request_id,
            codecs=self.codecs,
        )

    def play(self, tape: InlineReader, task: DecodeTask) -> None:
        task.exact = False
        with said_of_the_request():
            tape.play(self._sink(task, None))
            if task.sequences[0].length != tape.welcome.prompt_tokens or not task.first_token_at:
                raise ProtocolError("it ends before its prompt does")

    def _sink(self, task: DecodeTask, insertion: Insertion | None) -> Sink:
        """Into the first sequence, on the engine's thread, and into the store of prefixes, on this one. The first
        tokens go to the answer."""
        metrics, sequence, keeping = task.answer.metrics, task.sequences[0], threading.Lock()

        def place(piece: KVSlice) -> None:
            begun = time.perf_counter()
            try:
                self.scheduler.call(lambda: self.engine.place(sequence, piece))
            except SliceRefused as error:
                raise ProtocolError(f"a slice that does not belong here: {error}") from error
            metrics.inject_time += time.perf_counter() - begun
            if insertion:
                with keeping:
                    insertion.put(piece)

        def commit(length: int) -> None:
            self.scheduler.call(lambda: self.engine.commit(sequence, length))
            if length < metrics.prompt_tokens:  # all of it is read when the logits are here, and not before
                task.answer.was_read(length)

        def logits(row: Array) -> None:
            self._first(task, row)

        return Sink(place, commit, logits)

    def _first(self, task: DecodeTask, row: Array) -> None:
        task.first_token_at = time.perf_counter()
        task.answer.metrics.first_token_time = task.first_token_at - task.answer.begun_at
        task.answer.was_read(task.answer.metrics.prompt_tokens)  # slices may still be on their way: they were overtaken
        for choice in task.choices:
            choice.choose(row)

    def _warn_if_slow(self, answer: Generation) -> None:
        exposed = answer.metrics.exposed_transfer_time
        if exposed > _SLOW_TRANSFER_S:
            about = {"request_id": answer.request_id, "paths": answer.metrics.kv_paths}
            log.warning("the KV transfer went on for %.1f s after the prefill", exposed, extra=about)

    def _reuse(self, task: DecodeTask, most: int) -> Work[int]:
        """The longest beginning of the prompt that an earlier request left here."""
        match = self.kv_memory.prefixes.match(task.prompt or [], most)
        if not match.tokens:
            return 0
        sequence = task.sequences[0]
        for piece in match.slices(self.chunk_tokens):
            task.answer.require_wanted()
            self.engine.place(sequence, piece)
            if piece.layer == len(sequence.placed) - 1:
                yield
        self.engine.commit(sequence, match.tokens)
        return match.tokens

    @contextmanager
    def _keeping(self, task: DecodeTask) -> Iterator[Insertion | None]:
        """What arrives is kept for others who begin the same way; after a failure, as much of it as is whole."""
        insertion = self.kv_memory.prefixes.insert(task.prompt) if task.prompt and task.exact else None
        try:
            yield insertion
        finally:
            if insertion:
                insertion.finish()

    def read(self, task: DecodeTask) -> Work[None]:
        """This node's own engine reads the prompt, from where the kept prefix ends."""
        started, prompt, metrics = time.perf_counter(), task.prompt or [], task.answer.metrics
        sequence = task.sequences[0]
        at = metrics.cached_tokens = yield from self._reuse(task, len(prompt) - 1)
        new = task.unread = len(prompt) - at
        task.answer.was_read(at)
        with self._keeping(task) as insertion:
            spent = 0.0
            while at < len(prompt):
                task.answer.require_wanted()
                pace = self._pace if self.scheduler.batch.members else self.reading.expect(new)
                part = prompt[at : at + self.scheduler.chunk_tokens(pace, self.chunk_tokens)]
                begun = time.perf_counter()
                logits = self.engine.prefill(sequence, part, insertion.put if insertion else None)
                row = logits.numpy()[0] if at + len(part) == len(prompt) else None
                seconds = time.perf_counter() - begun
                if self.scheduler.batch.members:
                    self._pace = (self._pace or len(part) / seconds) * 0.7 + len(part) / seconds * 0.3
                at, spent = at + len(part), spent + seconds
                task.unread = len(prompt) - at
                if task.unread:  # the first token waits for nobody
                    task.answer.was_read(at)
                    yield
        self.reading.note(new, new, spent)
        metrics.prefill_time = time.perf_counter() - started
        assert row is not None
        self._first(task, row)


@contextmanager
def said_of_the_request() -> Iterator[None]:
    """What would be another node's fault on the wire is the caller's in a request."""
    try:
        yield
    except WireError as error:
        raise BadRequest(f"kv_cache: {error}") from error
