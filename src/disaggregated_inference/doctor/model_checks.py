"""Model files on this machine: whole, and small enough for its memory together with their KV cache."""

import os
import platform
from collections.abc import Iterator
from typing import Any

from disaggregated_inference.doctor import nvidia
from disaggregated_inference.doctor.commands import output_of
from disaggregated_inference.doctor.findings import CannotRead, Finding, found, note, ok
from disaggregated_inference.doctor.plan import ExpectedMachine, ExpectedServer
from disaggregated_inference.engines import file_kind
from disaggregated_inference.errors import ModelError
from disaggregated_inference.models import ModelFiles, ModelStore, describe_model

_TIGHT = 0.85  # above this share of the memory, engine buffers and the system may not fit
_METAL_SHARE = 0.75  # of a Mac's memory that the GPU may use, unless iogpu.wired_limit_mb says otherwise
_NO_FILES = ("simulated", "ollama")


class FoundModel:
    """A planned server with its files; `trouble` says why there are none."""

    def __init__(self, server: ExpectedServer) -> None:
        self.server = server
        self.model: ModelFiles | None = None
        self.trouble: Finding | None = None
        try:
            self.model = _resolve(server)
        except ModelError as error:
            self.trouble = found("error", "model-files", f"{server.name}: {error}")

    @property
    def context(self) -> int:
        assert self.model
        return self.server.context_window or self.model.spec.context_window

    @property
    def needed_bytes(self) -> int:
        """Weights, and the KV cache of one request as long as the context."""
        assert self.model
        return self.model.size_bytes + self.model.spec.kv_bytes(self.context, "bfloat16")


def _resolve(server: ExpectedServer) -> ModelFiles | None:
    """None: the engine needs no files here, or fetches the embedded model at its first start."""
    store, kind = ModelStore(), file_kind(server.engine)
    if server.engine in _NO_FILES or server.model.startswith("simulated:"):
        return None
    if server.model.lower() in ("smollm2", "smollm2:135m") and not store.list()[0].path:
        return None
    return store.resolve(server.model, kind=kind)


def check_models(plan: ExpectedMachine) -> Iterator[Finding]:
    models = [FoundModel(server) for server in plan.servers]
    for each in models:
        yield from _check_files(each)
    whole = [each for each in models if each.model]
    if whole:
        yield from judge_memory(whole, memory_bytes())


def _check_files(each: FoundModel) -> Iterator[Finding]:
    name = each.server.name
    if each.trouble:
        yield each.trouble
    elif each.model:
        try:
            each.model.fingerprint  # noqa: B018  reads a part of every tensor
        except ModelError as error:
            each.model = None
            yield found("error", "model-files", f"{name}: {error}")
        else:
            yield ok("model-files", f"{name}: {each.model.path} is whole ({_gigabytes(each.model.size_bytes)})")
    elif each.server.engine not in _NO_FILES and not each.server.model.startswith("simulated:"):
        yield note("model-files", f"{name}: the embedded model is fetched at the first start")


def judge_memory(models: list[FoundModel], memory: int) -> Iterator[Finding]:
    needed = sum(each.needed_bytes for each in models)
    parts = ", ".join(
        f"{each.server.name} {_gigabytes(each.needed_bytes)} at {each.context:,} tokens" for each in models
    )
    words = f"weights and KV cache need {_gigabytes(needed)} of {_gigabytes(memory)} ({parts})"
    if needed > memory:
        yield found("error", "memory", words)
    elif needed > _TIGHT * memory:
        yield found("warning", "memory", f"{words}: little is left for engine and system")
    else:
        yield ok("memory", words)


def memory_bytes() -> int:
    """Memory that an engine on this machine can use: the GPU's, or what it shares with the CPU."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if platform.system() == "Darwin":
        return metal_bytes(installed, output_of("sysctl", "-n", "iogpu.wired_limit_mb"))
    try:
        own = [gpu.memory_mib for gpu in nvidia.read_gpus()]
    except CannotRead:
        own = []
    return sum(size or 0 for size in own) * 2**20 or installed


def metal_bytes(installed: int, wired_limit_mb: str) -> int:
    """0 in `iogpu.wired_limit_mb` means macOS's own limit."""
    limit = int(wired_limit_mb.strip() or 0)
    return limit * 2**20 if limit else int(installed * _METAL_SHARE)


def describe_planned(plan: ExpectedMachine) -> dict[str, Any]:
    """What other machines compare: the model of each server, as `disagg models inspect --json` shows it."""
    described = {}
    for server in plan.servers:
        each = FoundModel(server)
        if each.model:
            try:
                described[server.name] = describe_model(each.model, each.context)
            except ModelError:
                continue
    return described


def _gigabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.0f} MB"
