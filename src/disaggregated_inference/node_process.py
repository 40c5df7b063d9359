"""This process as a node: from the options of `disagg serve`, of any engine, to a signal."""

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING

from disaggregated_inference.api import NodeHealth, StartLine
from disaggregated_inference.defaults import PORTS
from disaggregated_inference.engines import require_engine
from disaggregated_inference.engines.simulated import parse_profile
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.http import Announce, announce_as_json, is_loopback
from disaggregated_inference.kv_transfer import Address
from disaggregated_inference.logs import log_to_stderr
from disaggregated_inference.models import bare_name, default_home
from disaggregated_inference.node import (
    Begin,
    Node,
    NodeSettings,
    NodeStart,
    listen,
    load_node,
    memory_of,
    open_trust,
    parse_address,
    require_token,
    require_trusted_link,
)
from disaggregated_inference.private_files import warn_of_open

if TYPE_CHECKING:
    from disaggregated_inference.vllm_node import VllmLoader

log = logging.getLogger(__name__)

_VLLM_OPTIONS = ("vllm_python", "vllm_url", "vllm_args", "vllm_socket")


def run_node(settings: NodeSettings, announce: Announce = announce_as_json) -> None:
    """Load, warm up, and serve until a signal. The port answers `loading` meanwhile."""
    log_to_stderr(settings.log_level)
    warn_of_open(default_home())
    port = PORTS[settings.role] if settings.port is None else settings.port
    if settings.engine == "ollama":
        from disaggregated_inference.ollama_node import run_ollama_node

        return run_ollama_node(settings, port, announce)
    vllm = _vllm_loader(settings)
    if not vllm:
        _require_possible(settings)
    trust = open_trust(settings)
    hosts = settings.kv_address or [settings.host] if settings.role != "decode" else []
    host_option = "--kv-address" if settings.kv_address else "--host"
    addresses = [parse_address(text, settings.kv_port, host_option, min_port=0) for text in hosts]
    kv_hosts = [host for host, _ in addresses]
    require_trusted_link([settings.host, *kv_hosts], kv_hosts, trust)
    require_token([settings.host, *kv_hosts], trust, settings.insecure)
    _warn_of_loopback(settings.host, kv_hosts)
    _require_free((settings.host, port), addresses, host_option)
    model, engine = settings.model_name, settings.engine_name
    health = NodeHealth(status="loading", loaded=False, role=settings.role, model=model, backend=engine)
    announce(StartLine(event="start", role=settings.role, model=model, engine=engine, profile=settings.profile))

    def load(begin: Begin) -> Node:
        return (vllm.load if vllm else load_node)(settings, addresses, begin, trust)

    ends = (vllm.app, vllm.close) if vllm else ()
    NodeStart(load, health, (settings.host, port), settings.token, settings.drain_s, announce, trust, *ends).run()


def _vllm_loader(settings: NodeSettings) -> "VllmLoader | None":
    """Of `--engine vllm`: options that contradict each other and a missing environment show before anything loads."""
    given = [name for name in _VLLM_OPTIONS if getattr(settings, name)]
    if settings.engine != "vllm":
        if given:
            raise BadRequest(f"--{given[0].replace('_', '-')} needs --engine vllm")
        return None
    from disaggregated_inference.vllm_node import VllmLoader

    return VllmLoader(settings)


def _require_possible(settings: NodeSettings) -> None:
    """What is wrong with the options shows before the node announces itself."""
    engine = settings.engine_name
    require_engine(engine)
    if settings.profile and engine != "simulated":
        raise BadRequest(f"--profile needs --engine simulated, not {engine}")
    family, _, shape = bare_name(settings.model_name).lower().partition(":")
    if settings.profile and family == "simulated":
        parse_profile(settings.profile, shape)
    memory_of(settings)


def _require_free(http: Address, kv: list[Address], kv_host_option: str) -> None:
    """A port that is taken shows now, not after minutes of loading. All at once: they may be the same."""
    with ExitStack() as stack:
        stack.enter_context(listen(http, ("--port", "--host")))
        for address in kv:
            stack.enter_context(listen(address, ("--kv-port", kv_host_option)))


def _warn_of_loopback(host: str, kv_hosts: list[str]) -> None:
    """A prefill node that other machines ask, and whose KV they cannot fetch. A tunnel may be what the user wants."""
    if kv_hosts and not is_loopback(host) and all(map(is_loopback, kv_hosts)):
        log.warning(
            "other machines can reach this node at %s, but not its KV at %s: give --kv-address an address of the link"
            " to the decode node, or `kv_addresses` in the cluster file if a tunnel leads there",
            host,
            kv_hosts[0],
        )
