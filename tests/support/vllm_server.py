"""Real vLLM servers on the CPU, in an environment of their own, for tests. DISAGG_VLLM_PYTHON says which."""

import json
import os
import re
import signal
import subprocess
import sysconfig
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from disaggregated_inference.models import ModelFiles
from disaggregated_inference.vllm_connector.messages import DECODES_OPTION, LOGITS_PROCESSOR, SOCKET_OPTION
from disaggregated_inference.vllm_node import VllmAddress, probe
from disaggregated_inference.vllm_node.guard import end_session
from tests.support.cluster import free_port, state_of
from tests.support.vllm_served import engine_cores
from tests.support.waiting import until

_ROOT = Path(__file__).parents[2]
SERVER = "vllm.entrypoints.openai.api_server"
NO_VLLM = "DISAGG_VLLM_PYTHON is not set: `make vllm` runs these tests"
START_S = 300.0  # two cores may be busy with other tests
BUSY_S = 120.0  # the same for what takes a moment
# On the CPU, vLLM 0.32 fails with pipeline stages unless a warm-up made the buffers between them; and it warms up only
# what it would compile.
_WARM_UP = {"VLLM_CPU_CI_ENV": "0", "VLLM_USE_AOT_COMPILE": "0"}


def vllm_python() -> Path | None:
    given = os.environ.get("DISAGG_VLLM_PYTHON")
    return Path(given) if given else None


class VllmForker:
    """Starts servers that share one import of vLLM."""

    def __init__(self, python: Path, log: Path) -> None:
        bare = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONHOME")}
        environment = bare | {
            "PYTHONPATH": str(_ROOT / "src"),
            "PATH": f"{python.parent}:{bare.get('PATH', '')}",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_CPU_CI_ENV": "1",  # no warm-up
            "VLLM_SERVER_DEV_MODE": "1",  # requests can be aborted by hand
            "TORCHDYNAMO_DISABLE": "1",  # as a node starts it
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.version = probe(python).version
        script = Path(__file__).parent / "vllm_forker.py"
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(python), str(script)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        try:
            self._answer("ready")
        except ValueError as error:
            raise RuntimeError(f"vLLM cannot be imported: {log.read_text()[-3000:]}") from error

    @property
    def computes_gpt_oss(self) -> bool:
        """In float32: before 0.31, vLLM on the CPU ends with "expected scalar type BFloat16 but found Float"."""
        return int(self.version.split(".")[1]) >= 31

    def run(self, program: str, *arguments: str, log: Path) -> str:
        """A module or a script, to its end. Returns what it wrote. Packages that vLLM does not bring are taken from
        this environment."""
        own = sysconfig.get_path("platlib")
        pid = self.start(list(arguments), {"VLLM_CPU_KVCACHE_SPACE": "1"}, log, program, [own])
        try:
            assert until(lambda: not _alive(pid), START_S), log.read_text()[-3000:]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        return log.read_text(errors="replace")

    def start(
        self,
        arguments: list[str],
        environment: dict[str, str],
        log: Path,
        program: str = SERVER,
        path: Sequence[str] = (),
    ) -> int:
        """`path`: more folders of packages."""
        assert self._process.stdin
        order = {"program": program, "arguments": arguments, "environment": environment, "log": str(log)}
        print(json.dumps(order | {"path": path}), file=self._process.stdin, flush=True)
        return int(self._answer("pid"))

    def _answer(self, key: str) -> Any:
        """Other lines are what libraries print."""
        assert self._process.stdout
        for line in self._process.stdout:
            with suppress(ValueError, KeyError, TypeError):
                return json.loads(line)[key]
        raise ValueError("the forker has ended")

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


class VllmServer:
    """One `vllm serve` with the connector, which meets its node at `border`."""

    def __init__(self, forker: VllmForker, model: ModelFiles, border: Path, log: Path, *arguments: str) -> None:
        self._forker, self._model, self._border, self._log = forker, model, border, log
        self._arguments = arguments
        self.port = self.pid = 0
        self.start()

    @property
    def address(self) -> VllmAddress:
        return VllmAddress(f"http://127.0.0.1:{self.port}")

    def start(self, port: int = 0, *more: str, processors: str = LOGITS_PROCESSOR) -> None:
        """At this port, or at a free one, where no outgoing connection can be. `more` arguments, for this run."""
        if self.pid:
            end_session(self.pid)  # a killed one may still have the port for a moment
        self.port = port or free_port()
        transfer = {
            "kv_connector": "DisaggConnector",
            "kv_role": "kv_producer",
            "kv_connector_module_path": "disaggregated_inference.vllm_connector.connector",
            "kv_connector_extra_config": {SOCKET_OPTION: str(self._border), DECODES_OPTION: False},
        }
        arguments = ["--model", str(self._model.path), "--host", "127.0.0.1", "--port", str(self.port)]
        arguments += ["--dtype", "float32", "--kv-transfer-config", json.dumps(transfer)]
        arguments += ["--logits-processors", processors] if processors else []
        stages = "--pipeline-parallel-size" in self._arguments
        arguments += ["--compilation-config", '{"backend": "eager"}'] if stages else ["--enforce-eager"]
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1"} | (_WARM_UP if stages else {})
        self.pid = self._forker.start([*arguments, *self._arguments, *more], environment, self._log)

    def why_stopped(self) -> str:
        """Empty while it runs."""
        return "" if _alive(self.pid) else f"vLLM has ended: {self.log_tail()}"

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def log_tail(self) -> str:
        return self.log()[-3000:]

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            if why := self.why_stopped():
                raise RuntimeError(why)
            with suppress(OSError):
                self.get("/health")
                return
            assert time.monotonic() < deadline, self.log_tail()
            time.sleep(0.1)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.address.url + path, timeout=10) as response:
            return str(response.read().decode())

    def abort_requests(self) -> None:
        """All that are open, by vLLM's own API."""
        request = urllib.request.Request(f"{self.address.url}/abort_requests", b"{}", method="POST")
        with urllib.request.urlopen(request, timeout=BUSY_S):
            pass

    def aborted_requests(self) -> int:
        """Of which vLLM's HTTP API has told the engine, with `--enable-log-requests`."""
        return self.log().count("Aborted request(s)")

    def engine(self) -> list[int]:
        """The processes that compute. To find them takes a moment."""
        found = engine_cores(self.pid)
        assert found
        return found

    def metric(self, name: str) -> float:
        """The sum over its labels, from vLLM's own /metrics."""
        found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert found, f"vLLM has no metric {name}"
        return sum(map(float, found))

    def kill(self) -> None:
        """All its processes, at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        self.kill()


@contextmanager
def frozen(pids: list[int]) -> Iterator[None]:
    """Of an engine: it computes nothing meanwhile; vLLM's HTTP API takes requests, and sees clients leave."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert until(lambda: all(state_of(pid) == "T" for pid in pids), BUSY_S)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
