"""How hard a model should think, as every API may ask for it and as chat templates know it."""

from typing import Any, Literal

from disaggregated_inference.models.tokenizer import ModelTokenizer

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_NEAR = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}

_THINKING = ("enable_thinking", "reasoning_effort", "thinking", "<think>")  # a template with one of them knows how


def can_think(tokenizer: ModelTokenizer) -> bool:
    return any(word in tokenizer.chat_template for word in _THINKING)


def nearest(effort: Effort) -> str:
    """Templates know low, medium and high."""
    return _NEAR.get(effort, effort)


def for_template(effort: Effort | None) -> dict[str, Any]:
    """Some templates know how hard, others whether at all; what one of them does not know it does not read."""
    return {"reasoning_effort": nearest(effort), "enable_thinking": effort != "none"} if effort else {}
