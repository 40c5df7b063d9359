"""The dashboard's cards, of the answers in the grade book: one for each model, and one for all."""

import statistics
from collections.abc import Sequence

import msgspec

from grader.models import Figures
from grader.store import Assignment, Database, StoredAnswer, recent_answers

_NEWEST = 500
_CACHED = 0.9  # of the prompt: then its prefill has no speed that means anything


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a model, or its failure. `at`: when it ended."""

    model: str
    layer: str
    ok: bool
    at: float
    figures: Figures

    @property
    def is_cached(self) -> bool:
        return self.figures.cached_tokens >= _CACHED * self.figures.prompt_tokens


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """Medians. None: not reported."""

    model: str
    answered: int
    prefill_s: float | None
    prefill_speed: float | None
    decode_s: float | None
    decode_speed: float | None
    total_s: float | None
    first_token_s: float | None


class CombinedCard(msgspec.Struct, frozen=True, kw_only=True):
    """`busy_s`: in which at least one model answered. `speedup`: by overlapping. `throughput`: tokens per second."""

    answered: int
    failed: int
    busy_s: float
    speedup: float | None
    throughput: float | None


def answer_records(database: Database, assignment: Assignment) -> list[AnswerRecord]:
    """Newest first."""
    return [_record(one) for one in recent_answers(database, assignment.id, _NEWEST)]


def _record(one: StoredAnswer) -> AnswerRecord:
    figures = msgspec.json.decode(one.figures, type=Figures)
    return AnswerRecord(model=one.model, layer=one.layer, ok=not one.error, at=one.at, figures=figures)


def model_card(model: str, records: Sequence[AnswerRecord]) -> ModelCard:
    answered = [one for one in records if one.model == model and one.ok]
    fresh = [one for one in answered if not one.is_cached]
    return ModelCard(
        model=model,
        answered=len(answered),
        prefill_s=_median(answered, "prefill_s"),
        prefill_speed=_median(fresh, "prefill_speed"),
        decode_s=_median(answered, "decode_s"),
        decode_speed=_median(answered, "decode_speed"),
        total_s=_median(answered, "total_s"),
        first_token_s=_median(answered, "first_token_s"),
    )


def _median(records: Sequence[AnswerRecord], name: str) -> float | None:
    known = [value for one in records if (value := getattr(one.figures, name))]
    return statistics.median(known) if known else None


def combined_card(records: Sequence[AnswerRecord]) -> CombinedCard:
    answered = [one for one in records if one.ok]
    busy_s = _busy_s(answered)
    alone_s = sum(one.figures.total_s for one in answered)
    tokens = sum(one.figures.completion_tokens for one in answered)
    return CombinedCard(
        answered=len(answered),
        failed=len(records) - len(answered),
        busy_s=busy_s,
        speedup=alone_s / busy_s if busy_s else None,
        throughput=tokens / busy_s if busy_s else None,
    )


def _busy_s(records: Sequence[AnswerRecord]) -> float:
    busy_s, until = 0.0, float("-inf")
    for start, end in sorted((one.at - one.figures.total_s, one.at) for one in records):
        busy_s += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy_s
