"""The connection of one process of vLLM to the node: dials until there is one, keeps the grants, and sends from its own
thread, so that vLLM never waits for the node."""

import contextlib
import logging
import mmap
import os
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from disaggregated_inference.vllm_connector.messages import (
    MAX_PACKET_BYTES,
    PROTOCOL,
    Accept,
    Attach,
    Decoder,
    Grant,
    InvalidMessage,
    LinkState,
    Ready,
    Refuse,
    Released,
    ReleaseTicket,
    ToNode,
    ToVllm,
    Unusable,
    encode,
)

log = logging.getLogger("vllm.disagg")

_REDIAL_S = 0.5
_REDIAL_REFUSED_S = 5.0


class _Refused(Exception):
    """The node said why."""


@dataclass(slots=True)
class Outgoing:
    """A message that may be sent once `wait` has returned: then its bytes are in shared memory. The node that it was
    meant for may be gone by then: `connection` says which one it was."""

    message: ToNode
    connection: int
    wait: Callable[[], None] | None = None


class NodeLink:
    """`on_region` gets the shared memory of every node that accepts. `lock` is held around every use of a grant: after
    `Released` nothing is written for that ticket."""

    def __init__(self, path: str, attach: Attach, on_region: Callable[[Accept, mmap.mmap], None]) -> None:
        self._path, self._attach, self._on_region = path, attach, on_region
        self.lock = threading.RLock()
        self.grants: dict[str, Grant] = {}
        self._sock: socket.socket | None = None
        self._number = 0  # of the current connection
        self._decoder = Decoder(ToVllm)
        self._outgoing: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()
        self._trouble = "it has not dialled yet"  # why there is no connection
        self._closing = threading.Event()
        self._dialer = threading.Thread(target=self._dial_forever, name="disagg-dial", daemon=True)
        self._sender = threading.Thread(target=self._send_all, name="disagg-send", daemon=True)
        self._dialer.start()
        self._sender.start()

    def send(self, message: ToNode, wait: Callable[[], None] | None = None) -> None:
        """In the order of the calls. Where no node is attached, nothing is sent."""
        self._outgoing.put(Outgoing(message, self._number, wait))

    def grant_of(self, ticket: str) -> Grant | None:
        """The node sends a grant before its request: if it is not here yet, it waits in the socket."""
        with self.lock:
            if ticket not in self.grants:
                self._take_waiting()
            return self.grants.get(ticket)

    def state(self) -> LinkState:
        return LinkState(protocol=PROTOCOL, socket=self._path, trouble="" if self._sock else self._trouble)

    def close(self) -> None:
        self._closing.set()
        self._outgoing.put(None)
        self._hang_up()

    def _hang_up(self) -> None:
        sock = self._sock
        if sock:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _dial_forever(self) -> None:
        while not self._closing.is_set():
            pause_s = _REDIAL_S
            try:
                self._serve_connection()
            except _Refused as error:
                log.error("the node at %s refuses this vLLM: %s", self._path, error)
                self._trouble, pause_s = f"the node refuses this vLLM: {error}", _REDIAL_REFUSED_S
            except (OSError, InvalidMessage) as error:
                if (trouble := _words(error)) != self._trouble:
                    log.warning("no connection to the node at %s: %s", self._path, trouble)
                self._trouble = trouble
            except Exception as error:
                log.exception("the connection to the node at %s failed", self._path)
                self._trouble, pause_s = f"{type(error).__name__}: {error}", _REDIAL_REFUSED_S
            self._closing.wait(pause_s)

    def _serve_connection(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(self._path)
            sock.sendall(encode(self._attach))
            try:
                self._begin(sock, *self._receive_answer(sock))
            except RuntimeError as error:  # of the model, or of the device
                sock.sendall(encode(Unusable(reason=str(error)[:500])))
                raise
            self.send(Ready())  # behind all that was meant for an earlier connection: it may still write to memory
            try:
                log.info("attached to the node at %s", self._path)
                while self._wait_readable(sock):
                    with self.lock:
                        self._take_waiting()
            finally:
                self._end()
                log.warning("the node at %s is gone", self._path)

    def _receive_answer(self, sock: socket.socket) -> tuple[Accept, int]:
        packet, descriptors, _, _ = socket.recv_fds(sock, MAX_PACKET_BYTES, 1)
        answer = self._decoder.decode(packet) if packet else None
        if isinstance(answer, Refuse):
            raise _Refused(answer.reason)
        if not isinstance(answer, Accept) or len(descriptors) != 1:
            raise InvalidMessage("the node's first message is no Accept with shared memory")
        return answer, descriptors[0]

    def _begin(self, sock: socket.socket, accept: Accept, descriptor: int) -> None:
        try:
            memory = mmap.mmap(descriptor, accept.region_bytes)
        finally:
            os.close(descriptor)
        with self.lock:
            self.grants.clear()
            self._number += 1
            self._on_region(accept, memory)
            self._sock = sock

    def _end(self) -> None:
        with self.lock:
            self._sock = None
            self.grants.clear()

    def _wait_readable(self, sock: socket.socket) -> bool:
        """Without the lock, and without taking the packet. False at the end of the connection."""
        return bool(sock.recv(1, socket.MSG_PEEK)) and self._sock is not None

    def _take_waiting(self) -> None:
        """Under the lock: all messages that have arrived."""
        while self._sock:
            try:
                packet = self._sock.recv(MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._sock = None
                return
            try:
                self._take(self._decoder.decode(packet))
            except InvalidMessage as error:  # vLLM's own thread may be here, and vLLM goes on
                log.error("the node at %s sends what this connector does not know: %s", self._path, error)
                self._hang_up()
                self._sock = None

    def _take(self, message: Any) -> None:
        if isinstance(message, Grant):
            self.grants[message.ticket] = message
        elif isinstance(message, ReleaseTicket):
            self.grants.pop(message.ticket, None)
            self.send(Released(ticket=message.ticket))  # behind everything that was exported for it
        else:
            raise InvalidMessage(f"{type(message).__name__} was not expected here")

    def _send_all(self) -> None:
        while (item := self._outgoing.get()) is not None:
            try:
                if item.wait:
                    item.wait()
                sock = self._sock
                if sock and item.connection == self._number:
                    sock.sendall(encode(item.message))
            except OSError as error:
                log.debug("a message to the node was lost: %s", error)
            except Exception:
                log.exception("a message to the node failed")
                self._hang_up()  # the node then fails its requests, instead of waiting for this message


def _words(error: Exception) -> str:
    """What is wrong with the socket, and what to do."""
    if isinstance(error, FileNotFoundError):
        return "there is no such socket where vLLM runs: in a container, mount its folder"
    if isinstance(error, ConnectionRefusedError):
        return "no node listens there"
    if isinstance(error, PermissionError):
        return f"user {os.getuid()}, who runs vLLM, may not open it: run vLLM and the node as one user"
    return str(error) or type(error).__name__
