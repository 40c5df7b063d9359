"""The documented cluster on the four machines of `machines.py`: its cluster file, and `disagg` on the controller.

The nodes are simulated: what is tested is everything around them. KV prefers a cable of its own (10.77.0.x); its second
path is the switch (169.254.150.x), by which control goes.
"""

import json
import re
import secrets
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, STDOUT, CompletedProcess, Popen
from typing import Any

from tests.support.machines import Machines
from tests.support.waiting import until

TOKEN, HF_TOKEN = secrets.token_hex(16), f"hf_{secrets.token_hex(16)}"
MACHINES = {"mac1": "systemd", "mac2": "systemd-user", "dgx1": "systemd", "dgx2": "background"}
QWEN, GPT_OSS = "simulated:qwen3-30b-a3b", "simulated:gpt-oss-120b"
NODES = {"dgx1": "DGX Spark 1", "dgx2": "DGX Spark 2", "mac1": "Mac Studio 1", "mac2": "Mac Studio 2"}
_PROFILE = ["--profile", "custom:prefill=20000,decode=200"]


def machine_settings(service: str, **more: Any) -> dict[str, Any]:
    """No package index: our wheel alone is installed, the other packages are those of the tests."""
    return {
        "python": sys.executable,
        "extras": [],
        "constraints": False,
        "pip_args": ["--no-deps", "--no-index"],
        "environment": {"PYTHONPATH": sysconfig.get_path("purelib"), "OMP_NUM_THREADS": "1"},
        "service": service,
    } | more


def _server(machine: str, host: str, model: str, **more: Any) -> dict[str, Any]:
    facts = {"name": NODES[machine], "machine": machine, "host": host, "model": model, "engine": "simulated"}
    return facts | {"arguments": list(_PROFILE)} | more


def cluster_file(machines: Machines) -> dict[str, Any]:
    prefill = [
        _server(
            name,
            machines[name].address,
            model,
            kv_addresses=[f"{machines[name].slow_address}:8100", f"{machines[name].address}:8100"],
        )
        for name, model in (("dgx1", "qwen"), ("dgx2", "gpt-oss"))
    ]
    decode = [_server(name, machines[name].address, model) for name, model in (("mac2", "qwen"), ("mac1", "gpt-oss"))]
    return {
        "token": "${LAB_TOKEN}",
        "trusted_link": "the cables of the lab",
        "prefill_servers": prefill,
        "decode_servers": decode,
        "models": {QWEN: {"aliases": ["qwen"]}, GPT_OSS: {"aliases": ["gpt-oss"]}},
        "machines": {name: machine_settings(service) for name, service in MACHINES.items()},
        "gateway": {"machine": "mac1"},
        "policies": {"local": "never"},
    }


def two_of_each(content: dict[str, Any]) -> dict[str, Any]:
    """The same cluster with one model, which two nodes prefill and two decode, and a gateway for other machines."""
    twins: dict[str, Any] = json.loads(json.dumps(content))
    for server in (*twins["prefill_servers"], *twins["decode_servers"]):
        server["model"] = "qwen"
    host = next(server["host"] for server in twins["decode_servers"] if server["machine"] == "mac1")
    gateway = {"machine": "mac1", "host": host, "arguments": ["--insecure"]}
    return twins | {"models": {QWEN: {"aliases": ["qwen"]}}, "gateway": gateway}


class Followed:
    """A command that goes on, with the file of what it said so far."""

    def __init__(self, said: Path) -> None:
        self._said = said

    def says(self, pattern: str) -> bool:
        return until(lambda: bool(re.search(pattern, self._said.read_text())), 90)


class SteadyRequests:
    """What became of the requests, when they have ended."""

    whole = 0
    failed: Sequence[str] = ()


class Lab:
    """The controller's `disagg`, with its cluster file."""

    first_deploy: CompletedProcess[str]

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.file = machines.home / "cluster.json"
        self._environment = {
            "LAB_TOKEN": TOKEN,
            "LAB_HF_TOKEN": HF_TOKEN,
            "DISAGG_CONFIG": str(Path("~/cluster.json").expanduser()),
            "DISAGG_COMMAND": str(Path(sysconfig.get_path("scripts")) / "disagg"),  # for scripts/
        }
        self.write(cluster_file(machines))
        uv = Path(sysconfig.get_path("scripts")) / "uv"
        for machine in machines.all.values():
            machine.enter("mkdir", "-p", "/root/.local/bin")
            if uv.exists():
                machine.enter("ln", "-sfn", str(uv), "/root/.local/bin/uv")

    def write(self, content: dict[str, Any]) -> None:
        self.content = content
        self.file.write_text(json.dumps(content, indent=1))

    def disagg(self, *arguments: str, check: bool = True, token: str = TOKEN) -> CompletedProcess[str]:
        """`check`: fail with what the command said."""
        command = [sys.executable, "-m", "disaggregated_inference", *arguments]
        done = self.machines.run(*command, check=False, timeout=400, env=self._environment | {"LAB_TOKEN": token})
        assert not check or done.returncode == 0, f"{' '.join(arguments)}:\n{done.stdout}\n{done.stderr}"
        return done

    def script(self, name: str) -> CompletedProcess[str]:
        """One of `scripts/`."""
        command = [sys.executable, str(Path(__file__).parents[2] / "scripts" / name)]
        return self.machines.run(*command, check=False, env=self._environment)

    def cluster(self, *arguments: str, check: bool = True, token: str = TOKEN) -> CompletedProcess[str]:
        return self.disagg("cluster", *arguments, check=check, token=token)

    @contextmanager
    def follow_logs(self) -> Iterator[Followed]:
        said = self.machines.home / "followed"
        command = [sys.executable, "-m", "disaggregated_inference", "cluster", "logs", "-f"]
        with said.open("w") as file, self._started(*command, stdout=file, stderr=STDOUT):
            yield Followed(said)

    @contextmanager
    def steady_requests(self, url: str, model: str) -> Iterator[SteadyRequests]:
        script = Path(__file__).with_name("steady_requests.py")
        with self._started(sys.executable, str(script), url, model, stdin=PIPE, stdout=PIPE) as process:
            assert process.stdout
            assert process.stdout.readline() == "asking\n"
            requests = SteadyRequests()
            yield requests
            told = json.loads(process.communicate()[0])
            requests.whole, requests.failed = told["whole"], told["failed"]

    @contextmanager
    def _started(self, *command: str, **options: Any) -> Iterator[Popen[str]]:
        """`nsenter` stays before the command, which must end with it."""
        ending = ["setpriv", "--pdeathsig", "KILL"]
        with self.machines.start(*ending, *command, env=self._environment, **options) as process:
            try:
                yield process
            finally:
                process.kill()

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.cluster("status", "--json", check=False).stdout)
        return found

    def services(self) -> dict[str, dict[str, Any]]:
        """By title: the name of a node, or `gateway`."""
        return {service["title"]: service for machine in self.status()["machines"] for service in machine["services"]}

    def ask(self, model: str, words: int = 400) -> dict[str, Any]:
        """The metrics of one request, of about `words` tokens. Each is new: a cached one would move no KV."""
        prompt = " ".join([str(time.time_ns()), *(str(number) for number in range(words // 4))])
        done = self.disagg("generate", prompt, "--model", model, "--max-tokens", "4", "--json")
        found: dict[str, Any] = json.loads(done.stdout)["metrics"]
        return found
