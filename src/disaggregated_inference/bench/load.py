"""`disagg bench load`: a gateway over simulated nodes under the load of GuideLLM, an independent load generator.

GuideLLM runs in its own environment. Its figures are compared with the gateway's /metrics of the same requests: if they
agree, a dashboard on /metrics can be trusted.
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
import venv
from collections import defaultdict
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from disaggregated_inference.bench.report import Report, Row, progress
from disaggregated_inference.bench.servers import MODEL, config_file, gateway_process, node_of
from disaggregated_inference.bench.targets import goal_of
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.local_nodes import running
from disaggregated_inference.models import ModelStore
from disaggregated_inference.timeouts import BenchTimeouts

GUIDELLM = "guidellm==0.8.1"  # the tested version: its options change between releases
_TORCH = "torch==2.13.0"  # installed first: it decides which other versions fit
_PROFILE = "custom:prefill=20000,decode=50"

Totals = dict[str, float]


def run(streams: int, requests: int, prompt: int, tokens: int, python: str, output: Path) -> Report:
    report = Report(f"{GUIDELLM} against a gateway over SIMULATED nodes: {requests} requests, {streams} at once")
    command = _guidellm(python)
    nodes = [node_of(role, _PROFILE) for role in ("prefill", "decode")]
    with running(nodes), tempfile.TemporaryDirectory() as folder:
        gateway = gateway_process(config_file(Path(folder), nodes[0], nodes[1].port))
        with running([gateway]):
            before = _sums(gateway.url)
            theirs = _run_guidellm(
                command, gateway.url, streams, requests, prompt, tokens, Path(folder) / "guidellm.json"
            )
            ours = {name: value - before.get(name, 0.0) for name, value in _sums(gateway.url).items()}
    _rows(report, theirs, ours)
    return report.publish(output / "load.json")


def _guidellm(python: str) -> Path:
    """The program in the given environment, or in one that is created once, next to the models."""
    home = Path(python) if python else ModelStore().home / "bench" / GUIDELLM.replace("==", "-")
    folder = home.parent if home.is_file() else home / "bin"
    if not (folder / "guidellm").is_file():
        if python:
            raise DisaggError(f"no guidellm in {folder}: install {GUIDELLM} there, or leave --python out")
        progress(f"installing {GUIDELLM} into {home}: takes some minutes, only the first time")
        venv.create(home, with_pip=True)
        for package in (_TORCH, GUIDELLM):
            subprocess.run([folder / "python", "-m", "pip", "install", "--quiet", package], check=True)
    return folder / "guidellm"


def _run_guidellm(
    command: Path, url: str, streams: int, requests: int, prompt: int, tokens: int, path: Path
) -> dict[str, Any]:
    """The metrics of GuideLLM's clients. It makes prompts with the local tokenizer; no hub is used."""
    options = {
        "backend": f"kind=openai_http,target={url},model={MODEL}",
        "profile": f"kind=concurrent,streams={streams}",
        "constraint": f"kind=max_requests,count={requests}",
        "tokenizer": f"kind=huggingface_auto,model={ModelStore().resolve(f'simulated:{MODEL}').path}",
        "data": f"kind=synthetic_text,prompt_tokens={prompt},output_tokens={tokens}",
        "output": f"kind=json,path={path}",
    }
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    done = subprocess.run(
        [command, "run", *arguments, "--disable-progress"],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdout=sys.stderr,
        timeout=BenchTimeouts().load_s,
    )
    if done.returncode or not path.is_file():
        raise DisaggError(f"guidellm ended with {done.returncode}; see its output above")
    metrics: dict[str, Any] = json.loads(path.read_text())["benchmarks"][0]["metrics"]
    return metrics


def _sums(url: str) -> Totals:
    """The counters of the gateway's metrics by name, summed over labels, without buckets."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        families = text_string_to_metric_families(response.read().decode())
    sums: Totals = defaultdict(float)
    for sample in (sample for family in families for sample in family.samples):
        if sample.name.endswith(("_sum", "_count", "_total")):
            sums[sample.name] += sample.value
    return sums


def _rows(report: Report, theirs: dict[str, Any], ours: Totals) -> None:
    def mean(name: str) -> float:
        return 1e3 * ours[f"vllm:{name}_seconds_sum"] / ours[f"vllm:{name}_seconds_count"]

    def add(what: str, value: float, unit: str, metric: float | None = None) -> None:
        report.add(Row(what, value, unit, metric, "/metrics" if metric is not None else ""))

    of = {name: each["successful"] for name, each in theirs.items() if isinstance(each, dict) and "successful" in each}
    add("requests that were answered", theirs["request_totals"]["successful"], "", ours["disagg_requests_total"])
    add("requests that were not", theirs["request_totals"]["errored"] + theirs["request_totals"]["incomplete"], "")
    add("tokens in", of["prompt_token_count"]["total_sum"], "", ours["vllm:prompt_tokens_total"])
    add("tokens out", of["output_token_count"]["total_sum"], "", ours["vllm:generation_tokens_total"])
    add("first token, mean", of["time_to_first_token_ms"]["mean"], "ms", mean("time_to_first_token"))
    add("between tokens, mean", of["inter_token_latency_ms"]["mean"], "ms", mean("inter_token_latency"))
    add("whole answer, mean", of["request_latency"]["mean"] * 1e3, "ms", mean("e2e_request_latency"))
    for share in ("p50", "p95", "p99"):
        add(f"first token, {share}", of["time_to_first_token_ms"]["percentiles"][share], "ms")
        add(f"between tokens, {share}", of["inter_token_latency_ms"]["percentiles"][share], "ms")
    report.add(Row("requests", of["requests_per_second"]["mean"], "/s", goal=goal_of("requests_per_second")))
    add("tokens out", of["output_tokens_per_second"]["mean"], "/s")
