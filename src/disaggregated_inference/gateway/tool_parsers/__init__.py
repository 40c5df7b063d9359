"""How families of models write tool calls and thoughts: one file each."""

from typing import Any

from disaggregated_inference.errors import DisaggError
from disaggregated_inference.gateway.tool_parsers.base import (
    ContentDelta,
    PlainParser,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    ToolParser,
)
from disaggregated_inference.gateway.tool_parsers.harmony import HarmonyParser, speaks_harmony
from disaggregated_inference.gateway.tool_parsers.hermes import CALL, CALL_END, HermesParser
from disaggregated_inference.gateway.tool_parsers.qwen import FUNCTION, QwenParser
from disaggregated_inference.gateway.tool_parsers.tagged import THINK, THINK_END, TaggedParser, stripped_tags
from disaggregated_inference.gateway.tool_parsers.tools import require_tools, schemas_of
from disaggregated_inference.models.tokenizer import ModelTokenizer


def parser_of(
    tokenizer: ModelTokenizer,
    tools: list[dict[str, Any]],
    tool_choice: str,
    *,
    template: dict[str, Any] | None = None,
    guided: bool = False,
) -> ToolParser:
    """One choice's parser, by what the model's chat template speaks of. `template` are the request's own options for it
    (`enable_thinking`); `guided`: the answer has a forced form, and so begins outside of any thought.

    Not known here: models that begin within a thought though their prompt did not open it; theirs is text.
    """
    if speaks_harmony(tokenizer):
        return HarmonyParser(tokenizer, schemas_of(tools))
    thoughts = THINK in tokenizer.chat_template
    free = not guided and tool_choice in ("auto", "none")
    options: dict[str, Any] = {
        "stripped": stripped_tags(tokenizer, (THINK, THINK_END, CALL, CALL_END)),
        "thoughts": thoughts,
        "inside": thoughts and free and _opens_thought(tokenizer, template or {}),
        "forced": tool_choice not in ("auto", "none"),
    }
    if tools and tool_choice != "none":
        qwen = FUNCTION in tokenizer.chat_template
        return QwenParser(schemas_of(tools), **options) if qwen else HermesParser(**options)
    return TaggedParser(**options) if thoughts else PlainParser()


def _opens_thought(tokenizer: ModelTokenizer, template: dict[str, Any]) -> bool:
    """Whether prompts end within a thought, as Qwen3-Thinking's and DeepSeek-R1's do."""
    try:
        prompt = tokenizer.render_chat([{"role": "user", "content": "?"}], **template)
    except DisaggError:
        return False
    return prompt.rstrip().endswith(THINK)


__all__ = [
    "ContentDelta",
    "PlainParser",
    "ReasoningDelta",
    "TextDelta",
    "ToolCallArguments",
    "ToolCallStart",
    "ToolParser",
    "parser_of",
    "require_tools",
]
