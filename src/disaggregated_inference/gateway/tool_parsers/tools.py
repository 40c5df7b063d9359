"""The tools of a request, in OpenAI's shape: `{"type": "function", "function": {"name": ..., "parameters": {...}}}`."""

import re
from typing import Any

from disaggregated_inference.errors import BadRequest

_SAY_NOTHING = {"type", "properties", "required", "title", "description", "$schema"}  # of a schema's own keys
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


def require_tools(tools: Any) -> None:
    if not isinstance(tools, list):
        raise BadRequest("tools must be a list")
    for place, tool in enumerate(tools):
        _require_tool(tool, f"tools[{place}]")


def schemas_of(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Every function's name, and the schema of its arguments."""
    functions = [tool["function"] for tool in tools]
    return {function["name"]: _schema(function.get("parameters") or {}) for function in functions}


def _schema(parameters: dict[str, Any]) -> dict[str, Any]:
    """Where none are named there are none: a model that is held to an object of any kind writes on and on."""
    if not parameters.get("properties") and parameters.keys() <= _SAY_NOTHING:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object"} | parameters


def _require_tool(tool: Any, where: str) -> None:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise BadRequest(f'{where} must be an object of the type "function": other types are not served')
    function = tool.get("function")
    if not isinstance(function, dict):
        raise BadRequest(f"{where}.function must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadRequest(f"{where}.function.name must be 1 to 64 letters, digits, underscores, dots or hyphens")
    if not isinstance(function.get("description") or "", str):
        raise BadRequest(f"{where}.function.description must be text")
    _require_parameters(function.get("parameters"), f"{where}.function.parameters")


def _require_parameters(schema: Any, where: str) -> None:
    if schema is None:
        return
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise BadRequest(f'{where} must be a JSON schema of the type "object"')
    if not isinstance(schema.get("properties", {}), dict):
        raise BadRequest(f"{where}.properties must be an object")
