"""GPT-OSS's prompts: the harmony format, token for token as the library openai-harmony writes it.

The chat template that comes with the model is not used, because it differs from that format: of several tool calls it
renders the first, it turns text before a call into reasoning, quotes tool results as JSON, and drops later system
messages.
"""

import json
import re
from collections.abc import Iterator, Sequence
from datetime import date
from typing import Any

from disaggregated_inference.errors import MessagesRefused
from disaggregated_inference.models.typescript import lines, typescript

Message = dict[str, Any]

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL)

_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
_CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
_CALLS = "\nCalls to these tools must go to the commentary channel: 'functions'."
_EFFORTS = ("low", "medium", "high")
_REASONING = ("reasoning_content", "reasoning", "thinking")  # what APIs and templates call it
_IN_MARK = re.compile(r"(?<=<\|)(?=[a-z])")  # the tokenizer splits words here too


def harmony_pieces(messages: Sequence[Message], options: dict[str, Any]) -> list[str]:
    """The prompt in pieces that are tokenized one by one: so a mark that a message contains as text stays text."""
    if options.get("builtin_tools"):
        raise MessagesRefused("builtin_tools are not supported: give browser and python as tools, and run them")
    tools = options.get("tools") or []
    pieces = [*_message("system", _system(options, bool(tools)))]
    leads = bool(messages) and messages[0]["role"] in ("system", "developer")
    pieces += _developer(messages[0]["content"] if leads else "", tools)
    pieces += _Conversation(messages[1:] if leads else messages).pieces()
    return [*pieces, START, "assistant"] if options.get("add_generation_prompt", True) else pieces


class _Conversation:
    """Reasoning is kept after the last answer only, where the model still works with tools on the next one."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages
        self._answered = max((at for at, each in enumerate(messages) if _answers(each)), default=-1)
        self._names: dict[str, str] = {}  # of functions, by the id of the call
        self._last = ""

    def pieces(self) -> Iterator[str]:
        for at, message in enumerate(self._messages):
            role, content = message["role"], message["content"]
            if role == "assistant":
                yield from self._assistant(message, at > self._answered)
            elif role == "tool":
                name = self._name(message).removeprefix("functions.")
                yield from _message(f"functions.{name} to=assistant", content, "commentary")
            elif role in ("system", "developer"):
                yield from _developer(content, [])
            elif role == "user":
                yield from _message("user", content)
            else:
                raise MessagesRefused(f"role: {role!r} is none of system, developer, user, assistant and tool")

    def _assistant(self, message: Message, with_reasoning: bool) -> Iterator[str]:
        if with_reasoning and (reasoning := _reasoning(message)):
            yield from _message("assistant", reasoning, "analysis")
        if _answers(message):
            yield from _message("assistant", message["content"], "final")
        elif message["content"]:  # a preamble
            yield from _message("assistant", message["content"], "commentary")
        for call in message.get("tool_calls") or ():
            yield from self._call(call)

    def _call(self, call: dict[str, Any]) -> Iterator[str]:
        function = call.get("function") or call
        name, arguments = function["name"], function.get("arguments") or {}
        self._last = self._names[call.get("id") or ""] = name
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        yield from (START, *_plain(f"assistant to=functions.{name}"), CHANNEL, "commentary", " ", CONSTRAIN, "json")
        yield from (MESSAGE, *_plain(text), CALL)

    def _name(self, message: Message) -> str:
        found = self._names.get(message.get("tool_call_id") or "") or message.get("name") or self._last
        if not isinstance(found, str) or not found:
            raise MessagesRefused("a message of the role tool needs a tool call before it")
        return found


def _message(header: str, content: str, channel: str = "") -> Iterator[str]:
    yield from (START, *_plain(header))
    if channel:
        yield from (CHANNEL, channel)
    yield from (MESSAGE, *_plain(content), END)


def _plain(text: str) -> list[str]:
    return _IN_MARK.split(text) if "<|" in text else [text]


def _answers(message: Message) -> bool:
    """A message that was cut off within its reasoning is no answer."""
    if message["role"] != "assistant" or message.get("tool_calls"):
        return False
    return bool(message["content"] or not _reasoning(message))


def _reasoning(message: Message) -> str:
    found = next((message[name] for name in _REASONING if message.get(name)), "")
    if not isinstance(found, str):
        raise MessagesRefused("the reasoning of a message must be text")
    return found


def _system(options: dict[str, Any], has_tools: bool) -> str:
    effort, identity = options.get("reasoning_effort") or "medium", options.get("model_identity") or _IDENTITY
    if effort not in _EFFORTS:
        raise MessagesRefused(f"reasoning_effort must be {', '.join(_EFFORTS)}, not {str(effort)[:40]!r}")
    about = f"{identity}\nKnowledge cutoff: 2024-06\nCurrent date: {date.today().isoformat()}"
    return f"{about}\n\nReasoning: {effort}\n\n{_CHANNELS}{_CALLS if has_tools else ''}"


def _developer(instructions: str, tools: Sequence[dict[str, Any]]) -> Iterator[str]:
    sections = ["# Instructions", instructions] if instructions else []
    sections += ["# Tools", "\n".join(_namespace(tools))] if tools else []
    if sections:
        yield from _message("developer", "\n\n".join(sections))


def _namespace(tools: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "## functions\n"
    yield "namespace functions {\n"
    for tool in tools:
        function = tool.get("function") or tool
        parameters = function.get("parameters")
        yield from (f"// {line}" for line in lines(function.get("description") or ""))
        argument = "" if parameters is None else f"_: {typescript(parameters)}"
        yield f"type {function['name']} = ({argument}) => any;\n"
    yield "} // namespace functions"
