"""A notebook file becomes a `Notebook`. A broken file becomes one with a flag: reading never fails."""

import hashlib
import json
import logging
import re
import warnings
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import nbformat

from grader.notebook.model import Cell, CellKind, Language, Notebook, Output
from grader.notebook.sections import deeper, markdown_lines
from grader.notebook.tables import as_text, tables_in
from grader.verdicts import Evidence, Flag

MAX_FILE_BYTES = 64 * 2**20
MAX_OUTPUT_CHARS = 200_000
MAX_OUTPUTS_CHARS = 1_000_000  # of the whole notebook
MAX_SOURCE_CHARS = 50_000
MAX_SOURCES_CHARS = 500_000  # of the whole notebook
MAX_CELLS = 5_000
_HIDING_TAGS = {"remove-cell", "remove_cell", "hide-cell", "hide-input", "remove-input", "hide_input"}
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_OBJECT = re.compile(r"<[\w.]+ object[^<>]*>")  # what Python writes of a thing that a page shows as a table
_OUTPUT_KINDS = {"stream": "stream", "display_data": "display", "execute_result": "result", "error": "error"}

logging.getLogger("traitlets").addHandler(logging.NullHandler())


class _Unreadable(Exception):
    """The file is no notebook; the text says why."""


def read_notebook(data: bytes, name: str) -> Notebook:
    """Parses a file of any content. `readable` is false when it is no notebook."""
    digest = hashlib.sha256(data).hexdigest()
    try:
        raw = _parsed(data)
        return _notebook(raw, name, digest)
    except _Unreadable as error:
        why = str(error)
    except Exception as error:  # any: the file is untrusted, and one file must not stop a class
        why = f"The file is no notebook: its content cannot be read ({type(error).__name__})."
    flag = Flag(code="unreadable", message=why, evidence=(Evidence(part="file"),))
    return Notebook(name=name, sha256=digest, readable=False, language="other", flags=(flag,))


def _parsed(data: bytes) -> dict[str, Any]:
    """The notebook in nbformat 4. nbformat converts older ones; it refuses newer ones."""
    if len(data) > MAX_FILE_BYTES:
        raise _Unreadable(f"The file has {len(data)} bytes; the grader reads up to {MAX_FILE_BYTES}.")
    if not data.strip():
        raise _Unreadable("The file is empty.")
    try:
        content = _json(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise _Unreadable("The file is no notebook: it is not UTF-8 text.") from None
    except (json.JSONDecodeError, RecursionError, ValueError) as error:
        raise _Unreadable(f"The file is no notebook: it is not JSON ({error}).") from None
    if not isinstance(content, dict) or not ("cells" in content or "worksheets" in content):
        raise _Unreadable("The file is JSON, but no notebook: it has no cells.")
    return _converted(content)


def _json(text: str) -> Any:
    """Halves of surrogate pairs, which no file and no database can hold, become the sign for unknown characters."""
    content = json.loads(text)
    if not _SURROGATE.search(text):
        return content
    plain = json.dumps(content, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json.loads(plain)


def _converted(content: dict[str, Any]) -> dict[str, Any]:
    if content.get("nbformat") == 4 and isinstance(content.get("cells"), list):
        return content  # what is odd in a version 4 is read leniently, cell by cell
    if isinstance(content.get("nbformat"), int) and content["nbformat"] > 4:
        raise _Unreadable(f"The notebook has format {content['nbformat']}; the grader reads format 4.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return cast(dict[str, Any], nbformat.reads(json.dumps(content), as_version=4))  # type: ignore[no-untyped-call]
    except Exception as error:  # nbformat raises many kinds for broken content
        raise _Unreadable(f"nbformat cannot read the notebook: {str(error)[:200]}") from None


def _notebook(raw: dict[str, Any], name: str, digest: str) -> Notebook:
    metadata = _mapping(raw.get("metadata"))
    flags = list[Flag]()
    cells = _cells(raw, flags)
    flags += _format_flags(raw, cells)
    return Notebook(
        name=name,
        sha256=digest,
        language=_language(metadata),
        kernel=_text(_mapping(metadata.get("kernelspec")).get("name")),
        cells=cells,
        flags=tuple(flags),
        metadata=dict(metadata),
    )


def _format_flags(raw: dict[str, Any], cells: tuple[Cell, ...]) -> list[Flag]:
    flags = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nbformat.validate(raw)
    except Exception as error:  # any: the file is untrusted
        flags.append(Flag(code="invalid_format", message=f"Not valid nbformat 4: {_said(error)}"))
    cut = [cell.index for cell in cells if any(output.cut for output in cell.outputs)]
    if cut:
        where = tuple(Evidence(cell=index, part="output") for index in cut)
        flags.append(
            Flag(code="huge_output", message=f"The output is cut at {MAX_OUTPUT_CHARS} characters", evidence=where)
        )
    return flags


def _said(error: Exception) -> str:
    """The first line. Some errors cannot even be told: the content is nested too deep."""
    try:
        return (str(error).splitlines() or [""])[0][:200] or type(error).__name__
    except RecursionError:
        return type(error).__name__


def _cells(raw: dict[str, Any], flags: list[Flag]) -> tuple[Cell, ...]:
    listed = raw["cells"] if isinstance(raw.get("cells"), list) else []
    if len(listed) > MAX_CELLS:
        flags.append(Flag(code="many_cells", message=f"The notebook has {len(listed)} cells; {MAX_CELLS} are read"))
    path: tuple[tuple[int, str], ...] = ()
    cells, sources, outputs = [], MAX_SOURCES_CHARS, MAX_OUTPUTS_CHARS
    for index, entry in enumerate(listed[:MAX_CELLS]):
        entry = _mapping(entry)
        whole = _text(entry.get("source"))
        source = whole[: min(MAX_SOURCE_CHARS, sources)]
        sources -= len(source)
        if len(source) < len(whole):
            message = f"The cell has {len(whole)} characters; {len(source)} are read"
            flags.append(Flag(code="huge_source", message=message, evidence=(Evidence(cell=index),)))
        if entry.get("cell_type") == "markdown":
            for line in markdown_lines(source):
                path = deeper(path, line) if line.level else path
        cell = _cell(index, entry, source, tuple(title for _, title in path))
        outputs -= sum(len(output.text) + len(output.html) for output in cell.outputs)
        cells.append(cell if outputs >= 0 else _without_text(cell))
    return tuple(cells)


def _without_text(cell: Cell) -> Cell:
    """Of a notebook with too much output: that the cell ran, and whether it failed."""
    outputs = (msgspec.structs.replace(output, text="", html="", cut=True) for output in cell.outputs)
    return msgspec.structs.replace(cell, outputs=tuple(outputs))


def _cell(index: int, entry: Mapping[str, Any], source: str, section: tuple[str, ...]) -> Cell:
    metadata = _mapping(entry.get("metadata"))
    tags = metadata.get("tags")
    kind = entry.get("cell_type")
    count = entry.get("execution_count")
    return Cell(
        index=index,
        kind=cast(CellKind, kind if kind in ("code", "markdown") else "raw"),
        source=source,
        id=_text(entry.get("id")),
        tags=tuple(_text(tag) for tag in tags) if isinstance(tags, list) else (),
        section=section,
        execution_count=count if isinstance(count, int) else None,
        outputs=read_outputs(entry.get("outputs")) if kind == "code" else (),
        grade_id=_text(_mapping(metadata.get("nbgrader")).get("grade_id")),
        hidden=_is_hidden(metadata, tags),
        metadata=dict(metadata),
    )


def _is_hidden(metadata: Mapping[str, Any], tags: object) -> bool:
    jupyter = _mapping(metadata.get("jupyter"))
    folded = jupyter.get("source_hidden") or metadata.get("hide_input") or metadata.get("collapsed")
    return bool(folded) or (isinstance(tags, list) and bool(_HIDING_TAGS & {str(tag) for tag in tags}))


def read_outputs(raw: object) -> tuple[Output, ...]:
    """Outputs in the form of nbformat 4, as a kernel gives them."""
    return tuple(_output(_mapping(each)) for each in _list(raw))


def _output(raw: Mapping[str, Any]) -> Output:
    kind = _OUTPUT_KINDS.get(_text(raw.get("output_type")), "display")
    data = _mapping(raw.get("data"))
    text, cut = _bounded(_text(raw.get("text")) if kind == "stream" else _text(data.get("text/plain")))
    html, html_cut = _bounded(_text(data.get("text/html")))
    if _OBJECT.fullmatch(text.strip()) and (tables := tables_in(html)):
        text, cut = _bounded(as_text(tables))
    if kind == "error":
        text, cut = _bounded("\n".join(map(_text, _list(raw.get("traceback")))))
    return Output(
        kind=cast(Any, kind),
        text=text,
        html=html,
        stream=_text(raw.get("name")) if kind == "stream" else "",
        images=tuple(str(mime) for mime in data if str(mime).startswith("image/")),
        error_name=_text(raw.get("ename")),
        error_value=_text(raw.get("evalue"))[:MAX_OUTPUT_CHARS],
        cut=cut or html_cut,
    )


def _bounded(text: str) -> tuple[str, bool]:
    return text[:MAX_OUTPUT_CHARS], len(text) > MAX_OUTPUT_CHARS


def _language(metadata: Mapping[str, Any]) -> Language:
    kernel, info = _mapping(metadata.get("kernelspec")), _mapping(metadata.get("language_info"))
    for name in (kernel.get("language"), info.get("name"), kernel.get("name")):
        name = _text(name).casefold()
        if name.startswith(("python", "ipython")):
            return "python"
        if name in ("r", "ir"):
            return "r"
    return "other" if _text(info.get("name")) or _text(kernel.get("name")) else "python"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    """nbformat allows a list of lines wherever it has a text."""
    if isinstance(value, list):
        return "".join(part for part in value if isinstance(part, str))
    return value if isinstance(value, str) else ""
