"""The cache's blocks in memory, as a tree: a child continues where its parent ends. Only the last block of a sequence
is shorter than the others, and it has no children. Children of one block may have different salts: then their
addresses have different parents, and only those with the wanted one are looked at.

Using a block uses its parents too, and `touch` marks children first. So the least recently used block is always a leaf,
and evicting it cuts no sequence in the middle. This class neither locks nor reads rows: the cache does.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from disaggregated_inference.kv.prefix_cache.block_file import Label
from disaggregated_inference.kv.prefix_cache.blocks import MAX_SNAPSHOTS, Block, BlockAddress, Snapshot, shared_tokens
from disaggregated_inference.kv.prefix_cache.disk import DiskTier

TreeItem = Block | Label
Reach = Callable[[BlockAddress, TreeItem], int]


def rows_reached(wanted: BlockAddress, item: TreeItem) -> int:
    """The position up to which an item has the wanted rows; 0 if they share no token."""
    shared = shared_tokens(wanted.tokens, item.address.tokens)
    return wanted.start + shared if shared else 0


def snapshot_reached(wanted: BlockAddress, item: TreeItem) -> int:
    """The last such position at which the windows of sliding layers are known too."""
    reached = rows_reached(wanted, item) if item.positions else 0
    return max((position for position in item.positions if position <= reached), default=0)


@dataclass(frozen=True, slots=True)
class TreePath:
    """Blocks from the start of a sequence, and how many of its tokens they cover."""

    items: list[TreeItem]
    tokens: int

    @property
    def blocks(self) -> list[Block]:
        return [item for item in self.items if isinstance(item, Block)]


@dataclass(frozen=True, slots=True)
class Hold:
    """Memory reserved for an insertion, and the block it continues, which is not evicted meanwhile."""

    size_bytes: int
    pin: Block


class BlockTree:
    def __init__(self, root: bytes, limit_bytes: int) -> None:
        self.root = Block(BlockAddress(root, b"", 0, b""), np.empty(0), np.empty(0))
        self.limit_bytes = limit_bytes
        self.blocks: OrderedDict[bytes, Block] = OrderedDict()  # the least recently used first
        self.size_bytes = 0  # of the blocks and of reserved memory
        self.evicted = 0
        self._held_bytes = 0
        self._pins: Counter[Block] = Counter()

    def path(self, addresses: Sequence[BlockAddress], reach: Reach, disk: DiskTier | None = None) -> TreePath:
        """Complete blocks as far as possible, then the child that reaches furthest. Goes back a level while no child
        reaches any position: there may be no snapshot there."""
        items: list[TreeItem] = []
        for wanted in addresses:
            item = self._find(wanted) or (disk.find(wanted) if disk else None)
            if item is None:
                break
            items.append(item)
        for level in range(min(len(items), len(addresses) - 1), -1, -1):
            wanted = addresses[level]
            tokens, best = 0, None
            for child in self._children(items[level - 1] if level else self.root, wanted, disk):
                if (reached := reach(wanted, child)) > tokens:
                    tokens, best = reached, child
            if best is not None:
                return TreePath([*items[:level], best], tokens)
        return TreePath([], 0)

    def touch(self, blocks: Sequence[Block], now: float) -> None:
        for block in reversed(blocks):
            block.used_at = now
            self.blocks.move_to_end(block.address.hash)

    @property
    def free_bytes(self) -> int:
        return self.limit_bytes - self.size_bytes

    def room(self, pin: Block) -> int:
        """Bytes available for an insertion after `pin` if all other blocks were evicted."""
        staying: dict[bytes, int] = {}
        for pinned in (pin, *self._pins):
            block: Block | None = pinned
            while block is not None and block.address.hash not in staying:
                staying[block.address.hash] = block.size_bytes
                block = block.parent
        return self.limit_bytes - self._held_bytes - sum(staying.values())

    def hold(self, size_bytes: int, pin: Block) -> Hold | None:
        """Reserve memory, evicting other blocks; None if that is not enough, and then nothing is evicted."""
        if size_bytes > self.free_bytes and size_bytes > self.room(pin):
            return None
        self._pins[pin] += 1
        while self.size_bytes + size_bytes > self.limit_bytes and (victim := self._victim()):
            self._evict(victim)
        self.size_bytes += size_bytes
        self._held_bytes += size_bytes
        return Hold(size_bytes, pin)

    def release(self, hold: Hold) -> None:
        self.size_bytes -= hold.size_bytes
        self._held_bytes -= hold.size_bytes
        self._pins[hold.pin] -= 1
        if not self._pins[hold.pin]:
            del self._pins[hold.pin]

    def evict_unused_since(self, when: float) -> None:
        while (victim := self._victim()) and victim.used_at < when:
            self._evict(victim)

    def add(self, parent: Block, block: Block) -> Block | None:
        """Link a block, or return the one that covers its tokens; None if the parent was evicted meanwhile."""
        if parent is not self.root and self.blocks.get(parent.address.hash) is not parent:
            return None
        found = self._covering(parent, block.address) or self._link(parent, block)
        if found is not block:
            self.give(found, block.snapshots)
        return found

    def grow(self, addresses: Sequence[BlockAddress], fresh: dict[int, Block]) -> list[Block]:
        """The path of a sequence, from existing and `fresh` blocks (by number), up to the first missing block."""
        path: list[Block] = []
        for number, wanted in enumerate(addresses):
            parent = path[-1] if path else self.root
            block = self.add(parent, fresh[number]) if number in fresh else self._covering(parent, wanted)
            if block is None:
                break
            path.append(block)
        return path

    def give(self, block: Block, snapshots: dict[int, Snapshot]) -> None:
        """Add snapshots to a block; the newest stay."""
        before = block.size_bytes
        fresh = {position: snapshot for position, snapshot in snapshots.items() if position not in block.snapshots}
        block.snapshots = dict([*block.snapshots.items(), *fresh.items()][-MAX_SNAPSHOTS:])
        self.size_bytes += block.size_bytes - before

    def _find(self, wanted: BlockAddress) -> Block | None:
        block = self.blocks.get(wanted.hash)
        return block if block and block.address == wanted else None

    def _children(self, parent: TreeItem, wanted: BlockAddress, disk: DiskTier | None) -> list[TreeItem]:
        """Those in memory first: of two that reach equally far, the first is taken. A block that is only on disk has
        no children in memory."""
        near = _rivals(parent, wanted) if isinstance(parent, Block) else []
        return [*near, *(disk.children(wanted.parent) if disk else ())]

    def _covering(self, parent: Block, wanted: BlockAddress) -> Block | None:
        longer = (child for child in _rivals(parent, wanted) if child.address.tokens.startswith(wanted.tokens))
        return self._find(wanted) or next(longer, None)

    def _link(self, parent: Block, block: Block) -> Block:
        """Add a block in place of shorter blocks with the same beginning."""
        for child in _rivals(parent, block.address):
            if block.address.tokens.startswith(child.address.tokens):
                block.snapshots = {**child.snapshots, **block.snapshots}
                self._unlink(child)
        block.parent = parent
        parent.children[block.address.hash] = block
        self.blocks[block.address.hash] = block
        self.size_bytes += block.size_bytes
        self.give(block, {})
        return block

    def _unlink(self, block: Block) -> None:
        del self.blocks[block.address.hash]
        assert block.parent is not None
        del block.parent.children[block.address.hash]
        self.size_bytes -= block.size_bytes

    def _victim(self) -> Block | None:
        return next((block for block in self.blocks.values() if not block.children and block not in self._pins), None)

    def _evict(self, block: Block) -> None:
        self._unlink(block)
        self.evicted += 1


def _rivals(parent: Block, wanted: BlockAddress) -> list[Block]:
    """The children of a block in the place of `wanted`, with the same salt."""
    return [child for child in parent.children.values() if child.address.parent == wanted.parent]
