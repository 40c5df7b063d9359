"""The goodput of a path: an average that one stalled slice does not move far."""

from disaggregated_inference.kv_transfer.paths import NetworkPath
from disaggregated_inference.timeouts import TransferTimeouts

_MB = 1_000_000


class Line:
    """A path whose slices of a megabyte take as long as the test says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.path = NetworkPath(("127.0.0.1", 1), TransferTimeouts(goodput_s=2.0), lambda: self.now)

    def receive(self, count: int, seconds: float) -> float:
        """Megabytes per second by now."""
        for _ in range(count):
            with self.path.measure(_MB):
                self.now += seconds
            self.now += 5.0  # waits between slices do not count
        assert self.path.goodput_bytes_s
        return self.path.goodput_bytes_s / _MB


def test_the_first_slices_are_the_measurement() -> None:
    assert round(Line().receive(1, 0.5)) == 2


def test_a_stalled_slice_moves_the_goodput_by_half_at_most() -> None:
    line = Line()
    assert round(line.receive(400, 0.01)) == 100
    assert line.receive(1, 20.0) > 66
    assert line.receive(200, 0.01) > 90, "and soon it is as before"


def test_a_line_that_becomes_slow_is_followed_in_some_seconds_of_receiving() -> None:
    line = Line()
    line.receive(400, 0.01)
    assert line.receive(20, 0.5) < 3, "2 MB/s now"


def test_a_fast_first_slice_does_not_hide_a_slow_line() -> None:
    line = Line()
    line.receive(1, 0.00001)
    assert line.receive(5, 0.05) < 30
