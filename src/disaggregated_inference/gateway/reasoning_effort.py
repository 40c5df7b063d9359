"""Reasoning effort: what each API calls it, and what chat templates call it."""

from typing import Any, Literal

from disaggregated_inference.models import ModelTokenizer

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_NEAREST = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
_REASONING_WORDS = ("enable_thinking", "reasoning_effort", "thinking", "<think>")


def can_think(tokenizer: ModelTokenizer) -> bool:
    return any(word in tokenizer.chat_template for word in _REASONING_WORDS)


def nearest_effort(effort: Effort) -> str:
    """Templates know low, medium and high."""
    return _NEAREST.get(effort, effort)


def template_options(effort: Effort | None) -> dict[str, Any]:
    """Some templates know how much, others only whether to think. Each ignores the option that it does not know."""
    return {"reasoning_effort": nearest_effort(effort), "enable_thinking": effort != "none"} if effort else {}
