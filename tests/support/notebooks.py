"""Notebooks made in a test."""

from typing import Any

from grader.notebook import Notebook, read_notebook
from grader.synthetic import code, failed, notebook_bytes, printed, result, text

__all__ = ["code", "failed", "notebook", "notebook_bytes", "printed", "result", "text"]


def notebook(*cells: dict[str, Any], language: str = "python") -> Notebook:
    return read_notebook(notebook_bytes(*cells, language=language), "student.ipynb")
