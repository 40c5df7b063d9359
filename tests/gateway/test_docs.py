"""The gateway's page is true: its examples are run as they stand there, by curl and by the official clients, and what
it lists is what there is. Simulated nodes: what is said does not matter here, what comes back and in which shape does.

The page speaks to http://127.0.0.1:8080 and a model `qwen`; here the port is another one, and `qwen` an alias.
"""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from disaggregated_inference.gateway import metrics
from disaggregated_inference.gateway.anthropic import requests as anthropic_requests
from disaggregated_inference.gateway.app import ADAPTERS
from disaggregated_inference.gateway.ollama import requests as ollama_requests
from disaggregated_inference.gateway.ollama import routes as ollama
from disaggregated_inference.gateway.openai import requests as openai_requests
from disaggregated_inference.gateway.openai import responses_requests
from tests.support.cluster import config_of
from tests.support.gateway import served, simulated_pair

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "docs" / "GATEWAY.md", ROOT / "README.md")
PAGE = PAGES[0].read_text()
MODEL = "simulated:tiny"
ADDRESS = "http://127.0.0.1:8080"
_CURLRC = 'fail-with-body\nsilent\nshow-error\nmax-time = 30\nwrite-out = "\\n"\n'
_BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```(?:\n\n```json\n(.*?)^```)?", re.MULTILINE | re.DOTALL)


class Example(msgspec.Struct, frozen=True):
    place: str
    language: str
    text: str
    response: str  # the answer that the page prints, if it does

    def at(self, url: str) -> str:
        return self.text.replace(ADDRESS, url)


def _examples() -> Iterator[Example]:
    for page in PAGES:
        text = page.read_text()
        for found in _BLOCK.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            if ADDRESS in found[2]:
                yield Example(f"{page.name}:{line}", found[1], found[2], found[3] or "")


EXAMPLES = tuple(_examples())
SHELL = [example for example in EXAMPLES if example.language == "bash"]
PYTHON = [example for example in EXAMPLES if example.language == "python"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Completions without a limit are short here."""
    with simulated_pair() as pair:
        models = {MODEL: {"aliases": ["qwen"], "defaults": {"max_tokens": 12}}}
        links = [{"prefill": "p1", "decode": "d1", "gbps": 10}]
        with served(config_of(*pair) | {"models": models, "links": links}) as url:
            yield url


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """curl, with --fail: an HTTP error is a failure."""
    (tmp_path / ".curlrc").write_text(_CURLRC)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return os.environ | {"CURL_HOME": str(tmp_path), "HOME": str(tmp_path), "PATH": path}


@pytest.mark.parametrize("example", SHELL, ids=lambda example: example.place)
def test_the_curl_examples_run(url: str, shell: dict[str, str], tmp_path: Path, example: Example) -> None:
    command = ["bash", "-euc", example.at(url)]
    done = subprocess.run(command, env=shell, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not _errors(done.stdout)
    assert _keys(example.response) <= _keys(done.stdout)


def _keys(text: str) -> set[str]:
    """The keys of JSON that may be shortened, except names of models and architectures."""
    return set(re.findall(r'"(\w+)" ?:', text)) - {"smollm2"}


def _errors(text: str) -> list[Any]:
    """The fields of a body, or of the events of a stream."""
    found = [json.loads(line) for line in re.findall(r"^(?:data: )?(\{.*\})$", text, re.MULTILINE)]
    return [item["error"] for item in found if item.get("error")]


@pytest.mark.parametrize("example", PYTHON, ids=lambda example: example.place)
def test_the_python_examples_run(url: str, example: Example) -> None:
    """In this process, so that the clients are imported once; the test closes them."""
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        with redirect_stdout(io.StringIO()) as output:
            exec(compile(example.at(url), example.place, "exec"), names)
    finally:
        names["client"].close()
    assert output.getvalue().strip()


def test_every_path_has_an_example() -> None:
    shown = " ".join(example.text for example in SHELL) + " "
    for adapter in ADAPTERS:
        for route in adapter.routes():
            pattern = re.sub(r"\\\{\w+(?::path)?\\\}", r"[^/\\s]+", re.escape(route.path))
            if route.path not in {"/", "/v1/embeddings", *ollama.NOT_OFFERED}:
                assert re.search(re.escape(ADDRESS) + pattern + r"\s", shown), route.path


def test_every_field_is_documented() -> None:
    kinds: list[type[msgspec.Struct]] = [
        openai_requests.ChatCompletionRequest,
        openai_requests.CompletionRequest,
        responses_requests.CreateResponse,
    ]
    kinds += [
        anthropic_requests.MessagesRequest,
        ollama_requests.OllamaChatRequest,
        ollama_requests.OllamaGenerateRequest,
        ollama_requests.OllamaOptions,
    ]
    fields = {name for kind in kinds for name in kind.__struct_encode_fields__}
    assert not {name for name in fields if f"`{name}`" not in PAGE}
    assert not {name for name in ollama.NOT_OFFERED if f"`{name.removesuffix('/{digest}')}`" not in PAGE}


def test_every_metric_is_documented() -> None:
    assert not {name for name in (*metrics.HISTOGRAMS, *metrics.COUNTERS, *metrics.GAUGES) if f"`{name}`" not in PAGE}


# What programs send that are not run here, as their sources build it: Open WebUI 0.10.2, Continue 1.3.40, Cline 4.1.13,
# and the `ollama` command.
_SAID: Any = {
    "model": "qwen",
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
}
_CALLED: Any = {"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a"}'}}
_AFTER_A_CALL: Any = {
    "model": "qwen",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Read it."}, {"type": "text", "text": "<details>"}]},
        {"role": "assistant", "content": " ", "reasoning_content": "", "tool_calls": [_CALLED]},
        {"role": "tool", "tool_call_id": "c1", "content": "Hello"},
    ],
    "tools": [
        {"type": "function", "function": {"name": "read_file", "parameters": {"type": "object"}, "strict": False}}
    ],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
}
_OLLAMA_CALL: Any = {
    "model": "qwen",
    "messages": [
        {"role": "user", "content": "Read it."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"index": 0, "id": "c1", "function": {"name": "f", "arguments": {}}}],
        },
        {"role": "tool", "tool_call_id": "c1", "tool_name": "f", "content": "Hello"},
    ],
}
REPLAYS: list[tuple[str, str, Any]] = [
    ("Open WebUI", "/api/version", None),
    ("Open WebUI", "/api/tags", None),
    ("Open WebUI", "/api/ps", None),
    ("Open WebUI", "/v1/models", None),
    ("Open WebUI", "/api/chat", _SAID | {"options": {"stop": None, "num_ctx": 1 << 20, "mirostat": 0}, "metadata": {}}),
    ("Open WebUI", "/api/chat", _SAID | {"stream": False, "num_predict": 1000, "keep_alive": "5m"}),
    ("Open WebUI", "/v1/chat/completions", _SAID | {"stream": False, "max_completion_tokens": 8, "seed": None}),
    ("Open WebUI", "/v1/chat/completions", _SAID | {"stream": True, "stream_options": {"include_usage": True}}),
    ("Open WebUI", "/api/pull", {"model": "qwen"}),
    ("Continue", "/api/show", {"name": "qwen"}),
    ("Continue", "/api/chat", _SAID | {"options": {"num_predict": 8, "num_ctx": 8192}, "keep_alive": 1800}),
    ("Continue", "/api/generate", {"model": "qwen", "prompt": "def f(", "raw": True, "options": {"stop": ["\n"]}}),
    ("Continue", "/v1/chat/completions", _AFTER_A_CALL),
    ("Continue", "/v1/completions", {"model": "qwen", "prompt": "def f(", "stream": True, "stop": ["\n\n"]}),
    ("Cline", "/v1/chat/completions", _AFTER_A_CALL | {"max_tokens": 8, "temperature": 0}),
    ("Cline", "/api/chat", _OLLAMA_CALL | {"options": {"num_ctx": 1 << 20}}),
    ("ollama", "/", None),
    ("ollama", "/api/show", {"model": "qwen:latest", "system": "", "template": "", "options": None}),
    ("ollama", "/api/generate", {"model": "qwen", "prompt": "", "suffix": "", "template": "", "keep_alive": None}),
]


@pytest.mark.parametrize(("program", "path", "body"), REPLAYS, ids=[f"{who} {path}" for who, path, _ in REPLAYS])
def test_requests_of_known_programs_are_answered(url: str, program: str, path: str, body: Any) -> None:
    keys = {"Authorization": "Bearer k", "x-api-key": "k"}  # as Continue sends them; no key is needed here
    answer = httpx.request("GET" if body is None else "POST", url + path, json=body, headers=keys, timeout=30)
    assert answer.status_code == 200, answer.text
    assert not _errors(answer.text)
    if body and body.get("stream_options"):
        assert "completion_tokens" in answer.text.split("data: ")[-2]
