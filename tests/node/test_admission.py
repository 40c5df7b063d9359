"""Admission: order, limits, and callbacks that request and release memory."""

import random
import threading
import time
from collections import deque
from collections.abc import Callable

import pytest

from disaggregated_inference.errors import DisaggError, KVMemoryFull, NodeBusy, RequestTooLarge
from disaggregated_inference.node.admission import Admission, Claim


class Gate:
    """An admission with a manual clock; it records the callbacks."""

    def __init__(self, limit_bytes: int = 100, max_slots: int = 4, max_waiting: int = 256) -> None:
        self.now = 0.0
        self.admission = Admission(limit_bytes, max_slots, max_waiting, clock=lambda: self.now)
        self.started: list[str] = []
        self.refused: dict[str, DisaggError] = {}

    def ask(
        self, name: str, cost: int, slots: int = 1, wait_s: float = 10, then: Callable[[], None] = lambda: None
    ) -> Claim:
        def start(claim: Claim) -> None:
            self.started.append(name)
            then()

        return self.admission.request(cost, slots, start, lambda error: self.refused.update({name: error}), wait_s)

    def serve(self, cost: int, seconds: float) -> None:
        """Hold memory for some seconds."""
        claim = self.ask("served", cost)
        self.now += seconds
        self.admission.release(claim)


def test_a_request_that_fits_starts_at_once() -> None:
    gate = Gate()
    a, b = gate.ask("a", 60), gate.ask("b", 40, wait_s=0)
    assert gate.started == ["a", "b"]
    assert (gate.admission.held_bytes, gate.admission.held_slots, gate.admission.waiting) == (100, 2, 0)
    gate.admission.release(a)
    gate.admission.release(a)
    gate.admission.release(b)
    assert (gate.admission.held_bytes, gate.admission.held_slots, gate.admission.peak_bytes) == (0, 0, 100)


def test_first_come_first_served() -> None:
    gate = Gate()
    first = gate.ask("first", 70)
    gate.ask("long", 80)
    gate.ask("short", 10)
    assert gate.started == ["first"], "short would fit, but long was there before"
    with pytest.raises(NodeBusy, match="2 requests wait"):
        gate.ask("impatient", 10, wait_s=0)
    gate.admission.release(first)
    assert gate.started == ["first", "long", "short"]


def test_slots_are_limited() -> None:
    gate = Gate(max_slots=3)
    two = gate.ask("two", 1, slots=2)
    gate.ask("more", 1, slots=2)
    assert gate.started == ["two"]
    gate.admission.release(two)
    assert gate.started == ["two", "more"]


def test_a_request_that_can_never_fit_is_refused() -> None:
    gate = Gate()
    with pytest.raises(RequestTooLarge, match=r"101 bytes .* never fit 100 bytes"):
        gate.ask("large", 101)
    with pytest.raises(RequestTooLarge, match=r"5 slots .* 4 slots"):
        gate.ask("many", 1, slots=5)


def test_a_full_queue_refuses() -> None:
    gate = Gate(max_waiting=2)
    gate.ask("a", 100)
    gate.ask("b", 1)
    gate.ask("c", 1)
    with pytest.raises(NodeBusy, match="2 requests wait"):
        gate.ask("d", 1)
    assert gate.admission.waiting == 2


def test_release_while_waiting() -> None:
    gate = Gate()
    first, long = gate.ask("first", 70), gate.ask("long", 80)
    gate.ask("short", 10)
    gate.admission.release(long)
    assert gate.started == ["first", "short"], "the next request does not wait for a released one"
    gate.admission.release(first)
    gate.now = 99
    gate.admission.sweep()
    assert gate.started == ["first", "short"]
    assert not gate.refused


def test_a_late_request_is_refused() -> None:
    gate = Gate()
    gate.ask("first", 70)
    gate.ask("long", 80, wait_s=5)
    gate.ask("short", 10, wait_s=20)
    gate.now = 4.9
    gate.admission.sweep()
    assert not gate.refused
    gate.now = 5.5
    gate.admission.sweep()
    assert list(gate.refused) == ["long"]
    assert isinstance(gate.refused["long"], KVMemoryFull)
    assert "within 5.5 s: 80 bytes and 1 slots are needed, 70 of 100 bytes" in str(gate.refused["long"])
    assert gate.started == ["first", "short"]


def test_a_requeued_claim_does_not_block_others() -> None:
    gate = Gate()
    other = gate.ask("other", 20)
    broken = gate.ask("broken", 60)
    behind = gate.ask("behind", 30)
    gate.admission.requeue(broken)
    assert gate.admission.held_bytes == 50
    assert gate.started == ["other", "broken", "behind"], "it waits for a release; the others do not"
    gate.ask("impatient", 10, wait_s=0)
    assert gate.started[-1] == "impatient"
    gate.admission.release(other)
    assert gate.started[-1] == "broken"
    gate.admission.requeue(broken)
    gate.admission.release(behind)
    assert gate.started[-2:] == ["broken", "broken"], "it also waits for the claims that overtook it"


def test_overtaking_claims_keep_their_order() -> None:
    gate = Gate()
    first, broken = gate.ask("first", 40), gate.ask("broken", 50)
    gate.ask("long", 70)
    gate.ask("short", 10)
    gate.admission.requeue(broken)
    assert gate.started == ["first", "broken"], "long is not blocked: short waits behind it"
    with pytest.raises(NodeBusy, match="3 requests wait"):
        gate.ask("impatient", 10, wait_s=0)
    gate.admission.release(first)
    assert gate.started == ["first", "broken", "broken"], "it starts before both of them"


def test_overtaking_ends_after_half_the_wait() -> None:
    """Short requests come and end all the time; the memory that they free is never in one piece."""
    gate = Gate()
    holding = [gate.ask("other", 20)]
    broken = gate.ask("broken", 60, wait_s=10)
    gate.admission.requeue(broken)
    for gate.now in (1, 2, 3, 4):
        holding.append(gate.ask("short", 20))
        gate.admission.release(holding.pop(0))
        gate.admission.requeue(broken)
    assert gate.started.count("short") == 4
    assert gate.admission.retry_after_s() == 1, "there is memory for a small request"
    gate.now = 5
    gate.ask("short", 20)
    gate.ask("short", 20)
    with pytest.raises(NodeBusy):
        gate.ask("impatient", 1, wait_s=0)
    assert gate.started.count("short") == 4, "in the second half of its time it is not overtaken"
    gate.admission.release(holding.pop())
    assert gate.started[-3:] == ["broken", "short", "short"]


def test_error_messages_for_fragmented_memory() -> None:
    gate = Gate()
    gate.ask("other", 20)
    gate.admission.requeue(gate.ask("broken", 60, wait_s=5))
    gate.now = 5.5
    gate.admission.sweep()
    assert isinstance(refused := gate.refused["broken"], KVMemoryFull)
    assert "no 60 bytes of KV memory in one piece within 5.5 s" in str(refused)
    assert "other requests hold only 20 of the 100; request fewer tokens" in str(refused)
    gate.admission.requeue(gate.ask("broken", 60, wait_s=5))
    gate.ask("short", 30)
    gate.now = 11
    gate.admission.sweep()
    assert "within 5.5 s: 60 bytes and 1 slots are needed, 50 of 100 bytes" in str(gate.refused["broken"])


def test_requeue_after_a_release_starts_at_once() -> None:
    gate = Gate()
    other, broken = gate.ask("other", 20), gate.ask("broken", 60)
    gate.admission.release(other)
    gate.admission.requeue(broken)
    assert gate.started == ["other", "broken", "broken"], "the release that it would wait for has happened"
    gate.admission.requeue(broken)
    assert list(gate.refused) == ["broken"]


def test_requeue_of_the_last_holder_unblocks_the_others() -> None:
    gate = Gate()
    other, last = gate.ask("other", 10), gate.ask("last", 20)
    gate.admission.release(other)
    broken = gate.ask("broken", 30)
    gate.admission.requeue(broken)
    gate.admission.requeue(last)
    assert gate.started == ["other", "last", "broken", "last", "broken"]


def test_requeued_claims_keep_their_order() -> None:
    gate = Gate()
    other = gate.ask("other", 10)
    claims = [gate.ask(name, 20) for name in "ab"]
    for claim in claims:
        gate.admission.requeue(claim)
    gate.admission.requeue(gate.ask("c", 20))
    gate.admission.release(other)
    assert gate.started == ["other", "a", "b", "c", "a", "b", "c"]


def test_requeue_without_other_holders_is_refused() -> None:
    gate = Gate()
    first, second = gate.ask("first", 30), gate.ask("second", 60)
    gate.ask("third", 50)
    gate.admission.requeue(first)
    gate.admission.requeue(second)
    assert isinstance(gate.refused["second"], KVMemoryFull)
    assert "60 bytes of KV memory in one piece, though other requests hold only 0" in str(gate.refused["second"])
    assert gate.started == ["first", "second", "first", "third"], "the claim of first was requeued"
    gate.admission.requeue(second)
    assert gate.admission.held_bytes == 80, "an ended claim is not requeued"


def test_close_refuses_all_claims() -> None:
    gate = Gate()
    held = gate.ask("held", 100)
    gate.ask("a", 1)
    gate.ask("b", 1)
    gate.admission.close(NodeBusy("stopping"))
    assert {name: str(error) for name, error in gate.refused.items()} == {"a": "stopping", "b": "stopping"}
    for _ in range(2):
        with pytest.raises(NodeBusy, match="stopping"):
            gate.ask("late", 1)
    gate.admission.release(held)
    assert (gate.started, gate.admission.held_bytes) == (["held"], 0)


def test_requeue_after_close_is_refused() -> None:
    gate = Gate()
    gate.ask("other", 1)
    held = gate.ask("held", 1)
    gate.admission.close(NodeBusy("stopping"))
    gate.admission.requeue(held)
    assert str(gate.refused["held"]) == "stopping"
    assert (gate.admission.waiting, gate.admission.held_bytes) == (0, 1)


def test_callbacks_may_request_and_release() -> None:
    gate = Gate(max_waiting=10_000)
    first = gate.ask("first", 100)
    claims: deque[Claim] = deque()
    for number in range(5000):
        claims.append(gate.ask(str(number), 100, then=lambda: gate.admission.release(claims.popleft())))
    claims.append(gate.ask("asks", 100, then=lambda: claims.append(gate.ask("asked", 1))))
    gate.admission.release(first)
    assert len(gate.started) == 5002, "a long queue is not a deep stack"
    gate.admission.release(claims[0])
    assert gate.started[-1] == "asked"
    assert gate.admission.held_bytes == 1


def test_a_claim_released_before_its_callback_is_not_started() -> None:
    gate = Gate()
    first = gate.ask("first", 100)
    claims: list[Claim] = []
    gate.ask("a", 50, then=lambda: gate.admission.release(claims[0]))
    claims.append(gate.ask("b", 50))
    gate.admission.release(first)
    assert gate.started == ["first", "a"]
    assert gate.admission.held_bytes == 50


def test_a_failing_callback_releases_its_memory(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    first = gate.ask("first", 100)

    def fail() -> None:
        raise RuntimeError("no")

    gate.ask("broken", 100, then=fail)
    gate.ask("next", 100)
    gate.admission.release(first)
    assert gate.started == ["first", "broken", "next"]
    assert "could not start" in caplog.text
    assert str(gate.refused["broken"]) == "cannot start: no"


def test_retry_after() -> None:
    gate = Gate()
    assert gate.admission.retry_after_s() == 1
    claims = [gate.ask("held", 25) for _ in range(4)]
    assert gate.admission.retry_after_s() == 5, "no release was measured yet"
    for claim in claims:
        gate.now += 3
        gate.admission.release(claim)
        gate.ask("held", 25)
    gate.now += 3
    assert gate.admission.retry_after_s() == 3, "four releases in twelve seconds, no request waits"
    for _ in range(3):
        gate.ask("waits", 100)
    assert gate.admission.retry_after_s() == 12
    gate.now += 1000
    assert gate.admission.retry_after_s() == 60


def test_retry_after_ignores_idle_time() -> None:
    """Two claims held memory for nine seconds each, long ago. Now four hold memory at once."""
    gate = Gate()
    for _ in range(2):
        gate.serve(25, seconds=9)
        gate.now += 1000
    for _ in range(4):
        gate.ask("held", 25)
    gate.now += 1
    assert gate.admission.retry_after_s() == 2, "four that take nine seconds each: one ends every 2.25"
    gate.ask("waits", 25)
    gate.ask("waits", 25)
    assert gate.admission.retry_after_s() == 7
    gate.now += 39
    assert gate.admission.retry_after_s() == 44, "the next release is late: 160 seconds were held without one"


def test_retry_after_depends_on_the_request() -> None:
    gate = Gate()
    for _ in range(2):
        gate.serve(70, seconds=8)
    gate.ask("held", 70)
    assert gate.admission.retry_after_s() == 1, "30 bytes and three slots are free"
    with pytest.raises(NodeBusy) as busy:
        gate.ask("impatient", 31, wait_s=0)
    assert busy.value.retry_after_s == 8
    with pytest.raises(NodeBusy) as busy:
        gate.ask("impatient", 30, slots=4, wait_s=0)
    assert busy.value.retry_after_s == 8
    gate.ask("waits", 80, wait_s=5)
    gate.now += 6
    gate.admission.sweep()
    assert isinstance(refused := gate.refused["waits"], KVMemoryFull)
    assert refused.retry_after_s == 8


def test_limits_hold_with_many_threads() -> None:
    admission = Admission(1000, 5, max_waiting=10_000)
    lock, held, most = threading.Lock(), [0, 0], [0, 0]

    def count(cost: int, slots: int) -> None:
        with lock:
            held[:] = held[0] + cost, held[1] + slots
            most[:] = max(most[0], held[0]), max(most[1], held[1])

    def use(rng: random.Random, cost: int, slots: int) -> None:
        ready = threading.Event()

        def start(claim: Claim) -> None:
            count(cost, slots)
            ready.set()

        claim = admission.request(cost, slots, start, lambda error: None, wait_s=60)
        assert ready.wait(30)
        time.sleep(rng.random() / 1000)
        count(-cost, -slots)
        admission.release(claim)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            withdrawn = admission.request(rng.randint(1, 700), 1, lambda claim: None, lambda error: None, wait_s=60)
            time.sleep(rng.random() / 4000)
            admission.release(withdrawn)  # waiting or held
            use(rng, rng.randint(1, 700), rng.randint(1, 3))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (admission.held_bytes, admission.held_slots, admission.waiting) == (0, 0, 0)
    assert 700 < admission.peak_bytes <= 1000
    assert most[0] <= 1000
    assert 3 < most[1] <= 5
