"""Where a line stands that a model quotes: in a cell's source, in an output, or nowhere."""

from collections.abc import Iterator

import msgspec

from grader.models.fences import plain_spaces
from grader.models.prompts import output_text, without_names
from grader.notebook import Notebook
from grader.verdicts import Evidence, Part


class _Text(msgspec.Struct, frozen=True):
    """One part of one cell, as the model saw it."""

    cell: int
    part: Part
    whole: str
    lines: tuple[str, ...]


class Quotable(msgspec.Struct, frozen=True):
    """A notebook's texts. `fresh`: its outputs are of a re-run; else they are what the file says."""

    texts: tuple[_Text, ...]
    fresh: bool

    def find(self, quote: str) -> Evidence | None:
        """In code and text first. Head lines that the prompt puts around cells are not the student's."""
        wanted = plain_spaces(quote)
        for one in self.texts if wanted else ():
            if wanted in one.whole:
                line = next((number for number, line in enumerate(one.lines, 1) if wanted in line), 0)
                return Evidence(cell=one.cell, line=line if one.part == "source" else 0, quote=quote, part=one.part)
        return None


def quotable(notebook: Notebook, names: tuple[str, ...], fresh: bool) -> Quotable:
    return Quotable(tuple(_texts(notebook, names)), fresh)


def _texts(notebook: Notebook, names: tuple[str, ...]) -> Iterator[_Text]:
    for cell in notebook.cells:
        yield _text(cell.index, "source", cell.source, names)
    for cell in notebook.cells:
        if cell.outputs:
            yield _text(cell.index, "output", output_text(cell), names)


def _text(cell: int, part: Part, text: str, names: tuple[str, ...]) -> _Text:
    seen = without_names(text, names)
    return _Text(cell, part, plain_spaces(seen), tuple(plain_spaces(line) for line in seen.splitlines()))
