"""Answers of a given form: after every token, which tokens may come next. The grammars are llguidance's.

Every model's end tokens are alike here: they may come when the answer is complete, and not before.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from disaggregated_inference.errors import BadRequest, EngineUnavailable, ModelUnsupported
from disaggregated_inference.models.tokenizer import ModelTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

Result = TypeVar("Result")

_MOST_BYTES = 256 << 10
_MOST_COMPILED = 32
_MOST_COMPILED_CHARS = 1 << 20

# One space, or a new line and its indentation: what models were trained on, and never a page of blanks.
_WHITESPACE = {"whitespace_pattern": r"\x20|\n\x20{0,32}"}

# llguidance reads a grammar by recursion. 256 KB of rules that name each other need about 100 MB of stack, and a stack
# that is too small ends the process, not the request.
_STACK_BYTES = 512 << 20
_stack_lock = threading.Lock()


class Format(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


class Guides:
    """Makes guides for one model. What was compiled lately is kept: the same schema usually comes again."""

    def __init__(self, tokenizer: ModelTokenizer, vocabulary: int, eos_tokens: tuple[int, ...]) -> None:
        self._tokenizer, self._vocabulary, self._eos = tokenizer, vocabulary, list(eos_tokens)
        self._lock, self._building = threading.Lock(), threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def warm(self) -> None:
        """Half a second in which nothing else runs: before the first request, not in it."""
        with suppress(EngineUnavailable, ModelUnsupported):
            self._vocabulary_trie  # noqa: B018

    def start(self, format: Format) -> "Guide":
        """A guide at an answer's beginning. From any thread; a new grammar takes milliseconds, a huge one seconds."""
        format.require_valid()
        grammar = _grammar(format, self._llguidance.LLMatcher)
        ready = self._recall(grammar) or self._compile(grammar)
        return Guide(ready.deep_copy(), self._vocabulary)

    def _recall(self, grammar: str) -> "LLMatcher | None":
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
            return self._compiled.get(grammar)

    def _compile(self, grammar: str) -> "LLMatcher":
        matcher = _on_deep_stack(lambda: self._first_state(grammar))
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > _MOST_COMPILED or sum(map(len, self._compiled)) > _MOST_COMPILED_CHARS:
                self._compiled.popitem(last=False)
        return matcher

    def _first_state(self, grammar: str) -> "LLMatcher":
        limits = self._llguidance.LLParserLimits(verbose_errors=False)
        matcher: LLMatcher = self._llguidance.LLMatcher(self._vocabulary_trie, grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()  # some find out only now that nothing can match
        if matcher.is_error():
            raise BadRequest(f"format: {matcher.get_error().removesuffix('<non-verbose/>').strip()}")
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


class Guide:
    """One answer's form. It belongs to one thread at a time."""

    def __init__(self, matcher: "LLMatcher", vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def allow(self) -> NDArray[np.bool_]:
        """Which tokens may come next; ids that the tokenizer does not know may not."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise BadRequest(f"format: too complex to go on: {self._matcher.get_error()}")
        return np.unpackbits(bits, count=self._vocabulary, bitorder="little").view(np.bool_)

    def accept(self, token: int) -> None:
        """A token is part of the answer. One that the form does not permit changes nothing but raises."""
        self.replay([token])

    def replay(self, tokens: Iterable[int]) -> None:
        """An answer that was begun elsewhere. Raises at the first token that does not fit; those before it count."""
        answer = list(tokens)
        known = all(0 <= token < self._vocabulary for token in answer)
        taken = self._matcher.try_consume_tokens(answer) if known else 0
        if taken < len(answer):
            raise BadRequest(f"format: token {answer[taken]}, number {taken} of {len(answer)}, does not fit the format")

    @property
    def finished(self) -> bool:
        """Whether the answer is complete and nothing but an end token could follow: it ends here, with "stop"."""
        return self._matcher.is_stopped() and not self._matcher.is_error()


def _grammar(format: Format, compiler: Any) -> str:
    """What llguidance compiles: one text for every type."""
    if format.type == "regex":
        text: str = compiler.grammar_from_regex(format.pattern)
    elif format.type == "grammar":
        text = compiler.grammar_from_lark(format.grammar)
    elif format.type == "choice":
        literals = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in format.choices)
        text = compiler.grammar_from_lark(f"start: {literals}")
    else:
        text = _json_grammar(format, compiler)
    return text


def _json_grammar(format: Format, compiler: Any) -> str:
    try:
        text: str = compiler.grammar_from_json_schema(*_schema(format))
    except ValueError as error:  # more than a hundred objects in each other
        raise BadRequest(f"format: the schema cannot be read: {error}") from error
    return text


def _schema(format: Format) -> tuple[str, dict[str, str]]:
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
