"""What a node in front of an Ollama is asked, and how that is said in Ollama's words.

Everything is said, also what is a default of ours: Ollama's own are others (temperature 0.8, a context of 4096 tokens).
What it cannot do is refused with the reason; nothing is dropped in silence, but for what a message has beside its
words, thoughts, images and calls: a name, or a program's own marks.
"""

import base64
import hashlib
import json
import secrets
from typing import Any

import msgspec

from disaggregated_inference.errors import BadRequest, MessagesRefused
from disaggregated_inference.node.requests import DecodeRequest, PrefillRequest, Prompt
from disaggregated_inference.node.structured_output import OutputFormat
from disaggregated_inference.ollama_node.client import ModelDetails

_NO_IDS = "an Ollama takes and gives text: its tokens have no ids here"
_SEEDS = 1 << 31  # what every version of it keeps whole

# Settings that it has no word for, with what they are when nobody asks for them.
_REFUSED: dict[str, tuple[Any, str]] = {
    "tokens": (None, f"tokens: {_NO_IDS}; give prompt or messages"),
    "kv_cache": (None, "kv_cache: an Ollama cannot take a cache in; give prompt or messages"),
    "n": (1, "n: an Ollama writes one answer to a request; ask several times"),
    "logprobs": (None, f"logprobs: {_NO_IDS}"),
    "logit_bias": ({}, f"logit_bias: {_NO_IDS}"),
    "ignore_eos": (False, "ignore_eos: an Ollama ends an answer where the model does"),
    "min_tokens": (0, "min_tokens: an Ollama ends an answer where the model does"),
    "written": ((), f"written: {_NO_IDS}; give written_text"),
    "choice": (0, "choice: an Ollama writes one answer to a request"),
    "images": (None, "images: a prompt has no place for them; give messages, and the images in one of them"),
}
_THINKING = ("enable_thinking", "thinking", "reasoning_effort")  # of a chat template's words, those about thinking
_LEVELS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high"}


class TextRequest(DecodeRequest, frozen=True, kw_only=True):
    """As other nodes are asked, and what only text can say."""

    template: dict[str, Any] = msgspec.field(
        default_factory=dict
    )  # a chat template's words; Ollama knows tools and thinking
    tools: list[dict[str, Any]] | None = None  # the same as in template
    images: Any = None  # where Ollama has them in its own words; here they are in messages
    written_text: str = ""  # of an answer that another node began: writing goes on after it

    @property
    def limit(self) -> int:
        asked = self.max_new_tokens if self.max_tokens is None else self.max_tokens
        return 256 if asked is None else asked

    def require_possible(self) -> None:
        require_text(self)
        for name, (default, words) in _REFUSED.items():
            if getattr(self, name) not in (default, None):
                raise BadRequest(words)
        if None not in (self.max_tokens, self.max_new_tokens) and self.max_tokens != self.max_new_tokens:
            raise BadRequest("max_tokens and max_new_tokens are the same thing: give one of them")
        self._require_some_tokens()
        if not 0 < self.timeout_s <= 86400:
            raise BadRequest("timeout_s is seconds, up to a day")
        self._require_template()
        if self.format:
            _format(self.format)
        self._sampling.require_valid(0)

    def _require_template(self) -> None:
        if unknown := [name for name in self.template if name not in ("tools", *_THINKING)]:
            raise BadRequest(f"template: an Ollama has its own chat template, which is not told of {unknown[0]}")
        if self.tools and self.template.get("tools"):
            raise BadRequest("tools are given twice: leave them out of template")
        if self.messages is None and (self.tools or self.template):
            raise BadRequest(f"{'tools' if self.tools else 'template'}: a prompt is taken as it is; give messages")

    def options(self, shown: ModelDetails) -> dict[str, Any]:
        """All but `num_ctx`, which is the node's."""
        sampling = self._sampling
        options: dict[str, Any] = {
            "num_predict": self.limit,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repeat_penalty": sampling.repetition_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
        }
        if sampling.stop:
            options["stop"] = list(dict.fromkeys([*shown.stops, *sampling.stop]))
        if sampling.seed is not None:
            options["seed"] = sampling.seed % _SEEDS
        elif sampling.temperature:
            options["seed"] = secrets.randbelow(_SEEDS)
        return options

    def body(self, shown: ModelDetails) -> tuple[str, dict[str, Any]]:
        """The path, and what goes there beside the model and its options."""
        path, body = text_body(self)
        if self.format:
            body["format"] = _format(self.format)
        if path == "/api/chat":
            if shown.lacks("vision") and any(message.get("images") for message in body["messages"]):
                raise MessagesRefused("images: this model reads text alone; leave them out, or serve one with vision")
            if (thinks := _thinks(self.template, shown)) is not None:
                body["think"] = thinks
        return path, body


class WarmRequest(PrefillRequest, frozen=True, kw_only=True):
    """What a request that comes later will begin with: its tools are a part of that."""

    template: dict[str, Any] = msgspec.field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    images: Any = None

    def require_possible(self) -> None:
        if self.inline:
            raise BadRequest("inline: an Ollama keeps its cache to itself; there is none to send")
        if not self.wait:
            raise BadRequest("wait: there is no cache to fetch while it is being made; leave it out, or set it to true")
        self.one_token().require_possible()

    def one_token(self) -> TextRequest:
        same = {name: getattr(self, name) for name in ("prompt", "messages", "tokens", "template", "tools", "images")}
        return TextRequest(**same, max_tokens=1)


def require_text(asked: Prompt) -> None:
    given = [name for name in ("prompt", "messages", "tokens") if getattr(asked, name) is not None]
    if given == ["tokens"]:
        raise BadRequest(_REFUSED["tokens"][1])
    if len(given) != 1:
        raise BadRequest(f"give exactly one of prompt and messages, not {len(given)}")
    if not (asked.prompt or asked.messages):
        raise BadRequest("the prompt is empty")


def text_body(asked: TextRequest) -> tuple[str, dict[str, Any]]:
    """A prompt goes as it is, without a template around it, as other nodes take it."""
    written = asked.written_text
    if asked.messages is None:
        return "/api/generate", {"prompt": (asked.prompt or "") + written, "raw": True}
    messages = [_message(message) for message in asked.messages]
    messages += [{"role": "assistant", "content": written}] if written else []
    tools = asked.tools or asked.template.get("tools")
    return "/api/chat", {"messages": messages} | ({"tools": tools} if tools else {})


class ParsedPrompt:
    """All that will be read, but for what a template puts around it. `words` are in the prompt whatever the template
    is: one may leave old thoughts out, or write tools in fewer letters."""

    def __init__(self, asked: TextRequest) -> None:
        _, body = text_body(asked)
        messages = body.get("messages", ())
        self.in_chat = asked.messages is not None
        self.images = sum(len(message.get("images", ())) for message in messages)
        self.words = "\n".join(message["content"] for message in messages) or body.get("prompt", "")
        self.turns = "\n".join(map(_turn, messages)) or self.words
        self.tools = _json(body["tools"]) if "tools" in body else ""
        self.all = f"{self.tools}\n{self.turns}" if self.tools else self.turns

    def key(self, think: Any) -> str:
        """Of this prompt and no other."""
        return f"{self.in_chat} {think} {self.all}"


def _turn(message: dict[str, Any]) -> str:
    """An image is a few letters here: another one is another text."""
    seen = (hashlib.sha256(image.encode()).hexdigest()[:16] for image in message.get("images", ()))
    more = {name: value for name, value in message.items() if name not in ("role", "content", "images")}
    return " ".join([f"{message['role']}:", *seen, message["content"], *([_json(more)] if more else [])])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """From OpenAI's shape, which is that of every other node, to Ollama's."""
    if not isinstance(role := message.get("role"), str):
        raise MessagesRefused("every message needs a role")
    found: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": _content(message)}
    if images := message.get("images"):
        found["images"] = _images(images)
    if thoughts := message.get("thinking") or message.get("reasoning_content") or message.get("reasoning"):
        found["thinking"] = thoughts
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
        raise MessagesRefused(
            "a message's content is text, or a list of parts of the type text; pictures are its images, in base64"
        )
    return "".join(str(part.get("text", "")) for part in parts)


def _images(images: Any) -> list[str]:
    try:
        if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
            raise ValueError("this is no list of strings")
        for image in images:
            base64.b64decode(image, validate=True)
    except ValueError as error:
        raise MessagesRefused(f"images: a list of pictures, each the base64 of a file, is needed: {error}") from error
    return images


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MessagesRefused("every tool call in messages needs a function with a name")
    arguments = function.get("arguments") or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        raise MessagesRefused(f"the arguments of the call of {function['name']} are not JSON: {error}") from error
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return named | {"function": {"name": function["name"], "arguments": arguments}}


def _format(format: OutputFormat) -> Any:
    format.require_valid()
    if format.type == "json_object":
        return "json"
    if format.type == "json_schema" and isinstance(format.schema, dict):
        return format.schema
    raise BadRequest(f"format: an Ollama knows json_object and json_schema, not {format.type}")


def _thinks(template: dict[str, Any], shown: ModelDetails) -> bool | str | None:
    """None: as the model does by itself. GPT-OSS has levels, others think or do not."""
    effort = template.get("reasoning_effort")
    wanted = template.get("enable_thinking", template.get("thinking"))
    if effort is not None:
        wanted = effort not in ("none", "minimal")
    if wanted is None or (not wanted and shown.lacks("thinking")):
        return None
    levelled = shown.architecture.replace("-", "") == "gptoss"
    return _LEVELS.get(str(effort), True) if wanted and levelled else bool(wanted)
