"""Our own paths: text to tokens and back (by vLLM's names), whether anyone is there, and what the cluster does."""

from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from disaggregated_inference.errors import TokensRefused
from disaggregated_inference.gateway.auth import Caller
from disaggregated_inference.gateway.cluster.requests import DetokenizeRequest, TokenizeRequest, read
from disaggregated_inference.gateway.event_stream import EventStream
from disaggregated_inference.gateway.metrics import GatewayMetrics
from disaggregated_inference.gateway.request_context import RequestContext
from disaggregated_inference.gateway.slo import targets
from disaggregated_inference.http.sse import UNBUFFERED, body_of, json_response, unless_gone
from disaggregated_inference.models.tokenizer import ModelTokenizer
from disaggregated_inference.orchestrator import DisaggregatedInference
from disaggregated_inference.orchestrator.node_state import ModelInfo
from disaggregated_inference.orchestrator.orchestrator import VERDICTS
from disaggregated_inference.orchestrator.threads import in_thread

_HISTORY = 50
SERVES = VERDICTS[:3]
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def routes() -> list[Route]:
    return [
        Route("/tokenize", _tokenize, methods=["POST"]),
        Route("/detokenize", _detokenize, methods=["POST"]),
        Route("/health", _health),
        Route("/ready", _ready),
        Route("/metrics", _metrics),
        Route("/cluster", _cluster),
        Route("/cluster/events", _events),
    ]


def attach(app: Starlette) -> None:
    """What lives as long as the app does. Before its first request, so that all of them are counted."""
    app.state.metrics = GatewayMetrics(lambda: app.state.core)
    app.state.feed = EventStream(lambda: app.state.core)


async def about(core: DisaggregatedInference, model: str) -> ModelInfo | None:
    """What a model's nodes say of it, from memory; None before any of them did."""
    nodes = (await core.start()).of(model)
    known = [node.about for node in nodes if node.about and not node.mismatch]
    return max(known, key=lambda each: each.context_window, default=None)


async def window_of(core: DisaggregatedInference, model: str) -> int | None:
    """Tokens that a prompt and its answer may have together, as far as anyone has said."""
    known = await about(core, model)
    return core.config.options_of(model).context_window or (known.context_window if known else None)


async def _tokenize(request: Request) -> Response:
    call, wanted = RequestContext(request), read(await body_of(request), TokenizeRequest)
    wanted.require_possible()
    model = call.model(wanted.model)
    tokenizer = await call.core.tokenizer(model)
    text = _text(tokenizer, wanted)
    tokens = await unless_gone(request, in_thread(lambda: tokenizer.encode(text)))
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": await window_of(call.core, model),
        "tokens": tokens,
    }
    if wanted.return_token_strs:
        answer["token_strs"] = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokens]
    return json_response(answer, headers=call.headers())


def _text(tokenizer: ModelTokenizer, wanted: TokenizeRequest) -> str:
    """As a model would get it."""
    return tokenizer.render_chat(wanted.messages or [], **wanted.template()) if wanted.prompt is None else wanted.prompt


async def _detokenize(request: Request) -> Response:
    call, wanted = RequestContext(request), read(await body_of(request), DetokenizeRequest)
    model, tokens = call.model(wanted.model), wanted.tokens
    tokenizer = await call.core.tokenizer(model)
    known = await about(call.core, model)
    most = (known.vocabulary if known else None) or 1 << 31
    if not all(token < most for token in tokens):
        raise TokensRefused(f"tokens must be a list of numbers from 0 to {most - 1}")
    text = await in_thread(lambda: tokenizer.decode(tokens, special=True))
    return json_response({"prompt": text}, headers=call.headers())


async def _health(request: Request) -> Response:
    """Alive, and no more: a gateway whose cluster is down must not be restarted for it."""
    return json_response({"status": "healthy"})


async def _ready(request: Request) -> Response:
    status = await request.app.state.core.status()
    draining = getattr(request.app.state, "draining", False)
    ready = not draining and any(verdict in SERVES for verdict in status["models"].values())
    state = "ready" if ready else "draining" if draining else "not ready"
    worst = max(status["models"].values(), key=VERDICTS.index)  # the cluster's own names models, to whoever asks
    content = {"status": state, "verdict": worst} | _models_for(request.state.caller, status["models"])
    return json_response(content, 200 if ready else 503, {} if ready else {"Retry-After": "1"})


def _models_for(caller: Caller, models: dict[str, str]) -> dict[str, Any]:
    """Who is there is for whoever has a key, where keys are needed; load balancers have none and read the status."""
    return {"models": {name: said for name, said in models.items() if caller.may_use(name)}} if caller.known else {}


async def _metrics(request: Request) -> Response:
    request.state.caller.require_all()
    return Response(await request.app.state.metrics.text(), media_type=_PROMETHEUS)


async def _cluster(request: Request) -> Response:
    call = RequestContext(request)
    call.caller.require_all()
    core, status = call.core, await call.core.status()
    records = core.history.recent(core.config.policies.history)
    return json_response(status | {"history": records[:_HISTORY], "targets": targets(records, status["nodes"])})


async def _events(request: Request) -> Response:
    call, feed = RequestContext(request), request.app.state.feed
    call.caller.require_all()
    feed.require_room()
    # Not through a queue of its own: only so does a reader that does not read come to stand still, and is let go.
    return StreamingResponse(feed.listen(), headers=UNBUFFERED, media_type="text/event-stream")
