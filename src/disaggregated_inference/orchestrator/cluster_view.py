"""The cluster as a planner sees it: frozen, and small enough to write down in a test."""

from typing import Literal

import msgspec

Role = Literal["prefill", "decode", "both"]


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """How fast work of `size` to just under twice `size` goes. Size is prompt tokens for reading, answers at once for
    writing (whose `tokens_per_s` is that of all of them together)."""

    size: int
    tokens_per_s: float
    samples: int = 1


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One node, as its last status said, corrected by what was sent there since."""

    name: str
    role: Role
    model: str = ""
    engine: str = ""
    usable: bool = True  # healthy, and its breaker lets requests through
    group: str = ""  # nodes of one group hold the same model and may hand caches to each other
    exports: bool = True
    imports: bool = True
    context_window: int = 0
    kv_token_bytes: int = 0
    kv_free_bytes: int = 0
    waiting: int = 0  # requests there that nobody writes yet
    waiting_tokens: int = 0  # of their prompts, still to be read there
    running: int = 0  # answers being written there
    slots: int = 1
    reads: tuple[Rate, ...] = ()  # its reading of prompts
    writes: tuple[Rate, ...] = ()
    warmth: float = 1.0  # 0 to 1: a node that just came gets its share step by step

    @property
    def can_prefill(self) -> bool:
        return self.role != "decode" and self.exports

    @property
    def can_decode(self) -> bool:
        return self.role != "prefill"


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    nodes: tuple[NodeView, ...]
    links: dict[tuple[str, str], float] = {}  # (prefill, decode): measured or configured bytes per second
    met: frozenset[tuple[str, str]] = frozenset()  # pairs whose canary was proven already
    refused: frozenset[tuple[str, str]] = frozenset()  # and those where it was not right


class RouteRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a planner needs to know of a request."""

    model: str
    prompt_tokens: int
    max_tokens: int = 256
    choices: int = 1  # each with a cache of its own
    held: dict[str, int] = {}  # node: tokens of this prompt that it likely holds
    avoid: frozenset[str] = frozenset()  # nodes that failed this request already


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One way to serve a request; `prefill` None: the decode node reads the prompt itself."""

    decode: str
    prefill: str | None
    first_token_s: float
    total_s: float


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    decode: str
    prefill: str | None
    reason: str  # "local: 96 new tokens, 0.04 s < 0.09 s"
    first_token_s: float  # predicted
    total_s: float
    options: tuple[Route, ...] = ()  # all that were weighed, best first
