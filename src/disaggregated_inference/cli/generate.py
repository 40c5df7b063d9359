"""`disagg generate`: one prompt, one answer."""

import json
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

from disaggregated_inference.cli.options import checked, messages_of
from disaggregated_inference.cli.screen import Screen, hush
from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.errors import BadRequest


def asked(argument: str | None, system: str, raw: bool) -> dict[str, Any]:
    """What is asked: the prompt, or messages around it."""
    if raw and system:
        raise BadRequest("--system is a message of a chat, and --raw is none: write it into the prompt")
    prompt = checked(_prompt(argument))
    if raw:
        return {"prompt": prompt}
    return {"messages": messages_of(system and checked(system), {"role": "user", "content": prompt.rstrip("\n")})}


def _prompt(argument: str | None) -> str:
    """Where there is an argument, standard input is left alone: it may be anybody's."""
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise BadRequest("no prompt: write it behind the command or pipe it in; `disagg chat` is for talking")
    return sys.stdin.buffer.read().decode("utf-8", "surrogateescape")


def run(config: str | None, ask: dict[str, Any], *, stream: bool, as_json: bool, metrics: bool) -> None:
    hush()
    screen = Screen()
    try:
        with DisaggregatedClient(config) as client:
            told = _answered(client, ask, screen, stream=stream, as_json=as_json)
    finally:
        screen.end_line()
    screen.about(told, wanted=metrics)


def _answered(
    client: DisaggregatedClient, ask: dict[str, Any], screen: Screen, *, stream: bool, as_json: bool
) -> dict[str, Any]:
    if stream and not as_json:
        return streamed(client, ask, screen.write)
    response, told = client.generate(stream=False, **ask)
    screen.write(json.dumps({"response": response, "metrics": told}) if as_json else response)
    return told


def streamed(client: DisaggregatedClient, ask: dict[str, Any], put: Callable[[str], object]) -> dict[str, Any]:
    """The metrics. Closed at once when interrupted, so that both nodes hear of it while this process is there."""
    told: dict[str, Any] = {}
    with closing(client.stream(**ask)) as deltas:
        for delta in deltas:
            put(delta.text)
            told = delta.metrics or told
    return told
