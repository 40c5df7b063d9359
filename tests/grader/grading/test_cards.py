"""The dashboard's cards of stored answers."""

import pytest

from grader.grading import AnswerRecord, combined_card, model_card
from grader.models import Figures
from grader.web.cards import cards_html, combined_card_html, model_card_html


def _record(model: str, end: float, total_s: float, ok: bool = True, cached: int = 0) -> AnswerRecord:
    figures = Figures(
        total_s=total_s, prompt_tokens=100, cached_tokens=cached, completion_tokens=50, prefill_s=total_s / 4,
        decode_s=total_s / 2, prefill_speed=1000 * total_s, decode_speed=10 * total_s, first_token_s=total_s / 3,
    )  # fmt: skip
    return AnswerRecord(model=model, layer="code", ok=ok, at=end, figures=figures)


def test_a_card_has_medians_and_no_speed_of_a_cached_prompt() -> None:
    records = [_record("a", 10, 2), _record("a", 20, 4), _record("a", 30, 8, cached=95), _record("b", 30, 100)]
    card = model_card("a", [*records, _record("a", 40, 50, ok=False)])
    assert (card.answered, card.total_s, card.prefill_s, card.decode_s) == (3, 4, 1, 2)
    assert card.prefill_speed == 3000, "of two prompts that were read"
    assert card.decode_speed == 40
    nothing = model_card("c", records)
    assert (nothing.answered, nothing.total_s) == (0, None)


def test_the_combined_card_counts_time_in_which_a_model_answered() -> None:
    both = combined_card([_record("a", 10, 4), _record("b", 11, 4), _record("a", 20, 1, ok=False)])
    assert both.busy_s == 5
    assert both.speedup == pytest.approx(8 / 5)
    assert both.throughput == 100 / 5
    assert (both.answered, both.failed) == (2, 1)
    assert combined_card([]).speedup is None


def test_texts_in_cards_are_escaped() -> None:
    shown = cards_html([model_card_html(model_card("<b>", []), "<i>", False), combined_card_html(combined_card([]))])
    assert "<b>" not in shown
    assert "<i>" not in shown
    assert "&lt;b&gt;" in shown
