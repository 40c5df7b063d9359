"""Ollama's lists of models. All from memory: a list must not wait for a node that is away."""

import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from disaggregated_inference.errors import NoDecodeNode
from disaggregated_inference.gateway.cluster.routes import about, window_of
from disaggregated_inference.gateway.ollama.requests import OllamaModelRequest, can_call, read
from disaggregated_inference.gateway.reasoning_effort import can_think
from disaggregated_inference.gateway.request_context import RequestContext
from disaggregated_inference.http.sse import body_of, json_response
from disaggregated_inference.models.text_only import TextOnlyTokenizer
from disaggregated_inference.models.tokenizer import ModelTokenizer
from disaggregated_inference.orchestrator import DisaggregatedInference
from disaggregated_inference.orchestrator.node_state import ModelInfo

_SINCE = datetime.now(UTC)  # when a model was made is not known here; programs want some time
_KEPT = timedelta(days=3650)  # models stay
_PASSED_ON = ("completion", "tools", "thinking", "vision")  # of what an Ollama can, what can be asked for here


def model_of(call: RequestContext, name: Any) -> str:
    """Ollama's names have a tag, and `latest` is as good as none."""
    return call.model(name.removesuffix(":latest") if isinstance(name, str) else name)


async def tags(request: Request) -> Response:
    call = RequestContext(request)
    return json_response({"models": [await _listed(call.core, name) for name in call.models()]})


async def ps(request: Request) -> Response:
    """Those that some node has in memory now."""
    call = RequestContext(request)
    nodes = (await call.core.start()).nodes.values()
    loaded = {node.model for node in nodes if node.usable and node.status and node.status.loaded}
    return json_response({"models": [await _running(call.core, name) for name in call.models() if name in loaded]})


async def show(request: Request) -> Response:
    call, named = RequestContext(request), read(await body_of(request), OllamaModelRequest)
    model = model_of(call, named.model or named.name)
    known, tokenizer = await about(call.core, model), await _tokenizer(call.core, model)
    window = await window_of(call.core, model)
    answer = {
        "modelfile": f"# {model}, served by a cluster; there is no Modelfile",
        "parameters": f"num_ctx {window}" if window else "",  # Continue takes its window from here
        "template": "" if tokenizer is None or isinstance(tokenizer, TextOnlyTokenizer) else tokenizer.chat_template,
        "details": _details(known),
        "model_info": _info(known, window),
        "capabilities": _capabilities(tokenizer),
        "modified_at": _SINCE.isoformat(),
    }
    return json_response(answer)


async def _listed(core: DisaggregatedInference, name: str) -> dict[str, Any]:
    known = await about(core, name)
    identity = msgspec.json.encode(known.fingerprint or known.identity) if known else name.encode()
    return {
        "name": name,
        "model": name,
        "modified_at": _SINCE.isoformat(),
        "size": 0,  # nodes do not say
        "digest": hashlib.sha256(identity).hexdigest(),
        "details": _details(known),
    }


async def _running(core: DisaggregatedInference, name: str) -> dict[str, Any]:
    listed = await _listed(core, name)
    expires = (datetime.now(UTC) + _KEPT).isoformat()
    return listed | {"expires_at": expires, "size_vram": 0, "context_length": await window_of(core, name)}


def _details(known: ModelInfo | None) -> dict[str, Any]:
    who = known.fingerprint if known else None
    family = who.architecture if who else known.identity.architecture if known else ""
    return {
        "parent_model": "",
        "format": who.weights.format if who else "",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": "",
    }


def _info(known: ModelInfo | None, window: int | None) -> dict[str, Any]:
    family = _details(known)["family"] or "unknown"
    found: dict[str, Any] = {"general.architecture": family, f"{family}.context_length": window}
    if known and known.fingerprint:
        layout = known.fingerprint.layout
        found[f"{family}.block_count"] = len(layout.layers)
        found[f"{family}.attention.head_count_kv"] = layout.kv_heads
        found[f"{family}.attention.key_length"] = layout.head_dim
        found[f"{family}.vocab_size"] = known.vocabulary
    return found


def _capabilities(tokenizer: ModelTokenizer | None) -> list[str]:
    if isinstance(tokenizer, TextOnlyTokenizer):
        return [name for name in tokenizer.capabilities if name in _PASSED_ON] or ["completion"]
    able = [("tools", can_call), ("thinking", can_think)]
    return ["completion", *(name for name, can in able if tokenizer and can(tokenizer))]


async def _tokenizer(core: DisaggregatedInference, model: str) -> ModelTokenizer | None:
    try:
        return await core.tokenizer(model)
    except NoDecodeNode:
        return None
