"""The scheduler's half of the connector: which rows of which request every step adds, and in which blocks they are."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import asdict

from disaggregated_inference.vllm_connector.connection import NodeLink
from disaggregated_inference.vllm_connector.messages import (
    QUESTION_PARAM,
    STATE_PARAM,
    TICKET_PARAM,
    Ended,
    Failed,
    Started,
    Stepped,
)
from disaggregated_inference.vllm_connector.region import first_row

log = logging.getLogger("vllm.disagg")

_STEP_S = 1.0  # between two signs of life


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a block table."""

    block: int  # tokens of a block
    window: int  # 0: full attention


@dataclass(slots=True)
class Span:
    """What one step exports of one request: positions [start, stop). Of each group, `blocks` hold the rows that it
    keeps, beginning with the block of the first of them."""

    ticket: str
    start: int
    stop: int
    blocks: tuple[tuple[int, ...], ...]
    last: bool  # the prompt ends here: the step's logits belong to it


@dataclass(slots=True)
class _Tracked:
    ticket: str
    prompt_tokens: int
    blocks: list[list[int]]
    exported: int = 0
    computed: int = 0
    seen: bool = field(default=False)


class SchedulerHalf:
    """Every row is exported once. After a preemption, vLLM computes rows again; the ones that were exported stay."""

    def __init__(self, link: NodeLink, groups: Sequence[Group]) -> None:
        self._link, self._groups = link, groups
        self._tracked: dict[str, _Tracked] = {}  # by vLLM's request id
        self._stepped_at = 0.0

    def spans(self, output: Any) -> list[Span]:
        """Of vLLM's `SchedulerOutput`. A failure here fails the node's requests, not vLLM's step."""
        if self._link.grants and (now := time.monotonic()) - self._stepped_at > _STEP_S:
            self._stepped_at = now
            self._link.send(Stepped())
        try:
            return self._spans(output)
        except Exception as error:
            log.exception("the step's rows are not known")
            for tracked in self._tracked.values():
                self._link.send(Failed(ticket=tracked.ticket, reason=f"{type(error).__name__}: {error}"[:500]))
            self._tracked.clear()
            return []

    def _spans(self, output: Any) -> list[Span]:
        """The block tables are those of this step: later ones may have freed blocks."""
        found: list[Span] = []
        for new in output.scheduled_new_reqs:  # with the newer model runner, resumed requests too
            tracked = self._tracked.get(new.req_id) or self._track(new)
            if tracked:
                tracked.blocks = [list(blocks) for blocks in new.block_ids]
                found += self._advance(tracked, new.num_computed_tokens, output.num_scheduled_tokens[new.req_id])
        cached = output.scheduled_cached_reqs
        for id, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            if tracked := self._tracked.get(id):
                self._add_blocks(tracked, blocks, resumed=id in cached.resumed_req_ids)
                found += self._advance(tracked, computed, output.num_scheduled_tokens[id])
        return found

    def end(self, id: str, ticket: str, status: str) -> None:
        """vLLM frees the request's blocks now. All its rows were copied in their own step. Of a ticket that never had
        a step nothing was computed, and the node is told that too."""
        if tracked := self._tracked.pop(id, None) or (_Tracked(ticket, 0, []) if ticket else None):
            self._link.send(
                Ended(
                    ticket=tracked.ticket,
                    computed_tokens=tracked.computed,
                    exported_tokens=tracked.exported,
                    status=status,
                )
            )

    def answer(self, sampling_params: Any) -> dict[str, Any] | None:
        """To a node's question, in vLLM's response. None: there is none."""
        if QUESTION_PARAM not in _transfer_params(sampling_params):
            return None
        return {STATE_PARAM: asdict(self._link.state())}

    def close(self) -> None:
        self._link.close()

    def _track(self, new: Any) -> _Tracked | None:
        if not (ticket := ticket_of(new.sampling_params)):
            return None
        grant, tokens = self._link.grant_of(ticket), len(new.prompt_token_ids or ())
        if not grant or grant.tokens != tokens:
            log.warning("request %s has a ticket that no node granted for %d tokens", new.req_id, tokens)
            return None
        tracked = self._tracked[new.req_id] = _Tracked(ticket, tokens, [])
        return tracked

    def _add_blocks(self, tracked: _Tracked, blocks: Any, resumed: bool) -> None:
        if resumed:
            tracked.blocks = [[] for _ in self._groups]
        for held, new in zip(tracked.blocks, blocks or (), strict=False):
            held.extend(new)

    def _advance(self, tracked: _Tracked, computed: int, count: int) -> list[Span]:
        start, stop = tracked.exported, min(computed + count, tracked.prompt_tokens)
        if not tracked.seen:
            tracked.seen = True
            self._link.send(Started(ticket=tracked.ticket, cached_tokens=computed))
        tracked.computed += max(0, stop - computed)
        if stop <= start or not self._link.grant_of(tracked.ticket):
            return []
        tracked.exported = stop
        blocks = tuple(self._blocks(group, held, start, stop) for group, held in self._tables(tracked))
        return [Span(tracked.ticket, start, stop, blocks, stop == tracked.prompt_tokens)]

    def _tables(self, tracked: _Tracked) -> Any:
        return zip(self._groups, tracked.blocks, strict=True)

    @staticmethod
    def _blocks(group: Group, held: list[int], start: int, stop: int) -> tuple[int, ...]:
        first = first_row(group.window, start, stop)
        return tuple(held[first // group.block : -(-stop // group.block)])


def ticket_of(sampling_params: Any) -> str:
    """Empty for a request that is none of a node's."""
    ticket = _transfer_params(sampling_params).get(TICKET_PARAM)
    return ticket if isinstance(ticket, str) else ""


def _transfer_params(sampling_params: Any) -> Any:
    return (getattr(sampling_params, "extra_args", None) or {}).get("kv_transfer_params") or {}
