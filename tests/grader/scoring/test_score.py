"""The score: lines that sum to the total, for any maximum."""

from decimal import Decimal
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from grader.points import apportioned, plain, rounded, share_of
from grader.rubric import Cap, Item, LatePolicy, Letter, Manual, Rubric
from grader.scoring import Lateness, Score, letter_of, score
from grader.verdicts import Verdict

_POINTS = st.decimals(Decimal("0.01"), 500, places=2)


def _item(i: int, points: Decimal, deduction: bool = False) -> Item:
    return Item(id=f"i{i}", title="t", points=points, check=Manual(), deduction=deduction)


def _verdict(item: Item, share: Fraction) -> Verdict:
    points, sign = share_of(item.points, share), -1 if item.deduction else 1
    return Verdict(
        item_id=item.id,
        status="partial",
        points=sign * points,
        max_points=sign * item.points,
        reason="r",
        layer="structure",
    )


@st.composite
def _graded(draw: st.DrawFn) -> tuple[Rubric, list[Verdict], Lateness | None]:
    parts = draw(st.lists(st.tuples(_POINTS, st.booleans(), st.fractions(0, 1)), min_size=1, max_size=8))
    items = tuple(_item(i, points, taken) for i, (points, taken, _) in enumerate(parts))
    names = tuple(item.id for item in items)
    caps = draw(st.lists(st.builds(
        Cap, id=st.just("c"), at_most=_POINTS, reason=st.just("r"),
        items=st.sampled_from([(), names[:1], names[1:]]), unless=st.sampled_from(["", names[0]]),
    ), max_size=3))  # fmt: skip
    late = draw(st.none() | st.builds(LatePolicy, per_day_percent=st.decimals(0, 100, places=1)))
    rubric = Rubric(assignment="a", items=items, caps=tuple(caps), late=late)
    verdicts = [_verdict(item, share) for item, (_, _, share) in zip(items, parts, strict=True)]
    return rubric, verdicts, draw(st.none() | st.builds(Lateness, minutes=st.integers(0, 20_000)))


@given(_graded())
def test_components_sum_to_the_total_for_any_maximum(
    graded: tuple[Rubric, list[Verdict], Lateness | None],
) -> None:
    """The maximum is that of the rubric's items: from 0.01 to 4000 points here."""
    rubric, verdicts, lateness = graded
    whole = score(rubric, verdicts, lateness)
    assert whole.maximum == sum((item.points for item in rubric.items if not item.deduction), Decimal(0))
    assert sum((line.points for line in whole.components), Decimal(0)) == whole.total
    assert all(line.reason for line in whole.components)
    assert 0 <= whole.total <= whole.maximum
    assert 0 <= whole.percent <= 100
    assert whole.letter


@given(st.lists(_POINTS, min_size=1), _POINTS)
def test_apportioned_parts_are_near_and_exact(parts: list[Decimal], total: Decimal) -> None:
    given_out = apportioned(parts, total)
    assert sum(given_out, Decimal(0)) == total
    for part, share in zip(parts, given_out, strict=True):
        assert abs(Fraction(share) - Fraction(part) * Fraction(total) / Fraction(sum(parts, Decimal(0)))) <= Fraction(
            1, 100
        )


def _whole(points: str, minutes: int, **policy: int) -> Score:
    late = LatePolicy(per_day_percent=Decimal(10), **policy)  # type: ignore[arg-type]
    rubric = Rubric(assignment="a", items=(_item(0, Decimal(40)),), late=late)
    return score(rubric, [_verdict(rubric.items[0], Fraction(points))], Lateness(minutes=minutes))


def test_late_policy_is_a_line() -> None:
    assert _whole("1", 10, grace_minutes=15).total == 40
    one = _whole("1", 16, grace_minutes=15)
    assert one.total == 36
    assert one.components[-1].reason == "1 day late: 10 % of 40 points."
    assert _whole("1", 60 * 24 * 30, max_percent=50).total == 20
    assert _whole("1", 60 * 24 * 3 + 1, refuse_after_days=3).total == 0
    assert _whole("1/20", 60 * 24 * 3).total == 0


def test_cap_is_a_line_with_its_reason() -> None:
    cap = Cap(id="ran", at_most=Decimal(5), reason="The notebook does not run", unless="i0")
    rubric = Rubric(assignment="a", items=(_item(0, Decimal(10)), _item(1, Decimal(10))), caps=(cap,))
    capped = score(rubric, [_verdict(item, Fraction(1)) for item in rubric.items])
    assert capped.total == 5
    assert capped.components[-1].points == -15
    assert capped.components[-1].reason == "The notebook does not run (at most 5 points)"


def test_letters_reach_below_c() -> None:
    letters = Rubric(assignment="a", items=()).letters
    assert [letter_of(Decimal(percent), letters) for percent in (100, 93, 70, 65, 60, 59, 0)] == [
        "A", "A", "C-", "D", "D-", "F", "F",
    ]  # fmt: skip


def test_a_rubric_has_letters_of_its_own() -> None:
    letters = (Letter(letter="pass", from_percent=Decimal(50)), Letter(letter="fail", from_percent=Decimal(0)))
    rubric = Rubric(assignment="a", items=(_item(0, Decimal(40)),), letters=letters)
    shares = Fraction(1), Fraction(1, 2), Fraction(19, 40)
    assert [score(rubric, [_verdict(rubric.items[0], share)]).letter for share in shares] == ["pass", "pass", "fail"]


def test_points_are_exact_and_plain() -> None:
    assert rounded(Fraction(1, 3)) * 3 == Decimal("0.99")
    assert rounded(Decimal("0.005")) == Decimal("0.01")
    assert [plain(Decimal(text)) for text in ("10", "1E+2", "7.50", "0.00", "-0.0")] == ["10", "100", "7.5", "0", "0"]
