"""By each of the APIs that LiteLLM can speak."""

from collections.abc import Callable

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


def each(check: Callable[..., None], leave_out: str = "-") -> str:
    providers = {name: base for name, base in PROVIDERS.items() if not name.startswith(leave_out)}
    for model, base in providers.items():
        try:
            check({"model": model, "api_base": base, "api_key": KEY, "temperature": 0, "num_retries": 0})
        except Exception as error:
            raise AssertionError(f"{model}: {error}") from error
    return ", ".join(name.partition("/")[0] for name in providers)


def chat_by(provider: dict) -> None:
    same(litellm.completion(**provider, messages=HELLO, max_tokens=MAX_TOKENS).choices[0].message.content)


def streaming_by(provider: dict) -> None:
    chunks = litellm.completion(**provider, messages=HELLO, max_tokens=MAX_TOKENS, stream=True)
    joined(chunk.choices[0].delta.content for chunk in chunks)


def structured_by(provider: dict) -> None:
    answer = litellm.completion(**provider, messages=HELLO, max_tokens=60, response_format=City)
    City.model_validate_json(answer.choices[0].message.content)


def tools_by(provider: dict) -> None:
    answer = litellm.completion(**provider, messages=HELLO, max_tokens=60, tools=[TOOL], tool_choice="required")
    calls = answer.choices[0].message.tool_calls
    one_call((call.function.name, call.function.arguments) for call in calls)


def tools() -> None:
    """Ollama's API cannot force a call."""
    each(tools_by, leave_out="ollama")


report(
    "litellm",
    chat=lambda: "providers " + each(chat_by),
    streaming=lambda: each(streaming_by) and None,
    structured=lambda: each(structured_by) and None,
    tools=tools,
)
