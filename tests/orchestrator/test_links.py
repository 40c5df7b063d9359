"""What is said of links whose measured figures look wrong."""

import pytest

from disaggregated_inference.api import PathStatus
from disaggregated_inference.orchestrator.links import link_warning

TEN_GBIT = 1.25e9


def path(host: str = "10.0.0.1", gbps: float = 0.0, received_s: float = 0.0, failures: int = 0) -> PathStatus:
    bytes_s = gbps * 1e9 / 8
    return PathStatus(
        host=host,
        port=8100,
        goodput_bytes_s=bytes_s or None,
        payload_bytes=round(bytes_s * received_s),
        failures=failures,
    )


def said(*paths: PathStatus, line_rate: float | None = TEN_GBIT) -> str:
    return link_warning("dgx-1", "mac-1", list(paths), line_rate)


def test_a_link_as_expected() -> None:
    assert said() == said(path(gbps=9, received_s=5)) == said(path(gbps=3, received_s=5)) == ""


def test_a_link_far_below_its_line_rate() -> None:
    assert said(path(gbps=0.9, received_s=2)) == (
        "KV goes from dgx-1 to mac-1 with 0.9 Gb/s, the cluster file expects 10: is it the right interface?"
        " See kv_addresses, and disagg doctor --cluster"
    )


@pytest.mark.parametrize(
    "paths",
    [(path(gbps=0.9, received_s=0.1),), (path("a", 0.9, 5), path("b", 9, 5))],
    ids=["a burst", "a fast one too"],
)
def test_no_verdict_on_a_link(paths: tuple[PathStatus, ...]) -> None:
    assert said(*paths) == ""


def test_without_a_line_rate_nothing_is_expected() -> None:
    assert said(path(gbps=0.1, received_s=9), line_rate=None) == ""


def test_a_path_that_leads_nowhere() -> None:
    assert said(path("127.0.0.1", failures=3), path(gbps=9, received_s=2)) == (
        "mac-1 cannot reach dgx-1 at 127.0.0.1:8100 and takes another path: correct --kv-address or kv_addresses"
    )
    assert said(path("127.0.0.1", failures=3)) == "", "the failing request tells of it"
    assert said(path(gbps=9, received_s=2, failures=1)) == "", "it works, and failed once"
