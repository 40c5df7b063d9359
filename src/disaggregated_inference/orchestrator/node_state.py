"""One node as the orchestrator knows it: its last status, its standing, and what was sent there since."""

import asyncio
import time
from typing import Any

import aiohttp
import msgspec

from disaggregated_inference.cluster.config import Policies, Server
from disaggregated_inference.kv.fingerprint import Fingerprint
from disaggregated_inference.orchestrator.breaker import Breaker
from disaggregated_inference.orchestrator.cluster_view import NodeView, Rate, Role
from disaggregated_inference.orchestrator.heartbeat import Heartbeats
from disaggregated_inference.orchestrator.node_client import LegFailed, NodeClient

_LATE_S = 0.3
_AWAY, _UNAUTHORIZED = "unreachable", "unauthorized"
_NOT_ASKED = "not asked yet"
_QUIET_S = 5.0  # after its last answer; then it is gone
_MOST_READING = 32  # prompts of ours at a prefill node: it reads few at a time, and the others are better off here


class SlotStatus(msgspec.Struct, frozen=True):
    used: int = 0
    most: int = 1


class QueueDepth(msgspec.Struct, frozen=True):
    waiting: int = 0  # for memory or a slot


class KVMemoryStatus(msgspec.Struct, frozen=True):
    limit_bytes: int = 0  # for answers
    reserved_bytes: int = 0
    held_bytes: int = 0
    total_limit_bytes: int = 0  # and for prompts that wait to be fetched, where a node has both roles


class RateStatus(msgspec.Struct, frozen=True):
    prefill: tuple[Rate, ...] = ()
    decode: tuple[Rate, ...] = ()
    local_prefill: tuple[Rate, ...] = ()


class PathStatus(msgspec.Struct, frozen=True):
    host: str
    port: int
    goodput_bytes_s: float | None = None


class PeerStatus(msgspec.Struct, frozen=True):
    epoch: str
    refused: str | None = None


class NodeStatus(msgspec.Struct, frozen=True):
    """Of a node's `/status`, what is used here. Nodes of another version may say more, or less."""

    status: str = "unhealthy"
    model: str = ""
    loaded: bool = True
    backend: str = ""
    role: Role = "both"
    epoch: str = ""
    stalled_s: float = 0.0
    context_window: int = 0
    kv_token_bytes: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    running: int = 0
    exports: bool = True
    imports: bool = True
    reason: str = ""  # why it is unhealthy, where it says so
    slots: SlotStatus = SlotStatus()
    queue: QueueDepth = QueueDepth()
    kv: KVMemoryStatus = KVMemoryStatus()
    rates: RateStatus = RateStatus()
    paths: tuple[PathStatus, ...] = ()
    peers: tuple[PeerStatus, ...] = ()
    kv_addresses: tuple[str, ...] = ()
    tickets: int = 0


class ModelIdentity(msgspec.Struct, frozen=True):
    """Of a model that only its engine knows well: little, but enough to tell two models apart."""

    architecture: str = ""
    parameters: int = 0


class ModelInfo(msgspec.Struct, frozen=True):
    """Of a node's `/model`. Without a fingerprint it hands out neither cache nor tokenizer, and takes text."""

    context_window: int
    vocabulary: int | None = None
    fingerprint: Fingerprint | None = None
    identity: ModelIdentity = ModelIdentity()
    capabilities: tuple[str, ...] | None = None  # by Ollama's names; None: nobody knows, or the tokenizer shows

    def differences(self, other: "ModelInfo") -> list[str]:
        """One line per disagreement; none: both may answer for one model."""
        if self.fingerprint and other.fingerprint:
            return self.fingerprint.differences(other.fingerprint)
        if self.fingerprint or other.fingerprint:
            takes = {True: "tokens", False: "text alone"}
            return [f"it takes {takes[bool(other.fingerprint)]}, not {takes[bool(self.fingerprint)]}"]
        mine, theirs = self.identity, other.identity
        return [] if mine == theirs else [f"{theirs.architecture} of {theirs.parameters} parameters there"]


class NodeState:
    def __init__(
        self, server: Server, model: str, session: aiohttp.ClientSession, heartbeats: Heartbeats, policies: Policies
    ) -> None:
        self.server, self.model, self._policies = server, model, policies
        self.name = server.name
        self.client = NodeClient(server, session, heartbeats, policies.stuck_s)
        self.gate = asyncio.Semaphore(_MOST_READING)
        self.breaker = Breaker()
        self.status: NodeStatus | None = None  # None: never heard of
        self.about: ModelInfo | None = None
        self.reachable = False
        self._condition = _AWAY  # one word for people
        self.trouble = _NOT_ASKED  # why it is not usable; empty when it is
        self.mismatch = ""  # why it must not be paired, or answer for its model
        self._quiet = False  # it is away, and nobody said so
        self._misses = 0  # questions in a row that it did not answer in time
        self.open = 0  # our requests there
        self.unread_tokens = 0  # of our prompts, sent there since its status and not known to be read
        self._read_tokens = 0  # of our prompts, read since: its status still counts them
        self._open_then = 0  # our requests there when its status came
        self.heard_at, self.used_at = 0.0, time.monotonic()

    @property
    def epoch(self) -> str:
        return self.status.epoch if self.status else ""

    @property
    def takes_text(self) -> bool:
        return self.about is not None and self.about.fingerprint is None and not self.mismatch

    @property
    def role(self) -> Role:
        return self.status.role if self.status else self.server.role

    @property
    def usable(self) -> bool:
        return self.reachable and not self.trouble and not self.mismatch and self.breaker.ready

    @property
    def serves(self) -> bool:
        """Also where only one request at a time may go, to see: others wait for it."""
        return self.reachable and not self.trouble and not self.mismatch and self.breaker.state != "open"

    @property
    def was_asked(self) -> bool:
        """And answered, or is known to be away."""
        return self.reachable or self.trouble != _NOT_ASKED

    @property
    def state(self) -> str:
        """One word for people, or two."""
        if not self.reachable or not self.status:
            return self._condition
        if self.mismatch:
            return "mismatch"
        return self._condition if self.trouble or self.breaker.state == "closed" else f"circuit {self.breaker.state}"

    @property
    def why(self) -> str:
        if not self.reachable:
            return self.trouble
        return self.mismatch or self.trouble or (self.breaker.reason if self.breaker.state != "closed" else "")

    async def poll(self) -> bool:
        """Ask how it is; whether something about its model is new."""
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        try:
            body = await self.client.get("/status", self._policies.health_timeout_s)
            status = msgspec.json.decode(body, type=NodeStatus)
            renewed = status.epoch != self.epoch or self.about is None
            if renewed:
                about = await self.client.get("/model", self._policies.health_timeout_s * 5)
                self.about = msgspec.json.decode(about, type=ModelInfo)
        except LegFailed as error:
            late = loop.time() > began_at + self._policies.health_timeout_s + _LATE_S  # it is we who were held up
            self._misses += 1
            if not error.silent or (self._misses > 1 and self.client.heard_at < began_at and not late):
                condition = _UNAUTHORIZED if error.code == _UNAUTHORIZED else _AWAY
                self.lost(str(error), condition, quiet=error.silent)
            return False
        except Exception as error:  # an answer that is none; whatever is at that port, it is not a node
            self.lost(f"{self.name}: it does not answer as a node: {error}")
            return False
        self._heard(status, renewed)
        return renewed

    def was_read(self, tokens: int, sent_at: float) -> None:
        """A prompt of ours, sent there then."""
        if sent_at < self.heard_at:
            self._read_tokens += tokens
        else:
            self.unread_tokens = max(0, self.unread_tokens - tokens)

    def lost(self, reason: str, condition: str = _AWAY, *, quiet: bool = False) -> None:
        """`quiet`: nobody said that it is gone, it only does not answer."""
        self.reachable, self.trouble, self._condition, self._quiet = False, reason, condition, quiet

    @property
    def may_come_back(self) -> bool:
        """At any moment: it has not answered its first question yet, or went quiet a moment ago, as a machine does that
        swaps."""
        if not self.was_asked:
            return True
        return self._quiet and not self.mismatch and time.monotonic() - self.heard_at < _QUIET_S

    def _heard(self, status: NodeStatus, renewed: bool) -> None:
        if self.status and renewed:  # it came back; at first sight all are as new
            self.breaker.renewed()
        self._misses, self.client.epoch = 0, status.epoch
        self.status, self.reachable, self.heard_at = status, True, time.monotonic()
        self.unread_tokens = self._read_tokens = 0  # the status counts them now
        self._open_then = self.open
        self._condition, self.trouble = self._standing(status)

    def _standing(self, status: NodeStatus) -> tuple[str, str]:
        """How it is, and why it is not usable: empty when it is."""
        if status.status not in ("healthy", "loading"):
            return status.status, f"it is {status.status}" + (f": {status.reason}" if status.reason else "")
        if status.stalled_s > self._policies.stuck_s:
            return "stuck", f"its engine has made no progress for {status.stalled_s:.0f} s"
        if {self.server.role, status.role} == {"prefill", "decode"}:
            role, listed = status.role, self.server.role
            return "wrong role", f"it runs as a {role} node, and the config has it under {listed}_servers"
        return status.status, ""

    def verdict_on(self, prefill: "NodeState") -> PeerStatus | None:
        """What the canary said about another node, as it is now; None where nobody asked."""
        peers = self.status.peers if self.status else ()
        return next((peer for peer in peers if prefill.epoch and peer.epoch == prefill.epoch), None)

    def view(self, group: str) -> NodeView:
        status = self.status or NodeStatus()
        reads = status.rates.prefill or status.rates.local_prefill
        others = max(0, status.running - self._open_then)  # of other orchestrators
        running = min(others + self.open, status.slots.most) if self.role != "prefill" else 0
        return NodeView(
            name=self.name,
            role=self.role,
            model=self.model,
            engine=status.backend,
            usable=self.usable,
            group=group,
            exports=status.exports,
            imports=status.imports,
            context_window=status.context_window,
            kv_token_bytes=status.kv_token_bytes,
            kv_free_bytes=max(0, status.kv.limit_bytes - status.kv.reserved_bytes),
            waiting=max(0, max(0, status.waiting - self._open_then) + self.open - running),
            waiting_tokens=max(0, status.waiting_tokens - self._read_tokens) + self.unread_tokens,
            running=running,  # what was sent a moment ago will be
            slots=status.slots.most,
            reads=reads,
            writes=status.rates.decode,
            warmth=self.breaker.warmth(),
        )

    def shown(self) -> dict[str, Any]:
        """For status pages."""
        status = self.status or NodeStatus()
        return {
            "name": self.name,
            "url": self.server.url,
            "role": self.role,
            "configured_role": self.server.role,
            "model": self.model,
            "engine": status.backend or self.server.engine,
            "state": self.state,
            "why": self.why,
            "usable": self.usable,
            "epoch": self.epoch,
            "breaker": self.breaker.state,
            "warmth": round(self.breaker.warmth(), 2),
            "open": self.open,
            "waiting": status.waiting,
            "running": status.running,
            "slots": msgspec.to_builtins(status.slots),
            "kv": msgspec.to_builtins(status.kv),
            "rates": msgspec.to_builtins(status.rates),
            "paths": msgspec.to_builtins(status.paths),
            "peers": msgspec.to_builtins(status.peers),
            "heard_s_ago": round(time.monotonic() - self.heard_at, 3) if self.heard_at else None,
        }
