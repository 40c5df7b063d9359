"""Admission: order, limits, and callbacks that may do anything."""

import random
import threading
import time
from collections import deque
from collections.abc import Callable

import pytest

from disaggregated_inference.errors import DisaggError, KVMemoryFull, NodeBusy, RequestTooLarge
from disaggregated_inference.node.admission import Admission, Claim


class Gate:
    """An admission on a clock that stands still, and what it called."""

    def __init__(self, limit_bytes: int = 100, most_slots: int = 4, most_waiting: int = 256) -> None:
        self.now = 0.0
        self.admission = Admission(limit_bytes, most_slots, most_waiting, clock=lambda: self.now)
        self.started: list[str] = []
        self.refused: dict[str, DisaggError] = {}

    def ask(
        self, name: str, cost: int, slots: int = 1, wait_s: float = 10, then: Callable[[], None] = lambda: None
    ) -> Claim:
        def start(claim: Claim) -> None:
            self.started.append(name)
            then()

        return self.admission.ask(cost, slots, start, lambda error: self.refused.update({name: error}), wait_s)

    def serve(self, cost: int, seconds: float) -> None:
        """One from its start to its end."""
        claim = self.ask("served", cost)
        self.now += seconds
        self.admission.release(claim)


def test_what_fits_starts_at_once() -> None:
    gate = Gate()
    a, b = gate.ask("a", 60), gate.ask("b", 40, wait_s=0)
    assert gate.started == ["a", "b"]
    assert (gate.admission.held_bytes, gate.admission.held_slots, gate.admission.waiting) == (100, 2, 0)
    gate.admission.release(a)
    gate.admission.release(a)
    gate.admission.release(b)
    assert (gate.admission.held_bytes, gate.admission.held_slots, gate.admission.peak_bytes) == (0, 0, 100)


def test_in_order_of_asking_and_nothing_overtakes() -> None:
    gate = Gate()
    first = gate.ask("first", 70)
    gate.ask("long", 80)
    gate.ask("short", 10)
    assert gate.started == ["first"], "short would fit, but long was there before"
    with pytest.raises(NodeBusy, match="2 requests wait"):
        gate.ask("impatient", 10, wait_s=0)
    gate.admission.release(first)
    assert gate.started == ["first", "long", "short"]


def test_slots_are_a_limit_too() -> None:
    gate = Gate(most_slots=3)
    two = gate.ask("two", 1, slots=2)
    gate.ask("more", 1, slots=2)
    assert gate.started == ["two"]
    gate.admission.release(two)
    assert gate.started == ["two", "more"]


def test_what_can_never_fit() -> None:
    gate = Gate()
    with pytest.raises(RequestTooLarge, match=r"101 bytes .* never fit 100 bytes"):
        gate.ask("large", 101)
    with pytest.raises(RequestTooLarge, match=r"5 slots .* 4 slots"):
        gate.ask("many", 1, slots=5)


def test_a_full_line() -> None:
    gate = Gate(most_waiting=2)
    gate.ask("a", 100)
    gate.ask("b", 1)
    gate.ask("c", 1)
    with pytest.raises(NodeBusy, match="2 requests wait"):
        gate.ask("d", 1)
    assert gate.admission.waiting == 2


def test_withdrawn_while_waiting() -> None:
    gate = Gate()
    first, long = gate.ask("first", 70), gate.ask("long", 80)
    gate.ask("short", 10)
    gate.admission.release(long)
    assert gate.started == ["first", "short"], "the next in line does not wait for one that left"
    gate.admission.release(first)
    gate.now = 99
    gate.admission.sweep()
    assert gate.started == ["first", "short"]
    assert not gate.refused


def test_waiting_too_long() -> None:
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


def test_memory_that_is_not_in_one_piece() -> None:
    gate = Gate()
    other = gate.ask("other", 20)
    broken = gate.ask("broken", 60)
    behind = gate.ask("behind", 30)
    gate.admission.again(broken)
    assert gate.admission.held_bytes == 50
    assert gate.started == ["other", "broken", "behind"], "it waits for someone to end; the others need not"
    gate.ask("impatient", 10, wait_s=0)
    assert gate.started[-1] == "impatient"
    gate.admission.release(other)
    assert gate.started[-1] == "broken"
    gate.admission.again(broken)
    gate.admission.release(behind)
    assert gate.started[-2:] == ["broken", "broken"], "those that passed it are waited for, too"


def test_who_passes_keeps_the_order() -> None:
    gate = Gate()
    first, broken = gate.ask("first", 40), gate.ask("broken", 50)
    gate.ask("long", 70)
    gate.ask("short", 10)
    gate.admission.again(broken)
    assert gate.started == ["first", "broken"], "long is not blocked: short waits behind it"
    with pytest.raises(NodeBusy, match="3 requests wait"):
        gate.ask("impatient", 10, wait_s=0)
    gate.admission.release(first)
    assert gate.started == ["first", "broken", "broken"], "and it comes before both of them"


def test_nobody_is_passed_for_ever() -> None:
    """Short ones come all the time and end; what they leave is never one piece, until there are none."""
    gate = Gate()
    holding = [gate.ask("other", 20)]
    broken = gate.ask("broken", 60, wait_s=10)
    gate.admission.again(broken)
    for gate.now in (1, 2, 3, 4):
        holding.append(gate.ask("short", 20))
        gate.admission.release(holding.pop(0))
        gate.admission.again(broken)
    assert gate.started.count("short") == 4
    assert gate.admission.retry_after_s() == 1, "for someone who needs little there is room"
    gate.now = 5
    gate.ask("short", 20)
    gate.ask("short", 20)
    with pytest.raises(NodeBusy):
        gate.ask("impatient", 1, wait_s=0)
    assert gate.started.count("short") == 4, "in the second half of its time it is passed no more"
    gate.admission.release(holding.pop())
    assert gate.started[-3:] == ["broken", "short", "short"]


def test_the_words_for_memory_in_pieces() -> None:
    gate = Gate()
    gate.ask("other", 20)
    gate.admission.again(gate.ask("broken", 60, wait_s=5))
    gate.now = 5.5
    gate.admission.sweep()
    assert isinstance(refused := gate.refused["broken"], KVMemoryFull)
    assert "no 60 bytes of KV memory in one piece, nor had for 5.5 s" in str(refused)
    assert "others hold only 20 of the 100; ask for a shorter answer" in str(refused)
    gate.admission.again(gate.ask("broken", 60, wait_s=5))
    gate.ask("short", 30)
    gate.now = 11
    gate.admission.sweep()
    assert "within 5.5 s: 60 bytes and 1 slots are needed, 50 of 100 bytes" in str(gate.refused["broken"])


def test_someone_ended_before_it_could_come_back() -> None:
    gate = Gate()
    other, broken = gate.ask("other", 20), gate.ask("broken", 60)
    gate.admission.release(other)
    gate.admission.again(broken)
    assert gate.started == ["other", "broken", "broken"], "what it would wait for has happened already"
    gate.admission.again(broken)
    assert list(gate.refused) == ["broken"]


def test_the_last_one_that_others_waited_for_comes_back_too() -> None:
    gate = Gate()
    other, last = gate.ask("other", 10), gate.ask("last", 20)
    gate.admission.release(other)
    broken = gate.ask("broken", 30)
    gate.admission.again(broken)
    gate.admission.again(last)
    assert gate.started == ["other", "last", "broken", "last", "broken"]


def test_those_that_come_back_keep_their_order() -> None:
    gate = Gate()
    other = gate.ask("other", 10)
    claims = [gate.ask(name, 20) for name in "ab"]
    for claim in claims:
        gate.admission.again(claim)
    gate.admission.again(gate.ask("c", 20))
    gate.admission.release(other)
    assert gate.started == ["other", "a", "b", "c", "a", "b", "c"]


def test_back_in_line_with_nobody_else_there() -> None:
    gate = Gate()
    first, second = gate.ask("first", 30), gate.ask("second", 60)
    gate.ask("third", 50)
    gate.admission.again(first)
    gate.admission.again(second)
    assert isinstance(gate.refused["second"], KVMemoryFull)
    assert "60 bytes of KV memory in one piece, though nobody else holds any" in str(gate.refused["second"])
    assert gate.started == ["first", "second", "first", "third"], "there was one less to wait for"
    gate.admission.again(second)
    assert gate.admission.held_bytes == 80, "one that ended does not come back"


def test_closed() -> None:
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


def test_nothing_comes_back_to_a_closed_line() -> None:
    gate = Gate()
    gate.ask("other", 1)
    held = gate.ask("held", 1)
    gate.admission.close(NodeBusy("stopping"))
    gate.admission.again(held)
    assert str(gate.refused["held"]) == "stopping"
    assert (gate.admission.waiting, gate.admission.held_bytes) == (0, 1)


def test_callbacks_may_ask_and_release() -> None:
    gate = Gate(most_waiting=10_000)
    first = gate.ask("first", 100)
    claims: deque[Claim] = deque()
    for number in range(5000):
        claims.append(gate.ask(str(number), 100, then=lambda: gate.admission.release(claims.popleft())))
    claims.append(gate.ask("asks", 100, then=lambda: claims.append(gate.ask("asked", 1))))
    gate.admission.release(first)
    assert len(gate.started) == 5002, "a long line is no deep stack"
    gate.admission.release(claims[0])
    assert gate.started[-1] == "asked"
    assert gate.admission.held_bytes == 1


def test_released_by_a_callback_before_its_own_turn_was_told() -> None:
    gate = Gate()
    first = gate.ask("first", 100)
    claims: list[Claim] = []
    gate.ask("a", 50, then=lambda: gate.admission.release(claims[0]))
    claims.append(gate.ask("b", 50))
    gate.admission.release(first)
    assert gate.started == ["first", "a"]
    assert gate.admission.held_bytes == 50


def test_a_callback_that_fails_gives_its_memory_back(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    first = gate.ask("first", 100)

    def fail() -> None:
        raise RuntimeError("no")

    gate.ask("broken", 100, then=fail)
    gate.ask("next", 100)
    gate.admission.release(first)
    assert gate.started == ["first", "broken", "next"]
    assert "could not begin" in caplog.text
    assert str(gate.refused["broken"]) == "it could not begin: no"


def test_when_to_come_back() -> None:
    gate = Gate()
    assert gate.admission.retry_after_s() == 1
    claims = [gate.ask("held", 25) for _ in range(4)]
    assert gate.admission.retry_after_s() == 5, "nobody knows yet"
    for claim in claims:
        gate.now += 3
        gate.admission.release(claim)
        gate.ask("held", 25)
    gate.now += 3
    assert gate.admission.retry_after_s() == 3, "four releases in twelve seconds, nobody waits"
    for _ in range(3):
        gate.ask("waits", 100)
    assert gate.admission.retry_after_s() == 12
    gate.now += 1000
    assert gate.admission.retry_after_s() == 60


def test_idle_time_is_no_pace() -> None:
    """Two held memory for nine seconds each, long ago, one after the other. Now four do at once."""
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
    assert gate.admission.retry_after_s() == 44, "the next is late: 160 seconds were held for nobody's end"


def test_who_is_refused_is_told_for_what_it_asked() -> None:
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


def test_limits_hold_whatever_threads_do() -> None:
    admission = Admission(1000, 5, most_waiting=10_000)
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

        claim = admission.ask(cost, slots, start, lambda error: None, wait_s=60)
        assert ready.wait(30)
        time.sleep(rng.random() / 1000)
        count(-cost, -slots)
        admission.release(claim)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            withdrawn = admission.ask(rng.randint(1, 700), 1, lambda claim: None, lambda error: None, wait_s=60)
            time.sleep(rng.random() / 4000)
            admission.release(withdrawn)  # waiting or held, as it happens
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
