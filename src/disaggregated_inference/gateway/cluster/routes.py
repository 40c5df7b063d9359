"""The gateway's own paths: tokenize and detokenize (with vLLM's names), health, metrics, cluster status, events."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from disaggregated_inference.api import ClusterPage, ClusterStatus, ModelInfo
from disaggregated_inference.errors import TokensRefused
from disaggregated_inference.gateway import openapi
from disaggregated_inference.gateway.auth import Caller, Keys
from disaggregated_inference.gateway.cluster import history_routes
from disaggregated_inference.gateway.cluster.requests import DetokenizeRequest, TokenizeRequest
from disaggregated_inference.gateway.cluster.visibility import seen_requests, seen_status, seen_summary
from disaggregated_inference.gateway.event_stream import EventStream
from disaggregated_inference.gateway.metrics import GatewayMetrics
from disaggregated_inference.gateway.openai.errors import error_body
from disaggregated_inference.gateway.query_cache import QueryCache
from disaggregated_inference.gateway.request_context import RequestContext
from disaggregated_inference.gateway.slo import figures_of, targets
from disaggregated_inference.gateway.validation import read_request
from disaggregated_inference.http import UNBUFFERED_HEADERS, json_response, read_json, unless_disconnected
from disaggregated_inference.models import ModelTokenizer
from disaggregated_inference.orchestrator import DisaggregatedInference, ModelVerdict, in_thread
from disaggregated_inference.timeouts import GatewayTimeouts

__all__ = ["ID_HEADER", "NAME", "error_body", "owns", "routes"]

NAME, ID_HEADER = "gateway", "x-request-id"
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def owns(connection: HTTPConnection) -> bool:
    path: str = connection.scope["path"]
    return not path.startswith("/v1/")


def routes() -> list[Route]:
    return [
        Route("/tokenize", _tokenize, methods=["POST"]),
        Route("/detokenize", _detokenize, methods=["POST"]),
        Route("/health", _health),
        Route("/ready", _ready),
        Route("/metrics", _metrics),
        Route("/cluster", _cluster),
        Route("/cluster/events", _events),
        *history_routes.routes(),
        *openapi.routes(),
    ]


def attach(app: Starlette, keys: Keys, timeouts: GatewayTimeouts = GatewayTimeouts()) -> None:
    """Metrics and events live as long as the app, and count from its first request on."""
    app.state.metrics = GatewayMetrics(lambda: app.state.core, lambda: keys.names)
    app.state.feed = EventStream(lambda: app.state.core, timeouts)
    app.state.answers = QueryCache(timeouts)
    app.state.keys = keys
    app.state.timeouts = timeouts


async def model_info(core: DisaggregatedInference, model: str) -> ModelInfo | None:
    """From memory; None until a node of the model has answered."""
    nodes = (await core.start()).of(model)
    known = [node.info for node in nodes if node.info and not node.mismatch]
    return max(known, key=lambda each: each.context_window, default=None)


async def context_window(core: DisaggregatedInference, model: str) -> int | None:
    """None: unknown so far."""
    info = await model_info(core, model)
    return core.config.options_of(model).context_window or (info.context_window if info else None)


async def _tokenize(request: Request) -> Response:
    context, wanted = RequestContext(request), read_request(await read_json(request), TokenizeRequest)
    wanted.require_supported()
    model = context.model(wanted.model)
    tokenizer = await context.core.tokenizer(model)
    tokens = await unless_disconnected(request, in_thread(lambda: _encode(tokenizer, wanted)))
    body: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": await context_window(context.core, model),
        "tokens": tokens,
    }
    if wanted.return_token_strs:
        body["token_strs"] = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokens]
    return json_response(body, headers=context.headers())


def _encode(tokenizer: ModelTokenizer, wanted: TokenizeRequest) -> list[int]:
    if wanted.prompt is not None:
        return tokenizer.encode(wanted.prompt)
    return tokenizer.encode_chat(wanted.messages or [], **wanted.template())


async def _detokenize(request: Request) -> Response:
    context, wanted = RequestContext(request), read_request(await read_json(request), DetokenizeRequest)
    model, tokens = context.model(wanted.model), wanted.tokens
    tokenizer = await context.core.tokenizer(model)
    info = await model_info(context.core, model)
    vocabulary = (info.vocabulary if info else None) or 1 << 31
    if not all(token < vocabulary for token in tokens):
        raise TokensRefused(f"tokens must be a list of numbers from 0 to {vocabulary - 1}")
    text = await in_thread(lambda: tokenizer.decode(tokens, special=True))
    return json_response({"prompt": text}, headers=context.headers())


async def _health(request: Request) -> Response:
    """Says nothing about the cluster: a gateway must not be restarted because nodes are down. The role is for a config
    that names its port as a node's."""
    return json_response({"status": "healthy", "role": "gateway"})


async def _ready(request: Request) -> Response:
    status: ClusterStatus = await request.app.state.core.cluster_status()
    draining = getattr(request.app.state, "draining", False)
    ready = not draining and any(verdict.serves for verdict in status.models.values())
    state = "ready" if ready else "draining" if draining else "not ready"
    worst = max(status.models.values(), key=list(ModelVerdict).index)  # the cluster's own verdict would name models
    content = {"status": state, "verdict": worst} | _models_for(request.state.caller, status)
    hint = {} if ready else {"Retry-After": str(request.app.state.timeouts.ready_hint_s)}
    return json_response(content, 200 if ready else 503, hint)


def _models_for(caller: Caller, status: ClusterStatus) -> dict[str, Any]:
    """Models are for callers with a key, where keys are needed. Load balancers have none and read the status."""
    if not caller.known:
        return {}
    models = {name: each for name, each in status.models.items() if caller.may_use(name)}
    nodes = [node for node in status.nodes if node.warning and caller.may_use(node.model)]
    warnings = [f"{node.name}: {node.warning}" for node in nodes]
    return {"models": models} | ({"warnings": warnings} if warnings else {})


async def _metrics(request: Request) -> Response:
    request.state.caller.require_all()
    return Response(await request.app.state.metrics.text(), media_type=_PROMETHEUS)


async def _cluster(request: Request) -> Response:
    context = RequestContext(request)
    context.caller.require_all()
    core, status, own = context.core, await context.core.cluster_status(), context.caller.only_own
    requests = [figures_of(each) for each in core.history.records(core.config.policies.history, caller=own)]
    page = ClusterPage(
        **msgspec.structs.asdict(seen_status(status, own)),
        history=tuple(seen_requests(core, own)),
        summary=seen_summary(core, own),
        targets=targets(requests, status.nodes, uptime=status.uptime),
        sees_all=own is None,
    )
    return json_response(page)


async def _events(request: Request) -> Response:
    context, events = RequestContext(request), request.app.state.feed
    context.caller.require_all()
    events.require_room(context.caller.only_own)
    keys, caller = request.app.state.keys, context.caller
    content = _while_allowed(events.listen(caller.only_own), lambda: keys.has(caller))
    # Without another queue in between: a client that stops reading must fill its queue in `events`, and be dropped.
    return StreamingResponse(content, headers=UNBUFFERED_HEADERS, media_type="text/event-stream")


async def _while_allowed(
    events: AsyncGenerator[bytes, None], is_allowed: Callable[[], bool]
) -> AsyncGenerator[bytes, None]:
    """A key may be taken out of the key file while its stream is open."""
    async with aclosing(events):
        async for event in events:
            if not is_allowed():
                return
            yield event
