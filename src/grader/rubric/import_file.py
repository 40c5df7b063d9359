"""A file that an instructor has becomes the text of a rubric: ours, another shape, or an assignment's notebook."""

from pathlib import PurePath

import msgspec

from grader.errors import ImportRefused
from grader.notebook import read_notebook
from grader.rubric.assignments import import_assignment
from grader.rubric.imported import Imported
from grader.rubric.importers import import_rubric
from grader.rubric.load import dump_rubric
from grader.rubric.located import read_located

LARGEST_RUBRIC_BYTES = 20 << 20


class ImportedText(msgspec.Struct, frozen=True):
    """A rubric as text, and notes about what a human should look at. `text`: of a file of our shape, as it is."""

    text: str
    notes: tuple[str, ...] = ()


def import_text(file_name: str, content: bytes) -> ImportedText:
    """A file that is a rubric already stays as it is, with its mistakes."""
    if len(content) > LARGEST_RUBRIC_BYTES:
        raise ImportRefused(f"{file_name} has more than {LARGEST_RUBRIC_BYTES >> 20} MiB: this is no rubric.")
    if PurePath(file_name).suffix != ".ipynb" and _is_ours(_data(file_name, content)):
        return ImportedText(content.decode("utf-8-sig"))
    imported = import_file(file_name, content)
    return ImportedText(dump_rubric(imported.rubric), imported.notes)


def import_file(file_name: str, content: bytes) -> Imported:
    """Raises ImportRefused for a file of no known shape."""
    stem = PurePath(file_name).stem
    if PurePath(file_name).suffix != ".ipynb":
        return import_rubric(_data(file_name, content), stem)
    notebook = read_notebook(content, file_name)
    if not notebook.readable:
        reason = notebook.flags[0].message if notebook.flags else "it is no notebook"
        raise ImportRefused(f"{file_name}: {reason}")
    return import_assignment(notebook, stem)


def _data(file_name: str, content: bytes) -> object:
    try:
        return read_located(content.decode("utf-8-sig"), file_name).data
    except UnicodeDecodeError:
        raise ImportRefused(f"{file_name} is no text in UTF-8.") from None


def _is_ours(data: object) -> bool:
    return isinstance(data, dict) and isinstance(data.get("items"), list) and "assignment" in data
