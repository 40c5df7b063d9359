"""Requests of every kind, drawn with a seed. Each is asked once before the faults begin; that answer is the truth."""

import random
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

Way = Literal["library", "completions", "chat"]  # the orchestrator in this process, or the gateway's APIs

_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"enum": ["small", "large"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
_SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 11},
    "penalties": {"temperature": 0.7, "seed": 5, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    "choices": {"temperature": 1.0, "seed": 3, "n": 3},
    "logprobs": {"temperature": 0.6, "seed": 7, "logprobs": 2},
    "schema": {
        "temperature": 0.8,
        "seed": 9,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA}},
    },
    "choice": {"temperature": 0, "response_format": {"type": "choice", "choices": ["yes, of course", "no, never"]}},
    "stop": {"temperature": 0, "stop": ["3]"]},
}
_WORDS = ("river", "stone", "lamp", "seven", "orange", "quiet", "engine", "paper", "north", "cloud", "table", "winter")
_LENGTHS, _TOKENS = (4, 30, 150, 300), (4, 24, 90, 200)  # words of prompts, tokens of completions
_SHORT_LENGTHS, _SHORT_TOKENS = (2, 6, 12), (2, 4, 6)
_SHARED_PREFIX, _SHARED_CHARACTERS = 0.3, 1200  # so many prompts start like another one


class ChaosRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`options`: by the names of OpenAI's API, which the library takes too."""

    name: str
    way: Way
    stream: bool
    prompt: str
    options: dict[str, Any]


def catalogue(seed: int, model: str, *, short: bool = False) -> list[ChaosRequest]:
    """Every kind of sampling, each way, streamed and whole, with prompts and completions of several lengths."""
    draw = random.Random(seed)
    lengths, tokens = (_SHORT_LENGTHS, _SHORT_TOKENS) if short else (_LENGTHS, _TOKENS)
    requests: list[ChaosRequest] = []
    for number, (kind, way, stream) in enumerate(_kinds()):
        prompt = _prompt(draw, draw.choice(lengths))
        if requests and draw.random() < _SHARED_PREFIX:
            prompt = f"{draw.choice(requests).prompt[:_SHARED_CHARACTERS]} {prompt}"
        limit = 64 if kind in ("schema", "choice") and not short else draw.choice(tokens)
        options = {"model": model, "max_tokens": limit} | _SAMPLINGS[kind]
        name = f"{number} {kind}, {way}{', streamed' if stream else ''}"
        requests.append(ChaosRequest(name=name, way=way, stream=stream, prompt=prompt, options=options))
    return requests


def _kinds() -> Iterator[tuple[str, Way, bool]]:
    ways: tuple[Way, ...] = ("library", "completions", "chat")
    return ((kind, way, stream) for kind in _SAMPLINGS for way in ways for stream in (False, True))


def _prompt(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(_WORDS, k=words))
