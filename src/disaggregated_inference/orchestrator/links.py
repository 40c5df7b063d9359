"""The links between prefill and decode nodes, as decode nodes measured them, and what looks wrong with them."""

from collections.abc import Iterator

from disaggregated_inference.api import PathStatus
from disaggregated_inference.orchestrator.node_state import NodeState

_SLOW = 0.25  # of the line rate in the cluster file
_ENOUGH_S = 0.25  # of receiving


def paths_between(prefill: NodeState, decode: NodeState) -> list[PathStatus]:
    """The decode node's paths to the prefill node: at the addresses of the cluster file, or else at those that the
    prefill node announces."""
    assert prefill.status
    assert decode.status
    announced = [_parts(address) for address in prefill.status.kv_addresses]
    ports = {port for _, port in announced}
    if written := [_parts(address) for address in prefill.server.kv_addresses]:
        known = {(host, each) for host, port in written for each in ({port} if port else ports)}
    else:
        known = {*announced, *((prefill.server.host, port) for port in ports)}
    return [path for path in decode.status.paths if (path.host, str(path.port)) in known]


def _parts(address: str) -> tuple[str, str]:
    """Host and port; the port of `mac-1` or `::1` is empty."""
    host, _, port = address.rpartition(":")
    if not host or (":" in host and not host.endswith("]")):
        return address.strip("[]"), ""
    return host.strip("[]"), port


def link_warning(prefill: str, decode: str, paths: list[PathStatus], line_rate_bytes_s: float | None) -> str:
    """Empty, or what to correct: a slow path or one that leads nowhere is used or passed over, but not silently."""
    return "; ".join([*_slow(prefill, decode, paths, line_rate_bytes_s), *_passed_over(prefill, decode, paths)])


def _slow(prefill: str, decode: str, paths: list[PathStatus], line_rate_bytes_s: float | None) -> Iterator[str]:
    speeds = [path.goodput_bytes_s for path in paths if _is_measured(path) and path.goodput_bytes_s]
    if speeds and line_rate_bytes_s and max(speeds) < _SLOW * line_rate_bytes_s:
        yield (
            f"KV goes from {prefill} to {decode} with {_gbps(max(speeds))} Gb/s, the cluster file expects"
            f" {_gbps(line_rate_bytes_s)}: is it the right interface? See kv_addresses, and disagg doctor --cluster"
        )


def _passed_over(prefill: str, decode: str, paths: list[PathStatus]) -> Iterator[str]:
    if not any(path.payload_bytes for path in paths):
        return
    for path in paths:
        if path.failures and not path.payload_bytes:
            yield (
                f"{decode} cannot reach {prefill} at {path.host}:{path.port} and takes another path: correct"
                " --kv-address or kv_addresses"
            )


def _is_measured(path: PathStatus) -> bool:
    """A short burst does not show what a line can do."""
    return bool(path.goodput_bytes_s) and path.payload_bytes / (path.goodput_bytes_s or 1) >= _ENOUGH_S


def _gbps(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e9:.3g}"
