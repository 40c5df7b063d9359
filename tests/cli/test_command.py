"""The command as people type it, mistakes included."""

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from typer.testing import CliRunner

from disaggregated_inference.api import Role
from disaggregated_inference.cli import gateway, main, serve_arguments
from disaggregated_inference.engines import ENGINES
from disaggregated_inference.gateway.server import GatewaySettings
from disaggregated_inference.kv import KVDType
from disaggregated_inference.kv_transfer import CODECS
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.node import NodeSettings
from tests.support.command import disagg, run_forked


@pytest.mark.slow
def test_demo_proves_the_hand_off(tiny_folder: Callable[[str], Path]) -> None:
    """With the embedded model: `make demo` in tests/examples/test_readme.py."""
    model = ModelFiles("llama", tiny_folder("llama"))
    chosen = ("--model", str(model.path), "--max-tokens", "12", "--chunk", "16")
    run = run_forked("demo", "Name three colours.", "--json", *chosen)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["prompt_tokens_recomputed"] == 0
    assert result["equal_to_decode_engine_alone"] is True
    assert result["kv_bytes"] == result["prompt_tokens"] * model.spec.kv_token_bytes("float32")
    assert result["answer"] in run.stderr


def test_models_lists_and_inspects(smollm2: ModelFiles) -> None:
    listed = json.loads(run_forked("models", "--json").stdout)
    assert {"name": "smollm2:135m", "path": str(smollm2.path), "note": "embedded, fetched on first use"} in listed
    result = json.loads(run_forked("models", "inspect", "smollm2", "--context", "1000", "--json").stdout)
    assert result["kv_bytes_per_token"] == 23040
    assert result["kv_bytes"] == 23_040_000
    assert result["memory_bytes"] > result["weights_bytes"] > 500e6
    assert result["engines"] == ["torch", "mlx", "llamacpp"]
    assert "23.04 MB at 1,000 tokens" in run_forked("models", "inspect", "smollm2", "--context", "1000").stdout
    assert json.loads(run_forked("models", "list", "--json").stdout) == listed


def test_a_piped_list_has_one_line_for_each_model(
    tmp_path: Path, smollm2: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, whatever the width of the terminal."""
    monkeypatch.setenv("COLUMNS", "40")
    disagg("models", "import", str(smollm2.path), "--name", "mine", home=tmp_path)
    listed = json.loads(disagg("models", "list", "--json", home=tmp_path).stdout)
    assert str(smollm2.path) in [row["path"] for row in listed]
    _, *lines = disagg("models", "list", home=tmp_path).stdout.splitlines()
    rows = [[cell for cell in (row["name"], row["path"] or "-", row["note"]) if cell] for row in listed]
    assert [re.split(r"\s{2,}", line.strip()) for line in lines] == rows


@pytest.mark.slow
def test_models_import(tmp_path: Path, smollm2: ModelFiles, smollm2_gguf: Path) -> None:
    run = run_forked("models", "import", str(smollm2.path), "--name", "mine", home=tmp_path)
    assert "(llama); serve it with --engine torch or mlx" in run.stdout
    assert json.loads(run_forked("models", "inspect", "mine", "--json", home=tmp_path).stdout)["path"] == str(
        smollm2.path
    )
    run = run_forked("models", "import", str(smollm2_gguf), "--name", "as/gguf", "--copy", home=tmp_path)
    copied = tmp_path / "models" / "as-gguf-gguf" / smollm2_gguf.name
    assert f"as/gguf is {copied}" in run.stdout
    assert copied.stat().st_size == smollm2_gguf.stat().st_size
    again = run_forked("models", "import", str(smollm2_gguf), "--name", "as/gguf", "--copy", home=tmp_path)
    assert "exists already" in again.stderr
    assert f"deleted {copied.parent}" in run_forked("models", "remove", "disaggregated:as/gguf", home=tmp_path).stdout
    assert "mine removed\n" in run_forked("models", "remove", "mine", home=tmp_path).stdout


def test_every_option_is_a_setting() -> None:
    """`serve` and `gateway` pass their options to these structs by name. `serve` reads its token file itself."""
    for command, settings, own in (
        (main.serve, NodeSettings, {"context", "token_file"}),
        (gateway.gateway, GatewaySettings, {"context"}),
    ):
        assert set(inspect.signature(command).parameters) - own == set(settings.__struct_fields__)


@pytest.mark.slow
def test_two_copies_are_one_model_or_not(tmp_path: Path, smollm2: ModelFiles, smollm2_gguf: Path) -> None:
    there = tmp_path / "there.json"
    there.write_text(run_forked("models", "inspect", str(smollm2_gguf), "--json").stdout)
    run = run_forked("models", "verify", "smollm2", str(there))
    assert (run.returncode, "stored differently" in run.stdout) == (0, True)
    assert run.stdout.count("\n") == 1
    run = run_forked("models", "verify", "simulated:tiny", "127.0.0.1:9", "--full")
    assert (run.returncode, "http://127.0.0.1:9 does not answer" in run.stderr) == (1, True)
    run = run_forked("models", "verify", "smollm2", str(smollm2.path), "--full")
    assert run.stdout == "the same model: every byte of the tensors is equal\n"
    run = run_forked("models", "verify", "smollm2", "simulated:tiny")
    assert (run.returncode, "layout: 30 layers, 3 x 64 here" in run.stdout) == (1, True)
    assert run.stdout.startswith("not the same model:\n  ")


def test_whether_copies_are_one_model_as_json() -> None:
    for other, same in (("simulated:tiny", True), ("simulated:qwen3-30b-a3b", False)):
        run = run_forked("models", "verify", "simulated:tiny", other, "--json")
        result = json.loads(run.stdout)
        assert (run.returncode, result["same"], bool(result["differences"])) == (0 if same else 1, same, not same)
        assert result["verdict"].startswith("the same model" if same else "not the same model")
    run = run_forked("models", "verify", "simulated:tiny", "http://127.0.0.1:9", "--json")
    assert (run.returncode, json.loads(run.stdout)["error"]["code"]) == (1, "model_not_found")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", "--model", "smolm2"), "no model 'smolm2'"),
        (("demo", "--decode", "vllm"), "unknown engine 'vllm': choose torch, mlx"),
        (("demo", ""), "the prompt is empty"),
        (("demo", "\udcff"), "not valid UTF-8"),
        (("bench", "engines", "--engine", "torch", "--device", "abacus"), "no torch device 'abacus'"),
        (("bench", "engines", "--shape", "qwen3-30b-a3b", "--device", "cuda:99"), "device"),
        (("demo", "--max-tokens", "9000"), "do not fit the context window of 8192"),
        (("demo", "--max-tokens", "9000"), ": shorten the prompt, or lower max_tokens"),
        (("models", "inspect", "gpt-oss:120b"), "hf download openai/gpt-oss-120b"),
        (("models", "import", "/nowhere"), "/nowhere does not exist"),
        (("models", "verify", "smollm2", "http://127.0.0.1:9"), "http://127.0.0.1:9 does not answer"),
        (("models", "verify", "simulated:tiny", "http://127.0.0.1:9"), "start the node, or check"),
        (("serve", "--engine", "simulated", "--kv-memory", "abc"), "--kv-memory: 'abc' is not a size"),
        (("serve", "--engine", "simulated", "--prefix-disk-size", "x"), "--prefix-disk-size: 'x' is not a size"),
        (("serve", "--engine", "simulated", "--kv-address", "foo:bar"), "--kv-address: 'foo:bar' is not an address"),
        (("serve", "--engine", "simulated", "--profile", "abacus"), "unknown profile 'abacus'"),
        (("bench", "engines", "--shape", "tiny"), "unknown shape 'tiny'; there are qwen3-30b-a3b"),
    ],
)
def test_mistakes_get_one_clear_line(arguments: tuple[str, ...], message: str) -> None:
    run = run_forked(*arguments)
    assert run.returncode == 1
    assert message in run.stderr
    assert "Traceback" not in run.stderr
    assert '"event"' not in run.stdout, "it shows before the server announces itself"


def test_bad_options_are_usage_errors() -> None:
    assert disagg("demo", "--max-tokens", "0").returncode == 2
    assert disagg("nonsense").returncode == 2
    for option in ("--role", "--engine", "--dtype", "--kv-codec", "--log-level"):
        refused = run_forked("serve", option, "abacus")
        assert (refused.returncode, f"Invalid value for '{option}'" in refused.stderr) == (2, True)
    assert disagg("--version").stdout.startswith("disagg ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "hi", "--temperature", "-1"), "Invalid value for '--temperature'"),
        (("generate", "hi", "--temperature", "1000"), "Invalid value for '--temperature'"),
        (("generate", "hi", "--timeout", "100000"), "Invalid value for '--timeout'"),
        (("generate", "hi", "--no-such-option"), "No such option"),
        (("models", "inspect"), "Missing argument"),
        (("config", "check", "a", "--config", "b"), "the file is given twice"),
        (("nonsense",), "No such command"),
    ],
)
def test_usage_errors_are_json_where_answers_are(arguments: tuple[str, ...], message: str) -> None:
    plain, run = run_forked(*arguments), run_forked(*arguments, "--json")
    assert (plain.returncode, plain.stdout) == (2, "")
    assert (run.returncode, run.stderr) == (2, plain.stderr)
    assert message in run.stderr
    error = json.loads(run.stdout)["error"]
    assert (error.keys(), error["code"]) == ({"code", "message"}, "usage")
    assert message in error["message"]


def options_of(*command: str) -> Iterator[tuple[str, str]]:
    """Every option of a command and of the commands below it, as its help shows it."""
    options, _, below = CliRunner().invoke(main.app, [*command, "--help"]).stdout.partition("Commands:")
    yield from ((" ".join(command), line.strip()) for line in options.splitlines() if line.startswith("  -"))
    for name in re.findall(r"^  (\S+)", below, re.MULTILINE):
        yield from options_of(*command, name)


def test_no_help_has_the_words_of_a_programming_language() -> None:
    """`<int range>`, `<list[str]>`. The benchmarks are for those who work on this project."""
    shown = [each for each in options_of() if not each[0].startswith("bench")]
    assert [line for command, line in shown if command == "gateway" and line.startswith("-c, --config PATH")]
    assert not [(command, line) for command, line in shown if re.search(r"<(?=[a-z])(?!\w+\|)", line)]


@pytest.mark.parametrize(
    ("argument", "known"),
    [
        (serve_arguments.NodeRole, get_args(Role)),
        (serve_arguments.NodeEngine, (*ENGINES, "vllm", "ollama")),
        (serve_arguments.KVDTypeName, get_args(KVDType)),
        (serve_arguments.KVCodec, CODECS),
    ],
)
def test_the_choices_of_serve_are_those_of_the_node(argument: Any, known: Iterable[str]) -> None:
    """They stand twice, because the command line imports neither numpy nor an engine."""
    kinds = [argument.__origin__, *get_args(argument.__origin__)]
    assert {each for kind in kinds if get_origin(kind) is Literal for each in get_args(kind)} == set(known)


def test_help_prints_no_error() -> None:
    shown = disagg("generate", "--help", "--json")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("Usage:")
    assert disagg().returncode == disagg("config").returncode == 2


def test_all_command_groups_exist() -> None:
    assert json.loads(disagg("config", "example").stdout)["decode_servers"]
    listed = disagg("bench", "--help").stdout
    assert all(name in listed for name in ("engines", "drift", "wire", "handoff", "decode", "serve"))
