"""The goodput of a path: an average that one stalled slice does not move far."""

import shutil
import socket
import subprocess
import sys

import pytest

from disaggregated_inference.errors import PeerGone
from disaggregated_inference.kv_transfer.paths import NetworkPath, failure_code
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


def test_a_failed_dial_has_a_code() -> None:
    """Its text, which clients may see, says only that nothing answers."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
    path = NetworkPath(address)
    with pytest.raises(PeerGone, match="does not answer") as caught:
        path.dial()
    path.record_failure(caught.value)
    assert (path.last_error_code, failure_code(PeerGone("away")), failure_code(KeyError())) == (
        *("refused", "peer_gone"),
        "failed",
    )


_DIAL = """
from disaggregated_inference.errors import PeerGone
from disaggregated_inference.kv_transfer.paths import NetworkPath, failure_code
try:
    NetworkPath(("10.1.2.3", 9)).dial(5)
except PeerGone as error:
    print(failure_code(error))
"""


@pytest.mark.skipif(not shutil.which("unshare") or not shutil.which("ip"), reason="no unshare or ip here")
def test_a_host_without_a_route_has_a_code() -> None:
    """In a network of its own, in which the kernel says of every host that there is no route to it."""
    setup = "ip link set lo up && ip route add unreachable 10.0.0.0/8 && exec "
    command = ["unshare", "-rn", "sh", "-c", setup + '"$0" -c "$1"', sys.executable, _DIAL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "unshare" in done.stderr or "RTNETLINK" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout.strip() == "no_route", done.stderr
