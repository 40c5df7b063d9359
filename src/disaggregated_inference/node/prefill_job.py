"""One prompt on a prefill node."""

import math
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

from disaggregated_inference.api import KVSecurity, PrefillMetrics
from disaggregated_inference.engines import Sequence
from disaggregated_inference.errors import Cancelled
from disaggregated_inference.kv import NO_SALT, Salt
from disaggregated_inference.kv_transfer import Outbox
from disaggregated_inference.node.admission import Claim


@dataclass(slots=True)
class PrefillJob:
    """One prompt, from its request until its KV was fetched or its ticket has ended."""

    tokens: list[int]
    ticket: str = ""  # empty: the canary prompt of a peer check
    outbox: Outbox = field(default_factory=Outbox)
    deadline: float = math.inf
    salt: Salt = NO_SALT  # of its prefixes
    security: KVSecurity = "plain"  # of the connections that fetch it
    scored_tokens: int | None = None  # with prompt logprobs: how many tokens have theirs already
    future: "Future[PrefillMetrics]" = field(default_factory=Future)
    admitted: "Future[None]" = field(default_factory=Future)
    claim: Claim | None = None
    sequence: Sequence | None = None
    cached_tokens: int = 0
    ended: bool = False
    saving: bool = False  # its KV is being copied into the prefix cache
    streams_done: set[int] = field(default_factory=set)

    def set_admitted(self, error: BaseException | None = None) -> None:
        """Admitted, or with an error, refused. The first call counts."""
        with suppress(InvalidStateError):
            self.admitted.set_exception(error) if error else self.admitted.set_result(None)

    def raise_if_cancelled(self) -> None:
        if self.ended:
            raise Cancelled("the prefill was cancelled")

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that are not computed yet."""
        sequence = self.sequence
        return len(self.tokens) - (sequence.length if sequence else 0)
