"""What is remembered of prefixes: the longest known chain, by node and epoch, within a bound."""

from hypothesis import given
from hypothesis import strategies as st

from disaggregated_inference.kv import Salt
from disaggregated_inference.orchestrator.prefix_index import PrefixIndex

HERE = {"a": "1", "b": "1"}


def test_nothing_at_first() -> None:
    remembered = PrefixIndex()
    assert remembered.lookup(list(range(1000)), HERE) == {}
    assert remembered.lookup([], HERE) == {}
    remembered.add("a", "1", [])
    assert len(remembered) == 0


def test_whole_blocks_are_held() -> None:
    remembered = PrefixIndex()
    remembered.add("a", "1", range(200))
    assert remembered.lookup(list(range(1000)), HERE) == {"a": 192}
    assert remembered.lookup(tuple(range(130)), HERE) == {"a": 128}
    assert remembered.lookup(list(range(63)), HERE) == {}


def test_every_node_has_its_own() -> None:
    remembered = PrefixIndex(block_tokens=4)
    remembered.add("a", "1", range(8))
    remembered.add("b", "1", range(16))
    assert remembered.lookup(range(100), HERE) == {"a": 8, "b": 16}
    assert remembered.lookup(range(100), {"b": "1"}) == {"b": 16}


def test_a_block_counts_only_after_the_same_beginning() -> None:
    remembered = PrefixIndex(block_tokens=4)
    remembered.add("a", "1", [1, 2, 3, 4, 5, 6, 7, 8])
    assert remembered.lookup([1, 2, 3, 4, 5, 6, 7, 8], HERE) == {"a": 8}
    assert remembered.lookup([1, 2, 3, 4, 5, 6, 7, 9], HERE) == {"a": 4}
    assert remembered.lookup([0, 2, 3, 4, 5, 6, 7, 8], HERE) == {}
    assert remembered.lookup([5, 6, 7, 8], HERE) == {}


def test_a_new_epoch_holds_nothing() -> None:
    remembered = PrefixIndex(block_tokens=4)
    remembered.add("a", "1", range(16))
    assert remembered.lookup(range(16), {"a": "2"}) == {}
    remembered.add("a", "2", range(8))
    assert remembered.lookup(range(16), {"a": "2"}) == {"a": 8}
    assert remembered.lookup(range(16), {"a": "1"}) == {}, "the chain goes through blocks of the new epoch"


def test_forgotten_nodes_leave_nothing() -> None:
    remembered = PrefixIndex(block_tokens=4)
    remembered.add("a", "1", range(16))
    remembered.add("b", "1", range(8))
    remembered.forget("a")
    assert remembered.lookup(range(16), HERE) == {"b": 8}
    assert len(remembered) == 2
    remembered.forget("b")
    remembered.forget("never seen")
    assert len(remembered) == 0


def test_the_oldest_is_forgotten_and_its_end_first() -> None:
    remembered = PrefixIndex(max_blocks=6, block_tokens=4)
    old, new = list(range(16)), list(range(100, 116))
    remembered.add("a", "1", old)
    remembered.add("a", "1", new)
    assert len(remembered) == 6
    assert remembered.lookup(new, HERE) == {"a": 16}
    assert remembered.lookup(old, HERE) == {"a": 8}


def test_used_blocks_stay() -> None:
    remembered = PrefixIndex(max_blocks=2, block_tokens=4)
    for tokens in ([1] * 4, [2] * 4, [1] * 4, [3] * 4):
        remembered.add("a", "1", tokens)
    assert [bool(remembered.lookup([each] * 4, HERE)) for each in (1, 2, 3)] == [True, False, True]


def test_a_prompt_beyond_the_bound_keeps_its_beginning() -> None:
    remembered = PrefixIndex(max_blocks=3, block_tokens=4)
    remembered.add("a", "1", range(100))
    assert len(remembered) == 3
    assert remembered.lookup(range(100), HERE) == {"a": 12}


_TOKENS = st.lists(st.integers(0, 1), max_size=12)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("12"), _TOKENS), max_size=12), _TOKENS)
def test_the_same_as_comparing_the_tokens(notes: list[tuple[str, str, list[int]]], prompt: list[int]) -> None:
    remembered = PrefixIndex(block_tokens=2)
    known: dict[tuple[int, ...], dict[str, str]] = {}
    for node, epoch, tokens in notes:
        remembered.add(node, epoch, tokens)
        for stop in range(2, len(tokens) + 1, 2):
            known.setdefault(tuple(tokens[:stop]), {})[node] = epoch
    expected = {}
    for node, epoch in HERE.items():
        stop = 0
        while stop + 2 <= len(prompt) and known.get(tuple(prompt[: stop + 2]), {}).get(node) == epoch:
            stop += 2
        if stop:
            expected[node] = stop
    assert remembered.lookup(prompt, HERE) == expected


@given(st.lists(st.tuples(st.sampled_from("ab"), _TOKENS), max_size=20), st.integers(1, 8))
def test_never_more_than_the_bound(notes: list[tuple[str, list[int]]], max_blocks: int) -> None:
    remembered = PrefixIndex(max_blocks=max_blocks, block_tokens=2)
    for node, tokens in notes:
        remembered.add(node, "1", tokens)
        assert len(remembered) <= max_blocks
        assert remembered.lookup(tokens, {node: "1"}).get(node, 0) == 2 * min(len(tokens) // 2, max_blocks)


def test_salts_are_kept_apart_beyond_what_is_shared() -> None:
    remembered = PrefixIndex(block_tokens=4)
    ann, bob = Salt("ann"), Salt("bob")
    remembered.add("a", "1", range(16), ann)
    assert remembered.lookup(range(16), HERE, ann) == {"a": 16}
    assert remembered.lookup(range(16), HERE, bob) == {}
    assert remembered.lookup(range(16), HERE) == {}
    remembered.add("a", "1", range(16), ann._replace(shared_tokens=9))
    assert remembered.lookup(range(16), HERE, bob._replace(shared_tokens=9)) == {"a": 8}
    assert remembered.lookup(range(16), HERE, bob) == {}
