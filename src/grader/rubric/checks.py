"""The kinds of check that a rubric item can name. `kind` in the file selects the struct."""

from typing import Literal, get_args

import msgspec

from grader.verdicts import Layer


class Where(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cells by tag, by section heading, by a variable that they assign, or by nbgrader's grade_id. Empty: all."""

    tag: str = ""
    section: str = ""
    variable: str = ""
    grade_id: str = ""

    @property
    def anywhere(self) -> bool:
        return not (self.tag or self.section or self.variable or self.grade_id)


class CheckBase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    where: Where = Where()


class Variables(CheckBase, frozen=True, kw_only=True, tag="variables"):
    """Every name is assigned in code. Credit in parts."""

    names: tuple[str, ...]


class Functions(CheckBase, frozen=True, kw_only=True, tag="functions"):
    """Every function is defined (`use: define`) or called (`use: call`). `equivalents` name others that count."""

    names: tuple[str, ...]
    use: Literal["define", "call"] = "call"
    equivalents: dict[str, tuple[str, ...]] = {}


class Sections(CheckBase, frozen=True, kw_only=True, tag="sections"):
    """Every heading exists. With `need_code`, a code cell under it ran without an error."""

    names: tuple[str, ...]
    need_code: bool = False


class Columns(CheckBase, frozen=True, kw_only=True, tag="columns"):
    """Every column is used in code or heads a table in the outputs."""

    names: tuple[str, ...]


class Words(CheckBase, frozen=True, kw_only=True, tag="words"):
    """Markdown answers with at least `min_words` words each; `questions` are texts of headings, or numbers."""

    min_words: int
    questions: tuple[str, ...] = ()


class Ran(CheckBase, frozen=True, kw_only=True, tag="ran"):
    """The code cells ran, without an error output, and in order where `in_order`. Credit in parts per cell."""

    in_order: bool = True
    all_or_nothing: bool = False


class OutputMatch(CheckBase, frozen=True, kw_only=True, tag="output"):
    """The output equals the solution's. Cells are matched by `where`, never by position."""

    compare: Literal["auto", "number", "table", "text", "image"] = "auto"
    rel_tol: float = 1e-6
    abs_tol: float = 1e-9
    ignore_case: bool = True
    ignore_row_order: bool = False
    partial: bool = False  # credit for the part that matches
    expected: str | None = None  # instead of the solution's output


class CodeTests(CheckBase, frozen=True, kw_only=True, tag="tests"):
    """Code that must pass after the student's own code, in the sandbox. `hidden`: students do not see it."""

    code: str
    hidden: bool = False
    after_cell: str = ""  # grade_id of the cell after which it runs; empty: at the end


class ModelJudged(CheckBase, frozen=True, kw_only=True, tag="model"):
    """A yes/no question for the code model (layer 3). Points only within the item's `ai_share`."""

    question: str


class Manual(CheckBase, frozen=True, kw_only=True, tag="manual"):
    """A human decides."""

    instructions: str = ""


Check = Variables | Functions | Sections | Columns | Words | Ran | OutputMatch | CodeTests | ModelJudged | Manual


def layer_of(check: Check) -> Layer:
    """The layer that decides this kind of check."""
    if isinstance(check, OutputMatch | CodeTests):
        return "outputs"
    if isinstance(check, ModelJudged):
        return "code"
    return "human" if isinstance(check, Manual) else "structure"


CHECK_KINDS: dict[str, type[CheckBase]] = {str(kind.__struct_config__.tag): kind for kind in get_args(Check)}
