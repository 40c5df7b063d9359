"""The router: which node prefills and which decodes. It predicts the time of every route and takes the fastest.

Pure, so that every decision can be replayed from what was known. Only the order of the predictions has to be right;
they rest on rates that the nodes measured at their own work, and on round numbers until there are some.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import msgspec

from disaggregated_inference.api import Rate
from disaggregated_inference.errors import (
    ClusterError,
    ContextTooLong,
    DisaggError,
    NoDecodeNode,
    PromptLogprobsUnsupported,
)
from disaggregated_inference.kv import reusable_tokens
from disaggregated_inference.orchestrator.cluster_view import ClusterView, NodeView, Plan, Route, RouteRequest
from disaggregated_inference.orchestrator.rate_curve import prefill_seconds

# Rates of a machine without measurements: a DGX Spark and a Mac Studio with a 30B model, rounded down. A rate that is
# too low costs a detour for a request or two; then there are measurements.
_PREFILL_TOKENS_PER_S = 2000.0
_LOCAL_PREFILL_TOKENS_PER_S = 400.0
_DECODE_RATE = Rate(size=1, tokens_per_s=30.0)
_LINK_BYTES_PER_S = 1e9  # 10 GbE, less headers and checksums

_ANSWER_TOKENS = 256  # a typical answer: few use up their limit
_PREFILL_SHARE = 2 / 3  # of the time beside running answers: a chunk lasts two decode steps, then comes a step
_HANDOVER_S = 0.005  # a second request, a connection, a handshake
_PEER_CHECK_S = 0.1  # for two nodes that have not checked each other yet
_LAST_SLICE_TOKENS = 16  # the last layer's slice of the last chunk is always exposed: 512 tokens over 32 layers
_COLDEST = 0.05


class _Estimate(NamedTuple):
    route: Route
    new_tokens: int
    overloaded: bool
    in_flight: int
    cold_s: float  # not predicted: a handicap for nodes that just came back
    credit_s: float  # the part of a peer check that does not count any more
    is_whole: bool  # a prefill node writes the answer too
    last_resort: bool  # its answer would be another one than the client asked for with its seed

    @property
    def rank(self) -> tuple[bool, bool, float, int, str, str]:
        """An overloaded route comes last, however fast it looks: the prediction leaves out that a node may refuse."""
        return (
            self.last_resort,
            self.overloaded,
            self.route.total_s + self.cold_s - self.credit_s,
            self.in_flight,
            self.route.decode,
            self.route.prefill or "",
        )

    @property
    def ready_s(self) -> float:
        return self.route.first_token_s + self.route.exposed_s

    @property
    def name(self) -> str:
        if self.is_whole:
            return f"{self.route.decode} alone"
        return f"{self.route.prefill} -> {self.route.decode}" if self.route.prefill else "local"


def plan(request: RouteRequest, cluster: ClusterView) -> Plan:
    """The route with the least time to the end of the answer."""
    estimates = sorted(_estimates(request, cluster), key=lambda estimate: estimate.rank)
    if not estimates:
        raise _no_route(request, cluster)
    best = estimates[0].route
    return Plan(
        decode=best.decode,
        prefill=best.prefill,
        reason=_reason(estimates[0], estimates[1:]),
        first_token_s=best.first_token_s,
        total_s=best.total_s,
        routes=tuple(estimate.route for estimate in estimates),
    )


def _estimates(request: RouteRequest, cluster: ClusterView) -> Iterator[_Estimate]:
    available = [node for node in cluster.nodes if _available(node, request) and _fits(node, request)]
    for decode in available:
        if _may_decode(decode, request):
            if _can_score(decode, request):
                yield _local(request, decode)
            scorers = (node for node in available if _can_score(node, request))
            readers = (node for node in scorers if _can_hand_over(node, decode, cluster))
            yield from (_remote(request, cluster, node, decode) for node in readers)


def _available(node: NodeView, request: RouteRequest) -> bool:
    return node.usable and node.name not in request.avoid


def _may_decode(node: NodeView, request: RouteRequest) -> bool:
    """An engine with a sampler of its own knows neither formats nor logprobs of prompts."""
    return node.can_decode and not (node.serves_alone and (request.structured or request.scored_tokens is not None))


def _can_score(reader: NodeView, request: RouteRequest) -> bool:
    return request.scored_tokens is None or reader.prompt_logprobs


def _fits(node: NodeView, request: RouteRequest) -> bool:
    return node.context_window <= 0 or request.prompt_tokens + request.max_tokens <= node.context_window


def _can_hand_over(prefill: NodeView, decode: NodeView, cluster: ClusterView) -> bool:
    able = prefill.can_prefill and decode.imports and prefill.name != decode.name
    return (
        able
        and (prefill.name, decode.name) not in cluster.refused
        and prefill.group != ""
        and prefill.group == decode.group
    )


def _no_route(request: RouteRequest, cluster: ClusterView) -> DisaggError:
    """If only the context windows are in the way, or the engines, that is the error."""
    decoders = [node for node in cluster.nodes if _may_decode(node, request) and _available(node, request)]
    windows = [node.context_window for node in decoders]
    if not windows:
        return NoDecodeNode()
    if any(_fits(node, request) for node in decoders):
        return _no_scores(cluster)
    wanted = request.prompt_tokens + request.max_tokens
    return ContextTooLong(wanted, max(windows), prompt_tokens=request.prompt_tokens)


def _no_scores(cluster: ClusterView) -> DisaggError:
    if able := sorted(node.name for node in cluster.nodes if node.prompt_logprobs):
        return ClusterError(f"only {', '.join(able)} can compute prompt logprobs, and cannot now: send it again later")
    engines = ", ".join(sorted({node.engine or "unknown" for node in cluster.nodes}))
    remedy = "leave out prompt_logprobs, or echo with logprobs"
    return PromptLogprobsUnsupported(f"the engines of this model compute no prompt logprobs ({engines}): {remedy}")


def _local(request: RouteRequest, node: NodeView) -> _Estimate:
    new = _computed_tokens(request, node)
    busy_s = _slot_s(node) + _queue_s(node) + _prefill_s(node, request.prompt_tokens, new)
    return _estimate(request, node, None, new, busy_s, busy_s * _coldness(node))


def _remote(request: RouteRequest, cluster: ClusterView, prefill: NodeView, decode: NodeView) -> _Estimate:
    new = _computed_tokens(request, prefill)
    prefill_s = _prefill_s(prefill, request.prompt_tokens, new)
    exposed_s = _exposed_s(request, cluster, prefill, decode, prefill_s)
    reader_s, slot_s = _queue_s(prefill) + prefill_s, _slot_s(decode)
    cold_s = reader_s * _coldness(prefill) + slot_s * _coldness(decode)
    found = _estimate(request, decode, prefill, new, _HANDOVER_S + reader_s + slot_s, cold_s, exposed_s)
    pair = prefill.name, decode.name
    return found if pair in cluster.checked else _with_check(found, cluster.check_credit_s.get(pair, 0.0))


def _with_check(estimate: _Estimate, credit_s: float) -> _Estimate:
    """A peer check happens once, and all later requests gain by it. So requests avoid it only until they have lost as
    much time as it takes: otherwise a node that is checked first gets all short requests for ever."""
    route, check_s = estimate.route, _PEER_CHECK_S
    checking = msgspec.structs.replace(
        route, first_token_s=route.first_token_s + check_s, total_s=route.total_s + check_s, check_s=check_s
    )
    return estimate._replace(route=checking, credit_s=min(credit_s, check_s))


def _estimate(
    request: RouteRequest,
    decode: NodeView,
    prefill: NodeView | None,
    new_tokens: int,
    first_token_s: float,
    cold_s: float,
    exposed_s: float = 0.0,
) -> _Estimate:
    nodes = [node for node in (decode, prefill) if node]
    decode_s = _decode_s(request, decode)
    return _Estimate(
        Route(
            decode=decode.name,
            prefill=prefill.name if prefill else None,
            first_token_s=first_token_s,
            total_s=first_token_s + exposed_s + decode_s,
            exposed_s=exposed_s,
        ),
        new_tokens,
        _is_full(request, decode) or (prefill is not None and _lacks_memory(prefill, request.prompt_tokens)),
        sum(node.running + node.waiting for node in nodes),
        cold_s + decode_s * _coldness(decode),
        0.0,
        decode.serves_alone,
        decode.serves_alone and request.seeded,
    )


def _computed_tokens(request: RouteRequest, node: NodeView) -> int:
    reusable = reusable_tokens(request.prompt_tokens, request.scored_tokens)
    return request.prompt_tokens - min(request.cached.get(node.name, 0), reusable)


def _prefill_s(node: NodeView, prompt_tokens: int, new_tokens: int) -> float:
    """At the speed of the whole prompt's length: attention reads all of it even for a few new tokens."""
    whole_s = prefill_seconds(node.prefill_rates, prompt_tokens)
    if whole_s is None:
        whole_s = prompt_tokens / (_LOCAL_PREFILL_TOKENS_PER_S if node.role == "decode" else _PREFILL_TOKENS_PER_S)
    alone_s = whole_s * new_tokens / max(prompt_tokens, 1)
    return alone_s / (_PREFILL_SHARE if node.running else 1.0)


def _queue_s(node: NodeView) -> float:
    """Until the prompts before this one are prefilled, each taken as long as their mean."""
    if not node.waiting_tokens:
        return 0.0
    return _prefill_s(node, node.waiting_tokens // max(node.waiting, 1), node.waiting_tokens)


def _slot_s(node: NodeView) -> float:
    """Until a slot is free for this answer."""
    too_many = node.running + node.waiting + 1 - node.slots
    if too_many <= 0:
        return 0.0
    slots = max(node.slots, 1)
    return too_many * _ANSWER_TOKENS / _decode_rate(node, slots) / slots


def _decode_s(request: RouteRequest, node: NodeView) -> float:
    answers = min(node.running + 1, max(node.slots, 1))
    return min(request.max_tokens, _ANSWER_TOKENS) / _decode_rate(node, answers)


def _decode_rate(node: NodeView, answers: int) -> float:
    """Tokens per second of one answer in a batch of this size. Beyond the measured sizes the nearest counts: a batch
    reads the weights once, so that another answer costs the others little."""
    rate = nearest_rate(node.decode_rates, answers) or _DECODE_RATE
    return rate.tokens_per_s / min(max(answers, rate.size, 1), max(2 * rate.size - 1, 1))


def nearest_rate(rates: tuple[Rate, ...], size: int) -> Rate | None:
    """In powers of two, as they are measured; of two equally near, the smaller."""
    return _nearest(rates, max(size, 1).bit_length())


@lru_cache(maxsize=1024)  # rates change with a node's status, sizes with every request
def _nearest(rates: tuple[Rate, ...], power: int) -> Rate | None:
    known = (rate for rate in rates if rate.tokens_per_s > 0)
    return min(known, key=lambda rate: (abs(max(rate.size, 1).bit_length() - power), rate.size), default=None)


def _exposed_s(
    request: RouteRequest, cluster: ClusterView, prefill: NodeView, decode: NodeView, prefill_s: float
) -> float:
    """What is left of the transfer when prefill ends: most slices went out before, never the last one."""
    bandwidth = cluster.links.get((prefill.name, decode.name), 0.0)
    token_s = (decode.kv_token_bytes or prefill.kv_token_bytes) / (bandwidth if bandwidth > 0 else _LINK_BYTES_PER_S)
    moved = max(1, request.prompt_tokens - request.cached.get(decode.name, 0))
    return max(0.0, moved * token_s - prefill_s) + min(moved, _LAST_SLICE_TOKENS) * token_s


def _coldness(node: NodeView) -> float:
    """Counting a new node's load as load / warmth gives it work step by step, and not all at once because it is idle.
    This is what that adds to a second of its time."""
    return 1 / max(node.warmth, _COLDEST) - 1 if node.warmth < 1.0 else 0.0


def _is_full(request: RouteRequest, node: NodeView) -> bool:
    queued = node.waiting > 0 and node.running + node.waiting >= node.slots
    if node.serves_alone:  # its status shows the memory for KV that waits to be fetched, not its engine's own
        return queued
    return queued or _lacks_memory(node, request.kv_tokens)


def _lacks_memory(node: NodeView, tokens: int) -> bool:
    """Waiting prompts alone do not overload a prefill node: it works on one after the other anyway."""
    return node.kv_token_bytes > 0 and node.kv_free_bytes < tokens * node.kv_token_bytes


def _reason(best: _Estimate, others: list[_Estimate]) -> str:
    """For people: what the route was chosen over. Two routes with one decode node are compared by the time until it can
    write, others by the whole time."""
    new = f"{best.new_tokens} new tokens"
    if not others:
        return f"only way: {best.name}, {new}, {best.ready_s:.2f} s"
    if best.credit_s and best.route.total_s > others[0].route.total_s:
        return f"{best.name}: {new}, {best.ready_s:.2f} s with the peer check, which later requests gain by"
    if any(estimate.is_whole for estimate in (best, *others)):
        return f"{best.name}: {new}; done in {', '.join(_three_ways([best, *others]))}"
    if rival := next((estimate for estimate in others if _differs_in_prefill(best, estimate)), None):
        where = "" if rival.route.prefill else " local"
        compared = _compare(best.ready_s, rival.ready_s)
    else:
        rival = others[0]
        where, compared = f" on {rival.route.decode}", _compare(best.route.total_s, rival.route.total_s, "done in ")
    note = " (overloaded)" if rival.overloaded and not best.overloaded else ""
    return f"{best.name}: {new}, {compared}{where}{note}"


def _three_ways(estimates: list[_Estimate]) -> Iterator[str]:
    """The best of each way: both machines, the decode node alone, a prefill node alone."""
    ways: dict[str, _Estimate] = {}
    for estimate in estimates:
        ways.setdefault("whole" if estimate.is_whole else "pair" if estimate.route.prefill else "local", estimate)
    for way, estimate in ways.items():
        name = f"{estimate.route.decode} alone" if way == "local" else estimate.name
        note = " (overloaded)" if estimate.overloaded else " (another sampler)" if estimate.last_resort else ""
        yield f"{estimate.route.total_s:.2f} s by {name}{note}"


def _differs_in_prefill(best: _Estimate, estimate: _Estimate) -> bool:
    return estimate.route.decode == best.route.decode and bool(estimate.route.prefill) != bool(best.route.prefill)


def _compare(mine_s: float, other_s: float, what: str = "") -> str:
    sign = "<" if mine_s < other_s else ">" if mine_s > other_s else "="
    return f"{what}{mine_s:.2f} s {sign} {other_s:.2f} s"
