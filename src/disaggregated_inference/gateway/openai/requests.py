"""Requests of OpenAI's chat completions and completions. null = unset; unknown fields are ignored."""

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from disaggregated_inference.api import OutputFormat, RequestOptions, output_format
from disaggregated_inference.api.sampling import (
    Bias,
    Choices,
    ClientSalt,
    EchoMaxTokens,
    Logprobs,
    MaxTokens,
    MinTokens,
    Penalty,
    Probability,
    RepetitionPenalty,
    Seed,
    Stops,
    StopString,
    Temperature,
    TokenId,
)
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.gateway.openai.messages import ChatMessage, ChatTool
from disaggregated_inference.gateway.reasoning_effort import Effort, template_options
from disaggregated_inference.gateway.tool_parsers.tools import forced_tool, required_tool
from disaggregated_inference.gateway.validation import read_request

_MAX_PROMPTS = 128

OpenAITopK = Annotated[int, Meta(ge=-1, le=1 << 31)]  # -1: no limit, as in vLLM
Stop = StopString | Stops
_LogitBias = Annotated[dict[TokenId, Bias], Meta(max_length=1024)]

# Fields that would change the completion and are not supported. False and empty values change nothing, but see
# _HARMLESS.
_REFUSED = {
    "functions": "is not supported any more: give tools",
    "function_call": "is not supported any more: give tool_choice",
    "audio": "is not supported: the models write text only",
    "web_search_options": "is not supported: the gateway does not search the web",
    "echo": "is for /v1/completions: render the chat with /tokenize, and send its tokens there",
    "suffix": "is not supported: the models write what follows the prompt; describe the gap in the prompt",
    "guided_json": "is not supported: give response_format with the type json_schema",
    "guided_regex": "is not supported: give response_format with the type regex and a pattern",
    "guided_choice": "is not supported: give response_format with the type choice and choices",
    "guided_grammar": "is not supported: give response_format with the type grammar and a Lark grammar",
    "structured_outputs": "is not supported: give response_format",
    "grammar": "is not supported: give response_format with the type grammar and a Lark grammar",
    "stop_token_ids": "is not supported: give stop, with strings",
    "include_stop_str_in_output": "is not supported: a completion ends before its stop string; add it yourself",
    "bad_words": "is not supported: give logit_bias, with token ids",
    "allowed_token_ids": "is not supported: give logit_bias, or response_format with the type choice or regex",
    "use_beam_search": "is not supported: completions are sampled, or greedy with a temperature of 0",
    "length_penalty": "is not supported: it applies to beam search only",
    "prompt_logprobs": "is not supported here: give /v1/completions echo and logprobs",
    "continue_final_message": "is not supported: end with a message of the user",
    "add_generation_prompt": "is not supported: the model always answers; /tokenize renders prompts without it",
    "truncate_prompt_tokens": "is not supported: prompts are never cut; send what fits",
    "chat_template": "is not supported: the model's own is used; send a rendered prompt to /v1/completions",
}
_HARMLESS = {
    "length_penalty": 1,
    "prompt_logprobs": None,
    "add_generation_prompt": True,
    "truncate_prompt_tokens": None,
}
_RESERVED = ("messages", "tools", "self")  # for a template: set from other fields, or a Python keyword argument


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None


class OpenAIRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of both endpoints. They are checked here because a node's refusal may come after a stream began."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: OpenAITopK | None = None
    min_p: Probability | None = None
    seed: Seed | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: _LogitBias | None = None
    stop: Stop | None = None
    ignore_eos: bool | None = None
    min_tokens: MinTokens | None = None
    response_format: dict[str, Any] | None = None
    include_metrics: bool | None = None  # ours
    return_progress: bool | None = None  # llama.cpp's; for streams
    cache_salt: ClientSalt | None = None  # vLLM's

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        """As the last event of a stream."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def options(self) -> RequestOptions:
        """For the orchestrator; None: unset."""
        if self.stream_options and not self.stream:
            raise BadRequest(
                "stream_options is for streams: leave it out, or set stream to true", param="stream_options"
            )
        if self.token_limit and (self.min_tokens or 0) > self.token_limit:
            raise BadRequest(
                f"min_tokens: {self.min_tokens} is more than max_tokens ({self.token_limit})", param="min_tokens"
            )
        return {
            "n": self.n,
            "max_tokens": self.token_limit,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias,
            "stop": self.stop,
            "ignore_eos": self.ignore_eos,
            "min_tokens": self.min_tokens,
            "progress": bool(self.return_progress and self.stream),
        }

    def format(self) -> OutputFormat | None:
        return output_format(self.response_format) if self.response_format else None


class ChatCompletionRequest(OpenAIRequest, frozen=True, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: list[ChatTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[str] | None = None

    def options(self) -> RequestOptions:
        if self.modalities and self.modalities != ["text"]:
            raise BadRequest(
                'modalities: the models write text only; leave it out, or give ["text"]', param="modalities"
            )
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs: set it to true", param="top_logprobs")
        alternatives = (self.top_logprobs or 0) if self.logprobs else None
        return super().options() | {"logprobs": alternatives}

    def template(self) -> dict[str, Any]:
        """Options of the chat template, besides messages and tools."""
        given = self.chat_template_kwargs or {}
        if reserved := [name for name in _RESERVED if name in given]:
            reason = f"{reserved[0]} cannot be set here; it is a field of the request"
            raise BadRequest(f"chat_template_kwargs: {reason}", param="chat_template_kwargs")
        verbosity = {"verbosity": self.verbosity} if self.verbosity else {}
        return template_options(self.reasoning_effort) | verbosity | given

    def choice(self) -> str:
        """auto, none, required, or the name of the function that must be called."""
        choice = "auto" if self.tool_choice is None else self.tool_choice
        names = [tool.function.name for tool in self.tools or []]
        if isinstance(choice, dict):
            function = choice.get("function")
            if choice.get("type") != "function" or not isinstance(function, dict):
                form = '{"type": "function", "function": {"name": ...}}'
                raise BadRequest(f"tool_choice: the object must be {form}", param="tool_choice")
            return forced_tool(function.get("name"), names)
        if choice not in ("auto", "none", "required"):
            expected = "give auto, none, required or a function"
            raise BadRequest(f"tool_choice: {choice[:40]!r} is unknown; {expected}", param="tool_choice")
        return required_tool(names) if choice == "required" else choice

    @property
    def token_limit(self) -> int | None:
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            reason = "max_tokens and max_completion_tokens mean the same and differ: give one of them"
            raise BadRequest(reason, param="max_tokens")
        return given.pop() if given else None


class CompletionRequest(OpenAIRequest, frozen=True, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Logprobs | None = None
    best_of: int | None = None
    echo: bool | None = None
    max_tokens: EchoMaxTokens | None = None

    @property
    def token_limit(self) -> int | None:
        """At least 1: the first token comes with the logits of the prompt."""
        return 1 if self.max_tokens == 0 else self.max_tokens

    def options(self) -> RequestOptions:
        if self.max_tokens == 0 and not self.echo:
            raise BadRequest("max_tokens: 0 needs echo, for the prompt alone; else give at least 1", param="max_tokens")
        if self.best_of not in (None, 1, self.n):
            raise BadRequest(
                "best_of: completions are not ranked; leave it out, or get all of them with n", param="best_of"
            )
        of_prompt = self.logprobs if self.echo else None
        return super().options() | {"logprobs": self.logprobs, "prompt_logprobs": of_prompt, "format": self.format()}

    @property
    def needs_tokenizer(self) -> bool:
        """For the text of tokens."""
        return self.logprobs is not None or bool(self.echo and any("tokens" in prompt for prompt in self.prompts()))

    def prompts(self) -> list[RequestOptions]:
        """Each as an option of the orchestrator."""
        if isinstance(self.prompt, str):
            return [{"prompt": self.prompt}]
        if len(kinds := {type(item) for item in self.prompt}) != 1:
            forms = "a string, a list of strings, a list of tokens, or a list of lists of tokens"
            raise BadRequest(f"prompt: give {forms}", param="prompt")
        if kinds == {int}:
            return [{"tokens": [token for token in self.prompt if isinstance(token, int)]}]
        if len(self.prompt) > _MAX_PROMPTS:
            raise BadRequest(f"prompt: {len(self.prompt)} prompts; the limit is {_MAX_PROMPTS}", param="prompt")
        prompts = [item for item in self.prompt if not isinstance(item, int)]
        return [{"prompt": item} if isinstance(item, str) else {"tokens": item} for item in prompts]


Kind = TypeVar("Kind", bound=OpenAIRequest)


def read(body: dict[str, Any], kind: type[Kind]) -> Kind:
    if not _REFUSED.keys().isdisjoint(body):
        for name, reason in _REFUSED.items():
            if name not in kind.__struct_fields__ and _has_effect(name, body.get(name)):
                raise BadRequest(f"{name} {reason}", param=name)
    return read_request(body, kind)


def _has_effect(name: str, value: Any) -> bool:
    return value is not None and value != _HARMLESS[name] if name in _HARMLESS else bool(value)
