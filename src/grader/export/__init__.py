"""Grades on their way out: tables, reports, a ZIP of all."""

from grader.export.bundle import file_stem, released, tables, write_reports, write_tables, write_zip
from grader.export.gradebook import Filled, fill_gradebook
from grader.export.pdf import PrinterMissing, find_browser, write_pdf
from grader.export.report import report_html
from grader.export.tables import Identities, as_csv, canvas_table, guarded, item_table, moodle_table

__all__ = [
    "Filled",
    "Identities",
    "PrinterMissing",
    "as_csv",
    "canvas_table",
    "file_stem",
    "fill_gradebook",
    "find_browser",
    "guarded",
    "item_table",
    "moodle_table",
    "released",
    "report_html",
    "tables",
    "write_pdf",
    "write_reports",
    "write_tables",
    "write_zip",
]
