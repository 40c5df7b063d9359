"""Which rows of an engine's KV memory are taken."""

from disaggregated_inference.errors import KVMemoryFull


class RowAllocator:
    """First-fit allocation of runs of rows."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._taken: list[tuple[int, int]] = []  # first row and size of each run, in order

    def take(self, size: int) -> int:
        """The first row of the first run that is long enough."""
        first = index = 0
        for start, rows in self._taken:
            if start - first >= size:
                break
            first, index = start + rows, index + 1
        if first + size > self.count:
            free = self.count - self.used
            raise KVMemoryFull(f"no memory for {size} tokens of KV: {free} of {self.count} free, not contiguous")
        self._taken.insert(index, (first, size))
        return first

    def give_back(self, first: int) -> None:
        self._taken = [run for run in self._taken if run[0] != first]

    @property
    def used(self) -> int:
        return sum(size for _, size in self._taken)
