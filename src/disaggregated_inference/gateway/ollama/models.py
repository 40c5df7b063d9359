"""Ollama's lists of models, from memory: a list does not wait for nodes."""

import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from disaggregated_inference.api import ModelInfo
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
    return context.model(name.removesuffix(":latest") if isinstance(name, str) else name)


async def tags(request: Request) -> Response:
    context = RequestContext(request)
    return json_response({"models": [await _listed(context.core, name) for name in context.models()]})


async def ps(request: Request) -> Response:
    """The models that a node has in memory."""
    context = RequestContext(request)
    nodes = (await context.core.start()).nodes.values()
    loaded = {node.model for node in nodes if node.usable and node.status and node.status.loaded}
    names = [name for name in context.models() if name in loaded]
    return json_response({"models": [await _running(context.core, name) for name in names]})


async def show(request: Request) -> Response:
    context, wanted = RequestContext(request), read(await read_json(request), OllamaModelRequest)
    model = model_of(context, wanted.model or wanted.name)
    info, tokenizer = await model_info(context.core, model), await _tokenizer(context.core, model)
    window = await context_window(context.core, model)
    body = {
        "modelfile": f"# {model}, served by a cluster; there is no Modelfile",
        "parameters": f"num_ctx {window}" if window else "",  # Continue reads the window here
        "template": "" if tokenizer is None or isinstance(tokenizer, MissingTokenizer) else tokenizer.chat_template,
        "details": _details(info),
        "model_info": _parameters(info, window),
        "capabilities": _capabilities(tokenizer),
        "modified_at": _STARTED.isoformat(),
    }
    return json_response(body)


async def _listed(core: DisaggregatedInference, name: str) -> dict[str, Any]:
    info = await model_info(core, name)
    identity = msgspec.json.encode(info.fingerprint or info.identity) if info else name.encode()
    return {
        "name": name,
        "model": name,
        "modified_at": _STARTED.isoformat(),
        "size": 0,  # unknown
        "digest": hashlib.sha256(identity).hexdigest(),
        "details": _details(info),
    }


async def _running(core: DisaggregatedInference, name: str) -> dict[str, Any]:
    listed = await _listed(core, name)
    expires = (datetime.now(UTC) + _STAYS_LOADED).isoformat()
    return listed | {"expires_at": expires, "size_vram": 0, "context_length": await context_window(core, name)}


def _details(info: ModelInfo | None) -> dict[str, Any]:
    fingerprint = info.fingerprint if info else None
    family = fingerprint.architecture if fingerprint else info.identity.architecture if info else ""
    return {
        "parent_model": "",
        "format": fingerprint.weights.format if fingerprint else "",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": "",
    }


def _parameters(info: ModelInfo | None, window: int | None) -> dict[str, Any]:
    family = _details(info)["family"] or "unknown"
    found: dict[str, Any] = {"general.architecture": family, f"{family}.context_length": window}
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
