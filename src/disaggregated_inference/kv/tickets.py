"""Tickets: the one-shot, expiring right to fetch the KV of one prefill attempt.

A ticket is bound to a model. The first fetch takes it: other connections of that fetch may join or resume, other
fetches are refused. A ticket has a lease that the receiver renews. When it is fetched, cancelled or expired, its memory
is released exactly once, and a counter records which of the three happened.
"""

import hmac
import math
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from disaggregated_inference.errors import Cancelled, NodeBusy, TicketRefused
from disaggregated_inference.kv.fingerprint import Fingerprint, require_same_model
from disaggregated_inference.timeouts import KVTimeouts

ReleaseKV = Callable[[], None]
Ending = Literal["fetched", "cancelled", "expired"]

_NO_TICKET = "no such ticket: unknown, expired, fetched already, or a wrong secret"
_MAX_EARLY = 4096


@dataclass(slots=True)
class Ticket:
    id: str
    secret: str
    fingerprint: Fingerprint
    release: ReleaseKV
    expires_at: float
    fetch: str | None = None


def _no_endings() -> dict[Ending, int]:
    return {"fetched": 0, "cancelled": 0, "expired": 0}


@dataclass(slots=True)
class TicketBook:
    """All live tickets of a node. Any thread may call; `release` runs outside the lock."""

    lease_s: float = 30.0
    most: int = 1024
    clock: Callable[[], float] = time.monotonic
    timeouts: KVTimeouts = KVTimeouts()
    endings: dict[Ending, int] = field(default_factory=_no_endings)  # how many tickets ended how
    _live: dict[str, Ticket] = field(default_factory=dict)
    # Cancelled before they were issued, with the time.
    _early: OrderedDict[str, float] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def issue(self, fingerprint: Fingerprint, release: ReleaseKV, id: str | None = None) -> Ticket:
        """A new ticket; `id` may be chosen by the orchestrator, new for every attempt."""
        self.sweep()
        ticket = Ticket(
            id=id or secrets.token_urlsafe(16),
            secret=secrets.token_urlsafe(32),
            fingerprint=fingerprint,
            release=release,
            expires_at=math.inf,  # the lease starts when the KV is complete
        )
        with self._lock:
            if self._early.pop(ticket.id, -math.inf) > self.clock() - self.timeouts.early_cancel_s:
                raise Cancelled("this ticket was cancelled before it was issued")
            if ticket.id in self._live:
                raise TicketRefused(f"ticket {ticket.id} exists already; every attempt needs a new ticket")
            if len(self._live) >= self.most:
                raise NodeBusy(f"{self.most} tickets are waiting to be fetched already")
            self._live[ticket.id] = ticket
        return ticket

    def redeem(self, id: str, secret: str, fetch: str, fingerprint: Fingerprint) -> Ticket:
        """Give the ticket to a connection of `fetch`. One message for all refusals: an attacker learns nothing."""
        self.sweep()
        with self._lock:
            ticket = self._checked(id, secret, fetch, fingerprint)
            ticket.fetch = fetch
            self._prolong(ticket)
            return ticket

    def secret_of(self, id: str) -> str:
        """In the authenticated mode the secret is a key and is not sent."""
        with self._lock:
            if ticket := self._live.get(id):
                return ticket.secret
        raise TicketRefused(_NO_TICKET)

    def check(self, id: str, secret: str, fetch: str, fingerprint: Fingerprint) -> None:
        """The checks of `redeem`; the ticket stays unspent."""
        self.sweep()
        with self._lock:
            self._checked(id, secret, fetch, fingerprint)

    def _checked(self, id: str, secret: str, fetch: str, fingerprint: Fingerprint) -> Ticket:
        ticket = self._live.get(id)
        known = ticket is not None and hmac.compare_digest(ticket.secret.encode(), secret.encode())
        if ticket is None or not known or ticket.fetch not in (None, fetch):
            raise TicketRefused(_NO_TICKET)
        require_same_model(ticket.fingerprint, fingerprint)
        return ticket

    def renew(self, id: str) -> None:
        """The receiver is alive. Renewing an ended ticket is no error: its connection gets the reason anyway."""
        with self._lock:
            if ticket := self._live.get(id):
                self._prolong(ticket)

    def hold(self, id: str) -> None:
        """Start the lease: the KV is complete, or will never be."""
        with self._lock:
            if ticket := self._live.get(id):
                ticket.expires_at = self.clock() + self.lease_s

    def _prolong(self, ticket: Ticket) -> None:
        if ticket.expires_at != math.inf:
            ticket.expires_at = self.clock() + self.lease_s

    def fetched(self, id: str) -> bool:
        return self._end(id, "fetched")

    def cancel(self, id: str) -> bool:
        """Whether the ticket existed. If not, it is refused when it is issued later: a cancellation may overtake the
        request that it cancels."""
        if self._end(id, "cancelled"):
            return True
        with self._lock:
            self._early[id] = self.clock()
            while len(self._early) > _MAX_EARLY:
                self._early.popitem(last=False)
        return False

    def sweep(self) -> int:
        """End expired tickets; returns how many."""
        now = self.clock()
        with self._lock:
            late = [ticket.id for ticket in self._live.values() if ticket.expires_at <= now]
        return sum(self._end(id, "expired") for id in late)

    def __len__(self) -> int:
        return len(self._live)

    def _end(self, id: str, how: Ending) -> bool:
        with self._lock:
            ticket = self._live.pop(id, None)
            if ticket is None:
                return False
            self.endings[how] += 1
        ticket.release()
        return True
