"""Ollama's lists of models, from memory: a list does not wait for nodes."""

import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from disaggregated_inference.api import ModelInfo, StoredModel
from disaggregated_inference.errors import NoDecodeNode
from disaggregated_inference.gateway.cluster.routes import context_window, model_info
from disaggregated_inference.gateway.ollama.requests import OllamaModelRequest, can_call_tools, read
from disaggregated_inference.gateway.reasoning_effort import can_think
from disaggregated_inference.gateway.request_context import RequestContext
from disaggregated_inference.http import json_response, read_json
from disaggregated_inference.models import MissingTokenizer, ModelTokenizer
from disaggregated_inference.orchestrator import DisaggregatedInference

_STARTED = datetime.now(UTC)  # programs want a time; the model's own is unknown
_STAYS_LOADED = timedelta(days=3650)
_CAPABILITIES = ("completion", "tools", "thinking", "vision")  # of an Ollama node, those that this API offers


def model_of(context: RequestContext, name: Any) -> str:
    """Ollama's names have a tag; `latest` means none."""
    return context.model(name, name.removesuffix(":latest") if isinstance(name, str) else "")


async def tags(request: Request) -> Response:
    context = RequestContext(request)
    listed = [await _listed(context.core, name, model) for name, model in context.names().items()]
    return json_response({"models": listed})


async def ps(request: Request) -> Response:
    """The models that a node has in memory."""
    context = RequestContext(request)
    nodes = (await context.core.start()).nodes.values()
    loaded = {node.model for node in nodes if node.usable and node.status and node.status.loaded}
    running = [await _running(context.core, *names) for names in context.names().items() if names[1] in loaded]
    return json_response({"models": running})


async def show(request: Request) -> Response:
    context, wanted = RequestContext(request), read(await read_json(request), OllamaModelRequest)
    model = model_of(context, wanted.model or wanted.name)
    tokenizer = await _tokenizer(context.core, model)  # it waits for the nodes, so that they are known below
    info = await model_info(context.core, model)
    window, stored = await context_window(context.core, model), await _stored(context.core, model)
    body = {
        "modelfile": f"# {model}, served by a cluster; there is no Modelfile",
        "parameters": f"num_ctx {window}" if window else "",  # Continue reads the window here
        "template": "" if tokenizer is None or isinstance(tokenizer, MissingTokenizer) else tokenizer.chat_template,
        "details": _details(info, stored),
        "model_info": _parameters(info, stored, window),
        "capabilities": _capabilities(tokenizer),
        "modified_at": _STARTED.isoformat(),
    }
    return json_response(body)


async def _listed(core: DisaggregatedInference, name: str, model: str) -> dict[str, Any]:
    """`name`: the model's own, or an alias."""
    info, stored = await model_info(core, model), await _stored(core, model)
    identity = msgspec.json.encode(info.fingerprint or info.identity) if info else model.encode()
    return {
        "name": name,
        "model": name,
        "modified_at": _STARTED.isoformat(),
        "size": stored.size_bytes,
        "digest": hashlib.sha256(identity).hexdigest(),
        "details": _details(info, stored),
    }


async def _running(core: DisaggregatedInference, name: str, model: str) -> dict[str, Any]:
    listed = await _listed(core, name, model)
    expires = (datetime.now(UTC) + _STAYS_LOADED).isoformat()
    return listed | {"expires_at": expires, "size_vram": 0, "context_length": await context_window(core, model)}


async def _stored(core: DisaggregatedInference, model: str) -> StoredModel:
    """Of a node that writes completions, if one is known. Nodes of one model may store it differently."""
    nodes = (await core.start()).of(model)
    ordered = sorted(nodes, key=lambda node: node.role == "prefill")
    return next((node.info.stored for node in ordered if node.info and not node.mismatch), StoredModel())


def _details(info: ModelInfo | None, stored: StoredModel) -> dict[str, Any]:
    fingerprint = info.fingerprint if info else None
    family = fingerprint.architecture if fingerprint else info.identity.architecture if info else ""
    return {
        "parent_model": "",
        "format": stored.format,
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _human(stored.parameters),
        "quantization_level": stored.quantization,
    }


def _human(count: int) -> str:
    """As Ollama writes it: 134.52M, 30.5B."""
    for unit, size, digits in (("B", 1e9, 1), ("M", 1e6, 2), ("K", 1e3, 0)):
        if count >= size:
            return f"{count / size:.{0 if count % size == 0 else digits}f}{unit}"
    return str(count) if count > 0 else ""


def _parameters(info: ModelInfo | None, stored: StoredModel, window: int | None) -> dict[str, Any]:
    family = _details(info, stored)["family"] or "unknown"
    found: dict[str, Any] = {"general.architecture": family, f"{family}.context_length": window}
    if stored.parameters:
        found["general.parameter_count"] = stored.parameters
    if info and info.fingerprint:
        layout = info.fingerprint.layout
        found[f"{family}.block_count"] = len(layout.layers)
        found[f"{family}.attention.head_count_kv"] = layout.kv_heads
        found[f"{family}.attention.key_length"] = layout.head_dim
        found[f"{family}.vocab_size"] = info.vocabulary
    return found


def _capabilities(tokenizer: ModelTokenizer | None) -> list[str]:
    if isinstance(tokenizer, MissingTokenizer):
        return [name for name in tokenizer.capabilities if name in _CAPABILITIES] or ["completion"]
    checks = [("tools", can_call_tools), ("thinking", can_think)]
    return ["completion", *(name for name, check in checks if tokenizer and check(tokenizer))]


async def _tokenizer(core: DisaggregatedInference, model: str) -> ModelTokenizer | None:
    try:
        return await core.tokenizer(model)
    except NoDecodeNode:
        return None
