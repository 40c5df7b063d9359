"""Many threads at one prefix cache."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from disaggregated_inference.kv import KVLayout
from disaggregated_inference.kv.prefix_cache import DiskTier
from tests.support.prefix_rows import FULL, FULL_BYTES, SLIDING, TOKENS, check, evict_all, fill, make, piece, verify


@pytest.mark.parametrize("layout", [FULL, SLIDING], ids=["full", "sliding"])
def test_many_threads(layout: KVLayout, tmp_path: Path) -> None:
    limit = 120 * FULL_BYTES
    store = make(layout, limit=limit, disk=DiskTier(tmp_path, 40_000))
    over: list[int] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(40):
            tokens = [*TOKENS[: chance.randrange(40)], *chance.choices(range(3), k=chance.randrange(1, 20))]
            match = store.match(tokens)
            verify(list(match.slices(9)), tokens, store, match.tokens, 9)
            insertion = store.insert(tokens)
            if insertion and chance.random() < 0.2:
                insertion.abandon()
            else:
                fill(insertion, tokens, layout, chance.randrange(1, 20))
            over.append(max(0, store.stats().size_bytes - limit))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    store.close()
    assert not any(over)
    assert store.stats().hits > 0
    evict_all(store)
    assert store.stats().size_bytes == 0


def test_layers_put_by_several_threads() -> None:
    store = make(SLIDING)
    insertion = store.insert(TOKENS)
    assert insertion is not None

    def put(layer: int) -> None:
        for at in range(0, 60, 4):
            insertion.put(piece(TOKENS, SLIDING, layer, at, at + 4, "float32"))

    threads = [threading.Thread(target=put, args=(layer,)) for layer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert insertion.finish() == 60
    check(store, TOKENS, 60)
    check(store, TOKENS, 56, most=59)
