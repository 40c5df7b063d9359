"""The rubric: its schema, its file, its checks, and the import of other shapes."""

from grader.rubric.assignments import import_assignment
from grader.rubric.checks import (
    Check,
    CodeTests,
    Columns,
    Functions,
    Manual,
    ModelJudged,
    OutputMatch,
    Ran,
    Sections,
    Variables,
    Where,
    Words,
    layer_of,
)
from grader.rubric.example import EXAMPLE
from grader.rubric.hashes import changed_items, item_hash, rubric_hash
from grader.rubric.import_file import LARGEST_RUBRIC_BYTES, ImportedText, import_file, import_text
from grader.rubric.imported import Imported
from grader.rubric.importers import import_rubric
from grader.rubric.load import dump_rubric, load_rubric
from grader.rubric.schema import Cap, CreditRule, Item, LatePolicy, Letter, Level, Rubric, RunLimits

__all__ = [
    "EXAMPLE",
    "LARGEST_RUBRIC_BYTES",
    "Cap",
    "Check",
    "CodeTests",
    "Columns",
    "CreditRule",
    "Functions",
    "Imported",
    "ImportedText",
    "Item",
    "LatePolicy",
    "Letter",
    "Level",
    "Manual",
    "ModelJudged",
    "OutputMatch",
    "Ran",
    "Rubric",
    "RunLimits",
    "Sections",
    "Variables",
    "Where",
    "Words",
    "changed_items",
    "dump_rubric",
    "import_assignment",
    "import_file",
    "import_rubric",
    "import_text",
    "item_hash",
    "layer_of",
    "load_rubric",
    "rubric_hash",
]
