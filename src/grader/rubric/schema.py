"""The rubric: items with points, and the rules that turn them into a grade. One schema, JSON or YAML."""

from decimal import Decimal
from typing import Literal

import msgspec

from grader.points import STEP
from grader.rubric.checks import Check

ZERO = Decimal(0)


class Level(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named quality, as `good`, with the share of the points that it earns. For humans and models."""

    name: str
    share: Decimal
    description: str = ""


class CreditRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of the points when the check fails and the code (without comments and strings) meets the condition.
    The rule with the highest priority wins."""

    when: Literal["regex", "not_regex", "all_of", "any_of"]
    patterns: tuple[str, ...]
    multiplier: Decimal
    priority: int = 0
    explanation: str = ""


class Item(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the rubric. `guideline` is private: graders and models see it, students do not. `deduction`: the
    points are taken away when the check holds. `ai_share`: the part of the points that a model may decide (0 to 1)."""

    id: str
    title: str
    points: Decimal
    check: Check
    group: str = ""
    guideline: str = ""
    deduction: bool = False
    ai_share: Decimal = ZERO
    levels: tuple[Level, ...] = ()
    credit_rules: tuple[CreditRule, ...] = ()
    feedback: str = ""  # shown to the student when points are lost


class Cap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At most `at_most` points for the items (empty: for all). With `unless`: only when that item is not earned."""

    id: str
    at_most: Decimal
    reason: str
    items: tuple[str, ...] = ()
    unless: str = ""


class LatePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Percent of the maximum lost per started day after the grace time, up to `max_percent`."""

    per_day_percent: Decimal
    grace_minutes: int = 0
    max_percent: Decimal = Decimal(100)
    refuse_after_days: int | None = None  # later: 0 points


class Letter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The letter from this percentage on."""

    letter: str
    from_percent: Decimal


LETTERS = tuple(
    Letter(letter=letter, from_percent=Decimal(percent))
    for letter, percent in [
        ("A", 93), ("A-", 90), ("B+", 87), ("B", 83), ("B-", 80), ("C+", 77), ("C", 73), ("C-", 70),
        ("D+", 67), ("D", 63), ("D-", 60), ("F", 0),
    ]
)  # fmt: skip


class RunLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a notebook may use in the sandbox."""

    cell_timeout_s: float = 60
    notebook_timeout_s: float = 600
    cpu_s: int = 600
    memory_mib: int = 2048
    disk_mib: int = 256
    processes: int = 128
    output_kib: int = 1024


class Rubric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`total` is checked against the items when it is given. `ai_share_max` bounds the models' part of all points."""

    assignment: str
    items: tuple[Item, ...]
    schema: Literal[1] = 1
    version: str = "1"
    title: str = ""
    instructions: str = ""
    language: Literal["python", "r", "any"] = "any"
    total: Decimal | None = None
    ai_share_max: Decimal = ZERO
    caps: tuple[Cap, ...] = ()
    late: LatePolicy | None = None
    letters: tuple[Letter, ...] = LETTERS
    point_step: Decimal = STEP
    rerun: bool = False
    limits: RunLimits = RunLimits()

    @property
    def maximum(self) -> Decimal:
        return sum((item.points for item in self.items if not item.deduction), ZERO)

    def item(self, item_id: str) -> Item:
        return next(item for item in self.items if item.id == item_id)
