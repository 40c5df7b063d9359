"""The verdicts of all layers as one: which layer decides an item, and when the instructor does."""

from collections.abc import Mapping

import msgspec

from grader.grading.results import ChecksResult
from grader.models import FEEDBACK_CONTRADICTS, Feedback, ModelsResult, contradicted_items
from grader.rubric import Item, ModelJudged, Rubric
from grader.verdicts import Flag, Verdict


def merged(rubric: Rubric, checks: ChecksResult, models: ModelsResult | None) -> tuple[Verdict, ...]:
    """Layers 1 and 2 own their items. A model's verdict takes the place of an open one only, and never in a notebook
    that tries to give orders to the model. Where the two models disagree, neither decides."""
    said = {verdict.item_id: verdict for verdict in models.verdicts} if models else {}
    if any(flag.code == "injection" for flag in checks.flags):
        said = {name: _distrusted(verdict) for name, verdict in said.items()}
    verdicts = tuple(_with_model(rubric.item(one.item_id), one, said) for one in checks.verdicts)
    return _disputed(models.feedback, verdicts) if models and models.feedback else verdicts


def _distrusted(verdict: Verdict) -> Verdict:
    reason = "needs review: the notebook tries to give orders to the model, so its answer does not count"
    return msgspec.structs.replace(_undecided(verdict, reason), evidence=())


def _undecided(verdict: Verdict, reason: str) -> Verdict:
    nothing = verdict.points * 0
    pending = max(verdict.max_points, nothing)
    return msgspec.structs.replace(verdict, status="needs_review", points=nothing, pending=pending, reason=reason)


def _disputed(feedback: Feedback, verdicts: tuple[Verdict, ...]) -> tuple[Verdict, ...]:
    decided = tuple(one for one in verdicts if one.layer == "code" and one.max_points)
    against = contradicted_items(feedback, decided)
    return tuple(_disagreed(one) if one.item_id in against else one for one in verdicts)


def _disagreed(verdict: Verdict) -> Verdict:
    message = f"the feedback model and the code model disagree about {verdict.item_id}"
    flag = Flag(code=FEEDBACK_CONTRADICTS, message=message)
    undecided = _undecided(verdict, f"needs review: the feedback model disagrees; {verdict.reason}")
    return msgspec.structs.replace(undecided, flags=(*verdict.flags, flag))


def _with_model(item: Item, checked: Verdict, said: Mapping[str, Verdict]) -> Verdict:
    if checked.status != "needs_review" or item.id not in said:
        return checked
    model = said[item.id]
    if isinstance(item.check, ModelJudged):
        return model
    return msgspec.structs.replace(checked, reason=f"{checked.reason}; {model.reason}", evidence=model.evidence)
