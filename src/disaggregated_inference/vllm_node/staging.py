"""The memory that vLLM's workers write KV into and the node sends it from. It is a file without a name: the connector
gets its descriptor over the socket, and it is gone when the last process that uses it is, however that ends."""

import mmap
import os

import numpy as np

from disaggregated_inference.engines import RowAllocator
from disaggregated_inference.errors import EngineUnavailable
from disaggregated_inference.kv import Array, KVDType, KVSlice, storage_dtype
from disaggregated_inference.vllm_connector.region import ALIGNMENT, RegionLayout


class Staging:
    """Memory is handed out in pieces of whole pages. Untouched pages take none of the machine's memory,
    unless a GPU's workers pin them."""

    def __init__(self, size_bytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise EngineUnavailable("vLLM and this node share memory, which needs Linux")
        self.pages = RowAllocator(size_bytes // ALIGNMENT)
        self.size_bytes = self.pages.count * ALIGNMENT
        self.descriptor = os.memfd_create("disagg-kv", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, self.size_bytes)
        self._memory = mmap.mmap(self.descriptor, self.size_bytes)
        self._bytes = np.frombuffer(self._memory, np.uint8)

    def take(self, size_bytes: int) -> int:
        """The offset of a free run of bytes. Raises `KVMemoryFull`."""
        return self.pages.take(-(-size_bytes // ALIGNMENT)) * ALIGNMENT

    def give_back(self, offset: int) -> None:
        self.pages.give_back(offset // ALIGNMENT)

    @property
    def used_bytes(self) -> int:
        return self.pages.used * ALIGNMENT

    def slice_at(
        self, layout: RegionLayout, dtype: KVDType, offset: int, tokens: int, layer: int, first: int, stop: int
    ) -> KVSlice:
        """A view: rows [first, stop) of a ticket whose memory is at `offset`, for a prompt of `tokens`."""
        at = offset + layout.rows_at(tokens, layer, first)
        shape = (2, stop - first, layout.kv_heads, layout.head_dim)
        both = self._view(at, (stop - first) * layout.row_bytes, storage_dtype(dtype)).reshape(shape)
        return KVSlice(layer, first, dtype, both[0], both[1])

    def logits_at(self, layout: RegionLayout, offset: int, tokens: int) -> Array:
        """A copy."""
        at = offset + layout.logits_at(tokens)
        return self._view(at, 4 * layout.vocabulary, np.dtype(np.float32)).copy()

    def _view(self, at: int, size: int, dtype: "np.dtype[np.generic]") -> Array:
        return self._bytes[at : at + size].view(dtype)

    def close(self) -> None:
        """The mapping itself ends with the last slice that uses it."""
        os.close(self.descriptor)
