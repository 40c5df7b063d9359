"""The benchmarks that run on a GPU, at their tiny shape with vLLM on the CPU: they come to their end."""

import asyncio
import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from disaggregated_inference.bench import vllm_handoff
from disaggregated_inference.bench.vllm_shapes import write_shape
from disaggregated_inference.vllm_node import EngineOptions, VllmAddress, serve_arguments
from disaggregated_inference.vllm_node.client import VllmClient
from disaggregated_inference.vllm_node.guard import end_session
from disaggregated_inference.vllm_node.process import Launch
from disaggregated_inference.vllm_node.versions import VllmBuild
from tests.support.vllm_server import SERVER, START_S, VllmForker
from tests.support.waiting import until

pytestmark = pytest.mark.slow


def test_the_kv_that_arrives_equals_the_pages(vllm_forker: VllmForker, tmp_path: Path) -> None:
    """`python -m disaggregated_inference.bench.vllm_pages tiny`: prompts one by one, then all in too few blocks."""
    lengths = "1,33,64,150"
    options = ["--lengths", lengths, "--chunk", "64", "--blocks", "12"]
    told = vllm_forker.run("disaggregated_inference.bench.vllm_pages", "tiny", *options, log=tmp_path / "log")
    for name in (*(f"prompt of {length}" for length in lengths.split(",")), "all at once, twice"):
        assert re.search(rf"^{name}: [\d.]+ MB equal, bit for bit", told, re.MULTILINE), told[-3000:]
    assert "layers of steps that no hook saw: 0" in told


def test_prompts_are_timed_without_http(vllm_forker: VllmForker, tmp_path: Path) -> None:
    """With the arguments of a server: `--uds` and the like are left out."""
    model = write_shape("tiny", tmp_path / "tiny")
    options = EngineOptions(
        model=str(model.path), name="tiny", socket="/s", dtype="float32", more="--load-format dummy"
    )
    arguments = serve_arguments(options, VllmBuild(version=vllm_forker.version, is_cpu=True))
    found = tmp_path / "times.json"
    sizes = str(found), "16,40", "2", str(model.spec.vocabulary)
    told = vllm_forker.run("disaggregated_inference.bench.vllm_offline", *sizes, *arguments, log=tmp_path / "log")
    assert found.exists(), told[-3000:]
    times = json.loads(found.read_text())
    assert [len(times[length]) for length in ("16", "40")] == [2, 2]
    assert all(second > 0 for each in times.values() for second in each)


class Forked:
    """In the place of `VllmProcess`: the same arguments, without an import of vLLM for each process."""

    def __init__(self, forker: VllmForker, folder: Path, launch: Launch, build: VllmBuild) -> None:
        self._forker, self._folder, self._launch = forker, folder, launch
        self._pid, self.key, self.url = 0, "secret", f"unix:{folder / 'http.sock'}"

    def start(self, begin: Callable[[str], None]) -> None:
        command, environment = self._launch(self.url.removeprefix("unix:"), self.key, str(self._folder))
        model, *arguments = command[command.index("serve") + 1 :]
        paths = environment.pop("PYTHONPATH").split(os.pathsep)
        log = self._folder / "log"
        self._pid = self._forker.start(["--model", model, *arguments], environment, log, SERVER, paths)
        client = VllmClient(lambda: VllmAddress(self.url, self.key))
        assert until(lambda: asyncio.run(client.is_healthy()), START_S), log.read_text()[-3000:]

    def stop(self) -> None:
        end_session(self._pid)


def test_bench_handoff(vllm_forker: VllmForker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`disagg bench handoff --prefill vllm --shape tiny --no-alone`: vLLM streams, another process fetches."""
    monkeypatch.setattr(vllm_handoff, "VllmProcess", partial(Forked, vllm_forker, tmp_path))
    report = vllm_handoff.bench_vllm("tiny", chunk=64, streams=2, repeats=1, alone=False)
    rows = {row.what: row for row in report.rows}
    for length in (64, 200, 600):
        assert rows[f"prefill {length}, connector idle"].value > 0
        assert rows[f"prefill {length}, while another process fetches the KV"].value > 0
