"""The cluster as the router sees it: frozen, and small enough to write down in a test."""

import msgspec

from disaggregated_inference.api import Rate, Role


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One node: its last status, corrected by what was sent there since."""

    name: str
    role: Role
    model: str = ""
    engine: str = ""
    usable: bool = True  # healthy, and its circuit breaker lets requests through
    group: str = ""  # nodes of one group hold the same model and may hand caches to each other
    exports: bool = True
    imports: bool = True
    whole_answers: bool = False  # a prefill node whose engine also writes answers, without KV from others
    prompt_logprobs: bool = False  # its engine can compute them
    context_window: int = 0
    kv_token_bytes: int = 0
    kv_free_bytes: int = 0
    waiting: int = 0  # requests there that are not in the decode batch yet
    waiting_tokens: int = 0  # of their prompts, still to be prefilled there
    running: int = 0  # answers in its decode batch
    slots: int = 1
    prefill_rates: tuple[Rate, ...] = ()
    decode_rates: tuple[Rate, ...] = ()
    warmth: float = 1.0  # 0 to 1: a node that just came back gets its share of work step by step

    @property
    def can_prefill(self) -> bool:
        return self.role != "decode" and self.exports

    @property
    def can_decode(self) -> bool:
        return self.role != "prefill" or self.whole_answers

    @property
    def serves_alone(self) -> bool:
        """A prefill node that decodes only what it prefilled itself, with a sampler of its own."""
        return self.role == "prefill" and self.whole_answers


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    nodes: tuple[NodeView, ...]
    links: dict[tuple[str, str], float] = {}  # (prefill, decode): measured or configured bytes per second
    checked: frozenset[tuple[str, str]] = frozenset()  # pairs that passed the peer check
    refused: frozenset[tuple[str, str]] = frozenset()  # pairs that failed it
    check_credit_s: dict[tuple[str, str], float] = {}  # unchecked pairs: what requests have lost by avoiding the check


class RouteRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the router needs to know of a request."""

    model: str
    prompt_tokens: int
    max_tokens: int = 256
    choices: int = 1  # each with KV of its own
    cached: dict[str, int] = {}  # node: tokens of this prompt that are likely in its prefix cache
    avoid: frozenset[str] = frozenset()  # nodes that failed this request already
    scored_tokens: int | None = None  # with prompt logprobs: how many tokens have theirs already
    structured: bool = False  # its output has a format, which only this project's own sampler knows
    seeded: bool = False  # the client gave a seed: another sampler draws other tokens with it

    @property
    def kv_tokens(self) -> int:
        """That a decode node reserves memory for."""
        return self.choices * (self.prompt_tokens + self.max_tokens)


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One way to serve a request. `prefill` None: the decode node prefills the prompt itself."""

    decode: str
    prefill: str | None
    first_token_s: float  # without the exposed transfer: the logits overtake it
    total_s: float
    exposed_s: float = 0.0  # between the first token and the second
    check_s: float = 0.0  # of the peer check of a pair that is not checked yet


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    decode: str
    prefill: str | None
    reason: str  # "local: 96 new tokens, 0.04 s < 0.09 s"
    first_token_s: float  # predicted
    total_s: float
    routes: tuple[Route, ...] = ()  # all that were compared, best first
