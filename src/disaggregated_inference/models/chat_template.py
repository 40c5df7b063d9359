"""Chat templates in Jinja, with the functions, variables and tags that transformers provides."""

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2.ext import Extension

Message = dict[str, Any]

_REASONING = ("reasoning_content", "reasoning", "thinking")


def with_reasoning_names(messages: list[Message]) -> list[Message]:
    """Templates have several names for the reasoning of a message."""
    found = [next((each[name] for name in _REASONING if each.get(name) is not None), None) for each in messages]
    return [
        each if text is None else {"thinking": text} | each | {"reasoning_content": text}
        for each, text in zip(messages, found, strict=True)
    ]


def compile_template(source: str) -> Any:
    """Templates come with the model, so they run in a sandbox."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
    return environment.from_string(source)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _generation_tag() -> "type[Extension]":
    """`{% generation %}` marks what the model writes, for training. Here its content is rendered as it is."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    return GenerationTag
