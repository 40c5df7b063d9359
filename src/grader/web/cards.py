"""The cards of the gateway's dashboard, as HTML in which every text is escaped."""

from collections.abc import Iterable
from html import escape

from grader.grading import CombinedCard, ModelCard

_STYLE = """<style>
.cards{display:flex;flex-wrap:wrap;gap:1rem}
.cards .card{flex:1 1 14rem;min-width:0;border:1px solid #d9dce1;border-radius:8px;padding:.8rem 1rem}
.cards .name{font-weight:600;overflow-wrap:anywhere}
.cards .under,.cards .foot,.cards .unit{color:#5b6472;font-size:12px}
.cards .figures{display:flex;gap:.6rem;margin:.6rem 0}.cards .figure{flex:1 1 0;min-width:0}
.cards .label{font-size:12px;color:#5b6472}.cards .value{font-size:1.45rem;font-variant-numeric:tabular-nums}
.cards .ok:before,.cards .bad:before{content:"\\25CF\\00A0";color:#1a7f37}.cards .bad:before{color:#c0392b}
</style>"""
Figure = tuple[str, str, str]  # label, value, what stands under it


def cards_html(cards: Iterable[str]) -> str:
    return f'{_STYLE}<div class="cards">{"".join(cards)}</div>'


def model_card_html(card: ModelCard, verdict: str, is_up: bool) -> str:
    figures = [
        ("Prefill", seconds(card.prefill_s), f"{rate(card.prefill_speed)} tok/s"),
        ("Decode", seconds(card.decode_s), f"{rate(card.decode_speed)} tok/s"),
        ("Total", seconds(card.total_s), f"first token {seconds(card.first_token_s)}"),
    ]
    foot = f"medians of {card.answered} answers" if card.answered else "no answer yet"
    return _card(card.model, f'<div class="under {"ok" if is_up else "bad"}">{escape(verdict)}</div>', figures, foot)


def combined_card_html(card: CombinedCard) -> str:
    figures = [
        ("Total", seconds(card.busy_s or None), "a model answered"),
        ("Speedup", "-" if card.speedup is None else f"{card.speedup:.2f}x", "by overlapping"),
        ("Throughput", rate(card.throughput), "tok/s average"),
    ]
    under = '<div class="under">both models, about this assignment</div>'
    return _card("Combined", under, figures, f"{card.answered} answers, {card.failed} requests without one")


def _card(name: str, under: str, figures: Iterable[Figure], foot: str) -> str:
    shown = "".join(
        f'<div class="figure"><div class="label">{escape(label)}</div><div class="value">{escape(value)}</div>'
        f'<div class="unit">{escape(unit)}</div></div>'
        for label, value, unit in figures
    )
    return (
        f'<div class="card"><div class="name">{escape(name)}</div>{under}<div class="figures">{shown}</div>'
        f'<div class="foot">{escape(foot)}</div></div>'
    )


def seconds(value: float | None) -> str:
    """As the dashboard writes them."""
    if value is None:
        return "-"
    if value < 0.0995:
        return f"{value * 1000:.{1 if value < 0.00995 else 0}f} ms"
    return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s"


def rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"
