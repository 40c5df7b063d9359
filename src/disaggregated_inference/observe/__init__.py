"""What a machine does: readings of its processor, memory, network, GPUs and power."""

from disaggregated_inference.observe.gauges import READING_GAUGES, reading_gauges
from disaggregated_inference.observe.memory import MemoryInUse, memory_in_use
from disaggregated_inference.observe.readings import Computes, ReadingsSampler

__all__ = ["READING_GAUGES", "Computes", "MemoryInUse", "ReadingsSampler", "memory_in_use", "reading_gauges"]
