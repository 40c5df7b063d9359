"""Copies from vLLM's pages to shared memory beside the forward pass. On CUDA, a stream of its own takes rows out of the
pages and moves them to pinned host memory. On the CPU both are plain copies."""

import logging
import math
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

log = logging.getLogger("vllm.disagg")


class SharedTensor:
    """The shared memory as tensors; pinned, where a GPU copies into it."""

    def __init__(self, memory: mmap.mmap, device: torch.device) -> None:
        self._memory = memory
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._pinned = device.type == "cuda"
        if self._pinned:
            torch.cuda.set_device(device)  # this may be a new thread
            _check(torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self._bytes.numel(), 0))

    def view(self, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        return self._bytes[at : at + size].view(dtype).view(shape)

    def close(self) -> None:
        if self._pinned:
            _check(torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr()))


class CopyStream:
    """Short prompts are limited by how fast the host queues work: a layer costs one wait, one gather, one copy and one
    event here."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = device.type == "cuda"
        self._gathered: torch.cuda.Event | None = None  # the last layer of this step is out of its pages
        if self._cuda:
            self._stream = torch.cuda.Stream(device)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Around a gather from the pages and its copies: after what the forward pass has queued until now."""
        if not self._cuda:
            yield
            return
        self._stream.wait_event(torch.cuda.current_stream(self.device).record_event())
        with torch.cuda.stream(self._stream):
            yield

    def mark_gathered(self) -> None:
        """After the last gather of a step, and before its copies."""
        if self._cuda:
            self._gathered = self._stream.record_event()

    def copy(self, target: torch.Tensor, rows: torch.Tensor) -> Callable[[], None] | None:
        """Copy gathered rows to shared memory. Returns what is left to do once the copy is done: heads of one rank
        among others are no run of bytes, and the host puts them there."""
        if not self._cuda or target.is_contiguous():
            target.copy_(rows, non_blocking=self._cuda)
            return None
        bounce = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        bounce.copy_(rows, non_blocking=True)
        return lambda: target.copy_(bounce) and None

    def copy_here(self, target: torch.Tensor, rows: torch.Tensor) -> Callable[[], None] | None:
        """In the forward pass's own order: what it computes next may change the rows."""
        target.copy_(rows, non_blocking=self._cuda)
        return self._event(torch.cuda.current_stream(self.device)) if self._cuda else None

    def done(self) -> Callable[[], None] | None:
        """Returns when the copies until now are done. None: they are."""
        return self._event(self._stream) if self._cuda else None

    def join(self) -> None:
        """What follows in the forward pass's stream waits until all rows of the step are out of the pages."""
        if not self._cuda:
            return
        current, gathered = torch.cuda.current_stream(self.device), self._gathered
        if gathered:
            current.wait_event(gathered)
        else:
            current.wait_stream(self._stream)
        self._gathered = None

    def synchronize(self) -> None:
        """Logits are copied in the forward pass's own stream."""
        if self._cuda:
            torch.cuda.synchronize(self.device)

    @staticmethod
    def _event(stream: "torch.cuda.Stream") -> Callable[[], None]:
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event.synchronize  # type: ignore[no-any-return]


def _check(result: int) -> None:
    if int(result):
        raise RuntimeError(f"CUDA cannot pin the shared memory (error {int(result)}): give the node less --kv-memory")
