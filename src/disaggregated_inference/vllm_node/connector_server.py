"""The node's side of the socket to vLLM: takes the connections of its scheduler and its workers, grants memory to
tickets and takes it back, and passes on what they report."""

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from disaggregated_inference.errors import BadRequest, EngineUnavailable
from disaggregated_inference.kv import KVDType
from disaggregated_inference.models import ModelSpec
from disaggregated_inference.timeouts import VllmBorderTimeouts
from disaggregated_inference.vllm_connector.messages import (
    MAX_PACKET_BYTES,
    PROTOCOL,
    Accept,
    Attach,
    AttachScheduler,
    AttachWorker,
    Decoder,
    Ended,
    Exported,
    ExportedRows,
    Failed,
    Grant,
    InvalidMessage,
    LogitsReady,
    Ready,
    Refuse,
    Released,
    ReleaseTicket,
    Started,
    Stepped,
    ToNode,
    ToVllm,
    Unusable,
    encode,
)
from disaggregated_inference.vllm_node.staging import Staging
from disaggregated_inference.vllm_node.versions import caution

log = logging.getLogger(__name__)

_WAITING = "the connector inside vLLM has not attached yet"


class Reports(Protocol):
    """What vLLM tells about tickets. Called on the threads of its connections."""

    def started(self, ticket: str, cached_tokens: int) -> None: ...
    def stepped(self) -> None: ...
    def exported(self, worker: int, rows: ExportedRows) -> None: ...
    def logits_ready(self, ticket: str) -> None: ...
    def failed(self, ticket: str, reason: str) -> None: ...
    def ended(self, ticket: str, computed_tokens: int, status: str) -> None: ...
    def lost(self, reason: str) -> None:
        """vLLM is gone, with all its requests."""
        ...


@dataclass(eq=False, slots=True)
class Peer:
    sock: socket.socket
    attach: Attach
    ready: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: ToVllm) -> None:
        with self.lock:
            self.sock.sendall(encode(message))

    def hang_up(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True)
class AttachedEngine:
    """One run of a vLLM, with all its processes attached."""

    scheduler: AttachScheduler
    dtype: KVDType
    senders: tuple[int, ...]  # for each layer, how many workers send a part of its heads


class ConnectorServer:
    """`spec` is the model that vLLM must have. One vLLM at a time."""

    def __init__(
        self, path: Path, spec: ModelSpec, staging: Staging, timeouts: VllmBorderTimeouts = VllmBorderTimeouts()
    ) -> None:
        self.path, self._spec, self._staging, self._timeouts = path, spec, staging, timeouts
        self.reports: Reports | None = None
        self._changed = threading.Condition()
        self._scheduler: Peer | None = None
        self._workers: dict[int, Peer] = {}
        self.engine: AttachedEngine | None = None
        self._required_dtype: KVDType | None = None  # of the first vLLM: prompts of another would not fit
        self._required_tokens = 0  # likewise: the node has told how long its prompts may be
        self.reason = _WAITING
        self._explained = ""  # what to do about it; until all are attached
        self._releasing: dict[str, tuple[set[int], Callable[[], None]]] = {}
        self._decoder = Decoder(ToNode)
        self._listener = _listen(path)
        self._inode = path.stat().st_ino
        threading.Thread(target=self._accept_all, name="vllm-border", daemon=True).start()

    def wait_attached(
        self,
        timeout_s: float,
        stopped: Callable[[], str] = lambda: "",
        begin: Callable[[str], None] = lambda step: None,
    ) -> AttachedEngine:
        """`stopped` may say why vLLM will never attach; `begin` is told what is waited for."""
        deadline, told = time.monotonic() + timeout_s, ""
        with self._changed:
            while not self.engine:
                if told != self.trouble():
                    begin(told := self.trouble())
                left = deadline - time.monotonic()
                if (why := stopped()) or left <= 0:
                    raise EngineUnavailable(f"vLLM did not attach: {why or self.trouble()}")
                self._changed.wait(min(left, self._timeouts.poll_s))
            return self.engine

    def trouble(self) -> str:
        """Why no prompt can be computed now; empty when all is well."""
        return "" if self.engine else self._explained or self.reason

    def explain(self, why: str) -> None:
        """Why vLLM is not attached, in words that say what to do."""
        with self._changed:
            if not self.engine and why != self._explained:
                self._explained = why
                log.error("vLLM is not attached: %s", why)

    def grant(self, ticket: str, offset: int, tokens: int) -> AttachedEngine:
        """Before the request is sent to vLLM."""
        with self._changed:
            if not self.engine or not self._scheduler:
                raise EngineUnavailable(f"vLLM is not attached: {self.trouble()}")
            message, engine = Grant(ticket=ticket, offset=offset, tokens=tokens), self.engine
            peers = [*self._workers.values(), self._scheduler]
        for peer in peers:
            try:
                peer.send(message)
            except OSError as error:
                peer.hang_up()
                raise EngineUnavailable(f"vLLM does not take messages: {error}") from error
        return engine

    def release(self, ticket: str, on_released: Callable[[], None]) -> None:
        """Take the memory back. `on_released` is called when no worker writes to it any more."""
        with self._changed:
            workers, scheduler = dict(self._workers), self._scheduler
            if workers:
                self._releasing[ticket] = (set(workers), on_released)
        for peer in [*workers.values(), *([scheduler] if scheduler else [])]:
            try:
                peer.send(ReleaseTicket(ticket=ticket))
            except OSError:
                peer.hang_up()  # the reader ends what it was to release
        if not workers:
            on_released()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with suppress(OSError):
            if self.path.stat().st_ino == self._inode:  # it is not another node's by now
                self.path.unlink()
        self._lose("this node is stopping", level=logging.INFO)

    def _accept_all(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            _limit_sends(sock, self._timeouts.send_s)
            threading.Thread(target=self._serve, args=(sock,), name="vllm-peer", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        """One connection, from its first message to its end."""
        peer: Peer | None = None
        reason = "the connection ended"
        try:
            with sock:
                peer = self._attach(sock)
                while peer and (packet := sock.recv(MAX_PACKET_BYTES)):
                    self._take(peer, self._decoder.decode(packet))
        except (OSError, InvalidMessage) as error:
            reason = str(error)
        except Exception as error:
            log.exception("a message of vLLM's connector failed")
            reason = f"{type(error).__name__}: {error}"
        if peer:
            self._lose(f"vLLM's {_name(peer)} is gone: {reason}", peer)

    def _attach(self, sock: socket.socket) -> Peer | None:
        attach = self._decoder.decode(sock.recv(MAX_PACKET_BYTES))
        if not isinstance(attach, AttachScheduler | AttachWorker):
            raise InvalidMessage("the first message of a connection is no attach")
        peer = Peer(sock, attach)
        with self._changed:
            if refused := self._why_refused(attach):
                self.reason = refused
                log.error("vLLM's %s is refused: %s", _name(peer), refused)
                peer.send(Refuse(reason=refused))
                return None
            socket.send_fds(sock, [encode(self._accept())], [self._staging.descriptor])
            if isinstance(attach, AttachScheduler):
                self._scheduler = peer
            else:
                self._workers[attach.rank] = peer
        return peer

    def _accept(self) -> Accept:
        layout = self._spec.layout
        return Accept(
            layers=len(layout.layers),
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            windows=tuple(plan.window for plan in layout.layers),
            vocabulary=self._spec.vocabulary,
            region_bytes=self._staging.size_bytes,
        )

    def _why_refused(self, attach: Attach) -> str:
        """Empty: it fits."""
        if attach.protocol != PROTOCOL:
            return f"its connector speaks protocol {attach.protocol}, this node {PROTOCOL}: use one version for both"
        engines = {peer.attach.engine for peer in self.peers()}
        if engines - {attach.engine}:
            return "another vLLM is attached to this node"
        if isinstance(attach, AttachScheduler):
            if attach.max_tokens < self._required_tokens:
                wanted = f"start it with {self._required_tokens}, or restart this node"
                return f"its --max-model-len is {attach.max_tokens}: {wanted}"
            return "" if not self._scheduler else "its scheduler is attached already"
        if attach.rank in self._workers:
            return f"worker {attach.rank} is attached already"
        dtypes = {peer.attach.dtype for peer in self._workers.values() if isinstance(peer.attach, AttachWorker)}
        if self._required_dtype:
            dtypes.add(self._required_dtype)
        if dtypes - {attach.dtype}:
            return f"its KV is {attach.dtype}, and {dtypes.pop()} was expected"
        layout, vocabulary = self._spec.layout, self._spec.vocabulary
        expected = (layout.kv_heads, layout.head_dim, vocabulary)
        if (attach.kv_heads, attach.head_dim, attach.vocabulary) != expected:
            found = f"{attach.kv_heads} KV heads of {attach.head_dim} and {attach.vocabulary} tokens"
            return f"it has another model: {found}, not {layout} and {vocabulary}"
        return ""

    def _complete(self) -> None:
        """Under the lock: ready when all processes are here and their heads make up the whole cache."""
        if not self._scheduler or not isinstance(scheduler := self._scheduler.attach, AttachScheduler):
            return
        ready = sum(peer.ready for peer in self._workers.values())
        if ready < scheduler.workers or not self._scheduler.ready:
            self.reason = f"{ready} of {scheduler.workers} workers of vLLM have attached"
            return
        attached = [peer.attach for peer in self._workers.values() if isinstance(peer.attach, AttachWorker)]
        layout = self._spec.layout
        heads = [set[int]() for _ in layout.layers]
        senders = [0] * len(layout.layers)
        for each in (sent for worker in attached for sent in worker.heads):
            numbers = set(range(each.first, each.first + each.count))
            if each.layer >= len(heads) or heads[each.layer] & numbers:
                return self.refuse_all(f"layer {each.layer} of vLLM has heads twice, or is not in the model")
            heads[each.layer] |= numbers
            senders[each.layer] += 1
        if any(found != set(range(layout.kv_heads)) for found in heads):
            return self.refuse_all("vLLM's workers do not send all heads of all layers")
        if sum(worker.sends_logits for worker in attached) != 1:
            return self.refuse_all("not exactly one of vLLM's workers sends logits")
        self._required_dtype = attached[0].dtype
        self._required_tokens = self._required_tokens or scheduler.max_tokens
        self.engine, self.reason = AttachedEngine(scheduler, attached[0].dtype, tuple(senders)), ""
        self._explained = ""
        log.info("vLLM %s is attached, with %d workers", scheduler.vllm_version, len(attached))
        if words := caution(scheduler.vllm_version, on_cpu=attached[0].device == "cpu"):
            log.warning("%s", words)
        self._changed.notify_all()

    def refuse_all(self, reason: str) -> None:
        self.explain(f"it is refused: {reason}")
        for peer in self.peers():
            peer.hang_up()

    def peers(self) -> list[Peer]:
        return [*self._workers.values(), *([self._scheduler] if self._scheduler else [])]

    def _take(self, peer: Peer, message: ToNode) -> None:
        rank = peer.attach.rank if isinstance(peer.attach, AttachWorker) else -1
        if isinstance(message, Released):
            self._released(rank, message.ticket)
        elif isinstance(message, Ready):
            with self._changed:
                peer.ready = True
                self._complete()
        elif isinstance(message, Unusable):
            self.explain(f"vLLM's {_name(peer)} cannot work with this node: {message.reason}")
        elif not (reports := self.reports):
            pass
        elif isinstance(message, Exported):
            for rows in message.rows:
                reports.exported(rank, rows)
        elif isinstance(message, LogitsReady):
            reports.logits_ready(message.ticket)
        elif isinstance(message, Started):
            reports.started(message.ticket, message.cached_tokens)
        elif isinstance(message, Stepped):
            reports.stepped()
        elif isinstance(message, Ended):
            reports.ended(message.ticket, message.computed_tokens, message.status)
        elif isinstance(message, Failed):
            reports.failed(message.ticket, message.reason)
        else:
            raise InvalidMessage(f"{type(message).__name__} was not expected here")

    def _released(self, rank: int, ticket: str) -> None:
        with self._changed:
            waited, on_released = self._releasing.get(ticket, (set[int](), lambda: None))
            waited.discard(rank)
            if waited or ticket not in self._releasing:
                return
            del self._releasing[ticket]
        on_released()

    def _lose(self, reason: str, peer: Peer | None = None, level: int = logging.WARNING) -> None:
        """One process of a vLLM without the others is of no use: all connections end."""
        with self._changed:
            if peer and peer not in self.peers():
                return
            peers, was_attached = self.peers(), self.engine is not None
            self._scheduler, self._workers, self.engine, self.reason = None, {}, None, reason
            released = [callback for _, callback in self._releasing.values()]
            self._releasing.clear()
        for each in peers:
            each.hang_up()
        if was_attached:
            log.log(level, "%s", reason)
            if self.reports:
                self.reports.lost(reason)
        for callback in released:
            callback()


def _name(peer: Peer) -> str:
    return f"worker {peer.attach.rank}" if isinstance(peer.attach, AttachWorker) else "scheduler"


def _listen(path: Path) -> socket.socket:
    """Only this user may connect, and not before `listen`."""
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(64)
    return listener


def _remove_stale(path: Path) -> None:
    """A socket that a node left behind. Anything else at that path stays."""
    if not os.path.lexists(path):
        return
    if not path.is_socket():
        raise BadRequest(f"{path} exists and is no socket: give another --vllm-socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise BadRequest(f"{path} cannot be used: {error}: give another --vllm-socket") from error
    raise BadRequest(f"another node listens at {path}: stop it, or give another --vllm-socket")


def _limit_sends(sock: socket.socket, seconds: float) -> None:
    whole = int(seconds)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", whole, int((seconds - whole) * 1e6)))
