"""A disk without room: commands that need it end with what to set; what serves goes on without it."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from disaggregated_inference.cli import generate
from tests.support.cluster import Process, config_of
from tests.support.command import run_here
from tests.support.gateway import served
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="mounting a small disk needs root")

MODEL = "simulated:tiny"
HOME = "set DISAGG_HOME to a folder on another one"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders and empty files can be made there, as on every full disk."""
    place = tmp_path_factory.mktemp("full")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "small", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this container does not allow mounts")
    try:
        (place / "fill").write_bytes(bytes(64 << 10))
        with pytest.raises(OSError, match="No space left"):
            (place / "more").write_bytes(b"x")
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def home(full: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DISAGG_HOME", str(full / "home"))
    return full / "home"


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        ("cluster keys init", "choose another folder with --keys or DISAGG_KEYS, or another home with DISAGG_HOME"),
        ("gateway key ann --file {full}/keys.json", "name a file in another folder with --file"),
        ("models inspect simulated:tiny", HOME),
        ("serve --engine simulated --port 0 --kv-port 0", HOME),
        ("up --simulated instant,instant --port 0", HOME),
        ("demo hi", HOME),
    ],
)
def test_a_command_that_needs_the_disk_says_what_to_set(
    command: str, remedy: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "hub"))  # no model is found elsewhere
    run = run_here(*command.format(full=home.parent).split())
    last = run.stderr.strip().splitlines()[-1]
    assert run.returncode == 1
    assert last.startswith("error: ")
    assert "No space left on device" in last
    assert last.endswith(remedy)


@pytest.mark.slow
def test_what_serves_goes_on(
    full: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A node whose prefix disk is full, and a gateway and a command whose home and history are."""
    node = Process("only", "both", "simulated", MODEL, "--prefix-disk", str(full / "prefixes")).ready()
    config = config_of(node, history_file=str(full / "history.db"))
    monkeypatch.setenv("DISAGG_HOME", str(full / "home"))
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "temperature": 0}
    prompt = "word " * 400
    try:
        with served(config) as url:
            texts = [
                httpx.post(f"{url}/v1/completions", json=ask | {"prompt": prompt}, timeout=60).json()["choices"]
                for _ in range(2)
            ]
            assert texts[0] == texts[1]
            assert httpx.get(f"{url}/cluster/history", timeout=60).status_code == 200
        assert "name another file in policies.history_file" in caplog.text
        assert "the tokenizer could not be written to disk" in caplog.text
        assert "set DISAGG_HOME" in caplog.text
        assert list((full / "home").rglob("*.partial")) == []
        (tmp_path / "cluster.json").write_text(json.dumps(config))
        generate.run(str(tmp_path / "cluster.json"), "", {"prompt": prompt}, stream=False, as_json=True, metrics=False)
        assert json.loads(capsys.readouterr().out)["response"]
        assert until(lambda: "name another folder with --prefix-disk" in node.said(), 60)
        assert node.said().count("--prefix-disk") == 1, "logged once"
        assert node.status()["prefixes"]["blocks"] > 0, "in memory"
    finally:
        node.end()
