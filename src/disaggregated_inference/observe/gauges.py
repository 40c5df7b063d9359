"""Readings as gauges for Prometheus. What is not available makes no series: 0 would be wrong."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily

from disaggregated_inference.api import Readings

_Of = Callable[[Any], float | None]
# Name: description, and the value of a reading.
MACHINE_GAUGES: dict[str, tuple[str, _Of]] = {
    "disagg_machine_cpu_share": ("Share of the processor that is in use, 0 to 1", lambda each: each.cpu_share),
    "disagg_machine_memory_used_bytes": ("Memory in use", lambda each: each.memory_used_bytes),
    "disagg_machine_memory_total_bytes": ("Memory of the machine", lambda each: each.memory_total_bytes),
    "disagg_machine_power_watts": (
        "Power that the machine's meter measures, where it covers what the engine computes on",
        lambda each: each.power_w,
    ),
}
NETWORK_GAUGES: dict[str, tuple[str, _Of]] = {
    "disagg_network_received_bytes_per_second": ("Received by an interface", lambda each: each.received_bytes_s),
    "disagg_network_sent_bytes_per_second": ("Sent by an interface", lambda each: each.sent_bytes_s),
    "disagg_network_line_rate_bits_per_second": ("What the interface negotiated", lambda each: each.line_rate_bits_s),
}
GPU_GAUGES: dict[str, tuple[str, _Of]] = {
    "disagg_gpu_utilisation": ("Share of the time in which the GPU worked, 0 to 1", lambda each: each.utilisation),
    "disagg_gpu_memory_used_bytes": ("Memory of the GPU in use", lambda each: each.memory_used_bytes),
    "disagg_gpu_memory_total_bytes": ("Memory of the GPU, if it has its own", lambda each: each.memory_total_bytes),
    "disagg_gpu_power_watts": ("Power of the GPU", lambda each: each.power_w),
    "disagg_gpu_temperature_celsius": ("Temperature of the GPU", lambda each: each.temperature_c),
    "disagg_gpu_clock_mhz": ("Clock of the GPU", lambda each: each.clock_mhz),
    "disagg_gpu_throttled": ("Whether the GPU's clocks are held down", lambda each: float(bool(each.throttled))),
}
READING_GAUGES = (*MACHINE_GAUGES, *NETWORK_GAUGES, *GPU_GAUGES)


def reading_gauges(nodes: Iterable[tuple[list[str], Readings]], labels: list[str]) -> Iterator[GaugeMetricFamily]:
    """`labels`: names, whose values come with each reading."""
    known = list(nodes)
    networks = [([*values, each.name], each) for values, readings in known for each in readings.networks]
    gpus = [([*values, str(n)], gpu) for values, readings in known for n, gpu in enumerate(readings.gpus)]
    yield from _families(MACHINE_GAUGES, labels, known)
    yield from _families(NETWORK_GAUGES, [*labels, "interface"], networks)
    yield from _families(GPU_GAUGES, [*labels, "gpu"], gpus)


def _families(
    gauges: dict[str, tuple[str, _Of]], labels: list[str], things: Iterable[tuple[list[str], Any]]
) -> Iterator[GaugeMetricFamily]:
    found = list(things)
    for name, (text, value_of) in gauges.items():
        family = GaugeMetricFamily(name, text, labels=labels)
        for values, thing in found:
            if (value := value_of(thing)) is not None:
                family.add_metric(values, float(value))
        yield family
