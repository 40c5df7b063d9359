"""What a layer says about one rubric item, and the places in the notebook that it rests on."""

from decimal import Decimal
from typing import Literal

import msgspec

Status = Literal["earned", "partial", "not_earned", "needs_review"]
# structure: layer 1; outputs: layer 2; code: layer 3 (code model); feedback: layer 4; human: an instructor.
Layer = Literal["structure", "outputs", "code", "feedback", "human"]
Part = Literal["source", "output", "file"]


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """A place in the notebook. `cell` counts from 0; `line` counts from 1, 0 is the whole cell."""

    cell: int | None = None
    line: int = 0
    quote: str = ""
    part: Part = "source"


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a human should see. A flag has no points. `code` is its stable name: `injection`, `copied`…"""

    code: str
    message: str
    evidence: tuple[Evidence, ...] = ()


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One item's points with their reason. A `needs_review` item has the points that are certain; review may add
    `pending` more. A failed or missing model answer is `needs_review`, never a number."""

    item_id: str
    status: Status
    points: Decimal
    max_points: Decimal
    reason: str
    layer: Layer
    evidence: tuple[Evidence, ...] = ()
    pending: Decimal = Decimal(0)
    flags: tuple[Flag, ...] = ()
    item_hash: str = ""

    def __post_init__(self) -> None:
        assert self.reason, f"{self.item_id}: a verdict without a reason"
        low, high = min(Decimal(0), self.max_points), max(Decimal(0), self.max_points)
        assert low <= self.points <= high, f"{self.item_id}: {self.points} of {self.max_points} points"
