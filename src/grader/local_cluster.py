"""A cluster on this machine for the demo and the benchmark: `disagg up` as a process of its own."""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from grader.errors import GraderError
from grader.timeouts import EndpointTimeouts, ProgramTimeouts

_READY = re.compile(r"ready: (\S+)/v1")
_CONFIG = re.compile(r"export DISAGG_CONFIG=(.+)")
# Both nodes share the processor of a machine that may be busy: a decode node that reads a prompt because the prefill
# takes long would do the same work once more.


class ClusterFailed(GraderError):
    """The cluster on this machine did not start."""


class LocalCluster(msgspec.Struct, frozen=True):
    url: str  # of the gateway, ends in /v1
    config: str  # path of the cluster file


@contextmanager
def local_cluster(simulated: str = "", model: str = "") -> Iterator[LocalCluster]:
    """The embedded model, or two simulated machines such as `dgx-spark,m3-ultra`. It ends with the block."""
    command = [sys.executable, "-m", "disaggregated_inference", "up", "--port", "0"]
    command += ["--simulated", simulated] if simulated else []
    command += ["--model", model] if model else []
    environ = os.environ | {"DISAGG_PARENT_PID": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+") as log, tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environ)
        try:
            assert process.stdout
            yield _with_patience(_ready(process.stdout, log), Path(folder))
        finally:
            _stop(process)


def _with_patience(made: LocalCluster, folder: Path, prefill_s: float = EndpointTimeouts().prefill_s) -> LocalCluster:
    """Another cluster file for the same nodes, with a longer time for prefills."""
    file = json.loads(Path(made.config).read_text(encoding="utf-8"))
    file["policies"] = file.get("policies", {}) | {"prefill_timeout_s": prefill_s}
    path = folder / "cluster.json"
    path.write_text(json.dumps(file), encoding="utf-8")
    return LocalCluster(made.url, str(path))


def _ready(output: IO[str], log: IO[str]) -> LocalCluster:
    url, said = "", []
    for line in output:
        said.append(line)
        if found := _READY.search(line):
            url = f"{found[1]}/v1"
        if found := _CONFIG.search(line):
            return LocalCluster(url, shlex.split(found[1])[0])
    log.seek(0)
    raise ClusterFailed(f"`disagg up` did not start:\n{''.join(said)}{log.read()}".strip()[-2000:])


def _stop(process: "subprocess.Popen[str]", timeouts: ProgramTimeouts = ProgramTimeouts()) -> None:
    process.terminate()
    try:
        process.communicate(timeout=timeouts.stop_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
