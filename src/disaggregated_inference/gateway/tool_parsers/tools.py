"""The tools of a request, in OpenAI's shape: `{"type": "function", "function": {"name": ..., "parameters": {...}}}`."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta

from disaggregated_inference.errors import BadRequest

_UNRESTRICTIVE = {"type", "properties", "required", "title", "description", "$schema"}  # keys of a schema
_RESERVED = ("auto", "none", "required")  # the other values of tool_choice
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


FunctionName = Annotated[str, Meta(pattern=r"^[\w.:/-]{1,128}$")]


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    described = {"description": description} if description else {}
    schema = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **described, **schema}}


def with_parameters(tool: dict[str, Any]) -> dict[str, Any]:
    """Many chat templates and engines require a schema, also of a function without arguments."""
    none = {"type": "object", "properties": {}}
    return tool | {"function": tool["function"] | {"parameters": tool["function"].get("parameters") or none}}


def function_call(id: str, name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def function_result(id: str, names: Mapping[str, str], text: str, field: str) -> dict[str, Any]:
    """`names`: of the functions that were called, by the id of the call. `field`: of the request, for the error."""
    if id not in names:
        raise BadRequest(f"{field}: the result of {id!r} has no such call before it", param=field)
    return {"role": "tool", "tool_call_id": id, "name": names[id], "content": text}


def require_tools(tools: Any) -> None:
    if not isinstance(tools, list):
        raise BadRequest("tools must be a list", param="tools")
    for place, tool in enumerate(tools):
        _require_tool(tool, f"tools[{place}]")


def required_tool(names: Sequence[str]) -> str:
    """`tool_choice` for any tool."""
    if not names:
        raise BadRequest("tool_choice: it needs at least one tool: give tools", param="tool_choice")
    return "required"


def forced_tool(name: Any, names: Sequence[str]) -> str:
    """`tool_choice` for this tool. A function with a reserved name may be called, but it cannot be forced."""
    if name not in names:
        found = f"tools has {', '.join(names) or 'none'}"
        raise BadRequest(f"tool_choice: no tool {str(name)[:80]!r}; {found}", param="tool_choice")
    if name in _RESERVED:
        reason = f"a function called {name} cannot be forced, because the word has a meaning: rename it"
        raise BadRequest(f"tool_choice: {reason}", param="tool_choice")
    return str(name)


def schemas_of(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The schema of each function's arguments, by the function's name."""
    functions = [tool["function"] for tool in tools]
    return {function["name"]: _schema(function.get("parameters") or {}) for function in functions}


def _schema(parameters: dict[str, Any]) -> dict[str, Any]:
    """Without properties there are no arguments: a model that may write any object does not stop."""
    if not parameters.get("properties") and parameters.keys() <= _UNRESTRICTIVE:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object"} | parameters


def _require_tool(tool: Any, where: str) -> None:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise BadRequest(
            f'{where} must be an object of the type "function": other types are not supported', param="tools"
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise BadRequest(f"{where}.function must be an object", param="tools")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        form = "1 to 64 letters, digits, underscores, dots or hyphens"
        raise BadRequest(f"{where}.function.name must be {form}", param="tools")
    if not isinstance(function.get("description") or "", str):
        raise BadRequest(f"{where}.function.description must be text", param="tools")
    _require_parameters(function.get("parameters"), f"{where}.function.parameters")


def _require_parameters(schema: Any, where: str) -> None:
    if schema is None:
        return
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise BadRequest(f'{where} must be a JSON schema of the type "object"', param="tools")
    if not isinstance(schema.get("properties", {}), dict):
        raise BadRequest(f"{where}.properties must be an object", param="tools")
