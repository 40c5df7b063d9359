"""Callers with a salt find only their own KV."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disaggregated_inference.kv import NO_SALT, KVLayout, Salt, salt_of
from disaggregated_inference.kv.prefix_cache.blocks import shared_tokens, words
from tests.support.prefix_rows import (
    BLOCK,
    FULL,
    FULL_BYTES,
    SLIDING,
    TOKENS,
    Reopen,
    check,
    evict_all,
    fill,
    keep,
    make,
)

ANN, BOB = Salt(salt_of("ann")), Salt(salt_of("bob"))


@pytest.mark.parametrize("layout", [FULL, SLIDING], ids=["full", "sliding"])
@pytest.mark.parametrize("other", [BOB, NO_SALT], ids=["another salt", "no salt"])
def test_a_salt_finds_only_its_own(layout: KVLayout, other: Salt) -> None:
    store = make(layout)
    keep(store, TOKENS, salt=ANN)
    check(store, TOKENS, 60, salt=ANN)
    for length in (1, 7, 8, 9, 59, 60):
        check(store, TOKENS[:length], 0, salt=other)
    keep(store, TOKENS, salt=other)
    check(store, TOKENS, 60, salt=other)
    assert store.stats().blocks == 16, "nothing is shared, not even the first block"


def test_the_disk_tier_keeps_salts_apart(reopen: Reopen) -> None:
    keep(reopen(), TOKENS, salt=ANN)
    store = reopen()
    for salt in (BOB, NO_SALT):
        store.recall(TOKENS, salt)
        check(store, TOKENS, 0, salt=salt)
    assert store.stats().disk_hits == 0
    keep(store, TOKENS[:20], salt=BOB)
    store = reopen()
    check(store, TOKENS, 20, salt=BOB)
    check(store, TOKENS, 60, salt=ANN)


def test_a_longer_block_takes_the_place_of_its_own_salt_only() -> None:
    store = make()
    keep(store, TOKENS[:5], salt=ANN)
    keep(store, TOKENS[:7], salt=BOB)
    check(store, TOKENS, 5, salt=ANN)
    check(store, TOKENS, 7, salt=BOB)


@pytest.mark.parametrize("layout", [FULL, SLIDING], ids=["full", "sliding"])
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_leading_tokens_may_be_shared(reopen: Reopen, layout: KVLayout, on_disk: bool) -> None:
    """Whole blocks of them: 20 tokens are two blocks of 8."""
    mine, other = ANN._replace(shared_tokens=20), BOB._replace(shared_tokens=20)
    tokens, store = TOKENS[:30], reopen(layout)
    fill(store.insert(tokens, mine), tokens, layout, chunk=8)
    store = reopen(layout) if on_disk else store
    check(store, tokens, 30, salt=mine)
    check(store, tokens, 16, salt=other)
    check(store, tokens[:12], 8 if layout is SLIDING else 12, salt=other)
    check(store, tokens, 0, salt=BOB)
    changed = [*tokens[:18], 1, *tokens[19:]]
    fill(store.insert(changed, other), changed, layout, chunk=8)
    check(store, tokens, 30, salt=mine)
    check(store, changed, 30, salt=other)


def test_shared_blocks_stay_while_private_ones_follow_them() -> None:
    store = make(limit=9 * BLOCK * FULL_BYTES)
    mine = ANN._replace(shared_tokens=24)
    keep(store, TOKENS, salt=mine)
    keep(store, list(range(8)), salt=BOB)
    keep(store, list(range(50, 66)), salt=BOB)  # evicts the end of the first sequence, never its shared beginning
    assert 24 <= store.match(TOKENS, None, mine).tokens < 60
    evict_all(store)
    assert store.stats().size_bytes == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.lists(st.integers(0, 1), max_size=24)), max_size=12))
def test_a_match_never_tells_of_another_salt(sequences: list[tuple[int, int, list[int]]]) -> None:
    """Beyond the shared blocks, a match is the longest beginning that the same salt has left."""
    store, left, shared = make(), dict[int, list[list[int]]](), [0] * BLOCK
    for number, shared_blocks, tail in sequences:
        tokens = [*shared, *tail]
        salt = Salt(f"salt-{number}", BLOCK * min(shared_blocks, 1))
        known = store.match(tokens, None, salt).tokens
        own = max((_common(tokens, each) for each in left.get(salt.shared_tokens * 10 + number, [])), default=0)
        assert known <= max(own, salt.shared_tokens), "no more than its own, or what is shared"
        keep(store, tokens, salt=salt)
        left.setdefault(salt.shared_tokens * 10 + number, []).append(tokens)


def _common(one: list[int], two: list[int]) -> int:
    return shared_tokens(words(one), words(two))
