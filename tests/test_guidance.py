"""Structured output: whatever is drawn from what a guide allows has the form that was asked for."""

import json
import random
import re
import sys
import threading
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from disaggregated_inference.errors import BadRequest, EngineUnavailable, ModelUnsupported
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.nodes import guidance
from disaggregated_inference.nodes.guidance import Format, Guide, Guides

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
CHOICES = ("yes", "yes!", "no", 'with "quotes" and \\', "a\nline\tand\x01", "naïve 🙂", "<|im_end|>")


@pytest.fixture(scope="module")
def guides(smollm2: ModelFiles) -> Guides:
    return Guides(smollm2.tokenizer, smollm2.spec.vocabulary, smollm2.spec.eos_tokens)


class Walk:
    """Writes what a guide allows: at random at first, then whatever closes what is open."""

    def __init__(self, model: ModelFiles, guide: Guide, seed: int, wander: int = 25) -> None:
        self.tokenizer, self.eos, self.guide, self.wander = model.tokenizer, model.spec.eos_tokens, guide, wander
        self.random = random.Random(seed)
        self.closing = [model.tokenizer.encode(text)[0] for text in ('"', "}", "]", "@", ".", "com", "null", ":", ",")]
        self.tokens: list[int] = []

    def text(self, most: int = 400) -> str:
        while not self.guide.finished and len(self.tokens) < most:
            allowed = self.guide.allow()
            assert allowed.any()
            if allowed[list(self.eos)].any() and self.random.random() < 0.5:
                break
            self.tokens.append(self.pick(allowed))
            self.guide.accept(self.tokens[-1])
        return self.tokenizer.decode(self.tokens)

    def pick(self, allowed: np.ndarray[Any, Any]) -> int:
        allowed[list(self.eos)] = False
        closing = [token for token in self.closing if allowed[token]]
        if closing and (len(self.tokens) > self.wander or self.random.random() < 0.4):
            return closing[0] if len(self.tokens) > self.wander else self.random.choice(closing)
        return int(self.random.choice(np.flatnonzero(allowed)))


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_schemas(guides: Guides, smollm2: ModelFiles, schema: dict[str, Any] | bool) -> None:
    for seed in range(12):
        text = Walk(smollm2, guides.start(Format(type="json_schema", schema=schema)), seed).text()
        assert Draft202012Validator(schema).is_valid(json.loads(text)), text


def test_json_objects(guides: Guides, smollm2: ModelFiles) -> None:
    texts = [Walk(smollm2, guides.start(Format(type="json_object")), seed).text() for seed in range(20)]
    assert all(isinstance(json.loads(text), dict) for text in texts)
    assert len(set(texts)) > 5


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(guides: Guides, smollm2: ModelFiles, pattern: str) -> None:
    for seed in range(20):
        text = Walk(smollm2, guides.start(Format(type="regex", pattern=pattern)), seed).text()
        assert re.fullmatch(pattern, text), text


def test_choices(guides: Guides, smollm2: ModelFiles) -> None:
    found = {
        Walk(smollm2, guides.start(Format(type="choice", choices=CHOICES)), seed, wander=99).text()
        for seed in range(200)
    }
    assert found == set(CHOICES)


def test_grammars(guides: Guides, smollm2: ModelFiles) -> None:
    sums = Format(type="grammar", grammar='start: term ("+" term)*\nterm: /[0-9]{1,2}/ | "(" start ")"')
    texts = [Walk(smollm2, guides.start(sums), seed, wander=99).text() for seed in range(20)]
    complete = [text for text in texts if text.count("(") == text.count(")")]
    assert len(complete) > 10
    assert all(isinstance(eval(re.sub(r"\b0+(?=\d)", "", text)), int) for text in complete)


def test_what_is_written_in_the_plain_styles_is_taken(guides: Guides, smollm2: ModelFiles) -> None:
    value = {"name": "Ann", "age": 7, "tags": ["a", None], "friend": {"friend": None, "x": 1.5}}
    styles: list[dict[str, Any]] = [{}, {"indent": 2}, {"indent": 4}, {"separators": (",", ":")}]
    for style in styles:
        guide = guides.start(Format(type="json_schema", schema=PERSON))
        guide.replay(smollm2.tokenizer.encode(json.dumps(value, **style)))
        assert guide.finished


def test_blanks_come_to_an_end(guides: Guides, smollm2: ModelFiles) -> None:
    blanks = [token for text in (" ", "\n", "\t", "  ", "\n\n") for token in smollm2.tokenizer.encode(text)]
    guide = guides.start(Format(type="json_object"))
    guide.replay(smollm2.tokenizer.encode("{"))
    for _ in range(40):
        allowed = [token for token in blanks if guide.allow()[token]]
        if not allowed:
            break
        guide.accept(allowed[-1])
    assert not allowed
    assert not guides.start(Format(type="json_object")).allow()[blanks].any(), "nor before it begins"


def test_a_schema_may_choose_its_own_blanks(guides: Guides, smollm2: ModelFiles) -> None:
    compact = {"type": "array", "x-guidance": {"whitespace_flexible": False}}
    guide = guides.start(Format(type="json_schema", schema=compact))
    guide.replay(smollm2.tokenizer.encode("["))
    assert not guide.allow()[smollm2.tokenizer.encode(" ")].any()


def test_end_tokens_are_alike_and_come_last(smollm2: ModelFiles) -> None:
    guides = Guides(smollm2.tokenizer, smollm2.spec.vocabulary, (0, 2))
    guide = guides.start(Format(type="regex", pattern="ab?"))
    assert not guide.allow()[[0, 2]].any()
    guide.replay(smollm2.tokenizer.encode("a"))
    assert guide.allow()[[0, 2]].all()
    before = guide.finished
    guide.accept(2)
    assert (before, guide.finished) == (False, True), "a b might have followed"
    guide = guides.start(Format(type="regex", pattern="ab"))
    guide.replay(smollm2.tokenizer.encode("ab"))
    assert guide.finished
    assert np.flatnonzero(guide.allow()).tolist() == [0, 2]


@pytest.mark.parametrize("difference", [-200, 0, 1000])
def test_the_models_vocabulary_and_the_tokenizers_differ(smollm2: ModelFiles, difference: int) -> None:
    known = smollm2.spec.vocabulary
    guides = Guides(smollm2.tokenizer, known + difference, smollm2.spec.eos_tokens)
    guide = guides.start(Format(type="regex", pattern=".*"))
    allowed = guide.allow()
    assert allowed.shape == (known + difference,)
    assert not allowed[known:].any()
    assert allowed[:known].sum() > 40_000
    with pytest.raises(BadRequest, match="does not fit"):
        guide.accept(known + difference)


def test_a_token_that_does_not_fit_changes_nothing(guides: Guides, smollm2: ModelFiles) -> None:
    guide = guides.start(Format(type="choice", choices=("yes", "no")))
    wrong, yes = smollm2.tokenizer.encode("maybe")[0], smollm2.tokenizer.encode("yes")[0]
    for token in (wrong, -1, 1 << 40, *smollm2.spec.eos_tokens):
        with pytest.raises(BadRequest, match=f"token {token}, number 0 of 1"):
            guide.accept(token)
    guide.accept(yes)
    assert guide.finished


def test_an_answer_goes_on_elsewhere(guides: Guides, smollm2: ModelFiles) -> None:
    first = Walk(smollm2, guides.start(Format(type="json_schema", schema=PERSON)), 5)
    first.text(most=9)
    resumed = guides.start(Format(type="json_schema", schema=PERSON))
    resumed.replay(first.tokens)
    assert (resumed.allow() == first.guide.allow()).all()
    with pytest.raises(BadRequest, match="number 9 of 10"):
        guides.start(Format(type="json_schema", schema=PERSON)).replay([*first.tokens, smollm2.spec.eos_tokens[0]])


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
        ({"type": "json_schema", "schema": {"$ref": "#"}}, "NoExtension"),
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
def test_refused(guides: Guides, asked: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        guides.start(msgspec.convert(asked, Format))


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="strict"):
        msgspec.convert({"type": "json_object", "strict": True}, Format)


def test_a_long_chain_of_rules_does_not_end_the_process(guides: Guides, smollm2: ModelFiles) -> None:
    rules = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(15_000)) + '\nr15000: "a"'
    guide = guides.start(Format(type="grammar", grammar=rules))
    assert guide.allow()[smollm2.tokenizer.encode("a")].all()
    steps = {f"{i}": {"items": {"$ref": f"#/$defs/{i + 1}"}, "type": "array"} for i in range(4000)}
    schema = {"$ref": "#/$defs/0", "$defs": steps | {"4000": {"type": "integer"}}}
    guide = guides.start(Format(type="json_schema", schema=schema))
    assert guide.allow()[smollm2.tokenizer.encode("[")].all()
    assert threading.stack_size() == 0, "only the compiling thread's stack is deep"


def test_guides_from_many_threads(smollm2: ModelFiles) -> None:
    guides = Guides(smollm2.tokenizer, smollm2.spec.vocabulary, smollm2.spec.eos_tokens)
    texts: list[str] = []

    def write(seed: int) -> None:
        form = Format(type="json_schema", schema=PERSON) if seed % 2 else Format(type="regex", pattern="a{3,9}")
        texts.append(Walk(smollm2, guides.start(form), seed).text())

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


def test_what_is_compiled_is_kept_within_bounds(smollm2: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    guides = Guides(smollm2.tokenizer, smollm2.spec.vocabulary, smollm2.spec.eos_tokens)
    monkeypatch.setattr(guidance, "_MOST_COMPILED", 2)
    compile_ = Mock(wraps=guides._first_state)
    monkeypatch.setattr(guides, "_first_state", compile_)
    for pattern in ("a", "a", "b", "a", "c", "a", "b"):
        guides.start(Format(type="regex", pattern=pattern))
    assert compile_.call_count == 4, "a, b, c, and b again: the one not asked for longest went"
    assert len(guides._compiled) == 2
    monkeypatch.setattr(guidance, "_MOST_COMPILED_CHARS", 100)
    guides.start(Format(type="regex", pattern="d" * 1000))
    assert not guides._compiled


def test_without_llguidance(smollm2: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(EngineUnavailable, match="pip install llguidance"):
        Guides(smollm2.tokenizer, 10, ()).start(Format(type="json_object"))


def test_a_tokenizer_that_does_not_know_the_end_token(smollm2: ModelFiles) -> None:
    guides = Guides(smollm2.tokenizer, 1 << 20, (1 << 19,))
    with pytest.raises(ModelUnsupported, match="out of range"):
        guides.start(Format(type="json_object"))
