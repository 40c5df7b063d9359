"""Requests to the OpenAI endpoints, and OpenAI's own client."""

from typing import Any

from openai import OpenAI

SLOW = "custom:prefill=20000,decode=60"
SIMULATED = "simulated:tiny"
HELLO: Any = [{"role": "user", "content": "Name three colours of the rainbow."}]
QUICK: Any = {"model": SIMULATED, "messages": HELLO, "temperature": 0, "max_tokens": 8}
FOR_EVER: Any = QUICK | {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time"}}


def openai_client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60)
