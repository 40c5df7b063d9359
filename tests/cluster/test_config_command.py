"""`disagg config check` and `example`."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from disaggregated_inference.cli.config import ConfigFormat, config_app, sample
from disaggregated_inference.errors import ConfigError
from tests.support.cluster_files import FOUR_SERVERS, NO_NAMES, written

runner = CliRunner()


def test_check_lists_servers_and_models(tmp_path: Path) -> None:
    text = FOUR_SERVERS.rstrip().removesuffix("}") + ', "comment": 1, "models": {"q3": {"aliases": ["qwen"]}}}'
    path = written(tmp_path, text)
    result = runner.invoke(config_app, ["check", str(path)])
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"{path}: 4 servers, 2 models",
        "prefill  DGX Spark 1   http://169.254.150.103:8000  qwen",
        "prefill  DGX Spark 2   http://169.254.150.104:8000  gpt-oss",
        "decode   Mac Studio 2  http://169.254.150.102:8001  qwen",
        "decode   Mac Studio 1  http://169.254.150.101:8001  gpt-oss",
        "model q3 (also qwen): prefill on DGX Spark 1; decode on Mac Studio 2",
        "model gpt-oss: prefill on DGX Spark 2; decode on Mac Studio 1",
        f"warning: {path}: comment: unknown key, ignored",
    ]


def test_check_as_json_hides_tokens(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(NO_NAMES | {"token": "hidden"}))
    result = runner.invoke(config_app, ["check", str(path), "--json"])
    data = json.loads(result.stdout)
    assert "hidden" not in result.stdout
    assert (data["ok"], data["token"], data["decode_servers"][0]["token"]) == (True, True, True)
    assert data["served"] == {"qwen": ["192.168.100.1:8000", "169.254.150.101:8001"]}
    assert data["warnings"] == []


def test_check_fails_with_the_error(tmp_path: Path) -> None:
    path = written(tmp_path, "{}")
    result = runner.invoke(config_app, ["check", str(path)])
    assert result.exit_code == 1
    assert isinstance(result.exception, ConfigError), "the command line prints it as one line"
    result = runner.invoke(config_app, ["check", str(path), "--json"])
    assert result.exit_code == 1
    message = f"{path}: no servers; list some under prefill_servers and decode_servers"
    assert json.loads(result.stdout) == {"ok": False, "error": {"code": "config_error", "message": message}}


def test_check_takes_the_file_as_other_commands_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(written(tmp_path, FOUR_SERVERS))
    monkeypatch.setenv("DISAGG_CONFIG", "/nowhere")
    plain = runner.invoke(config_app, ["check", path])
    assert runner.invoke(config_app, ["check", "-c", path]).stdout == plain.stdout != ""
    assert runner.invoke(config_app, ["check", path, "--config", path]).exit_code == 2


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"temperature": -3}, "temperature must be at least 0"),
        ({"top_p": float("nan")}, "top_p must be at least 0"),
        ({"request_id": "always"}, "request_id belongs to one request"),
        ({"prompt": "x"}, "prompt belongs to one request"),
        ({"messages": []}, "messages belongs to one request"),
        ({"model": "gpt-oss"}, "model: gpt-oss is another model"),
        ({"model_type": "nope"}, 'no model "nope"'),
        ({"response_format": {"type": "nope"}}, "response_format: its type must be text"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_check_reads_defaults_as_a_request(tmp_path: Path, defaults: dict[str, Any], message: str) -> None:
    path = str(written(tmp_path, json.dumps(json.loads(FOUR_SERVERS) | {"models": {"qwen": {"defaults": defaults}}})))
    error = runner.invoke(config_app, ["check", path]).exception
    assert isinstance(error, ConfigError)
    assert str(error).startswith(f"{path}: models.qwen.defaults: ")
    assert message in str(error)


def test_check_accepts_all_sampling_params(tmp_path: Path) -> None:
    defaults = {"model_type": "qwen", "response_format": {"type": "json_object"}, "temperature": 0, "seed": None}
    raw = json.loads(FOUR_SERVERS) | {"models": {"qwen": {"defaults": defaults}}}
    assert runner.invoke(config_app, ["check", str(written(tmp_path, json.dumps(raw)))]).exit_code == 0


def test_example(tmp_path: Path) -> None:
    assert runner.invoke(config_app, ["example"]).stdout == sample(ConfigFormat.JSON)
    assert runner.invoke(config_app, ["example", "--format", "toml"]).stdout == sample(ConfigFormat.TOML)
    assert runner.invoke(config_app, ["example", "--format", "yaml"]).exit_code == 2
