"""From the options of a node to a loaded engine and its roles."""

from functools import partial
from pathlib import Path
from typing import Any

from disaggregated_inference.engines import Engine, file_kind, load_engine
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.kv.prefix_cache import DiskTier
from disaggregated_inference.kv_transfer import Address
from disaggregated_inference.models import ModelFiles, ModelStore
from disaggregated_inference.node.decode import DecodeNode
from disaggregated_inference.node.engine_threads import EngineThreads
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.node import Node
from disaggregated_inference.node.prefill import PrefillNode
from disaggregated_inference.node.rate_measurement import measure, rescale_rates, warm_up
from disaggregated_inference.node.scheduler import Scheduler
from disaggregated_inference.node.settings import NodeSettings, memory_of
from disaggregated_inference.node.startup import Begin
from disaggregated_inference.node.trust import Trust
from disaggregated_inference.observe import Computes, ReadingsSampler
from disaggregated_inference.timeouts import NodeTimeouts


def load_node(settings: NodeSettings, addresses: list[Address], begin: Begin, trust: Trust) -> Node:
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


def _load(settings: NodeSettings, begin: Begin) -> tuple[ModelFiles, KVMemory, EngineThreads | None]:
    engine, name, memory = settings.engine_name, settings.model_name, memory_of(settings)
    begin(f"looking for {name}")
    files = ModelStore().resolve(name, lambda step, part: begin(f"{name}: {step}", part), file_kind(engine))
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
