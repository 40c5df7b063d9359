"""Runs each client's checks in its own process, and makes a table of what they report."""

import json
import os
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests.clients.samples import sample_command, samples

ROOT = Path(__file__).parents[2]
CHECKS = Path(__file__).parent / "checks"
ENVIRONMENTS = ROOT / ".venv-clients"
NODE = Path(__file__).parent / "node_modules" / ".bin" / "node"
COLUMNS = {"chat": "chat", "streaming": "streaming", "structured": "structured output", "tools": "tools"}
_ANSWER_S = 120


class Client(NamedTuple):
    name: str
    script: str
    environment: str = ""  # the folder in .venv-clients, for packages that cannot live beside the others
    limit_s: int = 600  # a guard against a hang: a busy machine may need most of it


CLIENTS = (
    Client("openai", "openai_python.py"),
    Client("anthropic", "anthropic_python.py"),
    Client("ollama", "ollama_python.py"),
    Client("LiteLLM", "litellm_python.py", "openai2"),
    Client("langchain-openai", "langchain_openai_python.py"),
    Client("langchain-anthropic", "langchain_anthropic_python.py"),
    Client("langchain-ollama", "langchain_ollama_python.py"),
    Client("LlamaIndex", "llama_index_python.py", "openai2"),
    Client("pydantic-ai", "pydantic_ai_python.py"),
    Client("instructor", "instructor_python.py", "openai2"),
    Client("llm", "llm_command.py"),
    Client("lm-evaluation-harness", "lm_eval_command.py"),
    Client("openai (npm)", "openai.mjs"),
    Client("@anthropic-ai/sdk (npm)", "anthropic.mjs"),
    Client("ollama (npm)", "ollama.mjs"),
    Client("Vercel AI SDK (npm)", "vercel_ai.mjs"),
    Client("GuideLLM", "guidellm_command.py"),
)


class Row(msgspec.Struct, kw_only=True):
    """What the checks of one client reported."""

    client: Client
    version: str = "?"
    cells: dict[str, str] = msgspec.field(default_factory=dict)
    notes: list[str] = msgspec.field(default_factory=list)
    errors: list[str] = msgspec.field(default_factory=list)
    log: str = ""

    def add(self, line: dict[str, str]) -> None:
        self.version = line.get("version", self.version)
        if (check := line.get("check")) is None:
            return
        if error := line.get("error"):
            self.errors.append(f"{check}: {error}")
        if check in COLUMNS:
            self.cells[check] = "FAILED" if error else "yes"
        if note := line.get("note"):
            self.notes.append(note)


def expected_answer(url: str) -> str:
    """By plain HTTP. Every client must get the same text."""
    message = {"role": "user", "content": "Why is the sky blue?"}
    body = {"model": "qwen", "messages": [message], "temperature": 0, "max_tokens": 12}
    with urllib.request.urlopen(url + "/v1/chat/completions", json.dumps(body).encode(), timeout=_ANSWER_S) as response:
        answer: str = json.load(response)["choices"][0]["message"]["content"]
    return answer


def served_requests(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url + "/cluster", timeout=_ANSWER_S) as response:
        served: dict[str, Any] = json.load(response)["served"]
    return served


def run_client(client: Client, environ: dict[str, str]) -> Row:
    """The client's checks, then its sample of docs/CLIENTS.md."""
    row = Row(client=client)
    interpreter = _interpreter(client)
    output, failed = _run([str(interpreter), str(CHECKS / client.script)], client, environ, row)
    for line in output.splitlines():
        if line.startswith('{"'):
            row.add(json.loads(line))
    if failed or not row.cells:
        row.errors.append(failed or "no check ran")
    command = sample_command(*samples()[client.name], interpreter, environ["GATEWAY_URL"])
    output, failed = _run(command, client, environ, row)
    if failed or not output.strip():
        row.errors.append(f"its sample: {failed or 'prints nothing'}")
    return row


def _run(command: list[str], client: Client, environ: dict[str, str], row: Row) -> tuple[str, str]:
    """The output, and why it failed, if so."""
    cwd = NODE.parents[2] if client.script.endswith(".mjs") else ROOT  # imports begin here
    with tempfile.TemporaryDirectory() as home:
        own = environ | {"LLM_USER_PATH": home, "HF_DATASETS_CACHE": home}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=client.limit_s, env=os.environ | own, cwd=cwd
            )
        except subprocess.TimeoutExpired as error:
            row.log += _text(error.stderr)
            return _text(error.stdout), f"not done after {client.limit_s} s"
    row.log += done.stderr
    return done.stdout, f"exit code {done.returncode}" if done.returncode else ""


def _interpreter(client: Client) -> Path:
    return NODE if client.script.endswith(".mjs") else ENVIRONMENTS / client.environment / "bin" / "python"


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def table(rows: list[Row]) -> str:
    """In Markdown, for the terminal and for docs/CLIENTS.md. An empty cell: the client has no such feature."""
    head = ["client", "version", *COLUMNS.values(), "note"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        cells = [row.cells.get(name, "") for name in COLUMNS]
        lines.append([row.client.name, row.version, *cells, "; ".join([*row.notes, *row.errors]).replace("|", "/")])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
