"""Forced tool calls (`tool_choice` required, or a name): a grammar that allows nothing else."""

import json
from collections.abc import Iterable
from typing import Any

from disaggregated_inference.api import OutputFormat
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.gateway.closed_schema import close_objects
from disaggregated_inference.gateway.tool_parsers.hermes import CALL, CALL_END
from disaggregated_inference.gateway.tool_parsers.tools import forced_tool, require_tools, required_tool, schemas_of
from disaggregated_inference.models import ModelTokenizer

# As chat templates write JSON, which models were trained on.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_REASONING = 'thought: <|channel|> "analysis" <|message|> /(.|\\n)*/ <|end|> <|start|> "assistant"'


def forced_format(tokenizer: ModelTokenizer, tools: list[dict[str, Any]], tool_choice: str) -> OutputFormat:
    """A Lark grammar for llguidance, for one call of any tool, or of the named one.

    Models with tags get Hermes' JSON between them, also Qwen3-Coder, whose bare values cannot follow a schema. GPT-OSS
    may reason first; other models cannot.
    """
    require_tools(tools)
    schemas = _closed_schemas(tools)
    if required_tool(list(schemas)) != tool_choice:
        schemas = {tool_choice: schemas[forced_tool(tool_choice, list(schemas))]}
    return _grammar(_harmony(schemas) if tokenizer.harmony else _hermes(tokenizer, schemas))


def either_format(tokenizer: ModelTokenizer, tools: list[dict[str, Any]], format: OutputFormat) -> OutputFormat:
    """Either a tool call or a completion in `format`, as the model decides."""
    require_tools(tools)
    schemas, body = _closed_schemas(tools), _body(format)
    if tokenizer.harmony:
        return _grammar(_harmony(schemas, f' | "final" <|message|> {body}'))
    return _grammar(_hermes(tokenizer, schemas, f" | {body}"))


def framed_format(tokenizer: ModelTokenizer, format: OutputFormat) -> OutputFormat:
    """The format for the whole completion: GPT-OSS writes headers around its text, and may reason first."""
    if not tokenizer.harmony:
        return format
    return _grammar([f'start: thought? <|channel|> "final" <|message|> {_body(format)}', _REASONING])


def _closed_schemas(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: close_objects(schema) for name, schema in schemas_of(tools).items()}


def _grammar(rules: Iterable[str]) -> OutputFormat:
    return OutputFormat(type="grammar", grammar="\n".join(rules))


def _body(format: OutputFormat) -> str:
    """The text itself, as a part of a grammar."""
    if isinstance(format.schema, dict):
        return _json(format.schema)
    if format.type == "json_object":
        return _json({"type": "object"})
    if format.choices:
        return "(" + " | ".join(_literal(choice) for choice in format.choices) + ")"
    forms = "json_schema, json_object or choice"
    raise BadRequest(f"format: {format.type} is not supported here: give {forms}", param="format")


def _hermes(tokenizer: ModelTokenizer, schemas: dict[str, dict[str, Any]], otherwise: str = "") -> Iterable[str]:
    opening, closing = (_tag(tokenizer, tag) for tag in (CALL, CALL_END))
    yield f'start: {opening} ({_any(schemas)}) "}}\\n" {closing}{otherwise}'
    for number, (name, schema) in enumerate(schemas.items()):
        before = _literal(f'\n{{"name": {json.dumps(name)}, "arguments": ')
        yield f"call{number}: {before} {_json(schema)}"


def _harmony(schemas: dict[str, dict[str, Any]], otherwise: str = "") -> Iterable[str]:
    yield f'start: thought? <|channel|> ("commentary to=functions." ({_any(schemas)}){otherwise})'
    yield _REASONING
    for number, (name, schema) in enumerate(schemas.items()):
        yield f'call{number}: {_literal(f"{name} ")} <|constrain|> "json" <|message|> {_json(schema)}'


def _tag(tokenizer: ModelTokenizer, tag: str) -> str:
    """A tag that is one token must be named as a token: as text, llguidance proposes the token and then refuses it."""
    return tag if tokenizer.token_id(tag) is not None else _literal(tag)


def _any(schemas: dict[str, dict[str, Any]]) -> str:
    return " | ".join(f"call{number}" for number in range(len(schemas)))


def _json(schema: dict[str, Any]) -> str:
    own = schema.get("x-guidance")
    return "%json " + json.dumps(schema | {"x-guidance": _SPACING | (own if isinstance(own, dict) else {})})


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
