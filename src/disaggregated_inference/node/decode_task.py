"""One request on a decode node."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from disaggregated_inference.engines import Sequence
from disaggregated_inference.kv import Salt
from disaggregated_inference.node.admission import Claim
from disaggregated_inference.node.choice import Choice
from disaggregated_inference.node.generation import Generation
from disaggregated_inference.node.structured_output import GrammarMatcher


@dataclass(eq=False, slots=True)
class DecodeTask:
    """A request from admission until its memory is free again."""

    generation: Generation
    prompt: list[int] | None  # None: only the prefill node has it so far
    capacity: int  # tokens of the prompt and of one choice
    grammars: list[GrammarMatcher | None]  # one for each choice
    extra_bytes: int = 0  # memory that it holds beside its sequences
    claim: Claim | None = None
    sequences: list[Sequence] = field(default_factory=list)  # one for each choice
    choices: list[Choice] = field(default_factory=list)
    waiting_tokens: int = 0  # prompt tokens that this node's engine has still to compute
    running_choices: int = 0
    finished: bool = False
    cacheable: bool = True  # its KV is what this model computes: not rounded in transfer, not sent by a client
    withdraw: Callable[[], None] | None = None  # tells the prefill node to free the KV
    renew_lease: Callable[[], float] | None = None  # returns the new lease in seconds
    renew_at: float = 0.0
    first_token_at: float = 0.0
    kv_ready_at: float = 0.0  # when decoding could begin; the first token of a transfer may come before it

    @property
    def salt(self) -> Salt:
        return self.generation.params.salt

    @property
    def waits_for_memory(self) -> bool:
        return self.claim is not None and self.claim.state == "waiting"

    def complete_metrics(self) -> None:
        metrics, now = self.generation.metrics, time.perf_counter()
        metrics.total_time = now - self.generation.arrived_at
        metrics.admission_time = metrics.admission_time or now - self.generation.created_at  # it was never admitted
        if self.kv_ready_at:
            metrics.decode_time = now - self.kv_ready_at
            metrics.decode_speed = max(0, metrics.completion_tokens - len(self.grammars)) / metrics.decode_time
        reasons = (choice.finish_reason for choice in self.choices if choice.finish_reason)
        metrics.finish_reason = next(reasons, "error")
