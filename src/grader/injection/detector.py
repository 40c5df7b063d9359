"""Finds text that speaks to the grader instead of to a reader. A flag for a human; points do not change."""

import functools
from collections.abc import Iterator

import msgspec

from grader.injection.patterns import FAMILIES
from grader.injection.text_variants import disguises
from grader.notebook import Cell, Notebook
from grader.verdicts import Evidence, Flag, Part

_QUOTE_CHARS = 200
_MAX_FLAGS = 20
_METADATA_CHARS = 100_000  # widgets keep their state there


class Piece(msgspec.Struct, frozen=True):
    """Text of one place in the notebook."""

    text: str
    cell: int | None = None
    part: Part = "source"


def find_attempts(notebook: Notebook, template: Notebook | None = None) -> tuple[Flag, ...]:
    """One flag per place, at most 20. What the template says is the instructor's."""
    given = {piece.text for piece in _pieces(template)} if template else set[str]()
    flags = []
    for piece in _pieces(notebook):
        kind = attempt_in(piece.text) if piece.text not in given else None
        if kind is not None:
            flags.append(_flag(piece, kind))
        if len(flags) == _MAX_FLAGS:
            break
    return tuple(flags)


@functools.lru_cache(maxsize=4096)
def attempt_in(text: str) -> str | None:
    """What kind of attempt the text is, or None."""
    for variant in disguises(text):
        for name, pattern in FAMILIES.items():
            if pattern.search(variant):
                return name
    return None


def _flag(piece: Piece, kind: str) -> Flag:
    line, quote = _place(piece.text)
    evidence = Evidence(cell=piece.cell, line=line, quote=quote[:_QUOTE_CHARS], part=piece.part)
    return Flag(code="injection", message=f"The text {kind}.", evidence=(evidence,))


def _place(text: str) -> tuple[int, str]:
    """The first line that is an attempt by itself; 0 when only the whole is."""
    for number, line in enumerate(text.splitlines()[:2000], 1):
        if attempt_in(line) is not None:
            return number, line.strip()
    return 0, text.strip()


def _pieces(notebook: Notebook) -> Iterator[Piece]:
    yield Piece("\n".join(_texts(notebook.metadata))[:_METADATA_CHARS], part="file")
    for cell in notebook.cells:
        yield Piece(cell.source, cell.index)
        yield Piece("\n".join([*cell.tags, *_texts(cell.metadata)])[:_METADATA_CHARS], cell.index, "file")
        yield from (Piece(text, cell.index, "output") for text in _output_texts(cell))


def _output_texts(cell: Cell) -> Iterator[str]:
    for output in cell.outputs:
        yield from (text for text in (output.text, output.html, output.error_value) if text)


def _texts(value: object) -> Iterator[str]:
    """Every text in metadata, at any depth."""
    stack = [value]
    while stack:
        here = stack.pop()
        if isinstance(here, str):
            yield here
        elif isinstance(here, dict):
            stack += [*here.keys(), *here.values()]
        elif isinstance(here, list):
            stack += here
