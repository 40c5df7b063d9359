"""The benchmarks that run on a GPU, at their tiny shape with vLLM on the CPU: they come to their end."""

import os
import re
from pathlib import Path

import pytest

from disaggregated_inference.bench.vllm_handoff import bench_vllm
from tests.support.vllm_server import VllmForker

pytestmark = pytest.mark.slow


def test_the_kv_that_arrives_equals_the_pages(vllm_forker: VllmForker, tmp_path: Path) -> None:
    """`python -m disaggregated_inference.bench.vllm_pages tiny`: prompts one by one, then all in too few blocks."""
    lengths = "1,33,64,150"
    options = ["--lengths", lengths, "--chunk", "64", "--blocks", "12"]
    told = vllm_forker.run("disaggregated_inference.bench.vllm_pages", "tiny", *options, log=tmp_path / "log")
    for name in (*(f"prompt of {length}" for length in lengths.split(",")), "all at once, twice"):
        assert re.search(rf"^{name}: [\d.]+ MB equal, bit for bit", told, re.MULTILINE), told[-3000:]
    assert "layers of steps that no hook saw: 0" in told


def test_bench_handoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """`disagg bench handoff --prefill vllm --shape tiny --no-alone`: vLLM streams, another process fetches."""
    monkeypatch.setitem(os.environ, "VLLM_CPU_CI_ENV", "1")  # no warm-up of vLLM's own
    report = bench_vllm("tiny", chunk=64, streams=2, repeats=1, alone=False)
    rows = {row.what: row for row in report.rows}
    for length in (64, 200, 600):
        assert rows[f"prefill {length}, connector idle"].value > 0
        assert rows[f"prefill {length}, while another process fetches the KV"].value > 0
