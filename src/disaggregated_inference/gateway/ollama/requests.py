"""Requests of Ollama's API. null = unset; unknown fields and options are ignored, as Ollama does."""

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from disaggregated_inference.api import OutputFormat, RequestOptions
from disaggregated_inference.api.sampling import (
    MOST_TOKENS,
    ClientSalt,
    Logprobs,
    Penalty,
    Probability,
    RepetitionPenalty,
    Stops,
    Temperature,
)
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.gateway.closed_schema import close_objects
from disaggregated_inference.gateway.reasoning_effort import can_think
from disaggregated_inference.gateway.tool_parsers.tools import require_tools
from disaggregated_inference.gateway.validation import read_request, without_nulls
from disaggregated_inference.models import ModelTokenizer

_REFUSED = {  # they would change the completion
    "template": "the model's own chat template is used; leave it out, or send a rendered prompt with raw",
    "suffix": "the models write what follows the prompt; describe the gap in the prompt",
    "context": "tokens of an earlier completion are not supported; send the conversation to /api/chat",
}

_NUMBER = r"\d+(\.\d+)?"
_Duration = Annotated[str, Meta(pattern=rf"^([-+]?({_NUMBER}|({_NUMBER}(ns|us|µs|ms|s|m|h))+))?$")]  # as Go writes it

_NumPredict = Annotated[int, Meta(le=MOST_TOKENS)]  # below 1: see `fills_window`
_TopK = Annotated[int, Meta(le=MOST_TOKENS)]  # below 1: no limit

Kind = TypeVar("Kind", bound=msgspec.Struct)


class OllamaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options that are supported, and samplers that are refused. Others are about loading a model and are ignored."""

    num_predict: _NumPredict | None = None
    num_ctx: int | None = None  # ignored: a prompt may always fill the context window
    temperature: Temperature | None = None
    top_k: _TopK | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: int | None = None
    stop: str | Stops | None = None
    mirostat: int | None = None
    typical_p: float | None = None

    def require_supported(self) -> None:
        for name, value, harmless in (("mirostat", self.mirostat, 0), ("typical_p", self.typical_p, 1)):
            if value not in (None, harmless):
                raise BadRequest(f"options.{name}: not supported; use temperature, top_k, top_p or min_p")

    @property
    def fills_window(self) -> bool:
        """-1 (no limit) and -2 (until the context window is full) mean the same here."""
        return self.num_predict is not None and self.num_predict <= 0

    def plain(self) -> RequestOptions:
        """For the orchestrator; None: unset."""
        self.require_supported()
        return {
            "max_tokens": None if self.fills_window else self.num_predict,
            "temperature": self.temperature,
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "top_p": self.top_p,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repeat_penalty,
            "seed": None if self.seed is None or self.seed < 0 else self.seed,
            "stop": self.stop or None,
        }


class OllamaRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of both endpoints."""

    model: str = ""
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | _Duration | None = None  # has no effect: models stay loaded
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    cache_salt: ClientSalt | None = None  # ours

    @property
    def is_streamed(self) -> bool:
        return self.stream is not False

    @property
    def unloads(self) -> bool:
        """Without a prompt, a keep_alive of 0 unloads a model."""
        return self.keep_alive is not None and str(self.keep_alive).rstrip("smh") in ("0", "0.0")

    def sampling(self) -> OllamaOptions:
        # Ollama reads 5.0 as an integer.
        given = {name: int(value) if _is_whole(value) else value for name, value in (self.options or {}).items()}
        return read(given, OllamaOptions)

    def plain(self) -> RequestOptions:
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs: set it to true")
        return self.sampling().plain() | {"logprobs": self.top_logprobs or 0 if self.logprobs else None}

    def output_format(self) -> OutputFormat | None:
        if not self.format:
            return None
        schema = close_objects(self.format) if isinstance(self.format, dict) else None
        return OutputFormat(type="json_schema" if schema else "json_object", schema=schema)

    def template(self, tokenizer: ModelTokenizer) -> dict[str, Any]:
        """Templates have different names for thinking. Each ignores the names that it does not know."""
        if self.think is None:
            return {}
        text, thinks = tokenizer.chat_template, bool(self.think)
        if self.think and not can_think(tokenizer):
            raise BadRequest(f'"{self.model}" does not support thinking: leave out think')
        if isinstance(self.think, str) and "reasoning_effort" not in text:
            raise BadRequest(f'think value "{self.think}" is not supported for this model: give true or false')
        effort = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return effort | {"enable_thinking": thinks, "thinking": thinks}


class OllamaGenerateRequest(OllamaRequest, frozen=True, kw_only=True):
    prompt: str | None = None
    system: str | None = None
    template_given: str | None = msgspec.field(default=None, name="template")
    raw: bool | None = None
    suffix: str | None = None
    images: list[Any] | None = None
    context: list[Any] | None = None

    def require_supported(self) -> None:
        given = {"template": self.template_given, "suffix": self.suffix, "context": self.context}
        for name, value in given.items():
            if value:
                raise BadRequest(f"{name}: {_REFUSED[name]}")
        if self.raw and self.system:
            raise BadRequest("raw mode does not support system: write it into the prompt")
        if self.raw and self.images:
            raise BadRequest("raw mode does not support images: leave out raw, or use /api/chat")

    def messages(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt} | _images(self.images)]


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """In OpenAI's form, which chat templates read; images in the form of Ollama nodes."""
        plain: dict[str, Any] = {"role": self.role, "content": self.content or ""} | _images(self.images)
        if self.thinking:
            plain |= {"reasoning_content": self.thinking, "thinking": self.thinking}  # Qwen's name and GPT-OSS's
        if self.tool_calls:
            plain["tool_calls"] = [{"type": "function"} | call for call in self.tool_calls]
        if self.tool_name:
            plain["name"] = self.tool_name
        return plain | ({"tool_call_id": self.tool_call_id} if self.tool_call_id else {})


class OllamaChatRequest(OllamaRequest, frozen=True, kw_only=True):
    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None

    def plain_tools(self, tokenizer: ModelTokenizer) -> list[dict[str, Any]]:
        tools = [{"type": "function"} | tool for tool in self.tools or ()]
        require_tools(tools)
        if tools and not can_call_tools(tokenizer):
            raise BadRequest(f'"{self.model}" does not support tools: leave them out, or use another model')
        return tools


class OllamaModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`name` is the old name of the field `model`."""

    model: str | None = None
    name: str | None = None


def can_call_tools(tokenizer: ModelTokenizer) -> bool:
    return "tools" in tokenizer.chat_template


def _images(images: list[Any] | None) -> dict[str, Any]:
    return {"images": images} if images else {}


def read(body: dict[str, Any], kind: type[Kind]) -> Kind:
    return read_request(without_nulls(body), kind)


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()
