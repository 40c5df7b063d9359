"""Which node likely has which prefix in its cache, from what was sent there. An estimate: nodes evict without notice.

Nodes compare the tokens themselves before they reuse anything: a wrong estimate costs time, never a wrong answer.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from disaggregated_inference.kv import NO_SALT, Salt

_HASH_BYTES = 16


class PrefixIndex:
    """Blocks of tokens by the hash of all tokens up to their end, with the nodes that have them and their epochs."""

    def __init__(self, max_blocks: int = 65536, block_tokens: int = 64) -> None:
        self.max_blocks, self.block_tokens = max_blocks, block_tokens
        self._blocks: OrderedDict[bytes, dict[str, str]] = OrderedDict()  # hash: {node: epoch}

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, node: str, epoch: str, tokens: Sequence[int], salt: Salt = NO_SALT) -> None:
        """The node has prefilled these tokens. The end of a prompt is added first, so that it is also evicted first: a
        block is of no use without those before it."""
        for address in reversed(list(self._chain(tokens, salt))):
            self._blocks.setdefault(address, {})[node] = epoch
            self._blocks.move_to_end(address)
        while len(self._blocks) > self.max_blocks:
            self._blocks.popitem(last=False)

    def lookup(self, tokens: Sequence[int], epochs: Mapping[str, str], salt: Salt = NO_SALT) -> dict[str, int]:
        """Of the nodes in `epochs`, how many tokens each has cached from the start; nodes without any are left out. The
        cache of an earlier epoch went with its process."""
        cached: dict[str, int] = {}
        left = list(epochs)
        for number, address in enumerate(self._chain(tokens, salt), 1):
            holders = self._blocks.get(address, {})
            left = [node for node in left if holders.get(node) == epochs[node]]
            if not left:
                break
            cached.update(dict.fromkeys(left, number * self.block_tokens))
        return cached

    def forget(self, node: str) -> None:
        for address, holders in list(self._blocks.items()):
            if holders.pop(node, None) is not None and not holders:
                del self._blocks[address]

    def _chain(self, tokens: Sequence[int], salt: Salt) -> Iterator[bytes]:
        """Whole blocks only: a partial block grows with the next turn of a chat, and would never be found."""
        data, address = array("I", tokens).tobytes(), b""
        size = self.block_tokens * array("I").itemsize
        for number, at in enumerate(range(0, len(data) - size + 1, size)):
            address = salt.parent(address, number, self.block_tokens)
            address = hashlib.blake2b(address + data[at : at + size], digest_size=_HASH_BYTES).digest()
            yield address
