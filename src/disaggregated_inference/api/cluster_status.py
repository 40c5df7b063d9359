"""The status of a whole cluster: the clients' `status()`, the gateway's `/cluster` and its events. The orchestrator and
the gateway encode it; the gateway, the commands and `disagg chaos` read it. A reader may be of another version: what
it does not know is left out, and what it misses has a default."""

from enum import StrEnum
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from disaggregated_inference.api.readings import Readings
from disaggregated_inference.api.status import KVMemoryStatus, PathStatus, PeerStatus, Rates, Role, SlotStatus


class ModelVerdict(StrEnum):
    ALL_UP = "all up"
    SOME_DOWN = "a node is down, others serve"
    PREFILL_DOWN = "prefill down: decode-only"
    DECODE_DOWN = "decode down: cannot serve"
    WHOLE_ANSWERS = "decode down: prefill nodes write the answers"
    NOTHING_UP = "nothing is up"

    @property
    def serves(self) -> bool:
        return self not in (ModelVerdict.DECODE_DOWN, ModelVerdict.NOTHING_UP)


class ClusterNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node as the orchestrator knows it: its entry of the cluster file, its last status, and what was sent there."""

    name: str
    url: str = ""
    role: Role = "both"
    configured_role: Role = "both"
    model: str = ""  # of the cluster file
    node_model: str | None = None  # the node's own name of it
    weights: str = ""  # hash of the weights that the node has
    engine: str = ""
    state: str = ""  # one or two words for people
    why: str = ""  # it is not usable
    warning: str = ""  # it serves all the same
    misnamed: bool = False
    usable: bool = False
    epoch: str = ""
    breaker: str = ""
    warmth: float = 0.0
    open: int = 0  # requests of this orchestrator
    waiting: int = 0
    running: int = 0
    working: int = 0
    slots: SlotStatus = SlotStatus()
    kv: KVMemoryStatus = KVMemoryStatus()
    rates: Rates = Rates()
    paths: tuple[PathStatus, ...] = ()
    peers: tuple[PeerStatus, ...] = ()
    readings: Readings | None = None
    configured_power_w: float | None = None
    idle_power_w: float | None = None
    identity: str = ""
    trusted_link: str = ""
    heard_s_ago: float | None = None


class ClusterLink(msgspec.Struct, frozen=True, kw_only=True):
    """`line_rate_bytes_s`: what the cluster file expects. `payload_bytes`: since the decode node started."""

    prefill: str
    decode: str
    bytes_per_s: float
    line_rate_bytes_s: float | None = None
    measured: bool = False
    payload_bytes: int = 0
    connections: int = 0
    warning: str = ""


class KVRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """A decode node that takes no KV of a prefill node."""

    prefill: str
    decode: str
    why: str


class QueueStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The request queue of one model."""

    waiting: int = 0
    running: int = 0
    places: int = 0


class LatencyStatus(msgspec.Struct, frozen=True, kw_only=True):
    total_time: dict[str, float] = {}  # p50, p95, p99; empty: no request was answered


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`served` and `latency` are of all requests: a key that sees only its own gets neither."""

    verdict: str
    models: dict[str, ModelVerdict]
    nodes: tuple[ClusterNode, ...]
    links: tuple[ClusterLink, ...] = ()
    refusals: tuple[KVRefusal, ...] = ()
    warnings: tuple[str, ...] = ()
    queue: dict[str, QueueStatus] = {}
    served: dict[str, int] | UnsetType = UNSET  # by outcome
    uptime: float | None = None
    latency: LatencyStatus | UnsetType = UNSET


class ModelSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of the answered requests of one model. None: nothing was measured."""

    answered: int = 0
    all_cached: bool = False  # every prompt was in a prefix cache: no speed says anything
    prefill_time: float | None = None
    prefill_speed: float | None = None  # of prompts that a prefix cache did not hold
    decode_time: float | None = None
    decode_speed: float | None = None
    total_time: float | None = None
    first_token_time: float | None = None
    exposed_transfer_time: float | None = None  # of requests whose KV moved


class CombinedSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Answered requests of all models together."""

    answered: int = 0
    busy_time: float | None = None  # at least one of them ran
    sequential_time: float | None = None  # one after the other, each with the cluster to itself
    speedup: float | None = None
    tokens_per_s: float | None = None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The cards of the dashboard and of `disagg top`."""

    models: dict[str, ModelSummary] = {}
    combined: CombinedSummary = CombinedSummary()


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A service level target. Met below `goal` or above it, by `better`."""

    name: str
    unit: str
    goal: float
    better: Literal["lower", "higher"]
    what: str  # what `measured` is
    measured: float | None = None
    met: bool | None = None


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """`measured` above `limit` is an alarm; `why` then says what to look at. Unknown: too few requests."""

    name: str
    unit: str
    limit: float
    what: str
    state: Literal["ok", "alarm", "unknown"] = "unknown"
    measured: float | None = None
    why: str = ""


class ClusterPage(ClusterStatus, frozen=True, kw_only=True):
    """`/cluster`. `history`: the last requests, newest first, as the history keeps them: rows of earlier versions have
    fewer fields."""

    history: tuple[dict[str, Any], ...] = ()
    summary: Summary = Summary()
    targets: tuple[Target, ...] = ()
    sees_all: bool = True


class TargetsPage(msgspec.Struct, frozen=True, kw_only=True):
    """What `/cluster/targets` says beside the time that was asked for."""

    targets: tuple[Target, ...] = ()
    alarms: tuple[Alarm, ...] = ()
