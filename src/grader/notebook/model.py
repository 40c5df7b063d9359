"""A parsed notebook: cells, outputs, sections. It is a value: nothing in it runs or changes."""

from typing import Literal

import msgspec

from grader.verdicts import Flag

CellKind = Literal["code", "markdown", "raw"]
OutputKind = Literal["stream", "display", "result", "error"]
Language = Literal["python", "r", "other"]


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """One output of a code cell. `text` is what a reader sees; of an error, `error_name` and `error_value` too."""

    kind: OutputKind
    text: str = ""
    html: str = ""
    stream: str = ""  # stdout or stderr
    images: tuple[str, ...] = ()  # MIME types; the bytes are not kept
    error_name: str = ""
    error_value: str = ""
    cut: bool = False  # longer than the reader keeps


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """`section`: the headings above it, outermost first. `index` counts all cells from 0."""

    index: int
    kind: CellKind
    source: str
    id: str = ""
    tags: tuple[str, ...] = ()
    section: tuple[str, ...] = ()
    execution_count: int | None = None
    outputs: tuple[Output, ...] = ()
    grade_id: str = ""  # of nbgrader's metadata
    hidden: bool = False  # collapsed or marked to be removed
    metadata: dict[str, object] = {}

    @property
    def error(self) -> Output | None:
        """The error output, which is the only sign of failure: the word in a text is none."""
        return next((output for output in self.outputs if output.kind == "error"), None)

    @property
    def ran(self) -> bool:
        return self.execution_count is not None or bool(self.outputs)


class Notebook(msgspec.Struct, frozen=True, kw_only=True):
    """`readable` is false when the file is no notebook: then there are no cells, and a flag says why."""

    name: str
    sha256: str
    readable: bool = True
    language: Language = "python"
    kernel: str = ""
    cells: tuple[Cell, ...] = ()
    flags: tuple[Flag, ...] = ()
    metadata: dict[str, object] = {}

    @property
    def code_cells(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.kind == "code")

    @property
    def markdown_cells(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.kind == "markdown")
