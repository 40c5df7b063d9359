"""One node as the orchestrator knows it: its last status, whether it is usable, and what was sent there since."""

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import aiohttp
import msgspec

from disaggregated_inference.api import ClusterNode, ModelInfo, NodeStatus, PeerStatus, Rate, Rates, Role
from disaggregated_inference.cluster import Policies, Server
from disaggregated_inference.models import is_same_model
from disaggregated_inference.orchestrator.breaker import Breaker
from disaggregated_inference.orchestrator.cluster_view import NodeView
from disaggregated_inference.orchestrator.connection_errors import what_answers
from disaggregated_inference.orchestrator.energy import PowerLog, price_per_hour
from disaggregated_inference.orchestrator.heartbeat import Heartbeats
from disaggregated_inference.orchestrator.leg_errors import LegFailed
from disaggregated_inference.orchestrator.node_client import NodeClient
from disaggregated_inference.orchestrator.node_failures import WRONG_TOKEN
from disaggregated_inference.orchestrator.single_machine import MachineFacts

_UNREACHABLE = "unreachable"
_CONDITIONS = {WRONG_TOKEN: "wrong token", "node_loading": "loading"}  # by the code of a failed poll
_NEEDS_CORRECTION = ("wrong token", "wrong role")
_NOT_POLLED = "not polled yet"
_MAX_NAME = 200  # characters
_MISNAMED = (
    "it names its model {own}, the cluster file {model}: correct `model`, or list the other name under `aliases`"
)
_SLOWED = 1.5  # times slower than its best
_MIN_STEPS = 5
_FEW_SAMPLES = 3  # with fewer, one bad reading can be the estimate
_MAX_PREFILLS = 32  # of ours at a prefill node: it works on a few at a time, and the others are better off here


@dataclass(slots=True, eq=False)
class KVPromise:
    """KV memory of a node, for an answer of ours. Its status counts it once the request is there."""

    tokens: int
    sent_at: float = math.inf  # when the request went to the node, on the monotonic clock


class NodeState:
    def __init__(
        self,
        server: Server,
        model: str,
        session: aiohttp.ClientSession,
        heartbeats: Heartbeats,
        policies: Policies,
        spellings: Sequence[str] = (),
    ) -> None:
        """`spellings`: the names of its model in the cluster file; none: any name is right."""
        self.server, self.model, self._policies, self._spellings = server, model, policies, spellings
        self.name = server.name
        self.client = NodeClient(server, session, heartbeats, policies.stuck_s)
        self._timeouts = heartbeats.timeouts
        self.prefill_slots = asyncio.Semaphore(_MAX_PREFILLS)
        self.breaker = Breaker(timeouts=heartbeats.timeouts.breaker)
        self.status: NodeStatus | None = None  # None: the node has never answered
        self.power = PowerLog(self._timeouts.power_sample_s)
        self.info: ModelInfo | None = None
        self.reachable = False
        self._condition = _UNREACHABLE  # one word for people
        self.trouble = _NOT_POLLED  # why it is not usable; empty when it is
        self.mismatch = ""  # why it must not be paired, or answer for its model
        self.misnamed = ""  # its own name of its model is none of the cluster file
        self._missed_polls = 0  # in a row
        self.open = 0  # our requests there
        self.unread_tokens = 0  # of our prompts, sent since the last status and not known to be prefilled
        self._read_tokens = 0  # of our prompts, prefilled since the last status, which still counts them
        self._promises: set[KVPromise] = set()  # that its last status does not count
        self._open_at_status = 0
        self.polled_at, self.used_at = 0.0, time.monotonic()
        self._best_rates: dict[tuple[str, int], float] = {}  # of this epoch, by kind and size
        self.doubtful = False  # a rate is far below its best, or rests on the node's start alone
        self.explorations = 0  # requests sent there while that is so, to find out
        self._session, self._other_program, self._identified_at = session, "", -math.inf

    @property
    def epoch(self) -> str:
        return self.status.epoch if self.status else ""

    @property
    def takes_text(self) -> bool:
        return self.info is not None and self.info.fingerprint is None and not self.mismatch

    @property
    def own_model(self) -> str:
        """The node's own name of its model, fit for a terminal; empty until it has answered."""
        name = self.status.model if self.status else ""
        return "".join(character for character in name[:_MAX_NAME] if character.isprintable())

    @property
    def warning(self) -> str:
        """What is wrong with a node that serves all the same."""
        return self.misnamed if self.reachable and not self.mismatch else ""

    @property
    def role(self) -> Role:
        return self.status.role if self.status else self.server.role

    @property
    def whole_answers(self) -> bool:
        """A prefill node whose engine also writes answers, without KV from other nodes."""
        return self.role == "prefill" and self.status is not None and self.status.whole_answers

    @property
    def can_decode(self) -> bool:
        return self.role != "prefill" or self.whole_answers

    @property
    def usable(self) -> bool:
        return self.reachable and not self.trouble and not self.mismatch and self.breaker.ready

    @property
    def serves(self) -> bool:
        """Also while the breaker lets one trial request through: other requests wait for it."""
        return self.reachable and not self.trouble and not self.mismatch and self.breaker.state != "open"

    @property
    def was_polled(self) -> bool:
        """The node has answered, or is known to be unreachable."""
        return self.reachable or self.trouble != _NOT_POLLED

    @property
    def state(self) -> str:
        """One or two words for people."""
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
        """Fetch the status; returns whether the node is new or was restarted."""
        loop = asyncio.get_running_loop()
        began_at, timeout_s = loop.time(), self._policies.health_timeout_s
        try:
            status = msgspec.json.decode(await self.client.get("/status", timeout_s), type=NodeStatus)
            renewed = status.epoch != self.epoch or self.info is None
            if renewed:
                self.info = msgspec.json.decode(await self.client.get("/model", timeout_s * 5), type=ModelInfo)
        except LegFailed as error:
            late = loop.time() > began_at + timeout_s + self._timeouts.late_poll_s  # this process was held up
            self._missed_polls += 1
            silent = self._missed_polls > 1 and self.client.last_data_at < began_at and not late
            if silent or not error.timed_out:
                closed = isinstance(error.__cause__, aiohttp.ServerDisconnectedError)
                reason = await self._identified(error.message, error.code, closed)
                self.lost(reason, error.code)
            return False
        except Exception as error:  # the server at that port is not a node
            reason = f"it does not answer as a node: {error}"
            self.lost(await self._identified(reason, "bad_answer"))
            return False
        self.update(status, asked_at=began_at)
        return renewed

    async def _identified(self, reason: str, code: str, closed: bool = False) -> str:
        """With what answers there instead of a node, if that can be known. A server that was a node once is one.
        `closed`: it closed the connection instead of answering, as a KV port does."""
        if self.status is not None or code == "node_loading":
            return reason
        if code == _UNREACHABLE:
            return f"{reason}; is {self.server.port} its HTTP port, not its KV port?" if closed else reason
        if time.monotonic() - self._identified_at > self._timeouts.identify_s:
            self._other_program = await what_answers(self._session, self.server, self._policies.health_timeout_s)
            self._identified_at = time.monotonic()
        return f"{reason}; {self._other_program}" if self._other_program else reason

    def prompt_was_read(self, tokens: int, sent_at: float) -> None:
        """A prompt of ours, sent there at `sent_at`, was prefilled."""
        if sent_at < self.polled_at:
            self._read_tokens += tokens
        else:
            self.unread_tokens = max(0, self.unread_tokens - tokens)

    def promise(self, kv_tokens: int) -> KVPromise:
        made = KVPromise(kv_tokens)
        self._promises.add(made)
        return made

    def release(self, promise: KVPromise) -> None:
        """The answer has ended."""
        self._promises.discard(promise)

    @property
    def promised_tokens(self) -> int:
        return sum(promise.tokens for promise in self._promises)

    def lost(self, reason: str, code: str = _UNREACHABLE) -> None:
        self.reachable, self.trouble = False, reason
        self._condition = _CONDITIONS.get(code, _UNREACHABLE)

    @property
    def may_come_back(self) -> bool:
        """At any moment: it has not answered its first poll yet, or is starting, or was there before. A node that
        never answered, or needs a person to correct it, may not."""
        if not self.was_polled:
            return True
        if self.mismatch or self._condition in _NEEDS_CORRECTION:
            return False
        return self.status is not None or self._condition == "loading"

    def update(self, status: NodeStatus, asked_at: float | None = None) -> None:
        """What the node told when it was polled: at `asked_at` on the monotonic clock, now by default."""
        if self.status and self.epoch != status.epoch:  # it came back; at first sight every node is new
            self.breaker.renewed()
            self._best_rates.clear()
        self._missed_polls, self.client.epoch = 0, status.epoch
        self.status, self.reachable, self.polled_at = status, True, time.monotonic()
        self.unread_tokens = self._read_tokens = 0  # the status counts them now
        counted_until = self.polled_at if asked_at is None else asked_at
        self._promises = {promise for promise in self._promises if promise.sent_at >= counted_until}
        self._open_at_status = self.open
        self._compare_rates(status)
        self.power.add(status)
        self._condition, self.trouble = self._assess(status)
        own = self.own_model
        is_right = not (own and self._spellings) or is_same_model(own, self._spellings)
        self.misnamed = "" if is_right else _MISNAMED.format(own=own, model=self.model)

    def _compare_rates(self, status: NodeStatus) -> None:
        now = {(kind, rate.size): rate.tokens_per_s for kind, rates in _kinds(status.rates) for rate in rates}
        best = self._best_rates
        best.update({key: max(speed, best.get(key, 0.0)) for key, speed in now.items()})
        slowed = any(speed * _SLOWED < best[key] for key, speed in now.items())
        measured = (status.rates.prefill, status.rates.decode)
        few = any(max(rate.samples for rate in rates) < _FEW_SAMPLES for rates in measured if rates)
        self.doubtful = slowed or few
        if not self.doubtful:
            self.explorations = 0

    def _assess(self, status: NodeStatus) -> tuple[str, str]:
        """Its condition, and why it is not usable: empty when it is."""
        if status.status not in ("healthy", "loading"):
            return status.status, f"it is {status.status}" + (f": {status.reason}" if status.reason else "")
        if status.stalled_s > self._policies.stuck_s:
            return "stuck", f"its engine has made no progress for {status.stalled_s:.0f} s"
        if {self.server.role, status.role} == {"prefill", "decode"}:
            role, listed = status.role, self.server.role
            return "wrong role", f"it runs as a {role} node, and the config has it under {listed}_servers"
        return status.status, ""

    def peer_status(self, prefill: "NodeState") -> PeerStatus | None:
        """The result of this node's peer check of a prefill node, in its present epoch; None: not checked yet."""
        peers = self.status.peers if self.status and prefill.epoch else ()
        name = prefill.status.identity if prefill.status else ""
        found = [peer for peer in peers if peer.epoch == prefill.epoch and peer.identity in ("", name)]
        return min(found, key=lambda peer: bool(peer.refused), default=None)  # others may lie about their epoch

    def facts(self) -> MachineFacts:
        """What is known of its machine."""
        rates = self.status.rates if self.status else Rates()
        measured_w = self.power.mean_busy_w()
        return MachineFacts(
            prefill_rates=rates.local_prefill or rates.prefill,
            decode_rates=tuple(rate for rate in rates.decode if self.can_decode),
            busy_w=self.server.power_w if measured_w is None else measured_w,
            idle_w=self.server.idle_power_w,
            price_per_hour=price_per_hour(self.server),
        )

    def view(self, group: str) -> NodeView:
        status = self.status or NodeStatus()
        others = max(0, status.running - self._open_at_status)  # of other orchestrators
        running = min(others + self.open, status.slots.most) if self.role != "prefill" else 0
        if self.whole_answers:  # `open` are its prefills too
            running = min(status.running, status.slots.most)
        promised_bytes = math.ceil(self.promised_tokens * status.kv_token_bytes)
        return NodeView(
            name=self.name,
            role=self.role,
            model=self.model,
            engine=status.backend,
            usable=self.usable,
            group=group,
            exports=status.exports,
            imports=status.imports,
            whole_answers=self.whole_answers,
            prompt_logprobs=status.prompt_logprobs,
            context_window=status.context_window,
            kv_token_bytes=status.kv_token_bytes,
            kv_free_bytes=max(0, status.kv.limit_bytes - status.kv.reserved_bytes - promised_bytes),
            waiting=max(0, max(0, status.waiting - self._open_at_status) + self.open - running),
            waiting_tokens=max(0, status.waiting_tokens - self._read_tokens) + self.unread_tokens,
            running=running,  # those sent a moment ago included
            slots=status.slots.most,
            prefill_rates=status.rates.prefill or status.rates.local_prefill,
            decode_rates=status.rates.decode,
            warmth=self.breaker.warmth(),
        )

    def summary(self) -> ClusterNode:
        """For status pages."""
        status = self.status or NodeStatus()
        return ClusterNode(
            name=self.name,
            url=self.server.url,
            role=self.role,
            configured_role=self.server.role,
            model=self.model,
            node_model=self.own_model or None,
            weights=self.info.fingerprint.weights.hash if self.info and self.info.fingerprint else "",
            engine=status.backend or self.server.engine,
            state=self.state,
            why=self.why,
            warning=self.warning,
            misnamed=bool(self.misnamed),
            usable=self.usable,
            epoch=self.epoch,
            breaker=self.breaker.state,
            warmth=round(self.breaker.warmth(), 2),
            open=self.open,
            waiting=status.waiting,
            running=status.running,
            working=status.working,
            slots=status.slots,
            kv=status.kv,
            rates=status.rates,
            paths=status.paths,
            peers=status.peers,
            readings=status.readings if self.reachable else None,
            configured_power_w=self.server.power_w,
            idle_power_w=self.server.idle_power_w,
            identity=status.identity,
            trusted_link=status.trusted_link,
            heard_s_ago=round(time.monotonic() - self.polled_at, 3) if self.polled_at else None,
        )


def _kinds(rates: Rates) -> Iterator[tuple[str, tuple[Rate, ...]]]:
    """Without the first steps of a batch: they only schedule, and look fast."""
    yield from (("prefill", rates.prefill), ("local_prefill", rates.local_prefill))
    yield "decode", tuple(rate for rate in rates.decode if rate.samples >= _MIN_STEPS)
