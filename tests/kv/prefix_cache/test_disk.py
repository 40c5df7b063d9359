"""The disk tier: a restart forgets nothing, a damaged file is never served."""

import logging
import stat
import threading
from pathlib import Path

import pytest

from disaggregated_inference.kv import KVDType, KVLayout
from disaggregated_inference.kv.dtype import KV_DTYPES
from disaggregated_inference.kv.prefix_cache import DiskTier
from tests.support.prefix_rows import (
    BLOCK,
    FULL,
    FULL_BYTES,
    LOTS,
    SLIDING,
    TOKENS,
    Reopen,
    check,
    evict_all,
    files,
    fill,
    keep,
    make,
)


@pytest.mark.parametrize("layout", [FULL, SLIDING], ids=["full", "sliding"])
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_restart_forgets_nothing(reopen: Reopen, layout: KVLayout, dtype: KVDType) -> None:
    other = [*TOKENS[:16], 1, 2, 3]
    store = reopen(layout, dtype=dtype)
    keep(store, TOKENS[:21], chunk=21)
    keep(store, other, chunk=21)
    store = reopen(layout, dtype=dtype)
    assert store.stats().disk_blocks == 4
    check(store, TOKENS, 21)
    check(store, [*other, 4], 19)
    check(store, [9, *TOKENS], 0)
    seen = store.stats()
    assert (seen.disk_hits, seen.blocks, seen.hits) == (4, 4, 2)
    check(store, TOKENS, 21)
    assert store.stats().disk_hits == 4  # from memory now
    assert keep(store, TOKENS[:40], chunk=10) == 40
    check(reopen(layout, dtype=dtype), TOKENS, 40)


def test_a_longer_block_replaces_the_short_one_on_disk(reopen: Reopen, tmp_path: Path) -> None:
    store = reopen()
    for length in (10, 12, 16):
        keep(store, TOKENS[:length])
    reopen().close()
    assert len(files(tmp_path)) == 2
    check(reopen(), TOKENS, 16)


def test_files_are_for_this_user_alone(reopen: Reopen, tmp_path: Path) -> None:
    """They hold users' prompts."""
    keep(reopen(), TOKENS[:21])
    reopen().close()
    folders = {path for file in files(tmp_path) for path in file.parents if path.is_relative_to(tmp_path)}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files(tmp_path)} == {0o600}
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}


def test_new_snapshots_reach_the_disk(reopen: Reopen) -> None:
    store = reopen(SLIDING)
    keep(store, TOKENS[:30], chunk=30)
    fill(store.insert(TOKENS[:20]), TOKENS[:20], SLIDING, chunk=6)
    store = reopen(SLIDING)
    check(store, TOKENS, 20, most=29)
    check(store, TOKENS, 30)


def test_a_snapshot_on_disk_for_a_block_in_memory(reopen: Reopen) -> None:
    keep(reopen(SLIDING), TOKENS[:16], chunk=12)
    store = reopen(SLIDING)
    keep(store, TOKENS[:16], chunk=16)  # an insertion looks in memory only, and this one makes one snapshot
    check(store, TOKENS, 16)
    assert store.stats().disk_hits == 0
    check(store, TOKENS, 12, most=15)
    assert store.stats().disk_hits == 1


def test_the_disk_limit(reopen: Reopen, tmp_path: Path) -> None:
    store = reopen()
    keep(store, TOKENS[:8])
    store.close()
    one = files(tmp_path)[0].stat().st_size
    store = reopen(disk_limit=3 * one + 50)
    for start in range(0, 600, 100):
        keep(store, range(start, start + 8))
        store.disk.flush()  # type: ignore[union-attr]
        assert sum(path.stat().st_size for path in files(tmp_path)) == store.stats().disk_bytes <= 3 * one + 50
    store = reopen(disk_limit=2 * one + 50)
    assert store.stats().disk_blocks == 2
    check(store, range(500, 508), 8)
    check(store, range(300, 308), 0)
    assert reopen(disk_limit=10).stats().disk_blocks == 0
    assert files(tmp_path) == []


def test_a_sequence_loses_its_end_first(reopen: Reopen, tmp_path: Path) -> None:
    keep(reopen(), TOKENS[:32])
    store = reopen()
    size = store.stats().disk_bytes
    store = reopen(disk_limit=size - 1)
    assert store.stats().disk_blocks == 3
    check(store, TOKENS, 24)


def test_what_is_used_stays_on_disk(reopen: Reopen) -> None:
    store = reopen()
    for start in (0, 100, 200):
        keep(store, range(start, start + 8))
    store.disk.flush()  # type: ignore[union-attr]
    check(store, range(8), 8)  # in memory: the disk hears of it all the same
    size = store.stats().disk_bytes
    store = reopen(disk_limit=size - 1)
    check(store, range(8), 8)
    check(store, range(100, 108), 0)


def test_memory_smaller_than_what_is_on_disk(reopen: Reopen) -> None:
    keep(reopen(), TOKENS)
    limit = 20 * FULL_BYTES
    store = reopen(limit=limit)
    check(store, TOKENS, 16)
    assert store.stats().size_bytes == 16 * FULL_BYTES
    other = list(range(500, 520))
    keep(store, other)
    check(store, other, 20)
    check(store, TOKENS, 16)
    assert store.stats().size_bytes <= limit


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("at", [0, 30, 200, -200, -1])
@pytest.mark.parametrize("when", ["before the start", "after the start"])
def test_a_damaged_file_is_never_served(
    reopen: Reopen, tmp_path: Path, at: int, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    keep(reopen(), TOKENS[:8])
    store = reopen()
    if when == "before the start":
        damage(files(tmp_path)[0], at)
        store = reopen()
    else:
        damage(files(tmp_path)[0], at)
    check(store, TOKENS, 0)
    assert (store.stats().disk_damaged, store.stats().disk_blocks, store.stats().disk_bytes) == (1, 0, 0)
    assert files(tmp_path) == []
    assert store.stats().size_bytes == 0
    assert keep(store, TOKENS[:8]) == 8
    check(reopen(), TOKENS, 8)


def test_damage_in_the_middle_leaves_the_beginning(reopen: Reopen, tmp_path: Path) -> None:
    written: list[list[Path]] = []
    for blocks in (1, 2, 3):
        keep(reopen(), TOKENS[: blocks * BLOCK])
        store = reopen()  # the one before has written all
        written.append(files(tmp_path))
    [second] = set(written[1]) - set(written[0])
    damage(second, -20)
    check(store, TOKENS, 8)
    assert store.stats().disk_damaged == 1


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_truncated_files_are_removed_at_the_start(reopen: Reopen, tmp_path: Path, size: int) -> None:
    keep(reopen(), TOKENS[:8])
    reopen()
    path = files(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:size])
    store = reopen()
    check(store, TOKENS, 0)
    assert not path.exists()


def test_foreign_files(reopen: Reopen, tmp_path: Path) -> None:
    """Ours to remove is what ends in .kv in a folder named like ours, and nothing else."""
    keep(reopen(), TOKENS[:8])
    reopen()
    ours = files(tmp_path)[0]
    (ours.parent / "note.txt").write_text("mine")
    (ours.parent / "renamed.kv").write_bytes(ours.read_bytes())
    (ours.parent / "folder.kv").mkdir()
    (tmp_path / "widgets").mkdir()
    (tmp_path / "widgets" / "button.kv").write_text("mine")
    check(reopen(), TOKENS, 8)
    assert not (ours.parent / "renamed.kv").exists()
    assert (ours.parent / "note.txt").exists()
    assert (tmp_path / "widgets" / "button.kv").exists()


def test_other_models_count_and_can_be_evicted(reopen: Reopen, tmp_path: Path) -> None:
    keep(reopen(), TOKENS[:16])
    store = reopen(dtype="float16")
    size = store.stats().disk_bytes
    assert store.stats().disk_blocks == 2
    store = reopen(dtype="float16", disk_limit=size)
    keep(store, TOKENS[:8])
    store = reopen(dtype="float16", disk_limit=size)
    check(store, TOKENS, 8)
    assert store.stats().disk_blocks == 2  # one of each model


def test_a_file_that_vanished_is_a_miss(reopen: Reopen, tmp_path: Path) -> None:
    keep(reopen(), TOKENS[:8])
    store = reopen()
    files(tmp_path)[0].unlink()
    check(store, TOKENS, 0)
    assert (store.stats().disk_blocks, store.stats().disk_damaged) == (0, 0)


def test_a_disk_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused = []

    def replace(self: Path, target: Path) -> None:
        refused.append(target)
        raise PermissionError(13, "read-only")

    monkeypatch.setattr(Path, "replace", replace)
    store = make(disk=DiskTier(tmp_path, LOTS))
    with caplog.at_level(logging.WARNING):
        assert keep(store, TOKENS) == 60
        store.close()
    assert len(refused) == 8
    assert len(caplog.records) == 1
    check(store, TOKENS, 60)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    store = make(disk=DiskTier(tmp_path / "file" / "kv", LOTS))
    assert keep(store, TOKENS) == 60
    store.close()
    check(store, TOKENS, 60)
    assert len(caplog.records) == 1
    assert "name another folder with --prefix-disk" in caplog.text


def test_a_full_queue_drops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    write = DiskTier._write_block

    def slow(self: DiskTier, *given: object) -> None:
        gate.wait(10)
        write(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(DiskTier, "_write_block", slow)
    store = make(disk=DiskTier(tmp_path, LOTS, queue_blocks=2))
    keep(store, TOKENS)
    assert store.stats().disk_dropped >= 5
    gate.set()
    store.close()
    assert store.stats().disk_blocks + store.stats().disk_dropped == 8


def test_what_left_memory_before_its_turn_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    write = DiskTier._write

    def slow(self: DiskTier, *given: object) -> None:
        gate.wait(10)
        write(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(DiskTier, "_write", slow)
    store = make(disk=DiskTier(tmp_path, LOTS))
    keep(store, TOKENS)
    evict_all(store)
    gate.set()
    store.close()
    assert (store.stats().disk_blocks, store.stats().disk_dropped) == (0, 8)
