"""From the body of a request to its struct. An error names the field."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from disaggregated_inference.api import Misfit, misfit, with_reason
from disaggregated_inference.errors import BadRequest

Kind = TypeVar("Kind")


def read_request(body: Mapping[str, Any], kind: type[Kind], hints: Mapping[str, str] | None = None) -> Kind:
    """`hints`: what is accepted instead of an invalid value, by the beginning of the field's path."""
    try:
        return msgspec.convert(body, kind, str_keys=True)  # token ids are keys in logit_bias
    except msgspec.ValidationError as error:
        raise _invalid(misfit(error, kind), hints or {}) from error


def without_nulls(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


def _invalid(found: Misfit, hints: Mapping[str, str]) -> BadRequest:
    path, reason = found
    path = path.replace("[...]", "")
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", reason):
        path, reason = f"{path}.{missing[1]}".lstrip("."), "it is missing"
    if reason.startswith("Invalid value"):
        reason += next((f": {hint}" for start, hint in hints.items() if path.startswith(start)), "")
    return BadRequest(with_reason(path or "body", reason), param=path or None)
