"""The process that forks vLLM servers, in vLLM's own environment: `python vllm_forker.py`.

Importing vLLM takes most of its start, once for each of its three processes. Here it is imported once, and vLLM's own
processes are forked instead of spawned, which is what vLLM itself does by default on a GPU. Orders come as lines of
JSON: a module or a script to run. Its process id is the answer. It is a session of its own, so that all of it can be
killed.
"""

import importlib
import json
import multiprocessing
import os
import runpy
import signal
import sys
from contextlib import suppress

_MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.model_executor.models.gpt_oss",
    "disaggregated_inference.vllm_connector.connector",
    "disaggregated_inference.vllm_connector.first_token",
)
_SPAWNING = ("vllm.utils.system_utils", "vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor")


def _import() -> None:
    for name in _MODULES:
        importlib.import_module(name)
    context = multiprocessing.get_context("fork")
    for name in _SPAWNING:
        importlib.import_module(name).get_mp_context = lambda: context  # type: ignore[attr-defined]


def _become(order: dict[str, object]) -> None:
    """What was ordered, in this process."""
    os.setsid()
    log = os.open(str(order["log"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for fd in (1, 2):
        os.dup2(log, fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    os.environ.update(order["environment"])  # type: ignore[call-overload]
    sys.argv = ["vllm", *order["arguments"]]  # type: ignore[misc]
    sys.path += order["path"]  # type: ignore[arg-type]
    program = str(order["program"])
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def main() -> None:
    _import()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print(json.dumps({"ready": True}), flush=True)
    servers: list[int] = []
    for line in sys.stdin:
        if pid := os.fork():
            servers.append(pid)
            print(json.dumps({"pid": pid}), flush=True)
        else:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _become(json.loads(line))
            return
    for pid in servers:  # pytest has ended, perhaps without its fixtures' own end
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
