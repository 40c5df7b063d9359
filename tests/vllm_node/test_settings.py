"""Options that are wrong show before a model is downloaded."""

import sys
from pathlib import Path

import pytest

from disaggregated_inference.errors import BadRequest, DisaggError, EngineUnavailable
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.vllm_node.attached import AttachedVllm
from disaggregated_inference.vllm_node.settings import VllmSettings, open_server


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"url": "htp://h"}, BadRequest, "--vllm-url: 'htp://h' is no address"),
        ({"url": "unix:vllm.sock"}, BadRequest, "--vllm-url: 'unix:vllm.sock' is no path"),
        ({"url": "http://h:1", "socket": "/no/such/folder/s"}, BadRequest, "no folder /no/such/folder: make it first"),
        ({"url": "http://h:1", "socket": "/" + 120 * "s"}, BadRequest, "give a shorter --vllm-socket"),
        ({"python": sys.executable}, EngineUnavailable, "has no vLLM: .* -m pip install vllm=="),
        ({"url": "http://h:1", "arguments": "--x"}, BadRequest, "leave out --vllm-python and --vllm-args"),
        ({"role": "decode"}, BadRequest, "use --role prefill, or both"),
    ],
)
def test_wrong_options(options: dict[str, str], error: type[DisaggError], words: str) -> None:
    with pytest.raises(error, match=words):
        VllmSettings(**options).require_possible()  # type: ignore[arg-type]


def test_right_options(tmp_path: Path) -> None:
    VllmSettings(url="unix:/run/v.sock", socket=str(tmp_path / "s")).require_possible()


def test_the_command_for_a_users_vllm_keeps_its_full_graphs(tmp_path: Path, smollm2: ModelFiles) -> None:
    """It also writes answers: with piecewise graphs alone it would do so at half its speed."""
    server = open_server(VllmSettings(url="http://h:1"), smollm2, tmp_path / "s")
    assert isinstance(server, AttachedVllm)
    assert '"disagg_decodes": true' in server.advice
    assert f'"disagg_socket": "{tmp_path / "s"}"' in server.advice
