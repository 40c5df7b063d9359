"""`disagg serve`: from a command line to a running node."""

import logging
import re
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from disaggregated_inference.api import NodeHealth, Role, StartLine
from disaggregated_inference.defaults import KV_PORT, PORTS
from disaggregated_inference.engines import Engine, file_kind, load_engine, require_engine
from disaggregated_inference.engines.simulated import parse_profile
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.http import Announce, announce_as_json, is_loopback
from disaggregated_inference.identity import open_identity
from disaggregated_inference.kv import KVDType
from disaggregated_inference.kv.prefix_cache import DiskTier
from disaggregated_inference.kv_transfer import Address
from disaggregated_inference.logs import log_to_stderr
from disaggregated_inference.models import ModelFiles, ModelStore, bare_name, default_home
from disaggregated_inference.node.decode import DecodeNode
from disaggregated_inference.node.engine_threads import EngineThreads
from disaggregated_inference.node.kv_listener import listen, parse_address
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.node import Node
from disaggregated_inference.node.prefill import PrefillNode
from disaggregated_inference.node.rate_measurement import measure, rescale_rates, warm_up
from disaggregated_inference.node.scheduler import Scheduler
from disaggregated_inference.node.startup import Begin, NodeStart
from disaggregated_inference.node.trust import Trust, choose_security, default_security, require_trusted_link
from disaggregated_inference.observe import Computes, ReadingsSampler
from disaggregated_inference.private_files import warn_of_open
from disaggregated_inference.timeouts import NodeTimeouts

if TYPE_CHECKING:
    from disaggregated_inference.vllm_node import VllmLoader

log = logging.getLogger(__name__)

_VLLM_OPTIONS = ("vllm_python", "vllm_url", "vllm_args", "vllm_socket")


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `disagg serve`. 0 or empty: a default that suits engine and machine."""

    role: Role = "both"
    model: str = "smollm2"
    engine: str = ""
    profile: str = ""
    host: str = "127.0.0.1"
    port: int | None = None
    kv_port: int = KV_PORT
    kv_address: tuple[str, ...] = ()
    token: str = ""
    insecure: bool = False
    identity: str = ""
    trusted_link: str = ""
    kv_security: str = ""
    dtype: KVDType | None = None
    chunk: int = 0
    threads: int = 0
    lease_s: float = 60.0
    kv_streams: int = 4
    kv_codec: str = "raw"
    kv_memory: str = ""
    prefix_memory: str = ""
    prefix_disk: str = ""
    prefix_disk_size: str = "10G"
    queue: int = 256
    idle_unload_s: float = 0.0
    drain_s: int = 60
    ollama_host: str = "http://localhost:11434"
    ollama_context: int = 32768
    ollama_slots: int = 4
    keep_alive: str = ""
    vllm_python: str = ""
    vllm_url: str = ""
    vllm_args: str = ""
    vllm_socket: str = ""
    log_level: str = "warning"


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
    model, engine = _model_name(settings), _engine_name(settings)
    health = NodeHealth(status="loading", loaded=False, role=settings.role, model=model, backend=engine)
    announce(StartLine(event="start", role=settings.role, model=model, engine=engine, profile=settings.profile))

    def load(begin: Begin) -> Node:
        return (vllm.load if vllm else _load_node)(settings, addresses, begin, trust)

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
    engine = _engine_name(settings)
    require_engine(engine)
    if settings.profile and engine != "simulated":
        raise BadRequest(f"--profile needs --engine simulated, not {engine}")
    family, _, shape = bare_name(_model_name(settings)).lower().partition(":")
    if settings.profile and family == "simulated":
        parse_profile(settings.profile, shape)
    _memory_of(settings)


def open_trust(settings: NodeSettings) -> Trust:
    identity = open_identity(settings.identity)
    modes = choose_security(settings.kv_security, identity)
    if identity:
        if not identity.me.is_node:
            raise BadRequest(f"{identity.folder} is of a client: issue a certificate with --host for this node")
        identity.watch()
    if settings.trusted_link:
        if len(settings.trusted_link.split()) < 2:
            raise BadRequest('--trusted-link needs words: say which link it is, such as "the cable to mac-1"')
        log.warning("the link is declared trusted: %s", settings.trusted_link)
    return Trust(identity, settings.token, settings.trusted_link, default_security(modes, identity), modes)


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


def _load_node(settings: NodeSettings, addresses: list[Address], begin: Begin, trust: Trust = Trust()) -> Node:
    """`begin` is called with every step that begins."""
    files, kv_memory, threads = _load(settings, begin)
    try:
        codecs = tuple(dict.fromkeys((settings.kv_codec, "raw")))
        prefill = decode = None
        if settings.role != "decode":
            prefill = PrefillNode(kv_memory, addresses, settings.chunk, settings.lease_s, trust=trust)
        if settings.role != "prefill":
            decode = DecodeNode(kv_memory, files.tokenizer, settings.chunk, settings.kv_streams, codecs, trust=trust)
        served = Node(files, kv_memory, prefill, decode, start_readings(kv_memory.engine))
        begin("measuring this machine")
        kv_memory.scheduler.call(lambda: measure(served))
        if threads:
            threads.on_change = partial(rescale_rates, served)
        if served.prefill:
            served.prefill.compute_canary()
        if decode:
            decode.grammars.warm()
        kv_memory.unload_when_idle(settings.idle_unload_s)
        return served
    except BaseException:
        kv_memory.close_all()
        kv_memory.scheduler.stop()
        raise


def start_readings(engine: Engine, every_s: float = NodeTimeouts().readings_s) -> ReadingsSampler:
    computes: Computes = "nothing" if engine.name == "simulated" else "cpu" if engine.threads else "gpu"
    return ReadingsSampler(computes, every_s).start()


def require_token(hosts: list[str], trust: Trust, insecure: bool) -> None:
    """The HTTP port gives out tickets, and a ticket's secret opens the KV port: one token protects both. With an
    identity, TLS knows every client."""
    open_hosts = [host for host in hosts if not is_loopback(host)]
    if open_hosts and not (trust.identity or trust.token or insecure):
        raise BadRequest(
            f"refusing to listen on {open_hosts[0]} without a token: set DISAGG_TOKEN or --token-file, or give an"
            " identity (--identity), or --insecure if you mean it"
        )


def _load(settings: NodeSettings, begin: Begin) -> tuple[ModelFiles, KVMemory, EngineThreads | None]:
    engine, name, memory = _engine_name(settings), _model_name(settings), _memory_of(settings)
    begin(f"looking for {name}")
    files = ModelStore().resolve(name, lambda step, part: begin(f"{name}: {step} {part:.0%}"), file_kind(engine))
    options: dict[str, Any] = {"dtype": settings.dtype} if settings.dtype else {}
    if settings.profile:
        options["profile"] = settings.profile
    if memory.request_bytes is not None:
        options["kv_bytes"] = memory.request_bytes

    first_load = [files]
    threads = None if engine == "simulated" else EngineThreads(settings.threads)

    def load() -> Engine:
        """The first load uses the files found above; later loads read the folder again."""
        found = first_load.pop() if first_load else ModelFiles(files.name, files.path)
        begin(f"loading {files.name} into {engine}")
        loaded = load_engine(engine, found, **options)
        if threads:
            threads.apply(loaded)
        begin(f"warming up {engine}")
        warm_up(loaded)
        return loaded

    disk = DiskTier(Path(settings.prefix_disk).expanduser(), memory.disk_bytes) if settings.prefix_disk else None
    # Prompts are interleaved, so that a long one does not starve short ones; fewer where decode steps run in between.
    scheduler = Scheduler(load, max_running=8 if settings.role == "prefill" else 2)
    try:
        kv_memory = KVMemory(
            scheduler,
            memory.request_bytes or 0,
            memory.prefix_bytes,
            disk,
            settings.queue,
            both_roles=settings.role == "both",
        )
    except BadRequest:
        scheduler.stop()
        raise
    if threads:
        kv_memory.every_tick(lambda: threads.follow(scheduler))
    return files, kv_memory, threads


def _engine_name(settings: NodeSettings) -> str:
    return settings.engine or ("torch" if settings.role == "prefill" else "mlx")


def _model_name(settings: NodeSettings) -> str:
    """The simulated engine has its own default: it needs no weights."""
    simulated = settings.engine == "simulated" and settings.model == NodeSettings().model
    return "simulated:tiny" if simulated else settings.model


class _Memory(NamedTuple):
    """None: chosen from the free memory."""

    request_bytes: int | None
    prefix_bytes: int | None
    disk_bytes: int


def _memory_of(settings: NodeSettings) -> _Memory:
    kv_bytes = parse_size(settings.kv_memory, "--kv-memory")
    prefix_bytes = parse_size(settings.prefix_memory, "--prefix-memory")
    disk_bytes = parse_size(settings.prefix_disk_size, "--prefix-disk-size") or 0
    if kv_bytes is not None:
        prefix_bytes = kv_bytes // 4 if prefix_bytes is None else prefix_bytes
        if prefix_bytes >= kv_bytes:
            raise BadRequest("--prefix-memory must be smaller than --kv-memory")
    if settings.prefix_disk and prefix_bytes == 0:
        raise BadRequest("--prefix-disk needs memory for prefixes: leave out --prefix-memory 0")
    return _Memory(None if kv_bytes is None else kv_bytes - (prefix_bytes or 0), prefix_bytes, disk_bytes)


def parse_size(text: str, option: str) -> int | None:
    """Bytes: `512M`, `8G`, `1.5T`, or a plain number; None for an empty text."""
    if not text:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise BadRequest(f"{option}: {text!r} is not a size: give bytes, or a number with K, M, G or T")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))
