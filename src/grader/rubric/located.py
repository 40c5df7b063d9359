"""YAML and JSON as plain data, with the line and column of every value and key."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import yaml

from grader.errors import RubricInvalid
from grader.problems import Problem

MAX_NODES = 50_000
MAX_DEPTH = 50
Path = tuple[str | int, ...]


class Located(msgspec.Struct, frozen=True):
    """`places`: the line and column of each path; `keys`: of the key that names it."""

    data: Any
    places: dict[Path, tuple[int, int]]
    keys: dict[Path, tuple[int, int]]

    def place(self, path: Path, key: bool = False) -> tuple[int, int]:
        """Of the path, or of the nearest thing around it that is in the file."""
        while path not in self.places and path:
            path = path[:-1]
        return (self.keys if key and path in self.keys else self.places).get(path, (1, 1))

    def problem(self, path: Path, message: str, key: bool = False) -> Problem:
        line, column = self.place(path, key)
        return Problem(message=message, path=path_text(path), line=line, column=column)


def path_text(path: Path) -> str:
    """`items[2].points`"""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return "".join(parts).lstrip(".")


def read_located(text: str, source: str) -> Located:
    """Raises RubricInvalid when the text is neither YAML nor JSON, or names a key twice."""
    text = re.sub(r"^\t+", lambda tabs: " " * len(tabs.group()), text, flags=re.MULTILINE)  # JSON may have tabs
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        message = f"Not valid YAML or JSON: {error.problem or error.context}"
        raise RubricInvalid(source, [Problem(message=message, line=line, column=column)]) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise RubricInvalid(source, [Problem(message=f"Not valid YAML or JSON: {error}", line=1, column=1)]) from None
    if node is None:
        raise RubricInvalid(source, [Problem(message="The file is empty.", line=1, column=1)])
    builder = _Builder()
    data = builder.build(node, ())
    if builder.problems:
        raise RubricInvalid(source, builder.problems)
    return Located(data, builder.places, builder.keys)


class _Builder:
    def __init__(self) -> None:
        self.places: dict[Path, tuple[int, int]] = {}
        self.keys: dict[Path, tuple[int, int]] = {}
        self.problems: list[Problem] = []
        self.scalars = yaml.SafeLoader("")

    def build(self, node: yaml.Node, path: Path) -> Any:
        if len(self.places) >= MAX_NODES or len(path) > MAX_DEPTH:
            message = f"The file has more than {MAX_NODES} values, or they are nested deeper than {MAX_DEPTH}."
            self.problems = self.problems or [Problem(message=message, line=1, column=1)]
            return None
        self.places[path] = (node.start_mark.line + 1, node.start_mark.column + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(child, (*path, i)) for i, child in enumerate(node.value)]
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        data = dict[str, Any]()
        for key_node, value in node.value:
            key = str(key_node.value)
            here = (*path, key)
            mark = key_node.start_mark.line + 1, key_node.start_mark.column + 1
            if key in data:
                self.problems.append(_problem(here, "This key is there twice.", mark))
            self.keys[here] = mark
            data[key] = self.build(value, here)
        return data

    def _scalar(self, node: yaml.Node, path: Path) -> Any:
        if node.tag == "tag:yaml.org,2002:timestamp":
            return node.value
        try:
            return self.scalars.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            self.problems.append(_problem(path, f"Not a plain value: {error}", self.places[path]))
            return None


def _problem(path: Path, message: str, place: Sequence[int]) -> Problem:
    return Problem(message=message, path=path_text(path), line=place[0], column=place[1])
