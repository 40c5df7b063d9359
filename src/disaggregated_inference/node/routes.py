"""The HTTP of a node with an engine: JSON in, JSON or server-sent events out, every error typed. See docs/API.md."""

import asyncio
import base64
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from disaggregated_inference.api import DecodeRequest, PrefillRequest, PrefillResponse
from disaggregated_inference.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    DisaggError,
    NodeRestarted,
    TicketNotFound,
)
from disaggregated_inference.http import BODY_LIMIT_BYTES, json_response, read_body, request_id, unless_disconnected
from disaggregated_inference.node.app import base_app
from disaggregated_inference.node.generation import Generation, RequestInfo
from disaggregated_inference.node.kv_listener import parse_address
from disaggregated_inference.node.metrics import NodeMetrics
from disaggregated_inference.node.node import Node
from disaggregated_inference.node.prefill import PrefillNode
from disaggregated_inference.node.requests import INLINE_LIMIT_BYTES, inline_kv, prompt_tokens
from disaggregated_inference.node.streaming import respond

log = logging.getLogger(__name__)


def node_app(
    served: Node, token: str | None, more: Sequence[Route] = (), metrics: NodeMetrics | None = None
) -> Starlette:
    """The paths of the roles that this process has, and `more`."""
    routes = _prefill_routes(served) if served.prefill else []
    routes += _decode_routes(served) if served.decode else []
    return base_app(served, metrics or NodeMetrics(served), [*routes, *more], token)


def require_epoch(request: Request, served: Node) -> None:
    """A caller that names an epoch means that run of the node: after a restart it may hold another model."""
    if request.headers.get("x-node-epoch", served.epoch) != served.epoch:
        raise NodeRestarted("this node was restarted since its last status: read its status again")


def _prefill_routes(served: Node) -> list[Route]:
    node, model = served.prefill, served.model
    assert node

    async def prefill(request: Request) -> Response:
        params = await read_body(request, PrefillRequest)
        require_epoch(request, served)
        addresses = tuple(parse_address(text, node.kv_addresses[0][1], "kv_addresses") for text in params.kv_addresses)
        tokens = await asyncio.to_thread(read_tokens, params)
        reached_at = request.scope["server"][0]
        context, reading = node.submit(
            tokens,
            params.ticket,
            reached_at,
            params.queue_s,
            params.timeout_s,
            params.prompt_logprobs,
            params.scored_tokens,
            params.salt,
            params.kv_security,
        )
        request.state.started = True
        context = msgspec.structs.replace(context, addresses=addresses or context.addresses)
        response = PrefillResponse(context=node.trust.seal(context), ticket=context.ticket, prompt_tokens=len(tokens))
        about = {"request_id": request_id(request), "ticket": context.ticket, "prompt_tokens": len(tokens)}
        cancel_ticket = partial(node.tickets.cancel, context.ticket)
        try:
            # A request without memory here must not take memory of a decode node: two could wait for each other.
            await unless_disconnected(request, asyncio.wrap_future(node.admitted(context.ticket)), cancel_ticket)
            if not params.wait:
                reading.add_done_callback(lambda done: done.exception())  # the fetch gets the error
                log.info("prefill started", extra=about)
                return json_response(response)
            metrics = await unless_disconnected(request, asyncio.wrap_future(reading), cancel_ticket)
        except DisaggError:
            node.tickets.cancel(context.ticket)  # no client has its context
            raise
        response = msgspec.structs.replace(response, metrics=metrics)
        log.info("prefill done", extra=about | msgspec.to_builtins(metrics))
        if not params.inline:
            return json_response(response)
        return await asyncio.to_thread(_with_cache, node, response, tokens)

    def read_tokens(params: PrefillRequest) -> list[int]:
        tokens = prompt_tokens(params, model)
        node.kv_memory.prefixes.recall(tokens, params.salt)
        return tokens

    async def cancel(request: Request) -> Response:
        found = await asyncio.to_thread(node.tickets.cancel, request.path_params["ticket"])
        if not found:
            raise TicketNotFound("no such ticket: it is unknown, fetched, cancelled or expired")
        return json_response({"cancelled": True})

    return [
        Route("/prefill", prefill, methods=["POST"]),
        Route("/prefill/{ticket}", cancel, methods=["DELETE"]),
    ]


def _with_cache(node: PrefillNode, response: PrefillResponse, tokens: list[int]) -> Response:
    kv_cache = base64.b64encode(node.inline(response.ticket, INLINE_LIMIT_BYTES)).decode()
    return json_response(msgspec.structs.replace(response, input_ids=tuple(tokens), kv_cache=kv_cache))


def _decode_routes(served: Node) -> list[Route]:
    node, model = served.decode, served.model
    assert node

    async def decode(request: Request) -> Response:
        params = await read_body(request, DecodeRequest, BODY_LIMIT_BYTES + INLINE_LIMIT_BYTES * 4 // 3)
        return await generate_response(request, params)

    async def generate(request: Request) -> Response:
        params = await read_body(request, DecodeRequest)
        if params.context is not None or params.kv_cache is not None:
            raise BadRequest("/generate takes no context and no kv_cache: send them to /decode")
        return await generate_response(request, params)

    async def generate_response(request: Request, params: DecodeRequest) -> Response:
        require_epoch(request, served)
        info = RequestInfo(request_id(request), time.perf_counter())
        await compile_grammar(request, params)
        generation = await asyncio.to_thread(start, params, info)
        request.state.started = True
        heartbeat_s = node.timeouts.heartbeat_s
        return await respond(request, generation, params.stream, lambda: node.scheduler.stalled_s, heartbeat_s)

    async def compile_grammar(request: Request, params: DecodeRequest) -> None:
        """A new grammar may take seconds. They count against the request's own time limit, its client may disconnect,
        and no other request waits."""
        if params.format is None:
            return
        node.kv_memory.require_open()
        params.require_vocabulary(node.engine.spec.vocabulary)
        ready = node.grammars.prepare(params.format)
        late = DeadlineExceeded(
            f"the format was not compiled within {params.timeout_s:g} s: simplify it, or raise timeout_s"
        )
        timer = asyncio.get_running_loop().call_later(params.timeout_s, _fail, ready, late)
        try:
            gone = Cancelled("the client disconnected")
            await unless_disconnected(request, asyncio.wrap_future(ready), lambda: _fail(ready, gone))
        finally:
            timer.cancel()

    def start(request: DecodeRequest, info: RequestInfo) -> Generation:
        params = request.params()
        if request.context is not None:
            return node.generate_from_kv(node.trust.open(request.context), params, info, request.tokens)
        if request.kv_cache is not None:
            return node.generate_from_inline_kv(inline_kv(request.kv_cache), params, info)
        return node.generate_local(prompt_tokens(request, model), params, info)

    return [Route("/decode", decode, methods=["POST"]), Route("/generate", generate, methods=["POST"])]


def _fail(future: "Future[Any]", error: DisaggError) -> None:
    with suppress(InvalidStateError):  # it has just finished
        future.set_exception(error)
