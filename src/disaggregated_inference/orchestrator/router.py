"""Who reads a prompt and who writes the answer: the seconds that every way would take, guessed, and the least of them.

Pure, so that every decision can be replayed from what was known. Only the order of the guesses has to be right; they
rest on rates that the nodes measured at their own work, and on round numbers until there are some.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from disaggregated_inference.errors import ContextTooLong, DisaggError, NoDecodeNode
from disaggregated_inference.orchestrator.cluster_view import ClusterView, NodeView, Plan, Rate, Route, RouteRequest

# What a machine does of which nothing was measured yet: a DGX Spark and a Mac Studio with a 30B model, rounded down.
# Too low costs a detour for a request or two; then there are measurements.
_PREFILL_READS_TOKENS_PER_S = 2000.0
_DECODE_READS_TOKENS_PER_S = 400.0
_ONE_ANSWER = Rate(size=1, tokens_per_s=30.0)
_LINK_BYTES_PER_S = 1e9  # 10 GbE, less what headers and checksums take

_ANSWER_TOKENS = 256  # a typical answer: few use up what they may
_BESIDE_ANSWERS = (
    2 / 3
)  # of the time goes to reading where others write: a piece of prompt lasts two steps, then a step
_HANDOVER_S = 0.005  # a second request, a connection, a handshake
_CANARY_S = 0.1  # two nodes that never met prove each other first
_LAST_SLICE_TOKENS = 16  # one layer's rows of the last chunk leave when nothing computes any more: 512 tokens over 32
_COLDEST = 0.05


class _Estimate(NamedTuple):
    option: Route
    new_tokens: int
    overloaded: bool
    in_flight: int
    cold_s: float  # not predicted: held against nodes that just came

    @property
    def rank(self) -> tuple[bool, float, int, str, str]:
        """What is overloaded comes last, however fast it looks: its guess leaves out that it may refuse."""
        return (
            self.overloaded,
            self.option.total_s + self.cold_s,
            self.in_flight,
            self.option.decode,
            self.option.prefill or "",
        )

    @property
    def name(self) -> str:
        return f"{self.option.prefill} -> {self.option.decode}" if self.option.prefill else "local"


def plan(question: RouteRequest, cluster: ClusterView) -> Plan:
    """The way with the least time to the end of the answer."""
    ways = sorted(_ways(question, cluster), key=lambda way: way.rank)
    if not ways:
        raise _nobody(question, cluster)
    best = ways[0].option
    return Plan(
        decode=best.decode,
        prefill=best.prefill,
        reason=_reason(ways[0], ways[1:]),
        first_token_s=best.first_token_s,
        total_s=best.total_s,
        options=tuple(way.option for way in ways),
    )


def _ways(question: RouteRequest, cluster: ClusterView) -> Iterator[_Estimate]:
    there = [node for node in cluster.nodes if _there(node, question) and _fits(node, question)]
    for decode in there:
        if decode.can_decode:
            yield _local(question, decode)
            readers = (node for node in there if _can_hand_over(node, decode, cluster))
            yield from (_remote(question, cluster, node, decode) for node in readers)


def _there(node: NodeView, question: RouteRequest) -> bool:
    return node.usable and node.name not in question.avoid


def _fits(node: NodeView, question: RouteRequest) -> bool:
    return node.context_window <= 0 or question.prompt_tokens + question.max_tokens <= node.context_window


def _can_hand_over(prefill: NodeView, decode: NodeView, cluster: ClusterView) -> bool:
    able = prefill.can_prefill and decode.imports and prefill.name != decode.name
    return (
        able
        and (prefill.name, decode.name) not in cluster.refused
        and prefill.group != ""
        and prefill.group == decode.group
    )


def _nobody(question: RouteRequest, cluster: ClusterView) -> DisaggError:
    """Where only the context windows are in the way, saying so helps more than trying again."""
    windows = [node.context_window for node in cluster.nodes if node.can_decode and _there(node, question)]
    if not windows:
        return NoDecodeNode()
    wanted = question.prompt_tokens + question.max_tokens
    return ContextTooLong(wanted, max(windows), prompt_tokens=question.prompt_tokens)


def _local(question: RouteRequest, node: NodeView) -> _Estimate:
    new = _new_tokens(question, node)
    busy_s = _slot_s(node) + _queue_s(node) + new / _reading(node, question.prompt_tokens)
    return _way(question, node, None, new, busy_s, busy_s * _coldness(node))


def _remote(question: RouteRequest, cluster: ClusterView, prefill: NodeView, decode: NodeView) -> _Estimate:
    new = _new_tokens(question, prefill)
    reading_s = new / _reading(prefill, question.prompt_tokens)
    exposed_s = _exposed_s(question, cluster, prefill, decode, reading_s)
    met = (prefill.name, decode.name) in cluster.met
    overhead_s = _HANDOVER_S + (0.0 if met else _CANARY_S)
    reader_s, slot_s = _queue_s(prefill) + reading_s, _slot_s(decode)
    cold_s = reader_s * _coldness(prefill) + slot_s * _coldness(decode)
    return _way(question, decode, prefill, new, overhead_s + reader_s + slot_s + exposed_s, cold_s)


def _way(
    question: RouteRequest,
    decode: NodeView,
    prefill: NodeView | None,
    new_tokens: int,
    first_token_s: float,
    cold_s: float,
) -> _Estimate:
    nodes = [node for node in (decode, prefill) if node]
    writing_s = _writing_s(question, decode)
    return _Estimate(
        Route(
            decode=decode.name,
            prefill=prefill.name if prefill else None,
            first_token_s=first_token_s,
            total_s=first_token_s + writing_s,
        ),
        new_tokens,
        _is_full(question, decode) or (prefill is not None and _lacks_memory(prefill, question.prompt_tokens)),
        sum(node.running + node.waiting for node in nodes),
        cold_s + writing_s * _coldness(decode),
    )


def _new_tokens(question: RouteRequest, node: NodeView) -> int:
    """The last token is always read again: its logits are the first token of the answer."""
    return max(1, question.prompt_tokens - question.held.get(node.name, 0))


def _reading(node: NodeView, prompt_tokens: int) -> float:
    """Tokens per second. By the length of the whole prompt: attention looks at all of it, also where only a few tokens
    are new."""
    unknown = _DECODE_READS_TOKENS_PER_S if node.role == "decode" else _PREFILL_READS_TOKENS_PER_S
    rate = _nearest(node.reads, prompt_tokens)
    return (rate.tokens_per_s if rate else unknown) * (_BESIDE_ANSWERS if node.running else 1.0)


def _queue_s(node: NodeView) -> float:
    """Until the prompts before this one are read, which are as long as their mean."""
    return node.waiting_tokens / _reading(node, node.waiting_tokens // max(node.waiting, 1))


def _slot_s(node: NodeView) -> float:
    """Until a slot is free for this answer: with all of them busy, one ends every so often."""
    too_many = node.running + node.waiting + 1 - node.slots
    slots = max(node.slots, 1)
    return max(too_many, 0) * _ANSWER_TOKENS / _writing(node, slots) / slots


def _writing_s(question: RouteRequest, node: NodeView) -> float:
    answers = min(node.running + 1, max(node.slots, 1))
    return min(question.max_tokens, _ANSWER_TOKENS) / _writing(node, answers)


def _writing(node: NodeView, answers: int) -> float:
    """Tokens per second of one of so many answers. Beyond the sizes that were seen, as fast as the nearest of them: a
    batch shares one reading of the weights, so that another answer costs the others little."""
    rate = _nearest(node.writes, answers) or _ONE_ANSWER
    return rate.tokens_per_s / min(max(answers, rate.size, 1), max(2 * rate.size - 1, 1))


def _nearest(rates: Iterable[Rate], size: int) -> Rate | None:
    """In powers of two, as they are measured; of two equally near the smaller."""
    power = max(size, 1).bit_length()
    known = (rate for rate in rates if rate.tokens_per_s > 0)
    return min(known, key=lambda rate: (abs(max(rate.size, 1).bit_length() - power), rate.size), default=None)


def _exposed_s(
    question: RouteRequest, cluster: ClusterView, prefill: NodeView, decode: NodeView, reading_s: float
) -> float:
    """What is left of the transfer when reading is over: most of it went out meanwhile, never the last slice."""
    bandwidth = cluster.links.get((prefill.name, decode.name), 0.0)
    token_s = (decode.kv_token_bytes or prefill.kv_token_bytes) / (bandwidth if bandwidth > 0 else _LINK_BYTES_PER_S)
    moved = _new_tokens(question, decode)
    return max(0.0, moved * token_s - reading_s) + min(moved, _LAST_SLICE_TOKENS) * token_s


def _coldness(node: NodeView) -> float:
    """Time goes with load. Counting a new node's load as load / warmth gives it work step by step, and not all at once
    because it is the idle one. This is what that adds to a second of its time."""
    return 1 / min(max(node.warmth, _COLDEST), 1.0) - 1


def _is_full(question: RouteRequest, node: NodeView) -> bool:
    in_line = node.waiting > 0 and node.running + node.waiting >= node.slots
    return in_line or _lacks_memory(node, question.choices * (question.prompt_tokens + question.max_tokens))


def _lacks_memory(node: NodeView, tokens: int) -> bool:
    """A prompt that only waits to be read is no overload of a prefill node: it reads one after the other anyway."""
    return node.kv_token_bytes > 0 and node.kv_free_bytes < tokens * node.kv_token_bytes


def _reason(best: _Estimate, others: list[_Estimate]) -> str:
    """For people: what it was chosen over. On one decode node the two ways differ by the time to the first token, so
    that is what is compared; two decode nodes differ by the whole time."""
    new = f"{best.new_tokens} new tokens"
    if not others:
        return f"only way: {best.name}, {new}, {best.option.first_token_s:.2f} s"
    if rival := next((way for way in others if _is_other_reader(best, way)), None):
        where = "" if rival.option.prefill else " local"
        compared = _compared(best.option.first_token_s, rival.option.first_token_s)
    else:
        rival = others[0]
        where, compared = f" on {rival.option.decode}", _compared(best.option.total_s, rival.option.total_s, "done in ")
    spared = " (overloaded)" if rival.overloaded and not best.overloaded else ""
    return f"{best.name}: {new}, {compared}{where}{spared}"


def _is_other_reader(best: _Estimate, way: _Estimate) -> bool:
    return way.option.decode == best.option.decode and bool(way.option.prefill) != bool(best.option.prefill)


def _compared(mine_s: float, other_s: float, what: str = "") -> str:
    sign = "<" if mine_s < other_s else ">" if mine_s > other_s else "="
    return f"{what}{mine_s:.2f} s {sign} {other_s:.2f} s"
