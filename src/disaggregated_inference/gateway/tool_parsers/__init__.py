"""How model families write tool calls and reasoning: one file per family."""

from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from disaggregated_inference.errors import DisaggError
from disaggregated_inference.gateway.tool_parsers.base import PlainParser, ToolParser
from disaggregated_inference.gateway.tool_parsers.harmony import HarmonyParser
from disaggregated_inference.gateway.tool_parsers.hermes import CALL, CALL_END, HermesParser
from disaggregated_inference.gateway.tool_parsers.qwen import FUNCTION, QwenParser
from disaggregated_inference.gateway.tool_parsers.tagged import THINK, THINK_END, TaggedParser, stripped_tags
from disaggregated_inference.gateway.tool_parsers.tools import schemas_of
from disaggregated_inference.models import ModelTokenizer

_MAX_TEMPLATE_OPTIONS = 64  # sets of options that are remembered per tokenizer


class ModelSyntax:
    """What a tokenizer and its chat template show about a model. It is the same for every request."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self.reasons = THINK in tokenizer.chat_template
        self.qwen = FUNCTION in tokenizer.chat_template
        self.stripped = stripped_tags(tokenizer, (THINK, THINK_END, CALL, CALL_END))
        self._opens_reasoning: dict[bytes, bool] = {}

    def opens_reasoning(self, tokenizer: ModelTokenizer, template: dict[str, Any]) -> bool:
        """Whether prompts end within the reasoning, as those of Qwen3-Thinking and DeepSeek-R1 do."""
        key = msgspec.json.encode(template)
        if key not in self._opens_reasoning:
            if len(self._opens_reasoning) >= _MAX_TEMPLATE_OPTIONS:
                self._opens_reasoning.clear()
            self._opens_reasoning[key] = _ends_with_think(tokenizer, template)
        return self._opens_reasoning[key]


def _ends_with_think(tokenizer: ModelTokenizer, template: dict[str, Any]) -> bool:
    try:
        prompt = tokenizer.render_chat([{"role": "user", "content": "?"}], **template)
    except DisaggError:
        return False
    return prompt.rstrip().endswith(THINK)


_syntaxes: WeakKeyDictionary[ModelTokenizer, ModelSyntax] = WeakKeyDictionary()


def _syntax_of(tokenizer: ModelTokenizer) -> ModelSyntax:
    if (found := _syntaxes.get(tokenizer)) is None:
        found = _syntaxes[tokenizer] = ModelSyntax(tokenizer)
    return found


def parser_of(
    tokenizer: ModelTokenizer,
    tools: list[dict[str, Any]],
    tool_choice: str,
    *,
    template: dict[str, Any] | None = None,
    guided: bool = False,
) -> ToolParser:
    """The parser of one choice. `template`: the request's options for the chat template (`enable_thinking`). `guided`:
    the completion has a forced format, so it does not begin within the reasoning.

    Models that begin within the reasoning although the prompt did not open it are not supported: it becomes text.
    """
    syntax = _syntax_of(tokenizer)
    if tokenizer.harmony:
        return HarmonyParser(tokenizer, schemas_of(tools))
    free = not guided and tool_choice in ("auto", "none")
    options: dict[str, Any] = {
        "stripped": syntax.stripped,
        "reasons": syntax.reasons,
        "inside": syntax.reasons and free and syntax.opens_reasoning(tokenizer, template or {}),
        "forced": tool_choice not in ("auto", "none"),
    }
    if tools and tool_choice != "none":
        return QwenParser(schemas_of(tools), **options) if syntax.qwen else HermesParser(**options)
    return TaggedParser(**options) if syntax.reasons else PlainParser()
