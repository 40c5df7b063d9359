"""`disagg config reference`: docs/CLUSTER_FILE.md, made from the structs and the comments of their fields.

A comment is the field's meaning. What follows `; default: ` in it is the default of a field whose default depends on
something else.
"""

import inspect
import re
import textwrap
from importlib.resources import files
from types import NoneType
from typing import Any, get_args, get_origin

import msgspec

from disaggregated_inference.cluster.config import ClusterFile, Link, ModelOptions, Policies, Server
from disaggregated_inference.cluster.machines import ClusterMachine, GatewayService, ModelSource
from disaggregated_inference.errors import ConfigError

_SECTIONS: dict[type[msgspec.Struct], str] = {
    ClusterFile: "The file",
    Server: "Servers",
    ModelOptions: "Models",
    Link: "Links",
    Policies: "Policies",
    ClusterMachine: "Machines",
    ModelSource: "Model sources",
    GatewayService: "Gateway",
}
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
_COLUMNS = 100  # of the docs
_COMMENT = re.compile(r"^    (\w+): .*?  # (.+)$", re.MULTILINE)


def reference() -> str:
    """The page: the prose of reference.md, with the sections in place of the word FIELDS."""
    prose = (files("disaggregated_inference.cluster") / "reference.md").read_text(encoding="utf-8")
    sections = [section(kind, title) for kind, title in _SECTIONS.items()]
    return prose.replace("FIELDS", "\n\n".join(sections), 1)


def section(kind: type[msgspec.Struct], title: str) -> str:
    about = textwrap.fill(" ".join((inspect.getdoc(kind) or "").split()), _COLUMNS)
    comments = dict(_COMMENT.findall(inspect.getsource(kind)))
    rows = [_row(kind, field, comments.get(field.name, "")) for field in msgspec.structs.fields(kind)]
    return "\n".join([f"## {title}", "", about, "", "| field | type | default | |", "|---|---|---|---|", *rows])


def _row(kind: type[msgspec.Struct], field: msgspec.structs.FieldInfo, comment: str) -> str:
    meaning, _, default = comment.partition("; default: ")
    if not meaning:
        raise ConfigError(f"{kind.__name__}.{field.name} has no comment: write one sentence behind it")
    sentence = f"{meaning[0].upper()}{meaning[1:]}."
    cells = (f"`{field.name}`", _type(field.type), default or _default(field), sentence)
    return f"| {' | '.join(cells)} |"


def _type(hint: Any) -> str:
    """The JSON type, and what to write if the type does not say it."""
    if described := [meta.description for meta in getattr(hint, "__metadata__", ()) if meta.description]:
        return _described(_type(hint.__origin__), described[0])
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return f"object: see [{_SECTIONS[hint]}](#{_SECTIONS[hint].lower().replace(' ', '-')})"
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        return f"list of objects: see {_type(item).partition('see ')[2]}" if _is_struct(item) else "list of strings"
    if get_origin(hint) is dict:
        item = get_args(hint)[1]
        return f"object of objects: see {_type(item).partition('see ')[2]}" if _is_struct(item) else "object"
    if members := [each for each in get_args(hint) if each is not NoneType]:
        return "string" if isinstance(members[0], str) else _type(members[0])
    return _TYPES[hint]


def _described(plain: str, description: str) -> str:
    """Without saying it twice: "number of seconds > 0", "integer: a port from 1 to 65535"."""
    noun = re.match(r"an? (\w+)", description)
    if noun and plain.startswith(noun[1]):
        return plain + description[noun.end() :]
    return plain if plain == "boolean" else f"{plain}: {description}"


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if isinstance(value, msgspec.Struct):
        return "the defaults there"
    if value is None or value in ("", (), {}):
        return "none"
    return f"`{value:g}`" if isinstance(value, float) else f"`{msgspec.json.encode(value).decode()}`"
