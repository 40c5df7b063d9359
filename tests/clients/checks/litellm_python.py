"""By each of the APIs that LiteLLM can speak."""

from collections.abc import Callable, Iterable

import litellm
from common import CITY, KEY, MAX_TOKENS, MODEL, QUESTION, URL, City, joined, one_call, report, same

PROVIDERS = {
    f"openai/{MODEL}": f"{URL}/v1",
    f"hosted_vllm/{MODEL}": f"{URL}/v1",
    f"anthropic/{MODEL}": URL,
    f"ollama_chat/{MODEL}": URL,
}
HELLO = [{"role": "user", "content": QUESTION}]
TOOL = {"type": "function", "function": {"name": "save_city", "description": "Save a city", "parameters": CITY}}
SAVED = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "save_city", "arguments": '{"name": "Rome", "large": true}'},
}
EXAMPLE = [
    {"role": "user", "content": "Save Rome."},
    {"role": "assistant", "content": "", "tool_calls": [SAVED]},
    {"role": "user", "content": "Save Paris."},
]


def each(check: Callable[..., None]) -> str:
    for model, base in PROVIDERS.items():
        try:
            check({"model": model, "api_base": base, "api_key": KEY, "temperature": 0, "num_retries": 0})
        except Exception as error:
            raise AssertionError(f"{model}: {error}") from error
    return ", ".join(name.partition("/")[0] for name in PROVIDERS)


def chat_by(provider: dict) -> None:
    same(litellm.completion(**provider, messages=HELLO, max_tokens=MAX_TOKENS).choices[0].message.content)


def streaming_by(provider: dict) -> None:
    chunks = litellm.completion(**provider, messages=HELLO, max_tokens=MAX_TOKENS, stream=True)
    joined(chunk.choices[0].delta.content for chunk in chunks)


def structured_by(provider: dict) -> None:
    answer = litellm.completion(**provider, messages=HELLO, max_tokens=60, response_format=City)
    City.model_validate_json(answer.choices[0].message.content)


def tools_by(provider: dict) -> None:
    """Not streamed, then streamed. Ollama's API cannot force a call: there the model follows an example."""
    forced = {"messages": HELLO, "tool_choice": "required"}
    ask = provider | ({"messages": EXAMPLE} if provider["model"].startswith("ollama") else forced)
    ask |= {"tools": [TOOL], "max_tokens": 60}
    answer = litellm.completion(**ask)
    one_call((call.function.name, call.function.arguments) for call in answer.choices[0].message.tool_calls)
    deltas = [chunk.choices[0].delta for chunk in litellm.completion(**ask, stream=True)]
    one_call(streamed_calls(piece for delta in deltas for piece in delta.tool_calls or []))


def streamed_calls(pieces: Iterable) -> list[tuple[str, str]]:
    """A call's first piece has its name, each piece some of its arguments."""
    calls: dict[int, tuple[str, str]] = {}
    for piece in pieces:
        name, arguments = calls.get(piece.index, ("", ""))
        calls[piece.index] = (name + (piece.function.name or ""), arguments + (piece.function.arguments or ""))
    return list(calls.values())


report(
    "litellm",
    chat=lambda: "providers " + each(chat_by),
    streaming=lambda: each(streaming_by) and None,
    structured=lambda: each(structured_by) and None,
    tools=lambda: each(tools_by) and None,
)
