"""Answers of a given form: after every token, which tokens may come next. The grammars are llguidance's.

Every model's end tokens are alike here: they may come when the answer is complete, and not before.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from disaggregated_inference.errors import BadRequest, EngineUnavailable, ModelUnsupported
from disaggregated_inference.models.tokenizer import ModelTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Result = TypeVar("Result")

_MOST_BYTES = 256 << 10
_MOST_COMPILED = 32
_MOST_COMPILED_BYTES = 1 << 20
_COMPILERS = 2
_LONGEST_SPECIAL = 256  # characters, of the text that must come next; no token is longer

# One space, or a new line and its indentation: what models were trained on, and never a page of blanks.
_WHITESPACE = {"whitespace_pattern": r"\x20|\n\x20{0,32}"}

# llguidance reads a grammar by recursion. 256 KB of rules that name each other need about 100 MB of stack, and a stack
# that is too small ends the process, not the request.
_STACK_BYTES = 512 << 20
_stack_lock = threading.Lock()


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an answer must look like. Each type but `json_object` has one field that says it."""

    type: Literal["json_object", "json_schema", "regex", "grammar", "choice"]
    schema: dict[str, Any] | bool | None = None
    pattern: str | None = None
    grammar: str | None = None  # Lark
    choices: tuple[str, ...] = ()

    def require_valid(self) -> None:
        """Everything that can be said without compiling it."""
        wanted = _FIELDS[self.type]
        given = {name for name in _FIELDS.values() if name and getattr(self, name) not in (None, ())}
        if wanted and wanted not in given:
            raise BadRequest(f"format: the type {self.type} needs the field {wanted}")
        if superfluous := sorted(given - {wanted}):
            raise BadRequest(f"format: the type {self.type} has no field {superfluous[0]}; leave it out")
        if not all(self.choices):
            raise BadRequest("format: a choice is empty; every one of them needs at least one character")
        if (size := len(msgspec.json.encode(self))) > _MOST_BYTES:
            raise BadRequest(f"format: {size} bytes are too many; up to {_MOST_BYTES} are taken")


_FIELDS = {
    "json_object": None,
    "json_schema": "schema",
    "regex": "pattern",
    "grammar": "grammar",
    "choice": "choices",
}


class _Compilation:
    """One grammar on its way, and everyone who waits for it."""

    def __init__(self) -> None:
        self.waiting: set[Future[LLMatcher]] = set()
        self.work: Future[None] | None = None


class GrammarCompiler:
    """Makes guides for one model. What was compiled lately is kept: the same schema usually comes again. New grammars
    are compiled on threads of their own, each once however many ask for it: a huge one takes seconds."""

    def __init__(self, tokenizer: ModelTokenizer, vocabulary: int, eos_tokens: tuple[int, ...]) -> None:
        self._tokenizer, self._vocabulary, self._eos = tokenizer, vocabulary, list(eos_tokens)
        self._lock, self._building = threading.Lock(), threading.Lock()
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._compiling: dict[bytes, _Compilation] = {}
        self._compilers = ThreadPoolExecutor(_COMPILERS, "grammars")

    def warm(self) -> None:
        """Half a second in which nothing else runs: before the first request, not in it."""
        with suppress(EngineUnavailable, ModelUnsupported):
            self._vocabulary_trie  # noqa: B018

    def start(self, format: OutputFormat) -> "GrammarMatcher":
        """A guide at an answer's beginning. From any thread; it waits where the grammar is a new one."""
        return GrammarMatcher(self.prepare(format).result().deep_copy(), self._vocabulary, self._vocabulary_trie)

    def prepare(self, format: OutputFormat) -> "Future[LLMatcher]":
        """The grammar, once it is compiled. The future is this caller's alone: who sets an error in it waits no longer,
        and what nobody waits for is not begun."""
        format.require_valid()
        name, mine = msgspec.json.encode(format), Future["LLMatcher"]()
        with self._lock:
            if name in self._compiled:
                self._compiled.move_to_end(name)
                mine.set_result(self._compiled[name])
                return mine
            known = name in self._compiling
            compilation = self._compiling.setdefault(name, _Compilation())
            compilation.waiting.add(mine)
            if not known:
                compilation.work = self._compilers.submit(self._compile, name, format, compilation)
        mine.add_done_callback(lambda done: self._leave(name, compilation, done))
        return mine

    def _leave(self, name: bytes, compilation: _Compilation, done: "Future[LLMatcher]") -> None:
        with self._lock:
            compilation.waiting.discard(done)
            if not compilation.waiting and compilation.work and compilation.work.cancel():
                del self._compiling[name]

    def _compile(self, name: bytes, format: OutputFormat, compilation: _Compilation) -> None:
        outcome: LLMatcher | BaseException
        try:
            outcome = _on_deep_stack(lambda: self._first_state(_grammar(format, self._llguidance.LLMatcher)))
        except BaseException as error:
            outcome = error
        with self._lock:
            del self._compiling[name]
            if not isinstance(outcome, BaseException):
                self._keep(name, outcome)
            waiting = list(compilation.waiting)
        for each in waiting:
            with suppress(InvalidStateError):  # it has just given up
                each.set_exception(outcome) if isinstance(outcome, BaseException) else each.set_result(outcome)

    def _keep(self, name: bytes, matcher: "LLMatcher") -> None:
        self._compiled[name] = matcher
        while len(self._compiled) > _MOST_COMPILED or sum(map(len, self._compiled)) > _MOST_COMPILED_BYTES:
            self._compiled.popitem(last=False)

    def _first_state(self, grammar: str) -> "LLMatcher":
        limits = self._llguidance.LLParserLimits(verbose_errors=False)
        matcher: LLMatcher = self._llguidance.LLMatcher(self._vocabulary_trie, grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()  # some find out only now that nothing can match
        if matcher.is_error():
            raise BadRequest(f"format: {_reason(matcher)}")
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
        with self._building:  # half a second; the second thread takes what the first one builds
            return self._built_trie

    @cached_property
    def _built_trie(self) -> Any:
        try:
            return self._llguidance.LLTokenizer(self._tokenizer.json, eos_token=self._eos or None)
        except ValueError as error:
            raise ModelUnsupported(f"structured output cannot use this model's tokenizer: {error}") from error


class GrammarMatcher:
    """One answer's form. It belongs to one thread at a time."""

    def __init__(self, matcher: "LLMatcher", vocabulary: int, trie: "LLTokenizer") -> None:
        self._matcher, self._vocabulary, self._trie = matcher, vocabulary, trie

    def allow(self) -> NDArray[np.bool_]:
        """Which tokens may come next; ids that the tokenizer does not know may not."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise BadRequest(f"format: {_reason(self._matcher)}")
        allowed = np.unpackbits(bits, count=self._vocabulary, bitorder="little").view(np.bool_)
        if np.count_nonzero(allowed) == 1:
            self._require_ordinary(allowed)
        return allowed

    def _require_ordinary(self, allowed: NDArray[np.bool_]) -> None:
        """Where the text that must come reads like a special token, llguidance allows that token alone, and then does
        not take it. Such text is written in ordinary tokens."""
        only = int(allowed.argmax())
        if not self._trie.is_special_token(only) or self._matcher.is_accepting():
            return
        if self._matcher.validate_tokens([only]):
            return
        forced = self._matcher.compute_ff_bytes().decode(errors="ignore")[:_LONGEST_SPECIAL]
        ordinary = self._trie.greedy_tokenize(forced)[:1]
        if not ordinary or not self._matcher.validate_tokens(ordinary):
            raise BadRequest(f"format: the token {only} would have to come next, and may only end the answer")
        allowed[only], allowed[ordinary] = False, True

    def accept(self, token: int) -> None:
        """A token is part of the answer. One that the form does not permit changes nothing but raises."""
        self.replay([token])

    def replay(self, tokens: Iterable[int]) -> None:
        """An answer that was begun elsewhere. Raises at the first token that does not fit; those before it count. After
        a complete answer an end token fits, and changes nothing."""
        answer = list(tokens)
        known = all(0 <= token < self._vocabulary for token in answer)
        taken = self._matcher.try_consume_tokens(answer) if known else 0
        if self._matcher.is_error():
            raise BadRequest(f"format: {_reason(self._matcher)}")
        if taken < len(answer) and not (known and self.finished and self.allow()[answer[taken:]].all()):
            raise BadRequest(f"format: token {answer[taken]}, number {taken} of {len(answer)}, does not fit the format")

    @property
    def finished(self) -> bool:
        """Whether the answer is complete and nothing but an end token could follow: it ends here, with "stop"."""
        return self._matcher.is_stopped() and not self._matcher.is_error()


def _reason(matcher: "LLMatcher") -> str:
    """What llguidance says, in more words where it is short."""
    said = matcher.get_error().removesuffix("<non-verbose/>").strip()
    if said.startswith("NoExtension"):
        return f"nothing can ever match it ({said})"
    return said


def _grammar(format: OutputFormat, compiler: Any) -> str:
    """What llguidance compiles: one text for every type."""
    if format.type == "regex":
        text: str = compiler.grammar_from_regex(format.pattern)
    elif format.type == "grammar":
        text = compiler.grammar_from_lark(format.grammar)
    elif format.type == "choice":
        literals = " | ".join(map(json.dumps, format.choices))  # one terminal: rules would be counted, and are few
        text = compiler.grammar_from_lark(f"start: CHOICE\nCHOICE: {literals}")
    else:
        text = _json_grammar(format, compiler)
    return text


def _json_grammar(format: OutputFormat, compiler: Any) -> str:
    try:
        text: str = compiler.grammar_from_json_schema(*_schema(format))
    except ValueError as error:  # more than a hundred objects in each other
        raise BadRequest(f"format: the schema cannot be read: {error}") from error
    return text


def _schema(format: OutputFormat) -> tuple[str, dict[str, str]]:
    """The schema, and how it is spaced where its own "x-guidance" does not say so."""
    schema = {"type": "object"} if format.type == "json_object" else format.schema
    if not isinstance(schema, dict):
        schema = {} if schema else {"enum": []}  # true is anything, false is nothing
    own: Any = schema.get("x-guidance", {})
    if not isinstance(own, dict):
        raise BadRequest('format: "x-guidance" must be an object')
    spaced = own.keys() & {"whitespace_flexible", "whitespace_pattern"}
    return json.dumps(schema), {} if spaced else _WHITESPACE


def _on_deep_stack(work: Callable[[], Result]) -> Result:
    """Another thread that happens to start meanwhile gets a deep stack too: address space, which costs nothing."""
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
