"""Figures of agreement against published tables and values worked out by hand."""

import numpy as np
import pytest

from grader.agreement import agreement, icc_3_1, quadratic_kappa
from grader.agreement.measures import icc_3_1_of

# Shrout and Fleiss (1979), table 2: six targets, four judges; they give ICC(3,1) = .71.
_SHROUT_FLEISS = np.array(
    [[9, 2, 5, 8], [6, 1, 3, 2], [8, 4, 6, 8], [7, 1, 2, 6], [10, 5, 6, 9], [6, 2, 4, 7]], dtype=np.float64
)


def test_icc_of_the_published_table() -> None:
    assert icc_3_1_of(_SHROUT_FLEISS) == pytest.approx(0.7148, abs=1e-4)


def test_equal_graders_agree_fully() -> None:
    found = agreement([(1, 1), (2, 2), (5, 5)])
    assert (found.exact, found.within_one, found.kappa, found.bias, found.leniency) == (1, 1, 1, 0, 0)
    assert found.icc == pytest.approx(1)


def test_kappa_by_the_table_of_weights() -> None:
    """The usual form, with a confusion matrix, on a small example."""
    pairs = [(0, 0), (0, 1), (1, 1), (2, 1), (2, 2), (3, 3), (3, 1)]
    seen = np.zeros((4, 4))
    for human, machine in pairs:
        seen[human, machine] += 1
    weights = np.array([[(i - j) ** 2 for j in range(4)] for i in range(4)])
    chance = np.outer(seen.sum(axis=1), seen.sum(axis=0)) / len(pairs)
    assert quadratic_kappa(pairs) == pytest.approx(1 - (weights * seen).sum() / (weights * chance).sum())


def test_a_lenient_machine_is_told_from_a_strict_one() -> None:
    lenient = agreement([(3, 4), (3, 4), (3, 3), (4, 3)])
    assert lenient.bias == pytest.approx(0.25)
    assert lenient.leniency == pytest.approx(0.25)
    assert lenient.within_one == 1
    assert lenient.exact == 0.25


def test_too_little_for_a_figure_is_none() -> None:
    assert quadratic_kappa([(1, 1)]) is None
    assert quadratic_kappa([(1, 1), (1, 1)]) is None
    assert icc_3_1([(1, 1)]) is None
    assert agreement([]).count == 0
