"""The options of a node, whatever its engine."""

import re
from typing import NamedTuple

import msgspec

from disaggregated_inference.api import Role
from disaggregated_inference.defaults import KV_PORT
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.kv import KVDType


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

    @property
    def engine_name(self) -> str:
        return self.engine or ("torch" if self.role == "prefill" else "mlx")

    @property
    def model_name(self) -> str:
        """The simulated engine has its own default: it needs no weights."""
        simulated = self.engine == "simulated" and self.model == NodeSettings().model
        return "simulated:tiny" if simulated else self.model


class MemorySettings(NamedTuple):
    """None: chosen from the free memory."""

    request_bytes: int | None
    prefix_bytes: int | None
    disk_bytes: int


def memory_of(settings: NodeSettings) -> MemorySettings:
    kv_bytes = parse_size(settings.kv_memory, "--kv-memory")
    prefix_bytes = parse_size(settings.prefix_memory, "--prefix-memory")
    disk_bytes = parse_size(settings.prefix_disk_size, "--prefix-disk-size") or 0
    if kv_bytes is not None:
        prefix_bytes = kv_bytes // 4 if prefix_bytes is None else prefix_bytes
        if prefix_bytes >= kv_bytes:
            raise BadRequest("--prefix-memory must be smaller than --kv-memory")
    if settings.prefix_disk and prefix_bytes == 0:
        raise BadRequest("--prefix-disk needs memory for prefixes: leave out --prefix-memory 0")
    return MemorySettings(None if kv_bytes is None else kv_bytes - (prefix_bytes or 0), prefix_bytes, disk_bytes)


def parse_size(text: str, option: str) -> int | None:
    """Bytes: `512M`, `8G`, `1.5T`, or a plain number; None for an empty text."""
    if not text:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise BadRequest(f"{option}: {text!r} is not a size: give bytes, or a number with K, M, G or T")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))
