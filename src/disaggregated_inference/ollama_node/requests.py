"""Requests to a node in front of an Ollama, and their translation for Ollama.

Every setting is sent, also our defaults: Ollama's differ (temperature 0.8, a context of 4096 tokens). A setting
that Ollama does not have is refused with the reason, never dropped. Only extra fields of messages are dropped: all but
content, thinking, images and tool calls.
"""

import base64
import hashlib
import json
import secrets
from typing import Any

import msgspec

from disaggregated_inference.api import DEFAULT_NODE_TOKENS, OutputFormat, PrefillRequest, TextGenerateRequest
from disaggregated_inference.errors import BadRequest, MessagesRefused
from disaggregated_inference.ollama_node.client import ModelDetails

_NO_IDS = "Ollama takes and returns text, no token ids"
_SEEDS = 1 << 31  # every version of Ollama keeps this many apart

# Settings that Ollama does not have, with their defaults.
_REFUSED: dict[str, tuple[Any, str]] = {
    "tokens": (None, f"tokens: {_NO_IDS}; give prompt or messages"),
    "kv_cache": (None, "kv_cache: Ollama cannot import KV; give prompt or messages"),
    "n": (1, "n: Ollama generates one choice per request; send several requests"),
    "logprobs": (None, f"logprobs: {_NO_IDS}"),
    "prompt_logprobs": (None, f"prompt_logprobs: {_NO_IDS}"),
    "logit_bias": (None, f"logit_bias: {_NO_IDS}"),
    "ignore_eos": (False, "ignore_eos: Ollama stops where the model does"),
    "min_tokens": (0, "min_tokens: Ollama stops where the model does"),
    "written": ((), f"written: {_NO_IDS}; give written_text"),
    "choice": (0, "choice: Ollama generates one choice per request"),
    "images": (None, "images: a prompt cannot have images; give messages, with the images in one of them"),
}
_THINKING = ("enable_thinking", "thinking", "reasoning_effort")  # template arguments about thinking
_LEVELS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high"}


class TextRequest(TextGenerateRequest, frozen=True, kw_only=True):
    """The request to a node that takes text, and what Ollama makes of it."""

    @property
    def limit(self) -> int:
        return self.max_tokens or self.max_new_tokens or DEFAULT_NODE_TOKENS

    def require_possible(self) -> None:
        require_text(self)
        for name, (default, reason) in _REFUSED.items():
            if getattr(self, name) not in (default, None):
                raise BadRequest(reason, name)
        self._require_template()
        if self.format:
            _format(self.format)

    def _require_template(self) -> None:
        if unknown := [name for name in self.template if name not in ("tools", *_THINKING)]:
            raise BadRequest(f"template: Ollama has its own chat template, and does not know {unknown[0]}", "template")
        if self.tools and self.template.get("tools"):
            raise BadRequest("tools are given twice: leave them out of template", "tools")
        if self.messages is None and (self.tools or self.template):
            name = "tools" if self.tools else "template"
            raise BadRequest(f"{name}: a prompt has no chat template; give messages", name)

    def options(self, details: ModelDetails) -> dict[str, Any]:
        """All but `num_ctx`, which the node sets."""
        options: dict[str, Any] = {
            "num_predict": self.limit,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repeat_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
        }
        if self.stop_strings:
            options["stop"] = list(dict.fromkeys([*details.stops, *self.stop_strings]))
        if self.seed is not None:
            options["seed"] = self.seed % _SEEDS
        elif self.temperature:
            options["seed"] = secrets.randbelow(_SEEDS)
        return options

    def body(self, details: ModelDetails) -> tuple[str, dict[str, Any]]:
        """The path, and its body without model and options."""
        path, body = text_body(self)
        if self.format:
            body["format"] = _format(self.format)
        if path == "/api/chat":
            if details.lacks("vision") and any(message.get("images") for message in body["messages"]):
                raise MessagesRefused("images: this model reads text only; leave them out, or use one with vision")
            if (think := _think(self.template, details)) is not None:
                body["think"] = think
        return path, body


class WarmRequest(PrefillRequest, frozen=True, kw_only=True):
    """A prompt to cache for a later request. Its tools are a part of the prompt."""

    template: dict[str, Any] = msgspec.field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    images: Any = None

    def require_possible(self) -> None:
        if self.inline:
            raise BadRequest("inline: Ollama cannot export KV", "inline")
        if self.prompt_logprobs is not None:
            raise BadRequest(_REFUSED["prompt_logprobs"][1], "prompt_logprobs")
        if not self.wait:
            raise BadRequest("wait: Ollama has no KV to fetch during the prefill; set it to true", "wait")
        self.one_token().require_possible()

    def one_token(self) -> TextRequest:
        same = {name: getattr(self, name) for name in ("prompt", "messages", "tokens", "template", "tools", "images")}
        return TextRequest(**same, max_tokens=1)


def require_text(params: TextRequest) -> None:
    given = [name for name in ("prompt", "messages", "tokens") if getattr(params, name) is not None]
    if given == ["tokens"]:
        raise BadRequest(_REFUSED["tokens"][1], "tokens")
    if len(given) != 1:
        raise BadRequest(f"give exactly one of prompt and messages, not {len(given)}")
    if not (params.prompt or params.messages):
        raise BadRequest("the prompt is empty")


def text_body(params: TextRequest) -> tuple[str, dict[str, Any]]:
    """A prompt is sent without a chat template, as on other nodes."""
    written = params.written_text
    if params.messages is None:
        return "/api/generate", {"prompt": (params.prompt or "") + written, "raw": True}
    messages = [_message(message) for message in params.messages]
    messages += [{"role": "assistant", "content": written}] if written else []
    tools = params.tools or params.template.get("tools")
    return "/api/chat", {"messages": messages} | ({"tools": tools} if tools else {})


class ParsedPrompt:
    """The prompt without what the chat template adds. `text` is in the prompt whatever the template does: it may leave
    out old thinking, or write tools shorter."""

    def __init__(self, params: TextRequest) -> None:
        _, body = text_body(params)
        messages = body.get("messages", ())
        self.in_chat = params.messages is not None
        self.images = sum(len(message.get("images", ())) for message in messages)
        self.text = "\n".join(message["content"] for message in messages) or body.get("prompt", "")
        self.messages = "\n".join(map(_message_text, messages)) or self.text
        self.tools = _json(body["tools"]) if "tools" in body else ""
        self.all = f"{self.tools}\n{self.messages}" if self.tools else self.messages

    def key(self, think: Any) -> str:
        """Identifies this prompt."""
        return f"{self.in_chat} {think} {self.all}"


def _message_text(message: dict[str, Any]) -> str:
    """An image becomes its hash, so another image is another text."""
    images = (hashlib.sha256(image.encode()).hexdigest()[:16] for image in message.get("images", ()))
    more = {name: value for name, value in message.items() if name not in ("role", "content", "images")}
    return " ".join([f"{message['role']}:", *images, message["content"], *([_json(more)] if more else [])])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """From OpenAI's shape, which other nodes use, to Ollama's."""
    if not isinstance(role := message.get("role"), str):
        raise MessagesRefused("every message needs a role")
    found: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": _content(message)}
    if images := message.get("images"):
        found["images"] = _images(images)
    if thinking := message.get("thinking") or message.get("reasoning_content") or message.get("reasoning"):
        found["thinking"] = thinking
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in calls]
    if name := message.get("tool_name") or (message.get("name") if role == "tool" else None):
        found["tool_name"] = name
    return found | ({"tool_call_id": message["tool_call_id"]} if message.get("tool_call_id") else {})


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        raise MessagesRefused("content must be text or a list of text parts; give images as `images`, in base64")
    return "".join(str(part.get("text", "")) for part in parts)


def _images(images: Any) -> list[str]:
    try:
        if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
            raise ValueError("not a list of strings")
        for image in images:
            base64.b64decode(image, validate=True)
    except ValueError as error:
        raise MessagesRefused(f"images: give a list of files in base64: {error}") from error
    return images


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MessagesRefused("every tool call in messages needs a function with a name")
    arguments = function.get("arguments") or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        raise MessagesRefused(f"the arguments of the tool call {function['name']} are not JSON: {error}") from error
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return named | {"function": {"name": function["name"], "arguments": arguments}}


def _format(format: OutputFormat) -> Any:
    format.require_valid()
    if format.type == "json_object":
        return "json"
    if format.type == "json_schema" and isinstance(format.schema, dict):
        return format.schema
    raise BadRequest(f"format: Ollama knows json_object and json_schema, not {format.type}", "format")


def _think(template: dict[str, Any], details: ModelDetails) -> bool | str | None:
    """None: the model's default. GPT-OSS has levels, other models think or do not."""
    effort = template.get("reasoning_effort")
    wanted = template.get("enable_thinking", template.get("thinking"))
    if effort is not None:
        wanted = effort not in ("none", "minimal")
    if wanted is None or (not wanted and details.lacks("thinking")):
        return None
    levelled = details.architecture.replace("-", "") == "gptoss"
    return _LEVELS.get(str(effort), True) if wanted and levelled else bool(wanted)
