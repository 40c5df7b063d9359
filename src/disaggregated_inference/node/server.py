"""From a command line to a running node: load, warm up, listen, say so."""

import asyncio
import ipaddress
import json
import math
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from disaggregated_inference.engines import Engine, file_kind, load_engine, require_engine
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.kv.dtype import require_dtype
from disaggregated_inference.kv.prefix_cache.disk import DiskTier
from disaggregated_inference.kv_transfer.codecs import CODECS
from disaggregated_inference.kv_transfer.paths import Address, spoken
from disaggregated_inference.logs import log_to_stderr
from disaggregated_inference.models import ModelFiles, ModelStore
from disaggregated_inference.node.decode import DecodeNode
from disaggregated_inference.node.kv_listener import listen, parse_address
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.node import Node
from disaggregated_inference.node.prefill import PrefillNode
from disaggregated_inference.node.routes import node_app, serve_app
from disaggregated_inference.node.scheduler import Scheduler
from disaggregated_inference.ollama_node.client import OllamaClient
from disaggregated_inference.ollama_node.node import OllamaNode
from disaggregated_inference.ollama_node.routes import ollama_app

_MEASURED_TOKENS = (64, 512)
_MEASURED_S = 0.5  # a machine that needs longer for the shorter one need not show the longer one

ROLES = {"prefill": 8000, "decode": 8001, "both": 8001}


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`disagg serve`, as it was called. 0 or empty: what suits engine and machine."""

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


def run_node(asked: NodeSettings) -> None:
    """Load, warm up, listen, until a signal."""
    log_to_stderr(asked.log_level)
    if asked.role not in ROLES:
        raise BadRequest(f"no role {asked.role!r}; there are {', '.join(ROLES)}")
    if asked.kv_codec not in CODECS:
        raise BadRequest(f"no codec {asked.kv_codec!r}; there are {', '.join(CODECS)}")
    port = ROLES[asked.role] if asked.port is None else asked.port
    if asked.engine == "ollama":
        return _run_ollama(asked, port)
    reads, writes = asked.role != "decode", asked.role != "prefill"
    hosts = asked.kv_address or [asked.host] if reads else []
    addresses = [parse_address(text, asked.kv_port, least_port=0) for text in hosts]
    _require_token([asked.host, *(name for name, _ in addresses)], asked.token, asked.insecure)
    _require_free([(asked.host, port), *addresses])
    files, kv_memory = _load(asked)
    try:
        codecs = tuple(dict.fromkeys((asked.kv_codec, "raw")))
        prefill = PrefillNode(kv_memory, addresses, asked.chunk, asked.lease_s) if reads else None
        decode = DecodeNode(kv_memory, files.tokenizer, asked.chunk, asked.kv_streams, codecs) if writes else None
        served = Node(files, kv_memory, prefill, decode)
        kv_memory.scheduler.call(lambda: _measure(served))
        if served.prefill:
            served.prefill.read_canary()
        if decode:
            decode.grammars.warm()
        _serve(asked, port, served)
    finally:
        kv_memory.close_all()
        kv_memory.scheduler.stop()


def _run_ollama(asked: NodeSettings, port: int) -> None:
    """In front of a server that has its own memory, queue and cache."""
    ollama = OllamaClient(asked.ollama_host, asked.model)
    node = OllamaNode(
        ollama, asked.role, asked.ollama_context, asked.keep_alive, slots=asked.ollama_slots, queue=asked.queue
    )
    _require_token([asked.host], asked.token, asked.insecure)
    _require_free([(asked.host, port)])
    asyncio.run(node.require_model())
    about: dict[str, Any] = {"role": asked.role, "model": asked.model, "backend": "ollama", "host": asked.host}
    about["ollama"] = ollama.url
    app = ollama_app(node, asked.token or None)
    serve_app(app, asked.host, port, asked.drain_s, partial(_ready, **about), node.stop_taking)


def _serve(asked: NodeSettings, port: int, served: Node) -> None:
    kv_memory, nodes = served.kv_memory, [node for node in (served.prefill, served.decode) if node]
    about: dict[str, Any] = {"role": served.role, "model": served.model.name, "backend": kv_memory.engine.name}
    about |= {"host": asked.host, "kv_limit_bytes": kv_memory.admission.limit_bytes}
    if served.prefill:
        listening = [spoken(address) for address in served.prefill.kv_addresses]
        about |= {"kv_port": served.prefill.kv_addresses[0][1], "kv_addresses": listening}

    deadline = math.inf

    def ready(port: int) -> None:
        kv_memory.unload_when_idle(asked.idle_unload_s)
        _ready(port, **about)

    def stopping() -> None:
        nonlocal deadline
        kv_memory.draining = True
        deadline = time.monotonic() + asked.drain_s

    try:
        app = node_app(served, asked.token or None)
        serve_app(app, asked.host, port, asked.drain_s, ready, stopping)
    finally:
        for node in nodes:
            node.close(drain_s=max(0.0, min(deadline - time.monotonic(), asked.drain_s)))


def _require_token(hosts: list[str], token: str, insecure: bool) -> None:
    """Who reaches the HTTP port gets tickets, and a ticket's secret opens the KV port: one token guards both."""
    open_hosts = [host for host in hosts if not is_loopback(host)]
    if open_hosts and not (token or insecure):
        raise BadRequest(
            f"refusing to listen on {open_hosts[0]} without a token: give --token, or --insecure if you mean it"
        )


def _require_free(addresses: list[Address]) -> None:
    """A port that is taken shows before a model is loaded for minutes, not after."""
    for address in addresses:
        listen(address).close()


def _load(asked: NodeSettings) -> tuple[ModelFiles, KVMemory]:
    engine = asked.engine or ("torch" if asked.role == "prefill" else "mlx")
    require_engine(engine)
    if asked.profile and engine != "simulated":
        raise BadRequest(f"--profile is a simulated machine's: it needs --engine simulated, not {engine}")
    kv_bytes, prefix_bytes = parse_size(asked.kv_memory), parse_size(asked.prefix_memory)
    disk_bytes = parse_size(asked.prefix_disk_size)
    files = ModelStore().resolve(_model_name(asked, engine), kind=file_kind(engine))
    options: dict[str, Any] = {"dtype": require_dtype(asked.dtype)} if asked.dtype else {}
    if asked.profile:
        options["profile"] = asked.profile
    if kv_bytes is not None:
        prefix_bytes = kv_bytes // 4 if prefix_bytes is None else prefix_bytes
        if prefix_bytes >= kv_bytes:
            raise BadRequest("--kv-memory is for everything, prefixes included: give more of it, or less to them")
        options["kv_bytes"] = kv_bytes - prefix_bytes
    if asked.prefix_disk and prefix_bytes == 0:
        raise BadRequest("--prefix-disk needs memory to bring prefixes back to: leave out --prefix-memory 0")

    as_found = [files]

    def load() -> Engine:
        """The first time what was found above; later the files are looked at anew."""
        found = as_found.pop() if as_found else ModelFiles(files.name, files.path)
        loaded = load_engine(engine, found, **options)
        _warm_up(loaded)
        return loaded

    disk = DiskTier(Path(asked.prefix_disk).expanduser(), disk_bytes or 0) if asked.prefix_disk else None
    # Prompts take turns, so that a long one does not starve short ones; few of them where answers are written between.
    scheduler = Scheduler(load, in_turn=8 if asked.role == "prefill" else 2)
    try:
        return files, KVMemory(
            scheduler, options.get("kv_bytes", 0), prefix_bytes, disk, asked.queue, both_roles=asked.role == "both"
        )
    except BadRequest:
        scheduler.stop()
        raise


def _model_name(asked: NodeSettings, engine: str) -> str:
    """The default has weights, which the simulated engine has no use for."""
    return "simulated:tiny" if engine == "simulated" and asked.model == NodeSettings().model else asked.model


def parse_size(text: str) -> int | None:
    """Bytes: `512M`, `8G`, `1.5T`, or a plain number; None where nothing was said."""
    if not text:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise BadRequest(f"{text!r} is no size: give bytes, or a number with K, M, G or T")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


def _warm_up(engine: Engine) -> None:
    """The first request must not pay for the libraries' first time."""
    for length in engine.warm_lengths:
        if _has_room(engine, length):
            _read_once(engine, length)
    engine.counters.prompt_tokens = engine.counters.step_tokens = 0


def _has_room(engine: Engine, length: int) -> bool:
    """For a prompt so long and a token of its answer. A small node need not try what it will never be asked."""
    return length + 1 < engine.spec.context_window and engine.kv_cost(length + 1) <= engine.kv_limit_bytes


def _read_once(engine: Engine, length: int) -> None:
    sequence = engine.open(length + 1)
    tokens = engine.prefill(sequence, [index % 50 for index in range(length)], lambda piece: piece.wait()).greedy()
    engine.step([sequence], tokens).greedy().tolist()
    engine.close(sequence)


def _measure(served: Node) -> None:
    """What this machine can do, so that the first requests are planned by more than a guess: twice, because memory that
    is touched for the first time is slow."""
    engine = served.kv_memory.engine
    for length in _MEASURED_TOKENS:
        if not _has_room(engine, length):
            break
        reading_s, step_s = map(min, zip(_timed(engine, length), _timed(engine, length), strict=True))
        for rates in (served.prefill and served.prefill.reading, served.decode and served.decode.intake.reading):
            if rates:
                rates.note(length, length, reading_s)
        if served.decode:
            served.decode.batch.rates.note(1, 1, step_s)
        if reading_s > _MEASURED_S:
            break
    engine.counters.prompt_tokens = engine.counters.step_tokens = 0


def _timed(engine: Engine, length: int) -> tuple[float, float]:
    sequence = engine.open(length + 1)
    started = time.perf_counter()
    tokens = engine.prefill(sequence, [index % 50 for index in range(length)]).greedy().tolist()
    read = time.perf_counter()
    engine.step([sequence], tokens).greedy().tolist()
    written = time.perf_counter()
    engine.close(sequence)
    return read - started, written - read


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _ready(port: int, **about: object) -> None:
    """One line on standard output that a person or a program can wait for."""
    sys.stdout.write(json.dumps({"event": "ready", "port": port, **about}) + "\n")
    sys.stdout.flush()
