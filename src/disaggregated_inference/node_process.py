"""This process as a node: from the options of `disagg serve`, of any engine, to a signal."""

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING

from disaggregated_inference.api import NodeHealth, Role
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.http import Announce, announce_as_json, is_loopback
from disaggregated_inference.kv_transfer import CODECS, Address
from disaggregated_inference.logs import log_to_stderr
from disaggregated_inference.models import default_home
from disaggregated_inference.node import (
    Begin,
    Node,
    NodeSettings,
    NodeStart,
    listen,
    load_node,
    open_trust,
    parse_address,
    require_token,
    require_trusted_link,
)
from disaggregated_inference.private_files import warn_of_open

if TYPE_CHECKING:
    from disaggregated_inference.vllm_node import VllmLoader

log = logging.getLogger(__name__)

_ROLES = {"prefill": 8000, "decode": 8001, "both": 8001}  # and their ports
_VLLM_OPTIONS = ("vllm_python", "vllm_url", "vllm_args", "vllm_socket")


def run_node(settings: NodeSettings, announce: Announce = announce_as_json) -> None:
    """Load, warm up, and serve until a signal. The port answers `loading` meanwhile."""
    log_to_stderr(settings.log_level)
    warn_of_open(default_home())
    if settings.role not in _ROLES:
        raise BadRequest(f"unknown role {settings.role!r}: use {', '.join(_ROLES)}")
    if settings.kv_codec not in CODECS:
        raise BadRequest(f"unknown codec {settings.kv_codec!r}: use {', '.join(CODECS)}")
    port = _ROLES[settings.role] if settings.port is None else settings.port
    if settings.engine == "ollama":
        from disaggregated_inference.ollama_node import run_ollama_node

        return run_ollama_node(settings, port, announce)
    vllm = _vllm_loader(settings)
    trust = open_trust(settings)
    hosts = settings.kv_address or [settings.host] if settings.role != "decode" else []
    addresses = [parse_address(text, settings.kv_port, min_port=0) for text in hosts]
    kv_hosts = [host for host, _ in addresses]
    require_trusted_link([settings.host, *kv_hosts], kv_hosts, trust)
    require_token([settings.host, *kv_hosts], trust, settings.insecure)
    _warn_of_loopback(settings.host, kv_hosts)
    _require_free((settings.host, port), addresses, "--kv-address" if settings.kv_address else "--host")
    role: Role = "prefill" if settings.role == "prefill" else "decode" if settings.role == "decode" else "both"
    model, engine = settings.model_name, settings.engine_name
    health = NodeHealth(status="loading", loaded=False, role=role, model=model, backend=engine)
    announce("start", role=role, model=model, engine=engine, profile=settings.profile)

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
