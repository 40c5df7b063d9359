"""Structured output: after every token, a grammar (llguidance) decides which tokens may come next.

All end tokens of a model are treated alike: they may come only when the output is complete.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from disaggregated_inference.api import OutputFormat
from disaggregated_inference.errors import BadRequest, EngineUnavailable, ModelUnsupported
from disaggregated_inference.models import ModelTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Result = TypeVar("Result")

_COMPILERS = 2
_MAX_SPECIAL_CHARS = 256  # no special token is longer

# One space, or a new line with indentation: as in training data, and never a page of blanks.
_WHITESPACE = {"whitespace_pattern": r"\x20|\n\x20{0,32}"}

# llguidance parses a grammar by recursion. 256 KB of rules that refer to each other need about 100 MB of stack, and a
# stack overflow would end the process.
_STACK_BYTES = 512 << 20
_stack_lock = threading.Lock()


class _Compilation:
    """A grammar that is being compiled, and the futures of the requests that wait for it."""

    def __init__(self) -> None:
        self.waiting: set[Future[LLMatcher]] = set()
        self.work: Future[None] | None = None


class GrammarCompiler:
    """Compiles output formats for one model and caches them: the same schema usually comes again. Compilation has its
    own threads, because a huge grammar takes seconds, and runs once for all requests that wait for it."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        vocabulary: int,
        eos_tokens: tuple[int, ...],
        max_compiled: int = 32,
        max_compiled_bytes: int = 1 << 20,
    ) -> None:
        self._max_compiled, self._max_compiled_bytes = max_compiled, max_compiled_bytes
        self._tokenizer, self._vocabulary, self._eos = tokenizer, vocabulary, list(eos_tokens)
        self._lock, self._building = threading.Lock(), threading.Lock()
        self.compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self.compiling: dict[bytes, _Compilation] = {}
        self._compilers = ThreadPoolExecutor(_COMPILERS, "grammars")

    def warm(self) -> None:
        """Build the vocabulary trie before the first request: it blocks other threads for half a second."""
        with suppress(EngineUnavailable, ModelUnsupported):
            self._vocabulary_trie  # noqa: B018

    def start(self, format: OutputFormat) -> "GrammarMatcher":
        """A matcher at the start of an output. Any thread may call; it waits for a new grammar."""
        return GrammarMatcher(self.prepare(format).result().deep_copy(), self._vocabulary, self._vocabulary_trie)

    def prepare(self, format: OutputFormat) -> "Future[LLMatcher]":
        """The compiled grammar. The future belongs to this caller, who stops waiting by setting an error in it. A
        compilation without waiting futures is not started."""
        format.require_valid()
        key, future = msgspec.json.encode(format), Future["LLMatcher"]()
        with self._lock:
            if key in self.compiled:
                self.compiled.move_to_end(key)
                future.set_result(self.compiled[key])
                return future
            running = key in self.compiling
            compilation = self.compiling.setdefault(key, _Compilation())
            compilation.waiting.add(future)
            if not running:
                compilation.work = self._compilers.submit(self._compile, key, format, compilation)
        future.add_done_callback(lambda done: self._stop_waiting(key, compilation, done))
        return future

    def _stop_waiting(self, key: bytes, compilation: _Compilation, done: "Future[LLMatcher]") -> None:
        with self._lock:
            compilation.waiting.discard(done)
            if not compilation.waiting and compilation.work and compilation.work.cancel():
                del self.compiling[key]

    def _compile(self, key: bytes, format: OutputFormat, compilation: _Compilation) -> None:
        outcome: LLMatcher | BaseException
        try:
            outcome = _on_deep_stack(lambda: self.first_state(_grammar(format, self._llguidance.LLMatcher)))
        except BaseException as error:
            outcome = error
        with self._lock:
            del self.compiling[key]
            if not isinstance(outcome, BaseException):
                self._cache(key, outcome)
            waiting = list(compilation.waiting)
        for each in waiting:
            with suppress(InvalidStateError):  # its caller has stopped waiting
                each.set_exception(outcome) if isinstance(outcome, BaseException) else each.set_result(outcome)

    def _cache(self, key: bytes, matcher: "LLMatcher") -> None:
        self.compiled[key] = matcher
        while len(self.compiled) > self._max_compiled or sum(map(len, self.compiled)) > self._max_compiled_bytes:
            self.compiled.popitem(last=False)

    def first_state(self, grammar: str) -> "LLMatcher":
        limits = self._llguidance.LLParserLimits(verbose_errors=False)
        matcher: LLMatcher = self._llguidance.LLMatcher(self._vocabulary_trie, grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()  # some grammars fail only here
        if matcher.is_error():
            raise BadRequest(f"format: {_reason(matcher)}", "format")
        return matcher

    @cached_property
    def _llguidance(self) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise EngineUnavailable(f"structured output needs llguidance ({error}): pip install llguidance") from error
        return llguidance

    @property
    def _vocabulary_trie(self) -> Any:
        with self._building:  # one thread builds it, the others wait
            return self._built_trie

    @cached_property
    def _built_trie(self) -> Any:
        try:
            return self._llguidance.LLTokenizer(self._tokenizer.json, eos_token=self._eos or None)
        except ValueError as error:
            raise ModelUnsupported(f"structured output cannot use this model's tokenizer: {error}") from error


class GrammarMatcher:
    """The state of one output. One thread may use it at a time."""

    def __init__(self, matcher: "LLMatcher", vocabulary: int, trie: "LLTokenizer") -> None:
        self._matcher, self._vocabulary, self._trie = matcher, vocabulary, trie

    def allow(self) -> NDArray[np.bool_]:
        """A mask of the tokens that may come next. Ids that the tokenizer does not know are excluded."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise BadRequest(f"format: {_reason(self._matcher)}")
        allowed = np.unpackbits(bits, count=self._vocabulary, bitorder="little").view(np.bool_)
        if np.count_nonzero(allowed) == 1:
            self._require_ordinary(allowed)
        return allowed

    def _require_ordinary(self, allowed: NDArray[np.bool_]) -> None:
        """Where the next text looks like a special token, llguidance allows only that token and then rejects it. Allow
        the ordinary tokens of that text instead."""
        only = int(allowed.argmax())
        if not self._trie.is_special_token(only) or self._matcher.is_accepting():
            return
        if self._matcher.validate_tokens([only]):
            return
        forced = self._matcher.compute_ff_bytes().decode(errors="ignore")[:_MAX_SPECIAL_CHARS]
        ordinary = self._trie.greedy_tokenize(forced)[:1]
        if not ordinary or not self._matcher.validate_tokens(ordinary):
            raise BadRequest(f"format: the grammar needs token {only} next, which may only end the output")
        allowed[only], allowed[ordinary] = False, True

    def accept(self, token: int) -> None:
        """Add a token. A token that does not fit raises and changes nothing."""
        self.replay([token])

    def replay(self, tokens: Iterable[int]) -> None:
        """Add the tokens of an output that another node started. Raises at the first token that does not fit; those
        before it count. After a complete output an end token fits and changes nothing."""
        output = list(tokens)
        known = all(0 <= token < self._vocabulary for token in output)
        accepted = self._matcher.try_consume_tokens(output) if known else 0
        if self._matcher.is_error():
            raise BadRequest(f"format: {_reason(self._matcher)}")
        if accepted < len(output) and not (known and self.finished and self.allow()[output[accepted:]].all()):
            at = f"number {accepted} of {len(output)}"
            raise BadRequest(f"format: token {output[accepted]}, {at}, does not fit the format")

    @property
    def finished(self) -> bool:
        """The output is complete, and only an end token could follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()


def _reason(matcher: "LLMatcher") -> str:
    """The error of llguidance, explained where it is short."""
    error = matcher.get_error().removesuffix("<non-verbose/>").strip()
    return f"no output can match it ({error})" if error.startswith("NoExtension") else error


def _grammar(format: OutputFormat, compiler: Any) -> str:
    """The format as a grammar of llguidance."""
    if format.type == "regex":
        text: str = compiler.grammar_from_regex(format.pattern)
    elif format.type == "grammar":
        text = compiler.grammar_from_lark(format.grammar)
    elif format.type == "choice":
        literals = " | ".join(map(json.dumps, format.choices))  # one terminal: the number of rules is limited
        text = compiler.grammar_from_lark(f"start: CHOICE\nCHOICE: {literals}")
    else:
        text = _json_grammar(format, compiler)
    return text


def _json_grammar(format: OutputFormat, compiler: Any) -> str:
    try:
        text: str = compiler.grammar_from_json_schema(*_schema(format))
    except ValueError as error:  # more than a hundred nested objects
        raise BadRequest(f"format: cannot parse the schema: {error}") from error
    return text


def _schema(format: OutputFormat) -> tuple[str, dict[str, str]]:
    """The schema, and its whitespace where its own "x-guidance" does not set it."""
    schema = {"type": "object"} if format.type == "json_object" else format.schema
    if not isinstance(schema, dict):
        schema = {} if schema else {"enum": []}  # true allows everything, false nothing
    own: Any = schema.get("x-guidance", {})
    if not isinstance(own, dict):
        raise BadRequest('format: "x-guidance" must be an object')
    spaced = own.keys() & {"whitespace_flexible", "whitespace_pattern"}
    return json.dumps(schema), {} if spaced else _WHITESPACE


def _on_deep_stack(work: Callable[[], Result]) -> Result:
    """Run `work` on a thread with a large stack. A thread that starts at the same moment gets one too, which costs
    address space only."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    with _stack_lock:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(usual)
    return done.result()
