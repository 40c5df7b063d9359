"""A cluster on this machine for the demo and the benchmark: `disagg up` as a process of its own."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import msgspec

from grader.errors import GraderError

_READY = re.compile(r"ready: (\S+)/v1")
_CONFIG = re.compile(r"export DISAGG_CONFIG=(.+)")
_STOP_S = 20.0


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
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environ)
        try:
            assert process.stdout
            yield _ready(process.stdout, log)
        finally:
            _stop(process)


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


def _stop(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.communicate(timeout=_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
