"""Admission cannot deadlock: two prefill and two decode nodes, random sizes, fragmentation, cancellations, crashes.

The classes are those of the nodes: `Admission` and `RowAllocator`. What a scheduler's thread does is one step here.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.memory_cluster import Clock, MemoryNode, MemoryRequest

ROWS = 24
LONG_S = 1000.0  # no request gives up, unless a rule says so


class MemoryMachine(RuleBasedStateMachine):
    opens_first = True

    @initialize()
    def start(self) -> None:
        self.clock = Clock()
        names = ("p1", "p2", "d1", "d2")
        self.nodes = [MemoryNode(name, ROWS, self.clock, opens_first=self.opens_first) for name in names]
        self.requests: list[MemoryRequest] = []

    @property
    def open_requests(self) -> list[MemoryRequest]:
        return [request for request in self.requests if not request.over]

    @rule(
        prefill=st.integers(0, 1),
        decode=st.integers(2, 3),
        prompt=st.integers(1, 16),
        output=st.integers(1, 8),
        wait_s=st.sampled_from([0.0, 5.0, LONG_S, LONG_S, LONG_S]),
    )
    def ask(self, prefill: int, decode: int, prompt: int, output: int, wait_s: float) -> None:
        request = MemoryRequest(self.nodes[prefill], self.nodes[decode], prompt, output, wait_s)
        self.requests.append(request)
        request.begin()

    @rule(number=st.integers(0, 3))
    def run_scheduler(self, number: int) -> None:
        self.nodes[number].step()

    @precondition(lambda self: self.open_requests)
    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.open_requests), label="request").advance()

    @precondition(lambda self: self.open_requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.open_requests), label="request").cancel()

    @rule(number=st.integers(0, 3))
    def crash(self, number: int) -> None:
        """The node comes back empty; its requests end on the other nodes too."""
        node = self.nodes[number]
        node.posted.clear()
        for request in self.open_requests:
            if any(part.node is node and not part.ended for part in request.parts):
                request.cancel()
        node.restart()

    @rule(seconds=st.sampled_from([0.1, 3.0, 600.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        for node in self.nodes:
            node.admission.sweep()

    @invariant()
    def the_oldest_starts_when_its_memory_is_free(self) -> None:
        """Within the steps that the schedulers still have to take: at rest, the oldest waits only for what is taken."""
        if any(node.posted for node in getattr(self, "nodes", ())):
            return
        for node in getattr(self, "nodes", ()):
            assert not (oldest := node.oldest) or not node.could_start(oldest), f"{node.name}: {oldest}"

    @invariant()
    def promises_are_kept(self) -> None:
        """No node promises more than it has, and rows belong to promises."""
        for node in getattr(self, "nodes", ()):
            assert node.admission.held_bytes <= node.admission.limit_bytes
            assert node.rows.used * 10 <= node.admission.held_bytes

    def teardown(self) -> None:
        """From any state, without a new request and without a timeout: every request ends, in a bounded number of
        steps."""
        if hasattr(self, "nodes"):
            assert self.finish(), [(request.prompt, len(request.parts)) for request in self.open_requests]

    def finish(self) -> bool:
        for _ in range(4 * len(self.requests) + 4):
            while any([node.step() for node in self.nodes]):
                pass
            if not self.open_requests:
                return all(node.admission.held_bytes == node.rows.used == 0 for node in self.nodes)
            if not any([request.advance() for request in self.open_requests]):
                return False
        return False


MemoryMachine.TestCase.settings = settings(
    derandomize=True, max_examples=150, stateful_step_count=50, deadline=None, database=None
)
TestMemoryMachine = MemoryMachine.TestCase


def stuck_requests(*, opens_first: bool) -> int:
    """The wave that stood still for 30 s. The free memory of the prefill node is in pieces, and the prompt that waits
    for one piece takes the decode memory that the holders of the pieces need."""
    machine = MemoryMachine()
    machine.opens_first = opens_first
    machine.start()
    prefill, decode = machine.nodes[0], machine.nodes[2]

    def ask(prompt: int, output: int) -> MemoryRequest:
        machine.ask(0, 2, prompt, output, LONG_S)
        while any([node.step() for node in machine.nodes]):
            pass
        return machine.requests[-1]

    first, holder, last = ask(6, 1), ask(10, 5), ask(6, 1)
    assert [part.row for request in (first, holder, last) for part in request.parts[:1]] == [0, 6, 16]
    first.cancel()
    last.cancel()
    holder.parts[1].end()  # its decode node refused it once; it comes again, and needs all of the memory
    ask(14, 8)  # 14 rows are free there, not in one piece
    holder.parts.pop()
    holder.ask(decode, 20, lambda: None)
    assert prefill.rows.used == 10
    machine.finish()
    return len(machine.open_requests)


def test_a_context_before_its_memory_is_a_deadlock() -> None:
    assert stuck_requests(opens_first=False) == 2
    assert stuck_requests(opens_first=True) == 0
