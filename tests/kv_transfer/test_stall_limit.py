"""Connections that fall silent: how long a fetch waits for all of them together, on a clock of the test."""

from typing import Any

import pytest

from disaggregated_inference.cluster import Policies
from disaggregated_inference.errors import PeerGone
from disaggregated_inference.kv_transfer import Connection
from disaggregated_inference.kv_transfer.stall_limit import SilenceLimit
from disaggregated_inference.timeouts import TransferTimeouts

LIMITS = TransferTimeouts()


class SilentLine:
    """A socket without bytes: only its clock goes on. At the times in `bytes_at` some bytes arrive."""

    family = None

    def __init__(self, *bytes_at: float) -> None:
        self.now, self.timeout_s, self.bytes_at = 100.0, 0.0, [100.0 + at for at in bytes_at]
        self.connection = Connection(self)  # type: ignore[arg-type]

    def clock(self) -> float:
        return self.now

    def settimeout(self, seconds: float) -> None:
        assert seconds > 0
        self.timeout_s = seconds

    def recv_into(self, target: memoryview) -> int:
        until = self.now + self.timeout_s
        if self.bytes_at and self.bytes_at[0] <= until:
            self.now = self.bytes_at.pop(0)
            return 1
        self.now = until
        raise TimeoutError


def lost_s(line: SilentLine, limit: SilenceLimit, probe: Any) -> float:
    """What one silent connection costs."""
    line.connection = Connection(line)  # type: ignore[arg-type]
    began, line.connection.received_at = line.now, line.now
    limit.watch(line.connection, probe)
    with pytest.raises(PeerGone, match="silent"):
        line.connection.receive_header()
    return line.now - began


def answers_after(line: SilentLine, seconds: float, alive: bool = True) -> Any:
    def probe(limit_s: float) -> bool:
        took_s = min(seconds, limit_s, LIMITS.max_probe_s)
        line.now += took_s
        return alive and took_s == seconds

    return probe


@pytest.mark.parametrize(
    ("probe_s", "alive"),
    [(0.001, True), (0.3, True), (0.79, True), (LIMITS.probe_s, False), (LIMITS.max_probe_s, False)],
)
def test_silent_connections_cost_no_more_than_the_limit(probe_s: float, alive: bool) -> None:
    line = SilentLine()
    limit, lost = SilenceLimit(LIMITS, line.clock), []
    while not limit.reached:
        lost.append(lost_s(line, limit, answers_after(line, probe_s, alive)))
    assert sum(lost) <= LIMITS.max_silence_s + 0.011
    assert max(lost[1:], default=0) <= LIMITS.max_silence_s / 2 + probe_s
    assert len(lost) == (2 if probe_s <= LIMITS.probe_s else 1), "another connection gets its chance if there is time"


def test_a_node_that_did_not_answer_is_waited_for_once() -> None:
    line = SilentLine()
    assert lost_s(line, SilenceLimit(LIMITS, line.clock), None) == pytest.approx(LIMITS.silence_s)


def test_silence_that_ends_with_bytes_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a header of 36 bytes, one comes every 0.6 s: each time the node is probed, and the connection lives."""
    line = SilentLine(*(0.6 * number for number in range(1, 20)))
    limit, probes = SilenceLimit(LIMITS, line.clock), list[float]()
    monkeypatch.setattr("disaggregated_inference.kv_transfer.frames.time.monotonic", line.clock)

    def probe(limit_s: float) -> bool:
        probes.append(line.now)
        return True

    limit.watch(line.connection, probe)
    with pytest.raises(PeerGone, match="silent"):
        line.connection.receive_header()
    assert not line.bytes_at, "all bytes were waited for"
    assert len(probes) == 20
    assert line.now == pytest.approx(100 + 0.6 * 19 + LIMITS.max_silence_s / 2, abs=0.02)
    assert not limit.reached, "only the last silence counts"


def test_a_request_loses_at_most_three_seconds_to_a_silent_line() -> None:
    """By default: two fetches (one retry), and each may dial again."""
    fetches = Policies().retries + 1
    redials_s = 2 * LIMITS.redial_s / 5
    assert fetches * (LIMITS.max_silence_s + redials_s) <= 2.9
    assert LIMITS.silence_s + LIMITS.max_probe_s <= LIMITS.max_silence_s
    assert fetches * (LIMITS.dial_s + redials_s) <= 2.9
