"""Addresses, settings and entry points of the node."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import disaggregated_inference
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.ollama_node.client import (
    ModelDetails,
    OllamaClient,
    base_url,
    full_name,
    keep_alive_of,
    version_of,
)
from tests.support.cluster import ready_line
from tests.support.recorded_ollama import LONG_S, RecordedOllama


def test_addresses_names_and_versions() -> None:
    assert base_url("") == base_url("localhost") == "http://localhost:11434"
    assert base_url("0.0.0.0:99") == "http://127.0.0.1:99"
    assert base_url("https://box") == "https://box:11434"
    assert base_url("[::1]:5") == "http://[::1]:5"
    for wrong in ("ftp://x", "http://", "x:y", "http://x/path", "x y", "http://x y:5", "a,b"):
        with pytest.raises(BadRequest, match="is not an address"):
            base_url(wrong)
    assert full_name("a") == "a:latest"
    assert full_name("host:1/a:30b") == "host:1/a:30b"
    assert version_of("0.12.6-rc1") == (0, 12, 6)
    assert version_of("?") == (0, 0, 0)
    for path in ("model.gguf", "./models/smollm2", "~/x/y.GGUF", __file__):
        with pytest.raises(BadRequest, match=r"ollama create NAME -f Modelfile.*--engine llamacpp"):
            OllamaClient("", path)
    assert OllamaClient("", "disaggregated:smollm2").model == "smollm2"
    assert OllamaClient("", "hf.co/someone/some-GGUF:some-Q4_K_M.gguf").model
    assert ModelDetails(parameters='stop "a b"\nnum_ctx 4\nstop x').stops == ["a b", "x"]


@pytest.mark.parametrize(
    ("text", "sent"),
    [("30m", "30m"), ("1h30m", "1h30m"), ("500ms", "500ms"), ("-1m", "-1m"), ("90", 90), ("-1", -1), ("1.5", 1.5)],
)
def test_how_long_it_keeps_a_model(text: str, sent: float | str) -> None:
    assert keep_alive_of(text) == sent


@pytest.mark.parametrize("text", ["--5", "²", "5 minutes", "1d", "m", "-", "1h30", "nan", "inf", "9999999h", "1e3"])
def test_what_is_no_time_to_keep_it_ends_the_start(text: str) -> None:
    with pytest.raises(BadRequest, match="is not a duration: give"):
        keep_alive_of(text)


def test_it_ends_in_one_line(ollama: RecordedOllama) -> None:
    command = [sys.executable, "-m", "disaggregated_inference", "serve", "--engine", "ollama", "--model", "smollm2"]
    for wrong, says in (("--keep-alive=5 minutes", "is not a duration"), ("--ollama-host=x y", "is not an address")):
        ended = subprocess.run([*command, "--port", "0", wrong], capture_output=True, text=True, timeout=LONG_S)
        assert ended.returncode == 1
        assert says in ended.stderr
        assert len(ended.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "name", ["prefill_server_ollama", "decode_server_ollama", "prefill_server_dgx", "decode_server_mac"]
)
def test_entry_points_help(name: str) -> None:
    command = [sys.executable, "-m", f"disaggregated_inference.{name}", "--help"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    port = "8000" if name.startswith("prefill") else "8001"
    assert all(flag in said for flag in ("--model", "--host", "--port", port))
    assert ("--ollama-host" in said) == ("ollama" in name)
    wrong = subprocess.run([*command[:-1], "--port", "99999"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "'99999' is not a port" in wrong.stderr


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("prefill_server_dgx", "[torch]"),
        ("decode_server_mac", "[mlx]"),
        ("prefill_server_ollama", ""),
        ("decode_server_ollama", ""),
    ],
)
def test_an_entry_point_copied_alone_says_what_to_install(name: str, extra: str, tmp_path: Path) -> None:
    copy = tmp_path / f"{name}.py"
    copy.write_text(Path(disaggregated_inference.__file__).with_name(f"{name}.py").read_text())
    run = subprocess.run([sys.executable, "-I", "-S", str(copy)], capture_output=True, text=True)
    assert run.returncode == 1
    assert f"pip install 'disaggregated-inference{extra}'" in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_an_entry_point_serves(ollama: RecordedOllama) -> None:
    command = [sys.executable, "-m", "disaggregated_inference.decode_server_ollama", "--port", "0"]
    missing = subprocess.run([*command, "--model", "nope", "--ollama-host", ollama.url], capture_output=True, text=True)
    assert missing.returncode == 1
    assert "run `ollama pull nope`" in missing.stderr
    command += ["--model", "smollm2", "--ollama-host", ollama.url, "--host", "0.0.0.0"]
    bare = {name: value for name, value in os.environ.items() if name != "DISAGG_TOKEN"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=bare)
    try:
        assert process.stdout
        assert process.stderr
        assert "listening on 0.0.0.0 without a token: anyone who can reach" in process.stderr.readline()
        ready = ready_line(process.stdout)
        assert ready["backend"] == "ollama"
        assert ready["role"] == "decode"
        request = urllib.request.Request(
            f"http://127.0.0.1:{ready['port']}/generate", b'{"prompt": "7", "max_tokens": 1}'
        )
        with urllib.request.urlopen(request, timeout=LONG_S) as response:
            assert json.loads(response.read())["generated_text"] == " 8"
    finally:
        process.terminate()
        assert process.wait(LONG_S) == 0
        for pipe in (process.stdout, process.stderr):
            pipe and pipe.close()
