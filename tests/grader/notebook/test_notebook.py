"""Reading notebooks: any file gives a value, broken ones with a flag."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grader.notebook import MAX_OUTPUT_CHARS, names_section, read_notebook, words_of
from grader.notebook.reader import MAX_OUTPUTS_CHARS, MAX_SOURCES_CHARS
from tests.support.notebooks import code, failed, notebook, notebook_bytes, printed, text


def test_cells_have_their_sections_tags_and_outputs() -> None:
    read = notebook(
        text("# Report\n## Load data"),
        code("x = 1", printed("hello"), tags=("load",)),
        text("```\n# no heading\n```\n## Model"),
        code("y = 2", failed("ValueError", "bad")),
    )
    assert read.readable
    assert not read.flags
    assert read.cells[1].section == ("Report", "Load data")
    assert read.cells[1].tags == ("load",)
    assert read.cells[3].section == ("Report", "Model")
    assert read.cells[1].error is None
    assert read.cells[3].error is not None
    assert read.cells[3].error.error_name == "ValueError"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "The file is empty"),
        (b"%PDF-1.7 \xff\xfe", "not UTF-8"),
        (b"my homework", "not JSON"),
        (b'{"a": 1}', "has no cells"),
        (b"[1, 2]", "has no cells"),
        (b"[" * 100_000, "not JSON"),
        (b'{"nbformat": 5, "cells": []}', "format 5"),
        (b'{"nbformat": 2, "worksheets": 7}', "nbformat cannot read"),
    ],
)
def test_broken_file_gets_a_flag(data: bytes, why: str) -> None:
    read = read_notebook(data, "x.ipynb")
    assert not read.readable
    assert read.flags[0].code == "unreadable"
    assert why in read.flags[0].message
    assert read.cells == ()


def test_odd_parts_are_read_and_flagged() -> None:
    content = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": None,
        "cells": [3, {"cell_type": "code", "source": ["a=1"]}],
    }
    read = read_notebook(json.dumps(content).encode(), "x")
    assert read.readable
    assert read.cells[1].source == "a=1"
    assert [flag.code for flag in read.flags] == ["invalid_format"]


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_any_cells_can_be_read(cells: object) -> None:
    read_notebook(json.dumps({"nbformat": 4, "metadata": cells, "cells": [cells, {"cell_type": cells}]}).encode(), "x")


@given(st.binary())
def test_any_bytes_can_be_read(data: bytes) -> None:
    assert not read_notebook(data, "x").readable


def test_huge_output_is_cut_and_flagged() -> None:
    read = notebook(code("print('x' * 10**6)", printed("x" * 10**6)))
    assert len(read.cells[0].outputs[0].text) == MAX_OUTPUT_CHARS
    assert [flag.code for flag in read.flags] == ["huge_output"]


def test_huge_notebooks_are_bounded() -> None:
    read = notebook(*[code("x = 1\n" * 20_000, printed("y" * 150_000)) for _ in range(20)])
    assert sum(len(cell.source) for cell in read.cells) <= MAX_SOURCES_CHARS
    assert sum(len(output.text) for cell in read.cells for output in cell.outputs) <= MAX_OUTPUTS_CHARS
    assert {flag.code for flag in read.flags} == {"huge_source", "huge_output"}
    assert read.cells[19].ran


def test_r_kernel_is_known() -> None:
    assert read_notebook(notebook_bytes(code("x <- 1"), language="r"), "x").language == "r"


def test_sections_match_by_whole_words() -> None:
    assert names_section("Part 1: Load Data", "load data")
    assert not names_section("Question 10", "Question 1")
    assert not names_section("anything", "")


def test_words_of_any_script() -> None:
    assert len(words_of("The manager's well-known plan <b>works</b>. <!-- not this -->")) == 5
    assert len(words_of("Der Umsatz wächst überall")) == 4
    assert len(words_of("हिन्दी में उत्तर")) == 3
    assert len(words_of("销售增长")) == 4
