"""What stands between clients and simulated nodes: our gateway, a bare relay, LiteLLM's proxy. A process each."""

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from disaggregated_inference.bench import machines
from disaggregated_inference.bench.machines import Machine
from disaggregated_inference.bench.processes import Process, free_port, ours
from disaggregated_inference.errors import BadRequest

OURS, BARE, LITELLM = "ours", "bare", "litellm"
MODEL = "tiny"
_AT_HOME = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # it would fetch a list of prices first


class BenchServer(NamedTuple):
    process: Process
    url: str


Servers = dict[str, BenchServer]


def node_of(role: str, profile: str) -> Machine:
    return machines.simulated(role, role, MODEL, profile, "--prefix-memory", "0")


def port_of(machine: Machine) -> int:
    port: int = machine.entry["port"]
    return port


@contextmanager
def serving(prefill: Machine, decode_port: int, bare_port: int, litellm: str = "") -> Iterator[Servers]:
    """Ours over a prefill node and the decode node at the one port, the bare one over that at the other; LiteLLM, if an
    environment that has it is given, over the bare one."""
    with tempfile.TemporaryDirectory() as name, _processes() as started:
        folder = Path(name)
        config = config_file(folder, prefill, decode_port)
        started[OURS] = Process("the gateway", ours("gateway", "--config", config, "--port", "0"))
        relay = [sys.executable, "-m", "disaggregated_inference.bench.relay", f"http://127.0.0.1:{bare_port}"]
        started[BARE] = Process("the relay", relay)
        urls = {name: process.ready() for name, process in started.items()}
        if litellm:
            command, port = litellm_command(litellm, folder, urls[BARE]), free_port()
            started[LITELLM] = Process("LiteLLM", [*command, "--port", str(port)], port, **_AT_HOME)
            urls[LITELLM] = started[LITELLM].ready()
        yield {name: BenchServer(process, urls[name]) for name, process in started.items()}


@contextmanager
def _processes() -> Iterator[dict[str, Process]]:
    started: dict[str, Process] = {}
    try:
        yield started
    finally:
        for process in started.values():
            process.stop()


def config_file(folder: Path, prefill: Machine, decode_port: int) -> str:
    config: dict[str, Any] = {
        "prefill_servers": [prefill.entry],
        "decode_servers": [prefill.entry | {"name": "decode", "port": decode_port}],
        "policies": {"queue": 4096, "local": "never"},
    }
    path = folder / "cluster.json"
    path.write_text(json.dumps(config))
    return str(path)


def litellm_command(given: str, folder: Path, url: str) -> list[str]:
    """Its proxy, from an environment or the Python of one, in front of an OpenAI endpoint."""
    places = (Path(given) / "bin" / "litellm", Path(given).parent / "litellm")
    command = next((str(place) for place in places if place.is_file()), None)
    if not command:
        raise BadRequest(f"no LiteLLM in {given}: give an environment in which litellm[proxy] is installed")
    behind = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}
    open_to_all = {"dangerously_permit_weak_or_unset_master_key": True}  # as the others here: on loopback, for a moment
    settings = {"model_list": [{"model_name": MODEL, "litellm_params": behind}], "general_settings": open_to_all}
    config = folder / "litellm.json"  # JSON is YAML
    config.write_text(json.dumps(settings))
    return [command, "--config", str(config), "--host", "127.0.0.1", "--num_workers", "1"]
