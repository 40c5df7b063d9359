"""A prefill node whose engine is a vLLM in a process of its own. It also serves whole answers."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from disaggregated_inference.api import DecodeRequest, NodeHealth, NodeStatus, SlotStatus
from disaggregated_inference.errors import BadRequest, NodeLoading, NotOffered
from disaggregated_inference.http import read_body, request_id
from disaggregated_inference.node import (
    Node,
    NodeMetrics,
    RequestInfo,
    node_app,
    prompt_tokens,
    require_epoch,
    respond,
)
from disaggregated_inference.timeouts import VllmTimeouts
from disaggregated_inference.vllm_node.attached import AttachedVllm
from disaggregated_inference.vllm_node.generation import WholeAnswers
from disaggregated_inference.vllm_node.process import VllmProcess

VllmServer = VllmProcess | AttachedVllm


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmNode(Node):
    """`attached` says why the connector inside vLLM does not work with this node; empty: it does."""

    server: VllmServer
    answers: WholeAnswers
    attached: Callable[[], str] = lambda: ""
    stalled_s: Callable[[], float] = lambda: 0.0  # without progress of prompts inside vLLM

    @property
    def trouble(self) -> str:
        """Why no request can be served now; empty when all is well."""
        return self.server.reason or "vLLM is not ready" if self.server.state != "ready" else self.attached()

    async def health(self) -> NodeHealth:
        found = await Node.health(self)
        stalled_s = max(found.stalled_s, round(max(self.server.stalled_s, self.stalled_s()), 3))
        if (trouble := self.trouble) and found.status != "draining":
            found = msgspec.structs.replace(found, status="unhealthy", reason=trouble, loaded=False)
        return msgspec.structs.replace(found, stalled_s=stalled_s)

    async def status(self) -> NodeStatus:
        found, answers = await Node.status(self), self.answers
        return msgspec.structs.replace(
            found,
            whole_answers=True,
            context_window=answers.window,
            waiting=found.waiting + len(answers),
            running=answers.running,
            working=found.working + answers.running,
            slots=SlotStatus(answers.running, answers.slots),
            tokens_written=answers.written_tokens,
            rates=msgspec.structs.replace(found.rates, decode=tuple(answers.rates.stats())),
        )

    async def load(self) -> None:
        self.require_ready()

    async def unload(self) -> None:
        raise NotOffered("vLLM keeps its model in memory: stop this node to free it")

    def drain(self) -> int:
        return Node.drain(self) + len(self.answers)

    def require_ready(self) -> None:
        self.kv_memory.require_open()
        if trouble := self.trouble:
            raise NodeLoading(f"vLLM is not ready: {trouble}")


def vllm_app(served: Node, token: str | None, heartbeat_s: float = VllmTimeouts().heartbeat_s) -> Starlette:
    """The paths of a prefill node, and `/generate`."""
    assert isinstance(served, VllmNode)
    metrics = NodeMetrics(served)
    served.answers.on_end = metrics.count_decode

    async def generate(request: Request) -> Response:
        params = await read_body(request, DecodeRequest)
        require_epoch(request, served)
        if params.context is not None or params.kv_cache is not None:
            raise BadRequest("vLLM takes no KV: send a context to a decode node, or the prompt to /generate")
        served.require_ready()
        info = RequestInfo(request_id(request), time.perf_counter())
        generation = served.answers.start(prompt_tokens(params, served.model), params.params(), info)
        request.state.started = True
        return await respond(request, generation, params.stream, lambda: served.server.stalled_s, heartbeat_s)

    return node_app(served, token, [Route("/generate", generate, methods=["POST"])], metrics)
