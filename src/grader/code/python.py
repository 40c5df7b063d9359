"""Facts of Python code, from its syntax tree. Comments and strings are no names; `if False:` blocks do not count."""

import ast
import re
import warnings
from collections.abc import Iterator

from grader.code.facts import CodeFacts, Use

_TRANSPARENT_MAGICS = ("%%time", "%%timeit", "%%capture", "%%prun")
_ASSIGNED_MAGIC = re.compile(r"^(\s*[\w,][\w, ]*=\s*)[!%].*$")  # in time proportional to the line
# Calls whose strings are columns, and arguments that name columns in any call.
_COLUMN_CALLS = frozenset(
    [
        "groupby",
        "sort_values",
        "set_index",
        "drop",
        "merge",
        "join",
        "agg",
        "aggregate",
        "pivot",
        "pivot_table",
        "melt",
        "rename",
        "DataFrame",
        "nlargest",
        "nsmallest",
        "value_counts",
        "drop_duplicates",
        "dropna",
        "explode",
        "crosstab",
        "filter",
        "get",
        "insert",
        "pop",
    ]
)
_COLUMN_ARGUMENTS = frozenset(
    [
        "by",
        "on",
        "columns",
        "column",
        "values",
        "index",
        "x",
        "y",
        "hue",
        "subset",
        "left_on",
        "right_on",
        "id_vars",
        "value_vars",
        "names",
        "color",
    ]
)
_SHOWING_CALLS = frozenset(["print", "display", "round", "head", "tail", "to_string", "round_", "float", "int"])


def python_facts(source: str) -> CodeFacts:
    """Facts of one cell. IPython's magics and shell lines are left out."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(without_magics(source))
        reader = _FactReader(source.splitlines())
        reader.read_body(tree.body, top=True)
        reader.read_shown(tree.body)
        return CodeFacts(tuple(reader.uses))
    except SyntaxError as error:
        return CodeFacts(problem=f"SyntaxError: {error.msg}", problem_line=error.lineno or 0)
    except (ValueError, RecursionError, MemoryError) as error:
        return CodeFacts(problem=f"The code cannot be parsed: {type(error).__name__}")


def python_names(source: str) -> frozenset[str]:
    try:
        tree = ast.parse(without_magics(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


def without_magics(source: str) -> str:
    """The cell as plain Python with the same line numbers."""
    lines = source.splitlines()
    first = next((line.strip() for line in lines if line.strip()), "")
    if first.startswith("%%") and not first.startswith(_TRANSPARENT_MAGICS):
        return ""
    return "\n".join(_plain_line(line) for line in lines)


def _plain_line(line: str) -> str:
    stripped = line.lstrip()
    if stripped.startswith(("%", "!", "?")) or (stripped.endswith("?") and "#" not in stripped):
        return line[: len(line) - len(stripped)] + "pass"
    return _ASSIGNED_MAGIC.sub(r"\1None", line)


class _FactReader:
    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self.uses: list[Use] = []
        self.methods = set[int]()  # attributes that are called are no columns

    def read_body(self, body: list[ast.stmt], top: bool) -> None:
        for node in body:
            self._read(node, top)

    def _read(self, node: ast.AST, top: bool) -> None:
        """`top`: not inside a function or class, where an assignment makes a variable of the notebook."""
        if isinstance(node, ast.If) and _is_false(node.test):
            self.read_body(node.orelse, top)
            return
        if isinstance(node, ast.While) and _is_false(node.test):
            return
        self._read_definition(node)
        if top:
            self._read_assignment(node)
        self._read_call(node)
        self._read_column(node)
        inner = top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            self._read(child, inner)

    def _read_definition(self, node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._add("define", node.name, node)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            for target in node.targets:
                for name in _target_names(target):
                    self._add("define", name, node)

    def _read_assignment(self, node: ast.AST) -> None:
        for target in _targets(node):
            for name in _target_names(target):
                self._add("assign", name, node)

    def _read_call(self, node: ast.AST) -> None:
        if isinstance(node, ast.Call):
            dotted = _dotted(node.func)
            self._add("call", dotted, node)
            if "." in dotted:
                self._add("call", dotted.rpartition(".")[2], node)

    def _read_column(self, node: ast.AST) -> None:
        if isinstance(node, ast.Subscript):
            for name in _strings(node.slice):
                self._add("column", name, node)
        elif isinstance(node, ast.Attribute) and id(node) not in self.methods:
            self._add("column", node.attr, node)
        elif isinstance(node, ast.Call):
            self.methods.add(id(node.func))
            for name in _argument_columns(node):
                self._add("column", name, node)

    def read_shown(self, body: list[ast.stmt]) -> None:
        """Variables whose value the cell shows: its last expression, and what print and display get."""
        for node in body:
            if isinstance(node, ast.Expr):
                is_last = node is body[-1]
                for name in _shown(node.value, is_last):
                    self._add("show", name, node)

    def _add(self, fact: str, name: str, node: ast.AST) -> None:
        line = getattr(node, "lineno", 0)
        quote = self.lines[line - 1].strip() if 0 < line <= len(self.lines) else ""
        if name:
            self.uses.append(Use(fact, name, line, quote))  # type: ignore[arg-type]


def _is_false(test: ast.expr) -> bool:
    return isinstance(test, ast.Constant) and not test.value


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return [node.target]
    if isinstance(node, ast.AugAssign | ast.NamedExpr | ast.For | ast.AsyncFor):
        return [node.target]
    return [node.optional_vars] if isinstance(node, ast.withitem) and node.optional_vars else []


def _target_names(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Starred):
        yield from _target_names(target.value)
    elif isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _target_names(element)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return f"{inner}.{node.attr}" if inner else node.attr
    return ""


def _strings(node: ast.AST) -> Iterator[str]:
    """Strings of a subscript or argument: alone, in lists and tuples, or as keys of a dict."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.List | ast.Tuple):
        for element in node.elts:
            yield from _strings(element)
    elif isinstance(node, ast.Dict):
        for part in [*node.keys, *node.values]:
            if part is not None:
                yield from _strings(part)


def _argument_columns(call: ast.Call) -> Iterator[str]:
    name = _dotted(call.func).rpartition(".")[2]
    for argument in call.args if name in _COLUMN_CALLS else []:
        yield from _strings(argument)
    for keyword in call.keywords:
        if name == "assign" or name in ("agg", "aggregate"):
            yield keyword.arg or ""
        if keyword.arg in _COLUMN_ARGUMENTS:
            yield from _strings(keyword.value)


def _shown(node: ast.expr, is_last: bool) -> Iterator[str]:
    if isinstance(node, ast.Name):
        if is_last:
            yield node.id
    elif isinstance(node, ast.Call):
        name = _dotted(node.func).rpartition(".")[2]
        if name in _SHOWING_CALLS and (is_last or name in ("print", "display")):
            parts = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            for part in [*parts, *node.args]:
                yield from _named(part)
    elif is_last and isinstance(node, ast.Attribute | ast.Subscript | ast.Tuple | ast.JoinedStr):
        yield from _named(node)


def _named(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
            yield part.id
