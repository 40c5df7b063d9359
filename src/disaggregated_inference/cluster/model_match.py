"""Finds the model of a cluster that a request names: by a whole name, or by a part of one."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from disaggregated_inference.cluster.reader import quote
from disaggregated_inference.errors import BadRequest, ModelNotFound

_SHORTEST_PART = 3  # characters: shorter parts are in too many names


class ModelMatch(NamedTuple):
    name: str  # in the cluster file
    is_part: bool = False  # only a part fits: the request's name must not appear in the response


def bare_name(model: Any) -> str:
    """The name without the prefix that some programs add: `disaggregated:qwen3-coder:30b`."""
    if not isinstance(model, str):
        raise BadRequest(f"model: expected a name, got {quote(model)}", param="model")
    return model.strip().removeprefix("disaggregated:").strip()


def find_model(wanted: str, spellings: Mapping[str, str], names: Sequence[str]) -> ModelMatch:
    """In any case: a whole spelling, else a part of one, or one that is a part of `wanted`. `spellings` maps names and
    aliases to `names`."""
    text = wanted.casefold()
    whole = _distinct(name for spelling, name in spellings.items() if spelling.casefold() == text)
    parts = _distinct(name for spelling, name in spellings.items() if _is_part(text, spelling.casefold()))
    found = whole or parts
    if len(found) != 1:
        raise ModelNotFound(_not_found(wanted, found, names))
    return ModelMatch(found[0], is_part=not whole)


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _is_part(one: str, other: str) -> bool:
    short, long = sorted((one, other), key=len)
    return len(short) >= _SHORTEST_PART and short in long


def _not_found(wanted: str, found: Sequence[str], names: Sequence[str]) -> str:
    known = f"the cluster has {', '.join(names) or 'none'}"
    if not wanted:
        return f"name a model; {known}"
    if found:
        return f"{quote(wanted)} may be {' or '.join(found)}: write the full name; {known}"
    return f"no model {quote(wanted)}; {known}"
