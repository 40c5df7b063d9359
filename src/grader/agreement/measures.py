"""Agreement between two graders: pure functions of pairs of points. None: too few or too equal values for a figure."""

from collections.abc import Sequence

import msgspec
import numpy as np

Pair = tuple[float, float]  # human, machine

_SAME = 1e-9


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """Of machine points with a human's. `bias` and `limits`: Bland and Altman, in points; `leniency`: share of the
    pairs in which the machine gave more, minus the share in which it gave less."""

    count: int
    exact: float | None
    within_one: float | None
    kappa: float | None  # quadratic weighted
    icc: float | None  # ICC(3,1): consistency of single gradings
    mean_error: float | None  # absolute, in points
    bias: float | None  # machine minus human
    limits: tuple[float, float] | None  # 95 % limits of agreement
    leniency: float | None


def agreement(pairs: Sequence[Pair], one: float = 1.0) -> Agreement:
    """`one`: what counts as one step, in points."""
    if not pairs:
        return Agreement(
            count=0,
            exact=None,
            within_one=None,
            kappa=None,
            icc=None,
            mean_error=None,
            bias=None,
            limits=None,
            leniency=None,
        )
    difference = np.array([machine - human for human, machine in pairs])
    return Agreement(
        count=len(pairs),
        exact=float(np.mean(np.abs(difference) <= _SAME)),
        within_one=float(np.mean(np.abs(difference) <= one + _SAME)),
        kappa=quadratic_kappa(pairs),
        icc=icc_3_1(pairs),
        mean_error=float(np.mean(np.abs(difference))),
        bias=float(np.mean(difference)),
        limits=_limits(difference),
        leniency=float(np.mean(difference > _SAME) - np.mean(difference < -_SAME)),
    )


def quadratic_kappa(pairs: Sequence[Pair]) -> float | None:
    """Cohen's kappa with quadratic weights. In points: the weights of disagreement are squared differences, so that
    no list of levels is needed. None where both graders gave one and the same value throughout."""
    human, machine = _columns(pairs)
    expected = float(np.mean((human[:, None] - machine[None, :]) ** 2))
    if len(pairs) < 2 or expected <= _SAME:
        return None
    return 1.0 - float(np.mean((human - machine) ** 2)) / expected


def icc_3_1(pairs: Sequence[Pair]) -> float | None:
    """Two-way mixed effects, consistency, single grader (Shrout and Fleiss, 1979)."""
    return icc_3_1_of(np.column_stack(_columns(pairs))) if len(pairs) > 1 else None


def icc_3_1_of(table: "np.ndarray[tuple[int, int], np.dtype[np.float64]]") -> float | None:
    """`table`: a row for each target, a column for each grader."""
    rows, columns = table.shape
    mean = table.mean()
    between = columns * float(((table.mean(axis=1) - mean) ** 2).sum()) / (rows - 1)
    residual = table - table.mean(axis=1, keepdims=True) - table.mean(axis=0, keepdims=True) + mean
    error = float((residual**2).sum()) / ((rows - 1) * (columns - 1))
    total = between + (columns - 1) * error
    return (between - error) / total if total > _SAME else None


def _columns(pairs: Sequence[Pair]) -> "tuple[np.ndarray[tuple[int], np.dtype[np.float64]], ...]":
    return tuple(np.array(column, dtype=np.float64) for column in zip(*pairs, strict=True))


def _limits(difference: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> tuple[float, float] | None:
    if len(difference) < 2:
        return None
    centre, spread = float(difference.mean()), 1.96 * float(difference.std(ddof=1))
    return centre - spread, centre + spread
