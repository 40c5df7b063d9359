"""The score: components that sum to the total, each with its reason."""

from decimal import Decimal
from typing import Literal

import msgspec

from grader.verdicts import Evidence, Layer, Status

ComponentKind = Literal["item", "deduction", "cap", "late", "floor", "override"]


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the score. Caps, late policy and the floor at 0 are lines of their own, with negative or positive
    points, so that the lines always sum to the total."""

    id: str
    title: str
    kind: ComponentKind
    points: Decimal
    reason: str
    max_points: Decimal = Decimal(0)
    group: str = ""
    status: Status | None = None
    layer: Layer | None = None
    pending: Decimal = Decimal(0)
    evidence: tuple[Evidence, ...] = ()


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """`pending`: points that review may still add. `percent` is of `maximum`."""

    components: tuple[Component, ...]
    total: Decimal
    maximum: Decimal
    percent: Decimal
    letter: str
    pending: Decimal = Decimal(0)

    def __post_init__(self) -> None:
        whole = sum((component.points for component in self.components), Decimal(0))
        assert whole == self.total, f"components sum to {whole}, not to {self.total}"

    @property
    def needs_review(self) -> bool:
        return any(component.status == "needs_review" for component in self.components)
