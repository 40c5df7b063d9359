"""`disagg serve`: from a command line to a running node."""

import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from disaggregated_inference.engines import Engine, file_kind, load_engine, require_engine
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.http import HttpServer, is_loopback, write_ready_line
from disaggregated_inference.kv import KVSlice, require_dtype
from disaggregated_inference.kv.prefix_cache import DiskTier
from disaggregated_inference.kv_transfer import CODECS, format_address
from disaggregated_inference.logs import log_to_stderr
from disaggregated_inference.models import ModelFiles, ModelStore
from disaggregated_inference.node.decode import DecodeNode
from disaggregated_inference.node.kv_listener import listen, parse_address
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.node import Node
from disaggregated_inference.node.prefill import PrefillNode
from disaggregated_inference.node.routes import node_app
from disaggregated_inference.node.scheduler import Scheduler

_MEASURED_TOKENS = (64, 512)
_MEASURED_S = 0.5  # a machine that is slower than this on the first length skips the second

ROLES = {"prefill": 8000, "decode": 8001, "both": 8001}


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `disagg serve`. 0 or empty: a default that suits engine and machine."""

    role: str = "both"
    model: str = "smollm2"
    engine: str = ""
    profile: str = ""
    host: str = "127.0.0.1"
    port: int | None = None
    kv_port: int = 0
    kv_address: tuple[str, ...] = ()
    token: str = ""
    insecure: bool = False
    dtype: str = ""
    chunk: int = 0
    lease_s: float = 60.0
    kv_streams: int = 2
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
    log_level: str = "warning"


def run_node(settings: NodeSettings) -> None:
    """Load, warm up, and serve until a signal."""
    log_to_stderr(settings.log_level)
    if settings.role not in ROLES:
        raise BadRequest(f"unknown role {settings.role!r}: use {', '.join(ROLES)}")
    if settings.kv_codec not in CODECS:
        raise BadRequest(f"unknown codec {settings.kv_codec!r}: use {', '.join(CODECS)}")
    port = ROLES[settings.role] if settings.port is None else settings.port
    if settings.engine == "ollama":
        from disaggregated_inference.ollama_node import run_ollama_node

        return run_ollama_node(settings, port)
    prefills, decodes = settings.role != "decode", settings.role != "prefill"
    hosts = settings.kv_address or [settings.host] if prefills else []
    addresses = [parse_address(text, settings.kv_port, min_port=0) for text in hosts]
    require_token([settings.host, *(host for host, _ in addresses)], settings.token, settings.insecure)
    for address in [(settings.host, port), *addresses]:
        listen(address).close()  # a port that is taken shows now, not after minutes of loading
    files, kv_memory = _load(settings)
    try:
        codecs = tuple(dict.fromkeys((settings.kv_codec, "raw")))
        prefill = PrefillNode(kv_memory, addresses, settings.chunk, settings.lease_s) if prefills else None
        decode = (
            DecodeNode(kv_memory, files.tokenizer, settings.chunk, settings.kv_streams, codecs) if decodes else None
        )
        served = Node(files, kv_memory, prefill, decode)
        kv_memory.scheduler.call(lambda: _measure(served))
        if served.prefill:
            served.prefill.compute_canary()
        if decode:
            decode.grammars.warm()
        _serve(settings, port, served)
    finally:
        kv_memory.close_all()
        kv_memory.scheduler.stop()


def _serve(settings: NodeSettings, port: int, served: Node) -> None:
    kv_memory, deadline = served.kv_memory, math.inf
    about: dict[str, Any] = {"role": served.role, "model": served.model.name, "backend": kv_memory.engine.name}
    about |= {"host": settings.host, "kv_limit_bytes": kv_memory.admission.limit_bytes}
    if served.prefill:
        addresses = served.prefill.kv_addresses
        about |= {"kv_port": addresses[0][1], "kv_addresses": [format_address(address) for address in addresses]}

    def on_ready(port: int) -> None:
        kv_memory.unload_when_idle(settings.idle_unload_s)
        write_ready_line(port, **about)

    def on_stop() -> None:
        nonlocal deadline
        kv_memory.draining = True
        deadline = time.monotonic() + settings.drain_s

    app = node_app(served, settings.token or None)
    try:
        HttpServer(app, settings.host, port, settings.drain_s, on_ready=on_ready, on_stop=on_stop).run()
    finally:
        for role in served.roles:
            role.close(drain_s=max(0.0, min(deadline - time.monotonic(), settings.drain_s)))


def require_token(hosts: list[str], token: str, insecure: bool) -> None:
    """The HTTP port gives out tickets, and a ticket's secret opens the KV port: one token protects both."""
    open_hosts = [host for host in hosts if not is_loopback(host)]
    if open_hosts and not (token or insecure):
        raise BadRequest(
            f"refusing to listen on {open_hosts[0]} without a token: give --token, or --insecure if you mean it"
        )


def _load(settings: NodeSettings) -> tuple[ModelFiles, KVMemory]:
    engine = settings.engine or ("torch" if settings.role == "prefill" else "mlx")
    require_engine(engine)
    if settings.profile and engine != "simulated":
        raise BadRequest(f"--profile needs --engine simulated, not {engine}")
    kv_bytes, prefix_bytes = parse_size(settings.kv_memory), parse_size(settings.prefix_memory)
    disk_bytes = parse_size(settings.prefix_disk_size)
    files = ModelStore().resolve(_model_name(settings, engine), kind=file_kind(engine))
    options: dict[str, Any] = {"dtype": require_dtype(settings.dtype)} if settings.dtype else {}
    if settings.profile:
        options["profile"] = settings.profile
    if kv_bytes is not None:
        prefix_bytes = kv_bytes // 4 if prefix_bytes is None else prefix_bytes
        if prefix_bytes >= kv_bytes:
            raise BadRequest("--prefix-memory must be smaller than --kv-memory")
        options["kv_bytes"] = kv_bytes - prefix_bytes
    if settings.prefix_disk and prefix_bytes == 0:
        raise BadRequest("--prefix-disk needs memory for prefixes: leave out --prefix-memory 0")

    first_load = [files]

    def load() -> Engine:
        """The first load uses the files found above; later loads read the folder again."""
        found = first_load.pop() if first_load else ModelFiles(files.name, files.path)
        loaded = load_engine(engine, found, **options)
        _warm_up(loaded)
        return loaded

    disk = DiskTier(Path(settings.prefix_disk).expanduser(), disk_bytes or 0) if settings.prefix_disk else None
    # Prompts are interleaved, so that a long one does not starve short ones; fewer where decode steps run in between.
    scheduler = Scheduler(load, max_running=8 if settings.role == "prefill" else 2)
    try:
        return files, KVMemory(
            scheduler,
            options.get("kv_bytes", 0),
            prefix_bytes,
            disk,
            settings.queue,
            both_roles=settings.role == "both",
        )
    except BadRequest:
        scheduler.stop()
        raise


def _model_name(settings: NodeSettings, engine: str) -> str:
    """The simulated engine has its own default: it needs no weights."""
    return "simulated:tiny" if engine == "simulated" and settings.model == NodeSettings().model else settings.model


def parse_size(text: str) -> int | None:
    """Bytes: `512M`, `8G`, `1.5T`, or a plain number; None for an empty text."""
    if not text:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise BadRequest(f"{text!r} is not a size: give bytes, or a number with K, M, G or T")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


def _warm_up(engine: Engine) -> None:
    """The first run of the libraries is slow: no request should pay for it."""
    for length in engine.warm_lengths:
        if _fits(engine, length):
            _time(engine, length, lambda piece: piece.wait())
    engine.counters.prompt_tokens = engine.counters.step_tokens = 0


def _fits(engine: Engine, length: int) -> bool:
    """Whether the node can serve a prompt of this length and one more token."""
    return length + 1 < engine.spec.context_window and engine.kv_cost(length + 1) <= engine.kv_limit_bytes


def _measure(served: Node) -> None:
    """Measure this machine, so that the router plans the first requests with real rates. Each length runs twice:
    memory is slow when it is first touched."""
    engine = served.kv_memory.engine
    for length in _MEASURED_TOKENS:
        if not _fits(engine, length):
            break
        prefill_s, step_s = map(min, zip(_time(engine, length), _time(engine, length), strict=True))
        for rates in (
            served.prefill and served.prefill.chunked_prefill.rates,
            served.decode and served.decode.kv_source.prefill_rates,
        ):
            if rates:
                rates.record(length, length, prefill_s)
        if served.decode:
            served.kv_memory.scheduler.batch.rates.record(1, 1, step_s)
        if prefill_s > _MEASURED_S:
            break
    engine.counters.prompt_tokens = engine.counters.step_tokens = 0


def _time(engine: Engine, length: int, on_slice: Callable[[KVSlice], None] | None = None) -> tuple[float, float]:
    """Seconds of a prefill and of one decode step."""
    sequence = engine.open(length + 1)
    started = time.perf_counter()
    tokens = engine.prefill(sequence, [index % 50 for index in range(length)], on_slice).greedy().tolist()
    prefilled = time.perf_counter()
    engine.step([sequence], tokens).greedy().tolist()
    stepped = time.perf_counter()
    engine.close(sequence)
    return prefilled - started, stepped - prefilled
