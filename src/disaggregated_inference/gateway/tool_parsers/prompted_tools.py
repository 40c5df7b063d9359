"""For models whose chat template has no tools: the prompt describes them, and calls and results become text in Hermes'
form, which is also the form that is parsed from their completions."""

import json
from typing import Any

from disaggregated_inference.gateway.tool_parsers.hermes import CALL, CALL_END
from disaggregated_inference.models import ModelTokenizer

Message = dict[str, Any]

_DESCRIPTION = """You can call functions. These are their signatures:
<tools>
{tools}
</tools>
To call one, write its name and arguments as a JSON object within tags:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


def knows_tools(tokenizer: ModelTokenizer) -> bool:
    return tokenizer.harmony or "tools" in tokenizer.chat_template


def render_tools_as_text(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """The same conversation for a template that renders only roles and content."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    description = _DESCRIPTION.format(
        tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    )
    if plain and plain[0].get("role") in ("system", "developer"):
        return [plain[0] | {"content": f"{_text(plain[0])}\n\n{description}"}, *plain[1:]]
    return [{"role": "system", "content": description}, *plain]


def _plain(message: Message) -> Message:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_text(message)}\n</tool_response>"}
    if not (calls := message.get("tool_calls")):
        return message
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return kept | {"content": "\n".join(filter(None, [_text(message), *map(_call, calls)]))}


def _call(call: dict[str, Any]) -> str:
    function = {name: call["function"].get(name) for name in ("name", "arguments")}
    return f"{CALL}\n{json.dumps(function, ensure_ascii=False)}\n{CALL_END}"


def _text(message: Message) -> str:
    """The content may come in parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
