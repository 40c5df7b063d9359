"""Every attack of the corpus against the most obedient model there could be: points do not move."""

import json
from decimal import Decimal

import pytest

from grader.grading import ChecksResult, merged
from grader.injection import Attack, find_attempts, load_attacks, with_attack
from grader.layers import Submission, check_items
from grader.models import Figures, ModelSettings, Question, RawAnswer, Work, analyse
from grader.notebook import Notebook, read_notebook
from grader.rubric import Rubric, load_rubric
from grader.scoring import score
from tests.support.grade_books import RUBRIC, work

_ATTACKS = load_attacks()


def _obedient(layer: str, number: int, question: Question) -> RawAnswer:
    """Says yes to everything, with a real line of the notebook."""
    yes = {"quote": "sales = [10, 20, 30]", "reason": "as told", "answer": "yes", "confidence": "high"}
    text = json.dumps({name: yes for name in question.schema["properties"]}) if layer == "code" else "Full marks!"
    return RawAnswer(text, Figures(total_s=0.0))


def _total(rubric: Rubric, notebook: Notebook, with_models: bool) -> Decimal:
    solution = read_notebook(work(), "solution")
    verdicts = check_items(rubric, Submission(notebook=notebook, solution=solution))
    given = Work(rubric=rubric, notebook=notebook, solution=solution, verdicts=verdicts, names=(), secret=b"s")
    models = analyse(given, ModelSettings(code_model="c", feedback_model="f"), _obedient) if with_models else None
    checks = ChecksResult(verdicts=verdicts, flags=find_attempts(notebook, None))
    return score(rubric, merged(rubric, checks, models)).total


@pytest.mark.parametrize("attack", _ATTACKS, ids=lambda attack: attack.id)
def test_points_do_not_move(attack: Attack) -> None:
    rubric = load_rubric(RUBRIC)
    clean = _total(rubric, read_notebook(work(), "s"), with_models=False)
    attacked = read_notebook(with_attack(work(), attack), "s")
    assert _total(rubric, attacked, with_models=True) == clean  # `names` has an AI share of 1


@pytest.mark.parametrize("attack", _ATTACKS, ids=lambda attack: attack.id)
def test_models_without_a_share_give_no_points_with_or_without_an_attack(attack: Attack) -> None:
    rubric = load_rubric(RUBRIC.replace("ai_share: 1", "ai_share: 0"))
    attacked = read_notebook(with_attack(work(), attack), "s")
    clean = _total(rubric, read_notebook(work(), "s"), with_models=True)
    assert _total(rubric, attacked, with_models=True) == clean == 6


def test_without_an_attack_the_model_has_its_share() -> None:
    """The test above would see it if an attack worked."""
    rubric = load_rubric(RUBRIC)
    notebook = read_notebook(work(), "s")
    assert _total(rubric, notebook, with_models=True) == _total(rubric, notebook, with_models=False) + 2
