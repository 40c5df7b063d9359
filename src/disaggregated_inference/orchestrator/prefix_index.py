"""Which node likely holds which beginning of a prompt, from what was sent there. A guess: nodes evict unasked.

Nodes look at the tokens themselves before they reuse anything; a wrong guess here costs time, never a wrong answer.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

_HASH_BYTES = 16


class PrefixIndex:
    """Blocks of tokens by the hash of all tokens up to their end, and who was seen with them, in which epoch."""

    def __init__(self, most_blocks: int = 65536, block_tokens: int = 64) -> None:
        self.most_blocks, self.block_tokens = most_blocks, block_tokens
        self._blocks: OrderedDict[bytes, dict[str, str]] = OrderedDict()  # hash: {node: epoch}

    def __len__(self) -> int:
        return len(self._blocks)

    def note(self, node: str, epoch: str, tokens: Sequence[int]) -> None:
        """The node has read these tokens. The end of a prompt is noted first, so that it is also forgotten first: a
        block is of no use without those before it."""
        for address in reversed(list(self._chain(tokens))):
            self._blocks.setdefault(address, {})[node] = epoch
            self._blocks.move_to_end(address)
        while len(self._blocks) > self.most_blocks:
            self._blocks.popitem(last=False)

    def held(self, tokens: Sequence[int], epochs: Mapping[str, str]) -> dict[str, int]:
        """Of the nodes in `epochs`, how many tokens each holds from the start; those that hold none are left out. What
        an earlier epoch held went with its process."""
        held: dict[str, int] = {}
        left = list(epochs)
        for number, address in enumerate(self._chain(tokens), 1):
            seen = self._blocks.get(address, {})
            left = [node for node in left if seen.get(node) == epochs[node]]
            if not left:
                break
            held.update(dict.fromkeys(left, number * self.block_tokens))
        return held

    def forget(self, node: str) -> None:
        for address, seen in list(self._blocks.items()):
            if seen.pop(node, None) is not None and not seen:
                del self._blocks[address]

    def _chain(self, tokens: Sequence[int]) -> Iterator[bytes]:
        """Whole blocks only: an end that grows with the next turn of a chat would be found by nobody."""
        data, address = array("I", tokens).tobytes(), b""
        size = self.block_tokens * array("I").itemsize
        for at in range(0, len(data) - size + 1, size):
            address = hashlib.blake2b(address + data[at : at + size], digest_size=_HASH_BYTES).digest()
            yield address
