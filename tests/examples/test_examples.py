"""The examples run as their headers say, against simulated nodes: their output matters, not what the model writes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Process, config_of
from tests.support.gateway import served

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
SHAPES = {"simulated:tiny": "qwen3-coder:30b", "simulated:gpt-oss-120b": "gpt-oss:120b"}
SPEED = ("--profile", "instant", "--kv-memory", "256M")


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Process]]:
    """One model on two nodes, so that KV moves, and another one beside it."""
    places = [("p1", "prefill", "simulated:tiny"), ("d1", "decode", "simulated:tiny")]
    places.append(("b1", "both", "simulated:gpt-oss-120b"))
    started = [Process(name, role, "simulated", model, *SPEED) for name, role, model in places]
    try:
        yield [node.ready() for node in started]
    finally:
        for node in started:
            node.end()


@pytest.fixture
def config(nodes: list[Process], tmp_path: Path) -> Path:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(_config(nodes)))
    return path


def _config(nodes: list[Process]) -> dict[str, object]:
    return config_of(*nodes) | {"models": {name: {"aliases": [alias]} for name, alias in SHAPES.items()}}


def run(name: str, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    environment = {key: value for key, value in os.environ.items() if key != "DISAGG_CONFIG"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_plain_client(config: Path) -> None:
    arguments = ("--config", config, "--model", "qwen3-coder", "--max-tokens", "12", "Why is the sky blue?")
    printed = run("plain_client.py", *arguments).stdout
    assert "disaggregated_simulated" in printed
    assert "12 tokens on " in printed


def test_two_models(config: Path, tmp_path: Path) -> None:
    source = tmp_path / "solution.py"
    source.write_text("print(sum(range(10)))\n")
    printed = run("two_models.py", "--config", config, "--max-tokens", "8", source).stdout
    assert "== disaggregated:qwen3-coder:30b" in printed
    assert "== disaggregated:gpt-oss:120b" in printed
    assert "speedup" in printed


def test_openai_streaming(nodes: list[Process]) -> None:
    with served(_config(nodes)) as url:
        printed = run("openai_streaming.py", "--url", url, "--model", "qwen3-coder:30b", "--max-tokens", "10").stdout
    assert printed.rstrip().endswith("10 tokens")


def test_review_code(config: Path, tmp_path: Path) -> None:
    files = [tmp_path / "one.py", tmp_path / "two.py"]
    for file in files:
        file.write_text("def double(x):\n    return x + x\n")
    done = run("review_code.py", "--config", config, "--model", "qwen3-coder:30b", "--max-tokens", "3000", *files)
    assert [line.rpartition(":")[0] for line in done.stderr.splitlines()] == [str(file) for file in files]


def test_every_example_is_listed_and_tested() -> None:
    listed, tests = (EXAMPLES / "README.md").read_text(), Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f"({path.name})" in listed
        assert f'"{path.name}"' in tests
        assert path.read_text().startswith('"""')
