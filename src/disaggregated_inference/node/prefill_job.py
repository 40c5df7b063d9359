"""One prompt on a prefill node: while it is read, and until it was fetched."""

import math
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from disaggregated_inference.engines import Sequence
from disaggregated_inference.kv_transfer import Outbox
from disaggregated_inference.node.admission import Claim


class PrefillMetrics(msgspec.Struct, frozen=True):
    prompt_tokens: int
    prefill_time: float
    prefill_speed: float
    queue_time: float
    cached_tokens: int = 0  # of the prompt, that this node had read before


@dataclass(slots=True)
class PrefillJob:
    """One prompt being read, or read and waiting to be fetched."""

    tokens: list[int]
    ticket: str = ""
    outbox: Outbox = field(default_factory=Outbox)
    deadline: float = math.inf
    future: "Future[PrefillMetrics]" = field(default_factory=Future)
    admitted: "Future[None]" = field(default_factory=Future)  # there is memory for it
    claim: Claim | None = None
    sequence: Sequence | None = None
    cached_tokens: int = 0
    ended: bool = False
    keeping: bool = False  # its rows are being copied for later prompts
    streams_done: set[int] = field(default_factory=set)

    def was_admitted(self, error: BaseException | None = None) -> None:
        """Or never will be."""
        with suppress(InvalidStateError):
            self.admitted.set_exception(error) if error else self.admitted.set_result(None)

    @property
    def unread(self) -> int:
        sequence = self.sequence
        return len(self.tokens) - (sequence.length if sequence else 0)
