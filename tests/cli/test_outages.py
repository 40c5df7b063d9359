"""A request that waits for a node to come back says so, also where no SSE comment can: in the commands of the terminal,
and in a stream of Ollama's API. Streams with comments: tests/orchestrator/test_outages.py."""

import io
import json
import threading
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from disaggregated_inference.cli import generate
from disaggregated_inference.cli.chat import Chat
from disaggregated_inference.cli.options import CommandOptions
from disaggregated_inference.cli.screen import Screen
from disaggregated_inference.client import DisaggregatedClient
from tests.support.cluster import Process, config_of
from tests.support.gateway import served
from tests.support.waiting import until

pytestmark = pytest.mark.slow

MODEL = "simulated:tiny"
WAITING = f"waiting for a decode node of {MODEL}"
ASK: dict[str, Any] = {"max_tokens": 60, "temperature": 0}


@pytest.fixture(scope="module")
def only() -> Iterator[Process]:
    node = Process("only", "decode", "simulated", MODEL, "--profile", "custom:prefill=5000,decode=40")
    try:
        yield node.ready()
    finally:
        node.end()


@pytest.fixture
def config(only: Process) -> dict[str, Any]:
    return config_of(only, local="always", poll_s=0.2)


def generated(config: dict[str, Any], folder: Path) -> None:
    (folder / "cluster.json").write_text(json.dumps(config))
    ask = ASK | {"prompt": "hi"}
    generate.run(str(folder / "cluster.json"), "", ask, stream=True, as_json=True, metrics=False)


def chatted(config: dict[str, Any]) -> None:
    with DisaggregatedClient(config) as client:
        Chat(client, CommandOptions(**ASK), "", Screen(), metrics=False, as_json=False).handle("hi")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_command_says_on_standard_error_that_it_waits(
    only: Process, config: dict[str, Any], command: str, tmp_path: Path
) -> None:
    told, errors = io.StringIO(), io.StringIO()

    def run() -> None:
        if command == "chat":
            chatted(config)
        else:
            generated(config, tmp_path)

    with redirect_stdout(told), redirect_stderr(errors):
        before = only.status()["tokens_written"]
        running = threading.Thread(target=run)
        running.start()
        try:
            assert until(lambda: only.status()["tokens_written"] > before + 3, 60)
            only.kill()
            assert until(lambda: WAITING in errors.getvalue(), 60)
        finally:
            only.start()
            only.ready()
        running.join()
    assert errors.getvalue().count(WAITING) == 1
    assert WAITING not in told.getvalue()
    if command == "generate":  # with --json, which takes no text from the stream
        answer = json.loads(told.getvalue())
        assert answer["metrics"]["completion_tokens"] == ASK["max_tokens"]
        assert answer["response"]
        assert "response" not in answer["metrics"]


def test_a_stream_of_the_ollama_api_says_that_it_waits(only: Process, config: dict[str, Any]) -> None:
    """In an empty line of content: Ollama's own client reads the same answer from both streams."""
    ask = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "options": {"num_predict": 60, "seed": 1}}
    answers = []
    with served(config) as url:
        for disturbed in (False, True):
            lines: list[dict[str, Any]] = []
            with httpx.stream("POST", f"{url}/api/chat", json=ask, timeout=120) as answer:
                for line in answer.iter_lines():
                    lines.append(json.loads(line))
                    if disturbed and only.alive and len(lines) == 5:
                        only.kill()
                    if "waiting" in lines[-1]:
                        only.start()
                        only.ready()
            parts = [ollama.ChatResponse(**line) for line in lines]
            assert parts[-1].done
            answers.append("".join(part.message.content or "" for part in parts))
            assert [line["waiting"] for line in lines if "waiting" in line] == [WAITING] * disturbed
    assert answers[0] == answers[1] != ""
