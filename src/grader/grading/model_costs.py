"""What the models cost: tokens, the prefix cache's part of them, bytes moved, and the gain of asking both at once."""

from collections.abc import Iterable

import msgspec

from grader.models import Figures, ModelsResult


class ModelFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over notebooks. An answer is unusable if it cannot be read, or did not come. `speedup`: both models one
    after the other, over both at once, as they ran; without notebooks that have an answer of an earlier grading."""

    notebooks: int = 0
    answers: int = 0
    unusable_answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    kv_bytes: int = 0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0
    wall_s: float = 0.0
    sequential_s: float = 0.0

    @property
    def hit_rate(self) -> float | None:
        """Prompt tokens that the prefix cache had."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def speedup(self) -> float | None:
        return self.sequential_s / self.wall_s if self.wall_s else None

    @property
    def kv_bytes_per_notebook(self) -> float | None:
        return self.kv_bytes / self.notebooks if self.notebooks else None


def model_figures(results: Iterable[ModelsResult]) -> ModelFigures:
    found = list(results)
    runs = [run for result in found for run in result.runs]
    timed = [result for result in found if result.speedup is not None]
    figures = [run.figures for run in runs if run.figures]
    return ModelFigures(
        notebooks=len(found),
        answers=len(runs),
        unusable_answers=sum(bool(run.problem) for run in runs),
        prompt_tokens=sum(one.prompt_tokens for one in figures),
        cached_tokens=sum(one.cached_tokens for one in figures),
        completion_tokens=sum(one.completion_tokens for one in figures),
        kv_bytes=sum(one.kv_bytes or 0 for one in figures),
        prefill_s=_sum(figures, "prefill_s"),
        transfer_s=_sum(figures, "transfer_s"),
        decode_s=_sum(figures, "decode_s"),
        wall_s=sum(result.wall_s for result in timed),
        sequential_s=sum(result.sequential_s for result in timed),
    )


def _sum(figures: list[Figures], name: str) -> float:
    return sum(getattr(one, name) or 0.0 for one in figures)


def figures_line(figures: ModelFigures) -> str:
    """For people."""
    parts = [f"models: {figures.answers} answers about {figures.notebooks} notebooks"]
    if figures.unusable_answers:
        parts.append(f"{figures.unusable_answers} answers unusable")
    if figures.hit_rate is not None:
        parts.append(f"prefix cache {figures.hit_rate:.0%} of the prompts")
    if figures.speedup is not None:
        parts.append(f"both models at once {figures.speedup:.2f}x")
    return ", ".join(parts)
