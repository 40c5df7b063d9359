"""What OpenAI's programs ask for. Null is absent; fields nobody knows are let be; what cannot be done is refused.

Every refusal begins with the field it is about: `openai.error_body` reads it from there.
"""

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from disaggregated_inference.errors import BadRequest
from disaggregated_inference.gateway.openai.messages import ChatMessage, ChatTool
from disaggregated_inference.gateway.reasoning_effort import Effort, for_template
from disaggregated_inference.gateway.tool_parsers.forced_name import forced_name
from disaggregated_inference.orchestrator.request import format_of

_MOST_PROMPTS = 128

_Count = Annotated[int, Meta(ge=1, le=1 << 31)]
_Token = Annotated[int, Meta(ge=0, le=1 << 31)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
TopK = Annotated[int, Meta(ge=-1, le=1 << 31)]  # -1: all, as vLLM has it
_Share = Annotated[float, Meta(ge=0, le=1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Bias = Annotated[dict[_Token, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)]
_Stop = Annotated[str, Meta(min_length=1)]
Stop = _Stop | Annotated[list[_Stop], Meta(max_length=16)]

# Fields that would change the answer and cannot be had. False and empty are as good as absent, but see _HARMLESS.
_REFUSED = {
    "functions": "is no longer known: give tools",
    "function_call": "is no longer known: give tool_choice",
    "audio": "cannot be made: these models write text alone",
    "web_search_options": "cannot be had: nothing here searches the web",
    "echo": "cannot be had: the prompt's own likelihoods are not kept; join the prompt and the text yourself",
    "suffix": "cannot be had: these models write what comes after the prompt; write the gap into the prompt yourself",
    "guided_json": "is not known: give response_format with the type json_schema",
    "guided_regex": "is not known: give response_format with the type regex and a pattern",
    "guided_choice": "is not known: give response_format with the type choice and choices",
    "guided_grammar": "is not known: give response_format with the type grammar and a Lark grammar",
    "structured_outputs": "is not known: give response_format",
    "grammar": "is not known: give response_format with the type grammar and a Lark grammar",
    "stop_token_ids": "cannot be had: give stop, with texts",
    "include_stop_str_in_output": "cannot be had: an answer ends before its stop; add it yourself",
    "bad_words": "cannot be had: give logit_bias, with tokens",
    "allowed_token_ids": "cannot be had: give logit_bias, or response_format with the type choice or regex",
    "use_beam_search": "cannot be had: answers are sampled, or greedy with a temperature of 0",
    "length_penalty": "cannot be had: it is about beams, and there are none",
    "prompt_logprobs": "cannot be had: the prompt's own likelihoods are not kept",
    "continue_final_message": "cannot be had: answers are not begun for the model; end with the user's message",
    "add_generation_prompt": "cannot be had: the model always answers; /tokenize renders prompts without it",
    "truncate_prompt_tokens": "cannot be had: prompts are never cut; send what fits",
    "chat_template": "cannot be had: the model's own is used; send a whole prompt to /v1/completions",
}
_HARMLESS = {
    "length_penalty": 1,
    "prompt_logprobs": None,
    "add_generation_prompt": True,
    "truncate_prompt_tokens": None,
}
_OWN_FIELD = ("messages", "tools", "self")  # what a template gets from elsewhere, or Python would stumble over


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None


class OpenAIRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints take. Nodes check these ranges too, but a stream may have begun by then."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=16)] | None = None
    max_tokens: _Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: _Share | None = None
    top_k: TopK | None = None
    min_p: _Share | None = None
    seed: Seed | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: _Bias | None = None
    stop: Stop | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    response_format: dict[str, Any] | None = None
    include_metrics: bool | None = None  # ours
    return_progress: bool | None = None  # llama.cpp's; of streams

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def wants_usage(self) -> bool:
        """As the last event of a stream."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def options(self) -> dict[str, Any]:
        """For the orchestrator; what was not said is None there too."""
        if self.stream_options and not self.stream:
            raise BadRequest("stream_options is for streams: leave it out, or set stream to true")
        if self.most_tokens and (self.min_tokens or 0) > self.most_tokens:
            raise BadRequest(f"min_tokens: {self.min_tokens} are more than max_tokens ({self.most_tokens}) allows")
        options = {name: getattr(self, name) for name in _SAME}
        options["top_k"] = 0 if self.top_k == -1 else self.top_k  # as vLLM has it
        options["format"] = format_of(self.response_format) if self.response_format else None
        options["progress"] = bool(self.return_progress and self.stream)
        return options


_SAME = (
    "n",
    "max_tokens",
    "temperature",
    "top_p",
    "min_p",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "ignore_eos",
    "min_tokens",
)


class ChatCompletionRequest(OpenAIRequest, frozen=True, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[ChatTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[str] | None = None

    def options(self) -> dict[str, Any]:
        if self.modalities and self.modalities != ["text"]:
            raise BadRequest('modalities: these models write text alone; leave it out, or give ["text"]')
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs: set it to true")
        likely = (self.top_logprobs or 0) if self.logprobs else None
        return super().options() | {"max_tokens": self.most_tokens, "logprobs": likely}

    def template(self) -> dict[str, Any]:
        """What the chat template gets beside messages and tools."""
        more = self.chat_template_kwargs or {}
        if own := [name for name in _OWN_FIELD if name in more]:
            raise BadRequest(f"chat_template_kwargs: {own[0]} has a place of its own in the request")
        wordy = {"verbosity": self.verbosity} if self.verbosity else {}
        return for_template(self.reasoning_effort) | wordy | more

    def choice(self) -> str:
        """Whether a tool may or must be called, or the one that must."""
        wanted = "auto" if self.tool_choice is None else self.tool_choice
        if isinstance(wanted, dict):
            return self._named(wanted)
        if wanted not in ("auto", "none", "required"):
            raise BadRequest(f"tool_choice: {wanted[:40]!r} is not known; give auto, none, required or a function")
        if wanted == "required" and not self.tools:
            raise BadRequest("tool_choice: a tool must be called, and there are none: give tools")
        return wanted

    def _named(self, wanted: dict[str, Any]) -> str:
        function = wanted.get("function")
        if wanted.get("type") != "function" or not isinstance(function, dict):
            raise BadRequest('tool_choice: the object must be {"type": "function", "function": {"name": ...}}')
        known = [tool.function.name for tool in self.tools or []]
        if (name := function.get("name")) not in known:
            raise BadRequest(f"tool_choice: no function {str(name)[:80]!r}; tools has {', '.join(known) or 'none'}")
        return forced_name(str(name))

    @property
    def most_tokens(self) -> int | None:
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise BadRequest("max_tokens and max_completion_tokens are the same thing and differ: give one of them")
        return given.pop() if given else None


class CompletionRequest(OpenAIRequest, frozen=True, kw_only=True):
    prompt: str | list[str | _Token | list[_Token]]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: int | None = None

    def options(self) -> dict[str, Any]:
        if self.best_of not in (None, 1, self.n):
            raise BadRequest("best_of: answers are not ranked here; leave it out, or ask for all of them with n")
        return super().options() | {"logprobs": self.logprobs}

    def prompts(self) -> list[dict[str, Any]]:
        """Each as the orchestrator takes it."""
        if isinstance(self.prompt, str):
            return [{"prompt": self.prompt}]
        if len(kinds := {type(item) for item in self.prompt}) != 1:
            raise BadRequest("prompt: give a text, a list of texts, a list of tokens, or a list of lists of tokens")
        kind = kinds.pop()
        if kind is int:
            return [{"tokens": self.prompt}]
        if len(self.prompt) > _MOST_PROMPTS:
            raise BadRequest(f"prompt: {len(self.prompt)} of them at once; up to {_MOST_PROMPTS} are taken")
        return [{"prompt" if kind is str else "tokens": item} for item in self.prompt]


KNOWN = frozenset(ChatCompletionRequest.__struct_fields__ + CompletionRequest.__struct_fields__ + tuple(_REFUSED))

Kind = TypeVar("Kind", bound=OpenAIRequest)


def read(body: dict[str, Any], kind: type[Kind]) -> Kind:
    for name, reason in _REFUSED.items():
        if _matters(name, body.get(name)):
            raise BadRequest(f"{name} {reason}")
    try:
        return msgspec.convert(body, kind, str_keys=True)  # tokens are keys in logit_bias
    except msgspec.ValidationError as error:
        raise BadRequest(_placed(str(error))) from error


def _matters(name: str, value: Any) -> bool:
    """Whether it would change anything."""
    return value is not None and value != _HARMLESS[name] if name in _HARMLESS else bool(value)


def _placed(said: str) -> str:
    """msgspec's message with the place before the reason."""
    reason, _, place = said.partition(" - at ")
    found = re.search(r"`\$\.?([^`]*)`", place)
    path = found[1].replace("[...]", "") if found else ""
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", reason):
        return f"{path}.{missing[1]}: it is missing".lstrip(".")
    return f"{path}: {reason}" if path else reason
