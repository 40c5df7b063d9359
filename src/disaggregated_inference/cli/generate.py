"""`disagg generate`: one prompt, one completion."""

import json
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

from disaggregated_inference.cli.options import chat_messages, require_text
from disaggregated_inference.cli.screen import Screen, mute_logs
from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.cluster import load_config
from disaggregated_inference.errors import BadRequest


def prompt_arguments(argument: str | None, system: str, raw: bool) -> dict[str, Any]:
    """The client's `prompt` or `messages` argument."""
    if raw and system:
        raise BadRequest("--system needs a chat template, which --raw does not use: write the text into the prompt")
    prompt = require_text(_read_prompt(argument))
    if raw:
        return {"prompt": prompt}
    user = {"role": "user", "content": prompt.rstrip("\n")}
    return {"messages": chat_messages(system and require_text(system), user)}


def _read_prompt(argument: str | None) -> str:
    """Standard input is only read without an argument: inside a script it may belong to another command."""
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise BadRequest("no prompt: pass it as an argument or through a pipe; for a conversation use `disagg chat`")
    return sys.stdin.buffer.read().decode("utf-8", "surrogateescape")


def run(
    config: str | None, token_file: str, request: dict[str, Any], *, stream: bool, as_json: bool, metrics: bool
) -> None:
    mute_logs()
    screen = Screen()
    try:
        with DisaggregatedClient(load_config(config, token_file=token_file)) as client:
            summary = _generate(client, request, screen, stream=stream, as_json=as_json)
    finally:
        screen.end_line()
    screen.show_metrics(summary, verbose=metrics)


def _generate(
    client: DisaggregatedClient, request: dict[str, Any], screen: Screen, *, stream: bool, as_json: bool
) -> dict[str, Any]:
    if stream and not as_json:
        return stream_text(client, request, screen.write, screen.note)
    metrics = stream_text(client, request, lambda text: None, screen.note)
    response = metrics.pop("response")
    screen.write(json.dumps({"response": response, "metrics": metrics}) if as_json else response)
    return metrics


def stream_text(
    client: DisaggregatedClient,
    request: dict[str, Any],
    write: Callable[[str], object],
    note: Callable[[str, str], object],
) -> dict[str, Any]:
    """Returns the metrics. On Ctrl-C the stream is closed at once, so both nodes cancel the request. `note` tells that
    the request waits for a node to come back."""
    metrics: dict[str, Any] = {}
    with closing(client.stream(**request)) as deltas:
        for delta in deltas:
            if delta.waiting:
                note(delta.waiting, "yellow")
            write(delta.text)
            metrics = delta.metrics or metrics
    return metrics
