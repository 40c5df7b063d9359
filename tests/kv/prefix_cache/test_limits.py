"""A prefix cache never holds more than its limit."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from disaggregated_inference.kv.prefix_cache import Insertion
from tests.support.prefix_rows import (
    FULL,
    FULL_BYTES,
    SLIDING,
    TOKENS,
    Clock,
    check,
    evict_all,
    fill,
    keep,
    make,
    verify,
)


def test_the_least_recently_used_goes_first_and_from_its_end() -> None:
    clock = Clock()
    store = make(limit=40 * FULL_BYTES, clock=clock)
    one, two = TOKENS[:20], list(range(500, 520))
    keep(store, one)
    keep(store, two)
    check(store, one, 20)
    keep(store, list(range(700, 710)))
    check(store, two, 8)  # the last four, then eight more
    check(store, one, 20)
    seen = store.stats()
    assert seen.evicted_blocks == 2
    assert seen.size_bytes == (20 + 8 + 10) * FULL_BYTES


def test_a_sequence_larger_than_the_limit_is_kept_in_part() -> None:
    store = make(limit=21 * FULL_BYTES)
    keep(store, list(range(500, 520)))
    assert keep(store, TOKENS) == 21
    check(store, TOKENS, 21)
    assert store.stats().size_bytes == 21 * FULL_BYTES
    assert store.insert(TOKENS) is None  # what is there is what there is room for
    check(store, TOKENS, 21)


def test_unfinished_insertions_count_and_are_not_evicted() -> None:
    store = make(limit=30 * FULL_BYTES)
    keep(store, TOKENS[:8])
    first = store.insert(TOKENS[:24])
    second = store.insert(list(range(500, 530)))
    assert first is not None
    assert second is not None
    assert store.stats().size_bytes == 30 * FULL_BYTES
    assert store.insert(list(range(700, 710))) is None
    assert fill(second, list(range(500, 530))) == 6
    assert fill(first, TOKENS[:24]) == 24  # the block it goes on from stayed
    check(store, TOKENS, 24)


def test_what_an_insertion_goes_on_from_stays_to_its_root() -> None:
    store = make(limit=40 * FULL_BYTES)
    keep(store, TOKENS[:24])
    insertion = store.insert(TOKENS[:30])
    keep(store, list(range(700, 708)))  # used later, and yet it has to go
    assert keep(store, list(range(500, 540))) == 10
    assert fill(insertion, TOKENS[:30]) == 30
    check(store, TOKENS, 30)


def test_old_blocks_go() -> None:
    clock = Clock()
    store = make(clock=clock, max_age_s=10)
    keep(store, TOKENS[:20])
    clock.now += 8
    keep(store, list(range(500, 508)))
    check(store, TOKENS, 8, most=8)
    clock.now += 5
    check(store, TOKENS, 8)
    assert store.stats().blocks == 2
    clock.now += 100
    assert store.insert(TOKENS[:1]) is not None
    assert store.stats().blocks == 0


def test_a_match_survives_eviction() -> None:
    for layout, length in ((FULL, 20), (SLIDING, 20)):
        store = make(layout)
        keep(store, TOKENS[:20])
        match = store.match(TOKENS)
        evict_all(store)
        assert (store.stats().size_bytes, store.stats().blocks) == (0, 0)
        keep(store, list(range(500, 520)))
        assert match.tokens == length
        verify(list(match.slices(7)), TOKENS, store, length, 7)


STEPS = st.lists(
    st.tuples(st.sampled_from("kkkmua"), st.integers(0, 3), st.integers(1, 40), st.integers(1, 17)), max_size=30
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(steps=STEPS, limit=st.integers(1, 90), sliding=st.booleans())
def test_never_above_the_limit_and_never_wrong(
    steps: list[tuple[str, int, int, int]], limit: int, sliding: bool
) -> None:
    """Random sequences that share beginnings: kept, matched, abandoned, left open, aged."""
    clock = Clock()
    layout = SLIDING if sliding else FULL
    limit_bytes = limit * FULL_BYTES
    store = make(layout, limit=limit_bytes, clock=clock, max_age_s=20)
    open_ones: list[tuple[Insertion, list[int]]] = []
    for what, seed, length, chunk in steps:
        clock.now += chunk / 4
        tokens = [*TOKENS[: seed * 5], *random.Random(seed).choices(range(300), k=length)]
        if what == "m":
            match = store.match(tokens)
            verify(list(match.slices(chunk)), tokens, store, match.tokens, chunk)
        elif insertion := store.insert(tokens):
            if what == "k":
                fill(insertion, tokens, layout, chunk)
            elif what == "a":
                insertion.abandon()
            else:
                open_ones.append((insertion, tokens))
        assert store.stats().size_bytes <= limit_bytes
    for insertion, tokens in open_ones:
        fill(insertion, tokens, layout)
        assert store.stats().size_bytes <= limit_bytes
        match = store.match(tokens)
        verify(list(match.slices(9)), tokens, store, match.tokens, 9)
    evict_all(store)
    assert store.stats().size_bytes == 0
