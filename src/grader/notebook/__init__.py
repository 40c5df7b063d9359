"""Notebooks of students: untrusted files, parsed into values."""

from grader.notebook.model import Cell, CellKind, Language, Notebook, Output, OutputKind
from grader.notebook.reader import MAX_OUTPUT_CHARS, read_notebook, read_outputs
from grader.notebook.sections import Passage, in_section, markdown_lines, names_section, passages, words_of
from grader.notebook.tables import Table, tables_in

__all__ = [
    "MAX_OUTPUT_CHARS",
    "Cell",
    "CellKind",
    "Language",
    "Notebook",
    "Output",
    "OutputKind",
    "Passage",
    "Table",
    "in_section",
    "markdown_lines",
    "names_section",
    "passages",
    "read_notebook",
    "read_outputs",
    "tables_in",
    "words_of",
]
