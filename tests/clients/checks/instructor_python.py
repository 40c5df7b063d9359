"""Every mode that instructor has for OpenAI's and Anthropic's API.

Modes without a grammar describe the schema in the prompt only: there the model follows an example.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any

import instructor
from anthropic import Anthropic
from common import KEY, MAX_TOKENS, MODEL, QUESTION, URL, City, report, same
from instructor.v2.core.providers import Provider
from instructor.v2.core.registry import mode_registry
from openai import OpenAI

openai = OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
anthropic = Anthropic(base_url=URL, api_key=KEY, max_retries=0)
ask = {"model": MODEL, "max_tokens": 100, "max_retries": 0, "temperature": 0}


def messages(name: str) -> list[dict[str, Any]]:
    """Two answers of the kind that the mode wants, and a question."""
    said = [("Rome", _answer(name, "Rome")), ("Oslo", _answer(name, "Oslo"))]
    turns = [[{"role": "user", "content": f"Save {city}."}, {"role": "assistant"} | answer] for city, answer in said]
    return [*turns[0], *turns[1], {"role": "user", "content": "Save Paris."}]


def _answer(name: str, city: str) -> dict[str, Any]:
    fields = {"name": city, "large": True}
    text = json.dumps(fields)
    if name == "OpenAI PARALLEL_TOOLS":
        call = {"id": f"call_{city}", "type": "function", "function": {"name": "City", "arguments": text}}
        return {"content": "", "tool_calls": [call]}
    if name == "Anthropic PARALLEL_TOOLS":
        return {"content": [{"type": "tool_use", "id": f"call_{city}", "name": "City", "input": fields}]}
    return {"content": f"```json\n{text}\n```" if "MD_JSON" in name else text}


def clients() -> Iterable[tuple[str, Any]]:
    for mode in sorted(mode_registry.get_modes_for_provider(Provider.OPENAI), key=str):
        yield f"OpenAI {mode.name}", instructor.from_openai(openai, mode=mode)
    for mode in sorted(mode_registry.get_modes_for_provider(Provider.ANTHROPIC), key=str):
        yield f"Anthropic {mode.name}", instructor.from_anthropic(anthropic, mode=mode)


def chat() -> None:
    plain = ask | {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": MAX_TOKENS}
    same(instructor.from_openai(openai).create(**plain, response_model=None).choices[0].message.content)


def streaming() -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        parts = list(
            instructor.from_openai(openai, mode=mode).create_partial(**ask, messages=messages(""), response_model=City)
        )
        assert len(parts) > 1
        City.model_validate(parts[-1].model_dump())


def each(wanted: Callable[[str], bool]) -> str:
    passed, failed = [], []
    for name, client in clients():
        if wanted(name):
            try:
                passed.append(_check(name, client))
            except Exception as error:
                failed.append(f"{name}: {error!r:.200}")
    assert not failed, " / ".join(failed)
    return ", ".join(passed)


def structured() -> str:
    return each(lambda name: "TOOLS" not in name)


def tools() -> str:
    return each(lambda name: "TOOLS" in name)


def _check(name: str, client: Any) -> str:
    wanted = Iterable[City] if "PARALLEL" in name else City
    answer = client.create(**ask, messages=messages(name), response_model=wanted)
    cities = list(answer) if "PARALLEL" in name else [answer]
    assert cities
    assert all(isinstance(city, City) for city in cities)
    return name


report("instructor", chat=chat, streaming=streaming, structured=structured, tools=tools)
