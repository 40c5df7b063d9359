"""Tool calls that must happen (`tool_choice` required, or a name): a grammar that lets the model write nothing else."""

import json
from collections.abc import Iterable
from typing import Any

from disaggregated_inference.errors import BadRequest
from disaggregated_inference.gateway.tool_parsers.harmony import speaks_harmony
from disaggregated_inference.gateway.tool_parsers.hermes import CALL, CALL_END
from disaggregated_inference.gateway.tool_parsers.tools import require_tools, schemas_of
from disaggregated_inference.models.tokenizer import ModelTokenizer

# As chat templates write JSON, which is what models have read.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


_THOUGHT = 'thought: <|channel|> "analysis" <|message|> /(.|\\n)*/ <|end|> <|start|> "assistant"'


def forced_format(tokenizer: ModelTokenizer, tools: list[dict[str, Any]], tool_choice: str) -> dict[str, Any]:
    """A node's `format`: llguidance's Lark. One call, of any of the tools, or of the one that is named.

    Models that write tags get Hermes' JSON between them, Qwen3-Coder too: its bare values cannot be held to a schema.
    GPT-OSS may think first; a model whose prompt opens a thought has no time for it.
    """
    require_tools(tools)
    chosen = _chosen(schemas_of(tools), tool_choice)
    rules = _harmony(chosen) if speaks_harmony(tokenizer) else _hermes(tokenizer, chosen)
    return {"type": "grammar", "grammar": "\n".join(rules)}


def either_format(tokenizer: ModelTokenizer, tools: list[dict[str, Any]], format: dict[str, Any]) -> dict[str, Any]:
    """A call of a tool, or an answer in its format, as the model likes."""
    require_tools(tools)
    schemas, body = schemas_of(tools), _body(format)
    rules = _harmony_either(schemas, body) if speaks_harmony(tokenizer) else _hermes(tokenizer, schemas, f" | {body}")
    return {"type": "grammar", "grammar": "\n".join(rules)}


def framed_format(tokenizer: ModelTokenizer, format: dict[str, Any]) -> dict[str, Any]:
    """A format for the answer itself: GPT-OSS writes headers around it, and may think first. Others just write it."""
    if not speaks_harmony(tokenizer):
        return format
    rules = [f'start: thought? <|channel|> "final" <|message|> {_body(format)}', _THOUGHT]
    return {"type": "grammar", "grammar": "\n".join(rules)}


def _body(format: dict[str, Any]) -> str:
    """The answer itself, as a part of a grammar."""
    kind = format.get("type")
    if kind == "json_schema" and isinstance(format.get("schema"), dict):
        return _json(format["schema"])
    if kind == "json_object":
        return _json({"type": "object"})
    if kind == "choice" and format.get("choices"):
        return "(" + " | ".join(_literal(choice) for choice in format["choices"]) + ")"
    raise BadRequest(f"format: {kind} is not offered here: give a json_schema, json_object or choice")


def _chosen(schemas: dict[str, dict[str, Any]], tool_choice: str) -> dict[str, dict[str, Any]]:
    if not schemas:
        raise BadRequest("tool_choice asks for a tool call, and there are no tools")
    if tool_choice == "required":
        return schemas
    if tool_choice not in schemas:
        raise BadRequest(f"tool_choice names {tool_choice!r}; the tools are {', '.join(schemas)}")
    return {tool_choice: schemas[tool_choice]}


def _hermes(tokenizer: ModelTokenizer, schemas: dict[str, dict[str, Any]], otherwise: str = "") -> Iterable[str]:
    opening, closing = (_tag(tokenizer, tag) for tag in (CALL, CALL_END))
    yield f'start: {opening} ({_any(schemas)}) "}}\\n" {closing}{otherwise}'
    for number, (name, schema) in enumerate(schemas.items()):
        before = _literal(f'\n{{"name": {json.dumps(name)}, "arguments": ')
        yield f"call{number}: {before} {_json(schema)}"


def _harmony(schemas: dict[str, dict[str, Any]]) -> Iterable[str]:
    yield f'start: thought? <|channel|> "commentary to=functions." ({_any(schemas)})'
    yield from _harmony_calls(schemas)


def _harmony_either(schemas: dict[str, dict[str, Any]], body: str) -> Iterable[str]:
    call, answer = f'"commentary to=functions." ({_any(schemas)})', f'"final" <|message|> {body}'
    yield f"start: thought? <|channel|> ({call} | {answer})"
    yield from _harmony_calls(schemas)


def _harmony_calls(schemas: dict[str, dict[str, Any]]) -> Iterable[str]:
    yield _THOUGHT
    for number, (name, schema) in enumerate(schemas.items()):
        yield f'call{number}: {_literal(f"{name} ")} <|constrain|> "json" <|message|> {_json(schema)}'


def _tag(tokenizer: ModelTokenizer, tag: str) -> str:
    """A tag that is one token must be named as such: as text, llguidance proposes that token and then refuses it."""
    return tag if tokenizer.token_id(tag) is not None else _literal(tag)


def _any(schemas: dict[str, dict[str, Any]]) -> str:
    return " | ".join(f"call{number}" for number in range(len(schemas)))


def _json(schema: dict[str, Any]) -> str:
    own = schema.get("x-guidance")
    return "%json " + json.dumps(schema | {"x-guidance": _SPACING | (own if isinstance(own, dict) else {})})


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
