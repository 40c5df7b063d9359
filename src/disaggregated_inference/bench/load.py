"""`disagg bench load`: a gateway over simulated nodes, asked by a program that nobody here wrote.

GuideLLM runs from an environment of its own and tells what its clients saw; beside it stands what the gateway's own
/metrics say of the same requests. Where the two agree, a dashboard over /metrics can be believed.
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from disaggregated_inference.bench.machines import running
from disaggregated_inference.bench.processes import Process, ours
from disaggregated_inference.bench.report import Report, Row
from disaggregated_inference.bench.servers import MODEL, config_file, node_of, port_of
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.models import ModelStore

GUIDELLM = "guidellm==0.8.1"  # the one that this was tried with: its options change between releases
_TORCH = "torch==2.13.0"  # first and alone, as for everything else here: it decides what the rest may pull in
_PROFILE = "custom:prefill=20000,decode=50"
_LIMIT_S = 1800

Sums = dict[str, float]


def run(streams: int, requests: int, prompt: int, tokens: int, python: str, output: Path) -> Report:
    console = Console()
    report = Report(f"{GUIDELLM} against a gateway over SIMULATED nodes: {requests} requests, {streams} at once")
    command = _guidellm(python, console)
    nodes = [node_of(role, _PROFILE) for role in ("prefill", "decode")]
    with running(nodes), tempfile.TemporaryDirectory() as folder:
        config = config_file(Path(folder), nodes[0], port_of(nodes[1]))
        with _gateway(config) as url:
            before = _sums(url)
            seen = _asked(command, url, streams, requests, prompt, tokens, Path(folder) / "seen.json")
            told = {name: value - before.get(name, 0.0) for name, value in _sums(url).items()}
    _rows(report, seen, told)
    report.show(console)
    report.save(output / "load.json")
    console.print(f"saved {output / 'load.json'}", style="dim", highlight=False)
    return report


def _guidellm(python: str, console: Console) -> Path:
    """The program, in the environment given, or in one that is made once, beside the models."""
    home = Path(python) if python else ModelStore().home / "bench" / GUIDELLM.replace("==", "-")
    folder = home.parent if home.is_file() else home / "bin"
    if not (folder / "guidellm").is_file():
        if python:
            raise DisaggError(f"no guidellm in {folder}: leave out --python, or install {GUIDELLM} there")
        console.print(f"installing {GUIDELLM} into {home}: some minutes, once", style="dim", highlight=False)
        venv.create(home, with_pip=True)
        for what in (_TORCH, GUIDELLM):
            subprocess.run([folder / "python", "-m", "pip", "install", "--quiet", what], check=True)
    return folder / "guidellm"


@contextmanager
def _gateway(config: str) -> Iterator[str]:
    process = Process("the gateway", ours("gateway", "--config", config, "--port", "0"))
    try:
        yield process.ready()
    finally:
        process.stop()


def _asked(
    command: Path, url: str, streams: int, requests: int, prompt: int, tokens: int, path: Path
) -> dict[str, Any]:
    """What its clients saw. It needs a tokenizer to make prompts with; no hub is asked for one."""
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
        timeout=_LIMIT_S,
    )
    if done.returncode or not path.is_file():
        raise DisaggError(f"guidellm ended with {done.returncode}; what it said is above")
    metrics: dict[str, Any] = json.loads(path.read_text())["benchmarks"][0]["metrics"]
    return metrics


def _sums(url: str) -> Sums:
    """Of the gateway's metrics, the counters: by name, whatever their labels. Buckets are not needed here."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    found: Sums = {}
    for line in lines:
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0]
        if not line.startswith("#") and name.endswith(("_sum", "_count", "_total")):
            found[name] = found.get(name, 0.0) + float(value)
    return found


def _rows(report: Report, seen: dict[str, Any], told: Sums) -> None:
    def mean(name: str) -> float:
        return 1e3 * told[f"vllm:{name}_seconds_sum"] / told[f"vllm:{name}_seconds_count"]

    def add(what: str, value: float, unit: str, ours: float | None) -> None:
        report.add(Row(what, value, unit, ours, "/metrics" if ours is not None else ""))

    of = {name: each["successful"] for name, each in seen.items() if isinstance(each, dict) and "successful" in each}
    add("requests that were answered", seen["request_totals"]["successful"], "", told["disagg_requests_total"])
    add("requests that were not", seen["request_totals"]["errored"] + seen["request_totals"]["incomplete"], "", None)
    add("tokens in", of["prompt_token_count"]["total_sum"], "", told["vllm:prompt_tokens_total"])
    add("tokens out", of["output_token_count"]["total_sum"], "", told["vllm:generation_tokens_total"])
    add("first token, mean", of["time_to_first_token_ms"]["mean"], "ms", mean("time_to_first_token"))
    add("between tokens, mean", of["inter_token_latency_ms"]["mean"], "ms", mean("inter_token_latency"))
    add("whole answer, mean", of["request_latency"]["mean"] * 1e3, "ms", mean("e2e_request_latency"))
    for share in ("p50", "p95", "p99"):
        add(f"first token, {share}", of["time_to_first_token_ms"]["percentiles"][share], "ms", None)
        add(f"between tokens, {share}", of["inter_token_latency_ms"]["percentiles"][share], "ms", None)
    add("requests", of["requests_per_second"]["mean"], "/s", None)
    add("tokens out", of["output_tokens_per_second"]["mean"], "/s", None)
