"""Readings of a node's machine: processor, memory, network, GPUs, power.

None: not available, and `missing` says why. Nothing is estimated.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from disaggregated_inference.api.numbers import Amount, Number

Share = Annotated[float, Meta(ge=0, le=1)]
Celsius = Annotated[float, Meta(ge=-300, le=1000)]
Words = Annotated[str, Meta(max_length=300)]
Missing = Annotated[dict[Words, Words], Meta(max_length=32)]  # field: why it is None


class NetworkReading(msgspec.Struct, frozen=True, kw_only=True):
    name: Words
    received_bytes_s: Amount | None = None
    sent_bytes_s: Amount | None = None
    line_rate_bits_s: Amount | None = None  # what the interface negotiated


class GpuReading(msgspec.Struct, frozen=True, kw_only=True):
    """With shared memory (DGX Spark, Apple silicon) the GPU has none of its own: the machine's is the GPU's."""

    name: Words = ""
    utilisation: Share | None = None  # of the time
    memory_used_bytes: Number | None = None
    memory_total_bytes: Number | None = None
    memory_shared: bool = False  # with the processor
    power_w: Amount | None = None
    power_limit_w: Amount | None = None
    temperature_c: Celsius | None = None
    clock_mhz: Amount | None = None
    memory_clock_mhz: Amount | None = None
    throttled: Annotated[tuple[Words, ...], Meta(max_length=16)] = ()  # why its clocks are lower than they could be
    missing: Missing = {}


class Readings(msgspec.Struct, frozen=True, kw_only=True):
    """`power_w` is what the meters of this machine measure, if they cover what the node's engine computes on; else
    None. `power_covers` says which parts that is."""

    time: Amount = 0.0  # seconds since 1970
    age_s: Amount = 0.0  # at the time of the status
    machine: Words = ""
    cpu_share: Share | None = None
    cpu_count: Number = 0
    memory_used_bytes: Number | None = None
    memory_total_bytes: Number | None = None
    memory_shared: bool = False  # processor and GPU have one memory
    networks: Annotated[tuple[NetworkReading, ...], Meta(max_length=64)] = ()
    gpus: Annotated[tuple[GpuReading, ...], Meta(max_length=64)] = ()
    power_w: Amount | None = None
    power_covers: Words = ""
    missing: Missing = {}
