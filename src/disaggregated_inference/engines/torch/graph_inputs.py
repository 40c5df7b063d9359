"""Inputs that change with every pass, in tensors with fixed addresses, as CUDA graphs need them."""

from collections.abc import Sequence as Items

import numpy as np
import torch
from numpy.typing import NDArray

from disaggregated_inference.engines.sequence import Sequence
from disaggregated_inference.engines.torch.arena import TorchArena


class DeviceTable:
    """A table on the device and two on the host, used alternately: a pass can be prepared while the previous one is
    still being copied to the device."""

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.table = torch.zeros(shape, dtype=torch.int32, device=device)
        self._host = [torch.zeros(shape, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._host] if pinned else []
        self._current = 0

    def blank(self) -> NDArray[np.int32]:
        """The next host table, free for writing."""
        self._current = 1 - self._current
        if self._copied:
            self._copied[self._current].synchronize()
        return self.host

    @property
    def host(self) -> NDArray[np.int32]:
        array: NDArray[np.int32] = self._host[self._current].numpy()
        return array

    def upload(self) -> None:
        self.table.copy_(self._host[self._current], non_blocking=True)
        if self._copied:
            self._copied[self._current].record()


class Places(DeviceTable):
    """For each window size of the model: each sequence's next row, first row and number of rows."""

    def __init__(self, arena: TorchArena, capacity: int) -> None:
        self.arena = arena
        self.windows = sorted({plan.window for plan in arena.layout.layers})
        super().__init__((3 * len(self.windows) + 1, capacity + 1), arena.device)

    def load(self, sequences: Items[Sequence]) -> None:
        """Point at the sequences' rows; unused entries point at the padding."""
        table = self.blank()
        table[-1] = 0
        table[-1, : len(sequences)] = [s.length for s in sequences]
        for index, window in enumerate(self.windows):
            write, begin, count = table[3 * index : 3 * index + 3]
            write[:] = begin[:] = self.arena.padding[window]
            count[:] = 1
            for at, sequence in enumerate(sequences):
                begin[at] = sequence.state.starts[window]
                write[at] = begin[at] + (sequence.length % window if window else sequence.length)
                count[at] = min(sequence.length + 1, window or sequence.length + 1)
        self.upload()

    def spans(self, window: int) -> list[slice]:
        """Each sequence's rows, from the host table."""
        at = 3 * self.windows.index(window)
        begins, counts = self.host[at + 1 : at + 3].tolist()
        return [slice(begin, begin + count) for begin, count in zip(begins, counts, strict=True)]

    @property
    def positions(self) -> torch.Tensor:
        return self.table[-1]

    def rows(self, window: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        at = 3 * self.windows.index(window)
        return self.table[at], self.table[at + 1], self.table[at + 2]


class ChunkTable(DeviceTable):
    """One chunk: its tokens, positions and rows, and the inputs for attention. Entries after its end are another
    sequence in the padding that repeats the chunk's tokens: its values are finite, and it needs no other experts."""

    def __init__(self, arena: TorchArena, capacity: int) -> None:
        self.arena = arena
        super().__init__((4, capacity), arena.device)
        self.ids, self.positions, self.rows, numbers = self.table
        self.query_starts, self.begins = numbers[0:3], numbers[3:6]
        self.lengths, self.last = numbers[6:8], numbers[8:9]

    def load(self, sequence: Sequence, tokens: Items[int], size: int) -> None:
        ids, positions, rows, numbers = self.blank()
        count, first = len(tokens), sequence.state.starts[0]
        stop = sequence.length + count
        ids[:size] = np.resize(np.asarray(tokens, np.int32), size)
        positions[:count], positions[count:] = np.arange(sequence.length, stop), 0
        rows[:count], rows[count:] = first + positions[:count], self.arena.padding[0]
        padding = self.arena.padding[0]
        numbers[:9] = 0, count, size, first, padding, padding, stop, 1, count - 1
        self.upload()
