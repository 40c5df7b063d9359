"""What Ollama's programs ask for. Null is absent; fields and options nobody knows are let be, as Ollama does; what
would change the answer and cannot be had is refused."""

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from disaggregated_inference.errors import BadRequest
from disaggregated_inference.gateway.reasoning_effort import can_think
from disaggregated_inference.gateway.tool_parsers.tools import require_tools
from disaggregated_inference.models.tokenizer import ModelTokenizer

_REFUSED = {
    "template": "the model's own chat template is used; leave it out, or send a whole prompt with raw",
    "suffix": "these models write what comes after the prompt; write the gap into the prompt yourself",
    "context": "tokens of an earlier answer are not taken; send the conversation to /api/chat",
}

_NUMBER = r"\d+(\.\d+)?"
_Duration = Annotated[str, Meta(pattern=rf"^([-+]?({_NUMBER}|({_NUMBER}(ns|us|µs|ms|s|m|h))+))?$")]  # as Go writes it

Kind = TypeVar("Kind", bound=msgspec.Struct)


class OllamaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Those that have a meaning here, and samplers that cannot be had. Others are about how a model is loaded."""

    num_predict: int | None = None
    num_ctx: int | None = None  # room for it is there, up to the window, as in Ollama; what does not fit is refused
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    mirostat: int | None = None
    typical_p: float | None = None

    def require_possible(self) -> None:
        for name, value, harmless in (("mirostat", self.mirostat, 0), ("typical_p", self.typical_p, 1)):
            if value not in (None, harmless):
                raise BadRequest(f"options.{name}: there is no such sampler; use temperature, top_k, top_p or min_p")

    @property
    def fills_window(self) -> bool:
        """-1 (without an end) and -2 (until the window is full) are the same here: the window is an end."""
        return self.num_predict is not None and self.num_predict <= 0

    def plain(self) -> dict[str, Any]:
        """For the orchestrator; what was not said is None there too."""
        self.require_possible()
        same = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
        return {name: getattr(self, name) for name in same} | {
            "max_tokens": None if self.fills_window else self.num_predict,
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "repetition_penalty": self.repeat_penalty,
            "seed": None if self.seed is None or self.seed < 0 else self.seed,
            "stop": self.stop or None,
        }


class OllamaRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints take."""

    model: str = ""
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | _Duration | None = None  # models stay: it is taken and changes nothing
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def unloads(self) -> bool:
        """With nothing to answer: the way to be rid of a model."""
        return self.keep_alive is not None and str(self.keep_alive).rstrip("smh") in ("0", "0.0")

    def tuning(self) -> OllamaOptions:
        # Ollama takes a whole number with a point for an integer.
        given = {name: int(value) if _is_whole(value) else value for name, value in (self.options or {}).items()}
        return read(given, OllamaOptions)

    def plain(self) -> dict[str, Any]:
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs: set it to true")
        likely = {"logprobs": self.top_logprobs or 0} if self.logprobs else {}
        return self.tuning().plain() | likely | ({"format": self._format()} if self.format else {})

    def _format(self) -> dict[str, Any]:
        if self.format == "json":
            return {"type": "json_object"}
        return {"type": "json_schema", "schema": self.format}

    def template(self, tokenizer: ModelTokenizer) -> dict[str, Any]:
        """What the chat template gets to hear of thinking. Models call it differently; none minds the others' names."""
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

    def require_possible(self) -> None:
        given = {"template": self.template_given, "suffix": self.suffix, "context": self.context}
        for name, value in given.items():
            if value:
                raise BadRequest(f"{name}: {_REFUSED[name]}")
        if self.raw and self.system:
            raise BadRequest("raw mode does not support system: write it into the prompt")
        if self.raw and self.images:
            raise BadRequest("raw mode does not support images: leave out raw, or ask /api/chat")

    def messages(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt} | _pictures(self.images)]


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """As OpenAI has it, and so chat templates; pictures as an Ollama's node has them."""
        found: dict[str, Any] = {"role": self.role, "content": self.content or ""} | _pictures(self.images)
        if self.thinking:
            found |= {"reasoning_content": self.thinking, "thinking": self.thinking}  # Qwen's name, and GPT-OSS's
        if self.tool_calls:
            found["tool_calls"] = [{"type": "function"} | call for call in self.tool_calls]
        if self.tool_name:
            found["name"] = self.tool_name
        return found | ({"tool_call_id": self.tool_call_id} if self.tool_call_id else {})


class OllamaChatRequest(OllamaRequest, frozen=True, kw_only=True):
    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None

    def plain_tools(self, tokenizer: ModelTokenizer) -> list[dict[str, Any]]:
        tools = [{"type": "function"} | tool for tool in self.tools or ()]
        require_tools(tools)
        if tools and not can_call(tokenizer):
            raise BadRequest(f'"{self.model}" does not support tools: leave them out, or use another model')
        return tools


class OllamaModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One model, by the name of today or the one that Ollama had for it before."""

    model: str | None = None
    name: str | None = None


def can_call(tokenizer: ModelTokenizer) -> bool:
    return "tools" in tokenizer.chat_template


def _pictures(images: list[Any] | None) -> dict[str, Any]:
    return {"images": images} if images else {}


def read(body: dict[str, Any], kind: type[Kind]) -> Kind:
    given = {name: value for name, value in body.items() if value is not None}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the request cannot be understood: {error}") from error


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()
