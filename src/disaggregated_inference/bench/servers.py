"""Servers between clients and simulated nodes, one process each: the gateway, a bare relay, LiteLLM's proxy."""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from disaggregated_inference.bench import machines
from disaggregated_inference.bench.machines import Machine
from disaggregated_inference.bench.processes import free_port
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.local_nodes import Process, disagg, running

OURS, BARE, HANDING, LITELLM = "ours", "bare", "bare, handing over", "litellm"
MODEL = "tiny"
_OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # LiteLLM would fetch a price list first


Servers = dict[str, Process]


def node_of(role: str, profile: str) -> Machine:
    return machines.simulated(role, role, MODEL, profile, "--prefix-memory", "0")


@contextmanager
def serving(
    prefill: Machine, decode_port: int, bare_port: int, litellm: str = "", handing_over: bool = False
) -> Iterator[Servers]:
    """The gateway with a prefill node and the decode node at `decode_port`; the bare relay with that at `bare_port`,
    and, `handing_over`, one that uses the prefill node too; LiteLLM in front of the bare relay, if the environment
    `litellm` is given."""
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        relay = [sys.executable, "-m", "disaggregated_inference.bench.relay", f"http://127.0.0.1:{bare_port}"]
        gateway = gateway_process(config_file(folder, prefill, decode_port))
        servers = {OURS: gateway, BARE: Process("the relay", relay)}
        if handing_over:
            servers[HANDING] = Process("the relay that hands over", [*relay, f"http://127.0.0.1:{prefill.port}"])
        stack.enter_context(running([*servers.values()]))
        if litellm:
            command, port = litellm_command(litellm, folder, servers[BARE].url), free_port()
            servers[LITELLM] = Process("LiteLLM", [*command, "--port", str(port)], port, os.environ | _OFFLINE)
            stack.enter_context(running([servers[LITELLM]]))
        yield servers


@asynccontextmanager
async def in_thread(context: AbstractContextManager[Servers]) -> AsyncIterator[Servers]:
    """Servers start and stop in a thread, because the taps in front of their nodes need the event loop."""
    servers = await asyncio.to_thread(context.__enter__)
    try:
        yield servers
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


def gateway_process(config: str) -> Process:
    return Process("the gateway", disagg("gateway", "--config", config, "--port", "0"))


def config_file(folder: Path, prefill: Machine, decode_port: int) -> str:
    config: dict[str, Any] = {
        "prefill_servers": [prefill.entry],
        "decode_servers": [prefill.entry | {"name": "decode", "port": decode_port}],
        "policies": {"queue": 4096, "local": "never"},
    }
    path = folder / "cluster.json"
    path.write_text(json.dumps(config))
    return str(path)


def litellm_command(environment: str, folder: Path, url: str) -> list[str]:
    """LiteLLM's proxy in front of an OpenAI endpoint. `environment` is an environment or its Python."""
    places = (Path(environment) / "bin" / "litellm", Path(environment).parent / "litellm")
    command = next((str(place) for place in places if place.is_file()), None)
    if not command:
        raise BadRequest(f"no LiteLLM in {environment}: give an environment with litellm[proxy]")
    backend = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}
    no_key = {"dangerously_permit_weak_or_unset_master_key": True}  # like the other servers: on loopback, for a moment
    settings = {"model_list": [{"model_name": MODEL, "litellm_params": backend}], "general_settings": no_key}
    config = folder / "litellm.json"  # JSON is YAML
    config.write_text(json.dumps(settings))
    return [command, "--config", str(config), "--host", "127.0.0.1", "--num_workers", "1"]
