"""The disk tier of the prefix cache: one file per block, so that prefixes survive a restart.

Files are <folder>/<root of the model>/<hash of the block>.kv, written by one thread under a temporary name and then
renamed. Nothing is synced: size and checksum reveal an incomplete file, which is never used. A disk that is full,
read-only or gone costs cache hits, never a request; it is logged once.
"""

import contextlib
import logging
import os
import queue
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from disaggregated_inference.kv.prefix_cache.block_file import (
    Damaged,
    Label,
    encoded,
    read_block,
    read_label,
    write_block,
)
from disaggregated_inference.kv.prefix_cache.blocks import HASH_BYTES, Block, BlockAddress, BlockShape
from disaggregated_inference.private_files import make_private, make_private_folder, private_opener
from disaggregated_inference.timeouts import KVTimeouts

log = logging.getLogger(__name__)

_NAME = re.compile(f"[0-9a-f]{{{2 * HASH_BYTES}}}")


class DiskTier:
    """All blocks in one folder, of any model, in order of use. Any thread may call; one thread writes."""

    def __init__(
        self, folder: Path, limit_bytes: int, queue_blocks: int = 1024, timeouts: KVTimeouts = KVTimeouts()
    ) -> None:
        self.folder, self.limit_bytes, self._timeouts = folder, limit_bytes, timeouts
        self.size_bytes = self.hits = self.damaged = self.dropped = 0
        self._labels: OrderedDict[bytes, Label] = OrderedDict()
        self._children: dict[bytes, dict[bytes, Label]] = {}
        self._used: set[bytes] = set()  # since their files were last touched
        self._lock = threading.Lock()
        self._warned = self._closed = False
        self._scan()
        # Weak references: the queue has no limit in bytes, so it must not keep evicted blocks alive. A block that is
        # evicted before it is written is dropped and counted.
        self._queue: queue.Queue[tuple[bytes, BlockShape, weakref.ref[Block]] | None] = queue.Queue(queue_blocks)
        self._writer = threading.Thread(target=self._write_queued, name="prefix-disk", daemon=True)
        self._writer.start()

    @property
    def blocks(self) -> int:
        return len(self._labels)

    def find(self, wanted: BlockAddress) -> Label | None:
        with self._lock:
            label = self._labels.get(wanted.hash)
        return label if label and label.address == wanted else None

    def children(self, parent: bytes) -> list[Label]:
        with self._lock:
            return list(self._children.get(parent, {}).values())

    def used(self, hashes: Iterable[bytes]) -> None:
        """Mark blocks as recently used, after a hit here or in memory. `close` writes the order to the files."""
        with self._lock:
            for hash in hashes:
                if hash in self._labels:
                    self._labels.move_to_end(hash)
                    self._used.add(hash)

    def read(self, label: Label, shape: BlockShape) -> Block | None:
        """The block, checked; None if it is gone or damaged, and then its entry is removed."""
        path = self._path(label)
        try:
            block = read_block(path, label, shape)
        except Damaged as error:
            log.warning("removed a damaged prefix file: %s: %s", path.name, error)
            self._remove(label)
            with self._lock:
                self.damaged += 1
            return None
        except OSError as error:
            if not isinstance(error, FileNotFoundError):  # another process may have removed it
                self._warn(error)
            self._forget(label)
            return None
        with self._lock:
            self.hits += 1
        self._touch(label)
        return block

    def write(self, root: bytes, shape: BlockShape, block: Block) -> None:
        """Queue a block for writing, unless it is on disk. A full queue drops it."""
        if self._closed or self._has(block):
            return
        try:
            self._queue.put_nowait((root, shape, weakref.ref(block)))
        except queue.Full:
            self.dropped += 1

    def flush(self) -> None:
        """Wait until all queued blocks are written or dropped."""
        self._queue.join()

    def close(self) -> None:
        """Write queued blocks within `last_writes_s`, and the order of use for the next start."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=self._timeouts.last_writes_s)
        self._writer.join(self._timeouts.last_writes_s)
        for label in [label for hash, label in self._labels.items() if hash in self._used]:
            self._touch(label)

    def _path(self, label: Label) -> Path:
        return self.folder / label.root.hex() / f"{label.address.hash.hex()}.kv"

    def _has(self, block: Block) -> bool:
        label = self.find(block.address)
        return label is not None and set(block.positions) <= set(label.positions)

    def _touch(self, label: Label) -> None:
        now = time.time_ns()  # the kernel's clock is too coarse to keep the order
        with contextlib.suppress(OSError):
            os.utime(self._path(label), ns=(now, now))

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            remedy = "make room there, or name another folder with --prefix-disk"
            log.warning("the disk tier of the prefix cache has a problem (logged once): %s; %s", error, remedy)

    def _write_queued(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._write(*item)
            except OSError as error:
                self._warn(error)
            except Exception:
                log.exception("could not write a prefix block")
            finally:
                self._queue.task_done()
        self._queue.task_done()

    def _write(self, root: bytes, shape: BlockShape, queued: weakref.ref[Block]) -> None:
        block = queued()
        if block is None:
            self.dropped += 1
        elif not self._has(block):
            # A copy: the cache may add a snapshot meanwhile.
            self._write_block(root, shape, Block(block.address, block.keys, block.values, block.snapshots))

    def _write_block(self, root: bytes, shape: BlockShape, block: Block) -> None:
        label, head = encoded(root, shape, block)
        if not self._make_room(label.file_bytes, block.address.parent):
            self.dropped += 1
            return
        path = self._path(label)
        make_private_folder(path.parent)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            with open(temporary, "wb", opener=private_opener) as file:
                write_block(file, head, block)
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        self._remember(label)
        self._supersede(label)

    def _supersede(self, label: Label) -> None:
        """Remove blocks that are shorter beginnings of this one."""
        for other in self.children(label.address.parent):
            if other.address.hash != label.address.hash and label.address.tokens.startswith(other.address.tokens):
                self._remove(other)

    def _make_room(self, size: int, parent: bytes) -> bool:
        """Remove the least recently used blocks, children before parents, but never `parent`."""
        while size <= self.limit_bytes:
            with self._lock:
                if self.size_bytes + size <= self.limit_bytes:
                    return True
                leaves = (each for hash, each in self._labels.items() if hash != parent and hash not in self._children)
                victim = next(leaves, None)
            if victim is None:
                return False
            self._remove(victim)
        return False

    def _remember(self, label: Label) -> None:
        self._forget(label)
        with self._lock:
            self._labels[label.address.hash] = label
            self._children.setdefault(label.address.parent, {})[label.address.hash] = label
            self.size_bytes += label.file_bytes

    def _forget(self, label: Label) -> None:
        hash, parent = label.address.hash, label.address.parent
        with self._lock:
            known = self._labels.pop(hash, None)
            if known is None:
                return
            self.size_bytes -= known.file_bytes
            self._used.discard(hash)
            siblings = self._children[parent]
            del siblings[hash]
            if not siblings:
                del self._children[parent]

    def _remove(self, label: Label) -> None:
        self._forget(label)
        self._unlink(self._path(label))

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._warn(error)

    def _scan(self) -> None:
        """Read all files' headers. Folders with other names are ignored."""
        found: list[tuple[int, Label]] = []
        try:
            make_private_folder(self.folder)  # it holds users' prompts
            for folder in self.folder.iterdir():
                if _NAME.fullmatch(folder.name) and folder.is_dir():
                    found += self._scan_root(folder)
        except OSError as error:
            self._warn(error)
        for _, label in sorted(found, key=lambda each: each[0]):
            self._remember(label)
        self._make_room(0, b"")

    def _scan_root(self, folder: Path) -> list[tuple[int, Label]]:
        found = []
        make_private(folder)
        for path in folder.iterdir():
            try:
                make_private(path)
                status = path.stat()
                if path.suffix == ".kv":
                    found.append((status.st_mtime_ns, read_label(path, bytes.fromhex(folder.name), status.st_size)))
                elif path.suffix == ".tmp" and status.st_mtime < time.time() - self._timeouts.stale_file_s:
                    self._unlink(path)
            except Damaged:
                self.damaged += 1
                self._unlink(path)
            except OSError as error:
                self._warn(error)
        return found
