"""Where a ticket's KV and logits lie in the memory that vLLM's workers share with the node.

From the ticket's offset on, every layer has room for all tokens of the prompt. The rows of one slice lie there at their
first position: its keys `[rows, kv_heads, head_dim]`, then its values. So a GPU fills a slice with one copy, and the
node sends it without another. Sliding layers have the same room: how vLLM will cut the prompt into chunks is not known
before. The logits follow as float32.
"""

import msgspec

ALIGNMENT = 4096  # of a ticket's memory
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class RegionLayout(msgspec.Struct, frozen=True):
    layers: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    dtype: str

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.item_bytes

    def ticket_bytes(self, tokens: int) -> int:
        size = self.logits_at(tokens) + 4 * self.vocabulary
        return -(-size // ALIGNMENT) * ALIGNMENT

    def rows_at(self, tokens: int, layer: int, first: int) -> int:
        """Byte offset of a slice whose first row is position `first`, from the ticket's own offset, for a prompt of
        `tokens`."""
        return (layer * tokens + first) * self.row_bytes

    def logits_at(self, tokens: int) -> int:
        return self.layers * tokens * self.row_bytes


def first_row(window: int, start: int, stop: int) -> int:
    """The first position of [start, stop) that a layer still keeps at `stop`; a window of 0 keeps all."""
    return max(start, stop - window) if window else start
