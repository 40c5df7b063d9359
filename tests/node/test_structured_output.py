"""Structured output: every sequence of allowed tokens matches the format."""

import json
import re
import sys
import threading
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from disaggregated_inference.api import OutputFormat
from disaggregated_inference.errors import BadRequest, EngineUnavailable, ModelUnsupported
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.node.structured_output import GrammarCompiler
from tests.support.grammar_walk import Walk

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "maxItems": 3},
        "friend": {"anyOf": [{"$ref": "#/$defs/friend"}, {"type": "null"}]},
    },
    "required": ["name", "age", "friend"],
    "additionalProperties": False,
    "$defs": {
        "friend": {
            "type": "object",
            "properties": {
                "friend": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/friend"}]},
                "x": {"type": "number"},
            },
            "required": ["friend"],
        }
    },
}
SCHEMAS: list[dict[str, Any] | bool] = [
    True,
    {},
    PERSON,
    {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 5},
    {"type": "string", "pattern": "^[a-f]{2,8}$"},
    {"type": "object", "additionalProperties": {"type": "boolean"}},
    {"oneOf": [{"const": "yes"}, {"const": 7}]},
    {"type": "number", "minimum": -1.5, "exclusiveMaximum": 10},
]
PATTERNS = [r"[a-z]{3}-\d{2,4}", r"(yes|no|perhaps)( indeed)?", r"[a-z]+@[a-z]+\.(com|org)", r"é[à-ü]{1,3}\n"]
CHOICES = ("yes", "yes!", "no", 'with "quotes" and \\', "a\nline\tand\x01\x7f\x9f", "naïve 🙂", "<|im_end|>")
LIKE_SPECIAL: list[dict[str, Any]] = [
    {"type": "json_schema", "schema": {"const": "<|im_end|>"}},
    {"type": "json_schema", "schema": {"const": "<filename>"}},
    {"type": "choice", "choices": ["<|im_end|> x"]},
    {"type": "choice", "choices": ["x<|endoftext|>"]},
    {"type": "choice", "choices": ["a<|im_start|>b<<|im_end|><|im_end|>"]},
    {"type": "regex", "pattern": "<filename>[a-z]{3}"},
]


@pytest.fixture(scope="module")
def grammars(smollm2: ModelFiles) -> GrammarCompiler:
    return GrammarCompiler(smollm2.tokenizer, smollm2.spec.vocabulary, smollm2.spec.eos_tokens)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_schemas(grammars: GrammarCompiler, smollm2: ModelFiles, schema: dict[str, Any] | bool) -> None:
    for seed in range(12):
        text = Walk(smollm2, grammars.start(OutputFormat(type="json_schema", schema=schema)), seed).text()
        assert Draft202012Validator(schema).is_valid(json.loads(text)), text


def test_json_objects(grammars: GrammarCompiler, smollm2: ModelFiles) -> None:
    texts = [Walk(smollm2, grammars.start(OutputFormat(type="json_object")), seed).text() for seed in range(20)]
    assert all(isinstance(json.loads(text), dict) for text in texts)
    assert len(set(texts)) > 5


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(grammars: GrammarCompiler, smollm2: ModelFiles, pattern: str) -> None:
    for seed in range(20):
        text = Walk(smollm2, grammars.start(OutputFormat(type="regex", pattern=pattern)), seed).text()
        assert re.fullmatch(pattern, text), text


def test_choices(grammars: GrammarCompiler, smollm2: ModelFiles) -> None:
    found = {
        Walk(smollm2, grammars.start(OutputFormat(type="choice", choices=CHOICES)), seed, wander=99).text()
        for seed in range(200)
    }
    assert found == set(CHOICES)


def test_grammars(grammars: GrammarCompiler, smollm2: ModelFiles) -> None:
    sums = OutputFormat(type="grammar", grammar='start: term ("+" term)*\nterm: /[0-9]{1,2}/ | "(" start ")"')
    texts = [Walk(smollm2, grammars.start(sums), seed, wander=99).text() for seed in range(20)]
    complete = [text for text in texts if text.count("(") == text.count(")")]
    assert len(complete) > 10
    assert all(isinstance(eval(re.sub(r"\b0+(?=\d)", "", text)), int) for text in complete)


def test_usual_json_styles_are_accepted(grammars: GrammarCompiler, smollm2: ModelFiles) -> None:
    value = {"name": "Ann", "age": 7, "tags": ["a", None], "friend": {"friend": None, "x": 1.5}}
    styles: list[dict[str, Any]] = [{}, {"indent": 2}, {"indent": 4}, {"separators": (",", ":")}]
    for style in styles:
        grammar = grammars.start(OutputFormat(type="json_schema", schema=PERSON))
        grammar.replay(smollm2.tokenizer.encode(json.dumps(value, **style)))
        assert grammar.finished


def test_whitespace_is_limited(grammars: GrammarCompiler, smollm2: ModelFiles) -> None:
    blanks = [token for text in (" ", "\n", "\t", "  ", "\n\n") for token in smollm2.tokenizer.encode(text)]
    grammar = grammars.start(OutputFormat(type="json_object"))
    grammar.replay(smollm2.tokenizer.encode("{"))
    for _ in range(40):
        allowed = [token for token in blanks if grammar.allow()[token]]
        if not allowed:
            break
        grammar.accept(allowed[-1])
    assert not allowed
    assert not grammars.start(OutputFormat(type="json_object")).allow()[blanks].any(), "nor before the first character"


def test_a_schema_may_set_its_whitespace(grammars: GrammarCompiler, smollm2: ModelFiles) -> None:
    compact = {"type": "array", "x-guidance": {"whitespace_flexible": False}}
    grammar = grammars.start(OutputFormat(type="json_schema", schema=compact))
    grammar.replay(smollm2.tokenizer.encode("["))
    assert not grammar.allow()[smollm2.tokenizer.encode(" ")].any()


def test_end_tokens_are_alike_and_come_last(smollm2: ModelFiles) -> None:
    grammars = GrammarCompiler(smollm2.tokenizer, smollm2.spec.vocabulary, (0, 2))
    grammar = grammars.start(OutputFormat(type="regex", pattern="ab?"))
    assert not grammar.allow()[[0, 2]].any()
    grammar.replay(smollm2.tokenizer.encode("a"))
    assert grammar.allow()[[0, 2]].all()
    before = grammar.finished
    grammar.accept(2)
    assert (before, grammar.finished) == (False, True), "a b could follow"
    grammar = grammars.start(OutputFormat(type="regex", pattern="ab"))
    grammar.replay(smollm2.tokenizer.encode("ab"))
    assert grammar.finished
    assert np.flatnonzero(grammar.allow()).tolist() == [0, 2]


@pytest.mark.parametrize("asked", LIKE_SPECIAL, ids=str)
def test_text_that_looks_like_a_special_token_is_text(
    grammars: GrammarCompiler, smollm2: ModelFiles, asked: dict[str, Any]
) -> None:
    format = msgspec.convert(asked, OutputFormat)
    walk = Walk(smollm2, grammars.start(format), 3)
    text = walk.text()
    assert walk.grammar.finished
    assert min(walk.tokens) > 16, "no special tokens"
    if format.type == "regex":
        assert re.fullmatch("<filename>[a-z]{3}", text)
    else:
        assert text == (format.choices[0] if format.choices else json.dumps(asked["schema"]["const"]))


def test_special_tokens_that_a_grammar_names(grammars: GrammarCompiler, smollm2: ModelFiles) -> None:
    grammar = grammars.start(OutputFormat(type="grammar", grammar='start: "a" <|im_start|> "b"'))
    grammar.replay(smollm2.tokenizer.encode("a"))
    assert np.flatnonzero(grammar.allow()).tolist() == [1]
    grammar.accept(1)
    grammar = grammars.start(OutputFormat(type="grammar", grammar='start: "a" <|im_end|> "b"'))
    grammar.replay(smollm2.tokenizer.encode("a"))
    with pytest.raises(BadRequest, match="needs token 2 next, which may only end"):
        grammar.allow()


@pytest.mark.parametrize("difference", [-200, 0, 1000])
def test_the_models_vocabulary_and_the_tokenizers_differ(smollm2: ModelFiles, difference: int) -> None:
    known = smollm2.spec.vocabulary
    grammars = GrammarCompiler(smollm2.tokenizer, known + difference, smollm2.spec.eos_tokens)
    grammar = grammars.start(OutputFormat(type="regex", pattern=".*"))
    allowed = grammar.allow()
    assert allowed.shape == (known + difference,)
    assert not allowed[known:].any()
    assert allowed[:known].sum() > 40_000
    with pytest.raises(BadRequest, match="does not fit"):
        grammar.accept(known + difference)


def test_a_token_that_does_not_fit_changes_nothing(grammars: GrammarCompiler, smollm2: ModelFiles) -> None:
    grammar = grammars.start(OutputFormat(type="choice", choices=("yes", "no")))
    wrong, yes = smollm2.tokenizer.encode("maybe")[0], smollm2.tokenizer.encode("yes")[0]
    for token in (wrong, -1, 1 << 40, *smollm2.spec.eos_tokens):
        with pytest.raises(BadRequest, match=f"token {token}, number 0 of 1"):
            grammar.accept(token)
    grammar.accept(yes)
    assert grammar.finished


def test_an_output_continues_on_another_node(grammars: GrammarCompiler, smollm2: ModelFiles) -> None:
    first = Walk(smollm2, grammars.start(OutputFormat(type="json_schema", schema=PERSON)), 5)
    first.text(most=9)
    resumed = grammars.start(OutputFormat(type="json_schema", schema=PERSON))
    resumed.replay(first.tokens)
    assert (resumed.allow() == first.grammar.allow()).all()
    with pytest.raises(BadRequest, match="number 9 of 10"):
        grammars.start(OutputFormat(type="json_schema", schema=PERSON)).replay(
            [*first.tokens, smollm2.spec.eos_tokens[0]]
        )


def test_an_end_token_after_a_complete_output_changes_nothing(grammars: GrammarCompiler, smollm2: ModelFiles) -> None:
    yes, end = smollm2.tokenizer.encode("yes")[0], smollm2.spec.eos_tokens[0]
    grammar = grammars.start(OutputFormat(type="choice", choices=("yes",)))
    grammar.replay([yes, end])
    grammar.accept(end)
    assert grammar.finished
    with pytest.raises(BadRequest, match=f"token {yes}, number 0 of 1"):
        grammar.accept(yes)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"type": "json_schema"}, "needs the field schema"),
        ({"type": "regex"}, "needs the field pattern"),
        ({"type": "grammar"}, "needs the field grammar"),
        ({"type": "choice"}, "needs the field choices"),
        ({"type": "choice", "choices": ["a", ""]}, "at least one character"),
        ({"type": "json_object", "schema": {}}, "has no field schema"),
        ({"type": "regex", "pattern": "a", "choices": ["a"]}, "has no field choices"),
        ({"type": "json_schema", "schema": {"type": "objet"}}, "Invalid type: objet"),
        ({"type": "json_schema", "schema": False}, "Unsatisfiable"),
        ({"type": "json_schema", "schema": {"$ref": "#"}}, "no output can match"),
        ({"type": "regex", "pattern": "[^\\s\\S]"}, "no output can match"),
        ({"type": "json_schema", "schema": {"$ref": "http://example.com/schema"}}, "does not fetch"),
        ({"type": "json_schema", "schema": {"x-guidance": 5}}, "must be an object"),
        ({"type": "json_schema", "schema": {"x-guidance": {"lazy": True}}}, "unknown field"),
        ({"type": "json_schema", "schema": {"description": "x" * 300_000}}, "262144"),
        ({"type": "regex", "pattern": "(a"}, "unclosed group"),
        ({"type": "regex", "pattern": "a(?=b)"}, "look-around"),
        ({"type": "regex", "pattern": "(" * 50_000 + ")" * 50_000}, "invalid regex"),
        ({"type": "grammar", "grammar": "start: missing"}, "missing"),
        ({"type": "grammar", "grammar": "start: " + "(" * 9999 + '"a"' + ")" * 9999}, "nested"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_refused(grammars: GrammarCompiler, asked: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        grammars.start(msgspec.convert(asked, OutputFormat))


def test_a_choice_of_thousands(grammars: GrammarCompiler, smollm2: ModelFiles) -> None:
    choices = tuple(f"item{number:05d}" for number in range(5000))
    grammar = grammars.start(OutputFormat(type="choice", choices=choices))
    grammar.replay(smollm2.tokenizer.encode("item04242"))
    assert grammar.finished


def test_a_too_complex_grammar_is_an_error(grammars: GrammarCompiler, smollm2: ModelFiles) -> None:
    rules = " | ".join(f'"item{number:05d}"' for number in range(2100))
    grammar = grammars.start(OutputFormat(type="grammar", grammar=f"start: {rules}"))
    with pytest.raises(BadRequest, match="2101 items; max is 2000"):
        grammar.replay(smollm2.tokenizer.encode("item00042"))


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="strict"):
        msgspec.convert({"type": "json_object", "strict": True}, OutputFormat)


def test_a_long_chain_of_rules_does_not_end_the_process(grammars: GrammarCompiler, smollm2: ModelFiles) -> None:
    rules = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(15_000)) + '\nr15000: "a"'
    grammar = grammars.start(OutputFormat(type="grammar", grammar=rules))
    assert grammar.allow()[smollm2.tokenizer.encode("a")].all()
    steps = {f"{i}": {"items": {"$ref": f"#/$defs/{i + 1}"}, "type": "array"} for i in range(4000)}
    schema = {"$ref": "#/$defs/0", "$defs": steps | {"4000": {"type": "integer"}}}
    grammar = grammars.start(OutputFormat(type="json_schema", schema=schema))
    assert grammar.allow()[smollm2.tokenizer.encode("[")].all()
    assert threading.stack_size() == 0, "only the compiling thread's stack is deep"


def test_matchers_from_many_threads(smollm2: ModelFiles) -> None:
    grammars = GrammarCompiler(smollm2.tokenizer, smollm2.spec.vocabulary, smollm2.spec.eos_tokens)
    texts: list[str] = []

    def write(seed: int) -> None:
        form = (
            OutputFormat(type="json_schema", schema=PERSON)
            if seed % 2
            else OutputFormat(type="regex", pattern="a{3,9}")
        )
        texts.append(Walk(smollm2, grammars.start(form), seed).text())

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 8
    assert sum(bool(re.fullmatch("a{3,9}", text)) for text in texts) == 4
    for text in texts:
        if text.startswith("{"):
            Draft202012Validator(PERSON).validate(json.loads(text))


def test_the_cache_of_compiled_grammars_is_limited(smollm2: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    model = (smollm2.tokenizer, smollm2.spec.vocabulary, smollm2.spec.eos_tokens)
    grammars = GrammarCompiler(*model, max_compiled=2)
    compile_ = Mock(wraps=grammars.first_state)
    monkeypatch.setattr(grammars, "first_state", compile_)
    for pattern in ("a", "a", "b", "a", "c", "a", "b"):
        grammars.start(OutputFormat(type="regex", pattern=pattern))
    assert compile_.call_count == 4, "a, b, c, and b again: the least recently used one was removed"
    assert len(grammars.compiled) == 2
    small = GrammarCompiler(*model, max_compiled_bytes=100)
    small.start(OutputFormat(type="regex", pattern="d"))
    assert len(small.compiled) == 1
    small.start(OutputFormat(type="regex", pattern="d" * 1000))
    assert not small.compiled


class Slowly:
    """Grammars whose compilation waits for the test."""

    def __init__(self, grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.begun, self._first_state = threading.Event(), threading.Semaphore(0), grammars.first_state
        self.compile_ = Mock(side_effect=self._wait)
        monkeypatch.setattr(grammars, "first_state", self.compile_)

    def _wait(self, grammar: str) -> Any:
        self.begun.release()
        assert self.go.wait(20)
        return self._first_state(grammar)


def test_one_compilation_for_many_requests(smollm2: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = GrammarCompiler(smollm2.tokenizer, smollm2.spec.vocabulary, smollm2.spec.eos_tokens)
    slowly = Slowly(grammars, monkeypatch)
    first, second = (grammars.prepare(OutputFormat(type="regex", pattern="a{3}")) for _ in range(2))
    assert slowly.begun.acquire(timeout=20)
    first.set_exception(BadRequest("enough"))
    slowly.go.set()
    assert second.result(20)
    assert grammars.start(OutputFormat(type="regex", pattern="a{3}")).allow().any()
    assert slowly.compile_.call_count == 1
    assert not grammars.compiling


def test_a_compilation_without_waiting_requests_is_not_started(
    smollm2: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = GrammarCompiler(smollm2.tokenizer, smollm2.spec.vocabulary, smollm2.spec.eos_tokens)
    grammars.start(known := OutputFormat(type="regex", pattern="a"))
    slowly = Slowly(grammars, monkeypatch)
    waiting = [grammars.prepare(OutputFormat(type="regex", pattern=f"a{{{number}}}")) for number in range(2, 8)]
    assert all(slowly.begun.acquire(timeout=20) for _ in range(2))
    assert grammars.start(known).allow().any(), "a cached grammar does not wait"
    for each in waiting:
        each.set_exception(BadRequest("enough"))
    assert len(grammars.compiling) == 2
    slowly.go.set()
    grammars.start(OutputFormat(type="regex", pattern="b"))
    assert slowly.compile_.call_count == 3


def test_without_llguidance(smollm2: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(EngineUnavailable, match="pip install llguidance"):
        GrammarCompiler(smollm2.tokenizer, 10, ()).start(OutputFormat(type="json_object"))


def test_a_tokenizer_that_does_not_know_the_end_token(smollm2: ModelFiles) -> None:
    grammars = GrammarCompiler(smollm2.tokenizer, 1 << 20, (1 << 19,))
    with pytest.raises(ModelUnsupported, match="out of range"):
        grammars.start(OutputFormat(type="json_object"))
