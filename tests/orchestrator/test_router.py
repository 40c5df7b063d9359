"""The plan: what is possible, what is fastest, and that the same question always has the same answer."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disaggregated_inference.api import Rate
from disaggregated_inference.errors import (
    ClusterError,
    ContextTooLong,
    DisaggError,
    NoDecodeNode,
    PromptLogprobsUnsupported,
    QueueFull,
)
from disaggregated_inference.orchestrator.cluster_view import ClusterView, NodeView, Plan, Route, RouteRequest
from disaggregated_inference.orchestrator.router import plan

KV_TOKEN_BYTES = 98_304  # 48 layers, 4 heads of 128, bfloat16
PLENTY_BYTES = 64 << 30


def node(name: str, role: Any, **more: Any) -> NodeView:
    defaults: dict[str, Any] = {
        "group": "g",
        "kv_token_bytes": KV_TOKEN_BYTES,
        "kv_free_bytes": PLENTY_BYTES,
        "slots": 8,
    }
    return NodeView(name=name, role=role, **(defaults | more))


def dgx(name: str = "dgx-1", **more: Any) -> NodeView:
    return node(name, "prefill", **({"prefill_rates": (Rate(size=4096, tokens_per_s=4000.0),)} | more))


def mac(name: str = "mac-1", **more: Any) -> NodeView:
    rates: dict[str, Any] = {
        "prefill_rates": (Rate(size=4096, tokens_per_s=625.0),),
        "decode_rates": (Rate(size=1, tokens_per_s=60.0),),
    }
    return node(name, "decode", **(rates | more))


def cluster(*nodes: NodeView, **more: Any) -> ClusterView:
    met = frozenset((one.name, other.name) for one in nodes for other in nodes)
    return ClusterView(nodes=nodes, **({"checked": met} | more))


def ask(prompt_tokens: int, *nodes: NodeView, **more: Any) -> Plan:
    return plan(RouteRequest(model="m", prompt_tokens=prompt_tokens, **more), cluster(*nodes))


def chosen(made: Plan) -> tuple[str | None, str]:
    return made.prefill, made.decode


# What is faster


def test_a_long_prompt_goes_to_the_fast_prefill_node() -> None:
    made = ask(8000, dgx(), mac())
    assert chosen(made) == ("dgx-1", "mac-1")
    assert made.first_token_s == pytest.approx(0.005 + 2.0, abs=0.01), "the transfer hides behind the reading"
    assert made.total_s == pytest.approx(made.first_token_s + made.routes[0].exposed_s + 256 / 60)
    assert made.reason == "dgx-1 -> mac-1: 8000 new tokens, 2.01 s < 12.80 s local"
    assert [(option.prefill, option.decode) for option in made.routes] == [("dgx-1", "mac-1"), (None, "mac-1")]


def test_a_short_prompt_is_not_worth_a_transfer() -> None:
    made = ask(2, dgx(), mac())
    assert chosen(made) == (None, "mac-1")
    assert made.reason == "local: 2 new tokens, 0.00 s < 0.01 s"


def test_cached_tokens_are_not_computed_again() -> None:
    made = ask(8000, dgx(), mac(), cached={"mac-1": 7904})
    assert chosen(made) == (None, "mac-1"), "96 tokens here are faster than all of them there"
    assert made.reason.startswith("local: 96 new tokens, 0.15 s < 2.0")
    made = ask(8000, dgx(), mac(), cached={"dgx-1": 7904, "mac-1": 7000})
    assert chosen(made) == ("dgx-1", "mac-1")
    assert made.reason.startswith("dgx-1 -> mac-1: 96 new tokens, ")


def test_a_prompt_held_entirely_still_has_one_token_to_read() -> None:
    made = ask(100, mac(), cached={"mac-1": 5000})
    assert made.reason == "only way: local, 1 new tokens, 0.00 s"
    assert made.first_token_s == pytest.approx(1 / 625)


def test_a_slow_link_is_exposed() -> None:
    there = (dgx(), mac())
    slow = plan(RouteRequest(model="m", prompt_tokens=8000), cluster(*there, links={("dgx-1", "mac-1"): 1e8}))
    moved_s = 8000 * KV_TOKEN_BYTES / 1e8
    assert slow.first_token_s == pytest.approx(0.005 + 2.0), "the logits overtake the slices"
    assert slow.routes[0].exposed_s == pytest.approx(moved_s - 2.0 + 16 * KV_TOKEN_BYTES / 1e8)
    assert slow.total_s == pytest.approx(slow.first_token_s + slow.routes[0].exposed_s + 256 / 60)
    assert slow.reason.startswith("dgx-1 -> mac-1: 8000 new tokens, 7.89 s < 12.80 s"), "until the answer goes on"
    slower = plan(RouteRequest(model="m", prompt_tokens=8000), cluster(*there, links={("dgx-1", "mac-1"): 1e7}))
    assert chosen(slower) == (None, "mac-1")


def test_only_what_the_receiver_lacks_is_moved() -> None:
    there = cluster(dgx(), mac(), links={("dgx-1", "mac-1"): 1e8})
    made = plan(RouteRequest(model="m", prompt_tokens=8000, cached={"mac-1": 4000}), there)
    assert chosen(made) == ("dgx-1", "mac-1")
    assert made.routes[0].exposed_s == pytest.approx((4000 + 16) * KV_TOKEN_BYTES / 1e8 - 2.0)


def test_the_size_of_a_token_is_taken_from_either_side() -> None:
    links = {("dgx-1", "mac-1"): 1e8}
    question = RouteRequest(model="m", prompt_tokens=8000)
    known = plan(question, cluster(dgx(), mac(), links=links))
    assert plan(question, cluster(dgx(), mac(kv_token_bytes=0), links=links)).total_s == known.total_s
    assert plan(question, cluster(dgx(kv_token_bytes=0), mac(), links=links)).total_s == known.total_s


def test_a_new_pair_needs_a_peer_check() -> None:
    question = RouteRequest(model="m", prompt_tokens=8000)
    met, strangers = plan(question, cluster(dgx(), mac())), plan(question, cluster(dgx(), mac(), checked=frozenset()))
    assert strangers.first_token_s == pytest.approx(met.first_token_s + 0.1)


def test_a_busy_prefill_node_is_waited_for_or_avoided() -> None:
    other = dgx("dgx-2", prefill_rates=(Rate(size=4096, tokens_per_s=2000.0),))
    assert ask(8000, dgx(waiting=1, waiting_tokens=4000), other, mac()).prefill == "dgx-1"
    assert ask(8000, dgx(waiting=3, waiting_tokens=24000), other, mac()).prefill == "dgx-2"
    assert ask(8000, dgx(waiting=9, waiting_tokens=80000), mac()).prefill is None


def test_waiting_prompts_count_at_the_speed_of_their_length() -> None:
    reads = (Rate(size=64, tokens_per_s=100.0), Rate(size=4096, tokens_per_s=1000.0))
    short = ask(4096, mac(prefill_rates=reads, waiting=10, waiting_tokens=640, slots=99))
    assert short.first_token_s == pytest.approx(640 / 100 + 4096 / 1000)
    long = ask(4096, mac(prefill_rates=reads, waiting=1, waiting_tokens=4096, slots=99))
    assert long.first_token_s == pytest.approx(4096 / 1000 + 4096 / 1000)


def test_prefill_beside_running_generations_is_slower() -> None:
    assert ask(1000, mac()).first_token_s == pytest.approx(1.6)
    assert ask(1000, mac(running=3)).first_token_s == pytest.approx(2.4)


def test_defaults_where_nothing_was_measured() -> None:
    made = ask(8000, dgx(prefill_rates=()), mac(prefill_rates=(), decode_rates=()))
    assert made.first_token_s == pytest.approx(0.005 + 4)
    assert made.routes[0].exposed_s == pytest.approx(16 * KV_TOKEN_BYTES / 1e9)
    assert made.total_s == pytest.approx(made.first_token_s + made.routes[0].exposed_s + 256 / 30)
    assert made.routes[1].first_token_s == pytest.approx(20)
    nonsense = (Rate(size=64, tokens_per_s=0.0),)
    assert ask(8000, dgx(prefill_rates=nonsense), mac(prefill_rates=nonsense, decode_rates=nonsense)) == made


# Writing


def test_expected_completion_length() -> None:
    short, typical, long = (ask(100, mac(), max_tokens=count) for count in (16, 256, 100_000))
    assert short.total_s - short.first_token_s == pytest.approx(16 / 60)
    assert typical.total_s == long.total_s


def test_many_generations_share_a_node() -> None:
    writes = (Rate(size=1, tokens_per_s=60.0), Rate(size=4, tokens_per_s=120.0))
    for running, tokens_per_s in ((0, 60), (1, 60), (3, 30), (6, 120 / 7), (7, 120 / 7)):
        made = ask(100, mac(decode_rates=writes, running=running, slots=32))
        assert made.total_s - made.first_token_s == pytest.approx(256 / tokens_per_s), running
    alone = ask(100, mac(decode_rates=writes[1:]))
    assert alone.total_s - alone.first_token_s == pytest.approx(256 / 30), "not faster than what was seen"


def test_a_faster_decode_node_wins_a_short_prompt() -> None:
    made = ask(96, mac("mac-1"), mac("mac-2", decode_rates=(Rate(size=1, tokens_per_s=80.0),)))
    assert made.decode == "mac-2"
    assert made.reason == "local: 96 new tokens, done in 3.35 s < 4.42 s on mac-1"


def test_a_node_without_a_free_slot_costs_waiting_time() -> None:
    free, full = ask(100, mac(running=3, slots=4)), ask(100, mac(running=4, slots=4))
    assert full.first_token_s - free.first_token_s == pytest.approx(256 / 60 / 4), "until one of four ends"
    assert ask(100, dgx(), mac(running=4, slots=4)).first_token_s > 1


# Spreading


def test_equal_nodes_are_used_in_turn() -> None:
    assert ask(100, mac("mac-2"), mac("mac-1")).decode == "mac-1"
    assert ask(100, mac("mac-2", running=1), mac("mac-1", running=2)).decode == "mac-2"


def test_a_prefix_attracts_but_not_onto_a_full_node() -> None:
    held = {"mac-2": 960}
    assert ask(1000, mac("mac-1"), mac("mac-2"), cached=held).decode == "mac-2"
    assert ask(1000, mac("mac-1"), mac("mac-2", kv_free_bytes=1 << 20), cached=held).decode == "mac-1"
    crowded = mac("mac-2", running=8, waiting=1)
    assert ask(1000, mac("mac-1"), crowded, cached=held).decode == "mac-1"


def test_a_full_node_is_better_than_none() -> None:
    made = ask(1000, mac("mac-1", kv_free_bytes=0), mac("mac-2", running=8, waiting=3))
    assert made.decode == "mac-1"
    slow = mac("mac-3", prefill_rates=(Rate(size=1, tokens_per_s=1.0),))
    made = ask(1000, mac("mac-1", kv_free_bytes=0), slow)
    assert made.decode == "mac-3"
    assert made.reason.endswith("s > 5.87 s on mac-1 (overloaded)")


def test_unknown_memory_is_enough() -> None:
    assert ask(1000, mac("mac-1", kv_token_bytes=0, kv_free_bytes=0), mac("mac-2", running=1)).decode == "mac-1"


def test_a_prefill_node_without_memory_is_avoided() -> None:
    made = ask(8000, dgx(kv_free_bytes=7999 * KV_TOKEN_BYTES), mac())
    assert chosen(made) == (None, "mac-1")
    assert made.reason == "local: 8000 new tokens, 12.80 s > 2.01 s (overloaded)"
    assert ask(8000, dgx(kv_free_bytes=8000 * KV_TOKEN_BYTES), mac()).prefill == "dgx-1"


def test_a_queue_at_a_prefill_node_is_no_overload() -> None:
    assert ask(8000, dgx(waiting=3, waiting_tokens=8000, slots=1), mac()).prefill == "dgx-1"


def test_a_node_that_just_came_gets_its_share_step_by_step() -> None:
    assert ask(8000, dgx("dgx-1", warmth=0.2), dgx("dgx-2"), mac()).prefill == "dgx-2"
    busy = dgx("dgx-2", waiting=1, waiting_tokens=8000)
    assert ask(8000, dgx("dgx-1", warmth=0.2), busy, mac()).prefill == "dgx-2"
    busier = dgx("dgx-2", waiting=5, waiting_tokens=40000)
    assert ask(8000, dgx("dgx-1", warmth=0.2), busier, mac()).prefill == "dgx-1"
    assert ask(100, mac("mac-1", warmth=0.0), mac("mac-2", running=1)).decode == "mac-2"
    assert ask(100, mac(warmth=0.0)).decode == "mac-1", "a cold node is better than none"


# What is possible


@pytest.mark.parametrize(
    "there",
    [
        (),
        (dgx(),),
        (mac(usable=False), dgx()),
        (mac("failed-1"), mac("failed-2"), dgx()),
    ],
)
def test_no_decode_node(there: tuple[NodeView, ...]) -> None:
    with pytest.raises(NoDecodeNode, match=r"^Decode server unavailable - request failed$") as caught:
        ask(100, *there, avoid=frozenset({"failed-1", "failed-2"}))
    assert (caught.value.status, caught.value.code) == (503, "no_decode_node")


def test_a_prompt_too_long_for_all() -> None:
    there = (mac("mac-1", context_window=1000), mac("mac-2", context_window=1200), dgx())
    with pytest.raises(ContextTooLong, match=r"1256 tokens .* 1200 tokens"):
        ask(1000, *there)
    assert ask(944, *there).decode == "mac-2"
    assert ask(1000, *there, mac("mac-3")).decode == "mac-3"
    with pytest.raises(NoDecodeNode):
        ask(1000, *there, avoid=frozenset({"mac-1", "mac-2"}))


def test_a_prefill_node_with_a_small_window_is_left_out() -> None:
    assert ask(8000, dgx(context_window=8000), mac()).prefill is None


@pytest.mark.parametrize(
    ("reader", "writer"),
    [
        (dgx(group="other"), mac()),
        (dgx(group=""), mac(group="")),
        (dgx(exports=False), mac()),
        (dgx(), mac(imports=False)),
        (dgx(usable=False), mac()),
    ],
)
def test_pairs_that_cannot_transfer_are_left_out(reader: NodeView, writer: NodeView) -> None:
    made = ask(8000, reader, writer)
    assert chosen(made) == (None, "mac-1")
    assert made.reason == "only way: local, 8000 new tokens, 12.80 s"


def test_a_node_of_both_roles_serves_when_all_decode_nodes_are_gone() -> None:
    both = node("dgx-1", "both")
    assert chosen(ask(8000, both, mac(usable=False))) == (None, "dgx-1")
    assert chosen(ask(8000, both, mac(), avoid=frozenset({"mac-1"}))) == (None, "dgx-1")


def test_a_failed_prefill_node_is_not_used_again() -> None:
    assert ask(8000, dgx(), dgx("dgx-2"), mac(), avoid=frozenset({"dgx-1"})).prefill == "dgx-2"
    assert ask(8000, dgx(), mac(), avoid=frozenset({"dgx-1"})).prefill is None


def test_cluster_errors_have_their_place_in_the_tree() -> None:
    full = QueueFull("300 requests wait", 7)
    assert isinstance(full, ClusterError)
    assert (full.status, full.code, full.retry_after_s, str(full)) == (
        503,
        "queue_full",
        7,
        "300 requests wait; try again in 7 s",
    )
    assert issubclass(NoDecodeNode, ClusterError)


# Whatever the cluster looks like

_RATES = st.lists(
    st.builds(
        Rate,
        size=st.integers(0, 14).map(lambda power: 1 << power),
        tokens_per_s=st.just(0.0) | st.floats(0.01, 1e5),
    ),
    max_size=4,
).map(tuple)
_NAMES = ["a", "b", "c", "d", "e"]


def _node(name: str) -> st.SearchStrategy[NodeView]:
    return st.builds(
        NodeView,
        name=st.just(name),
        role=st.sampled_from(["prefill", "decode", "both"]),
        usable=st.sampled_from([True, True, True, False]),
        group=st.sampled_from(["", "g", "g", "h"]),
        exports=st.sampled_from([True, True, False]),
        imports=st.sampled_from([True, True, False]),
        context_window=st.sampled_from([0, 0, 2000, 100_000]),
        kv_token_bytes=st.sampled_from([0, 1, 100_000]),
        kv_free_bytes=st.sampled_from([0, 1 << 20, 1 << 40]),
        waiting=st.integers(0, 5),
        waiting_tokens=st.integers(0, 50_000),
        running=st.integers(0, 9),
        slots=st.integers(0, 8),
        prefill_rates=_RATES,
        decode_rates=_RATES,
        warmth=st.floats(0, 1),
    )


@st.composite
def _clusters(draw: st.DrawFn) -> ClusterView:
    nodes = [draw(_node(name)) for name in draw(st.lists(st.sampled_from(_NAMES), unique=True, max_size=5))]
    pairs = st.tuples(st.sampled_from(_NAMES), st.sampled_from(_NAMES))
    links = draw(st.dictionaries(pairs, st.just(0.0) | st.floats(1e3, 1e11), max_size=4))
    return ClusterView(nodes=tuple(nodes), links=links, checked=draw(st.frozensets(pairs, max_size=4)))


_QUESTIONS = st.builds(
    RouteRequest,
    model=st.just("m"),
    prompt_tokens=st.integers(1, 60_000),
    max_tokens=st.integers(1, 4000),
    cached=st.dictionaries(st.sampled_from(_NAMES), st.integers(0, 70_000)),
    avoid=st.frozensets(st.sampled_from(_NAMES), max_size=2),
)


def _answer(question: RouteRequest, there: ClusterView) -> Plan | str:
    try:
        return plan(question, there)
    except DisaggError as error:
        return repr(error)


def _may_serve(question: RouteRequest, view: NodeView) -> bool:
    fits = view.context_window == 0 or question.prompt_tokens + question.max_tokens <= view.context_window
    return view.usable and view.name not in question.avoid and fits


def _is_possible(question: RouteRequest, nodes: dict[str, NodeView], option: Route) -> bool:
    decode = nodes[option.decode]
    if not (decode.role in ("decode", "both") and _may_serve(question, decode)):
        return False
    if option.prefill is None:
        return True
    prefill = nodes[option.prefill]
    able = prefill.role in ("prefill", "both") and prefill.exports and decode.imports and prefill is not decode
    return able and _may_serve(question, prefill) and prefill.group == decode.group != ""


@given(_QUESTIONS, _clusters())
@settings(deadline=None)
def test_every_possible_route_is_weighed_and_no_other(question: RouteRequest, there: ClusterView) -> None:
    nodes = {view.name: view for view in there.nodes}
    every = [
        Route(decode=decode, prefill=prefill, first_token_s=0, total_s=0)
        for decode in nodes
        for prefill in (None, *nodes)
    ]
    expected = {(way.prefill, way.decode) for way in every if _is_possible(question, nodes, way)}
    made = _answer(question, there)
    if isinstance(made, str):
        assert not expected
        return
    assert {(option.prefill, option.decode) for option in made.routes} == expected
    assert len(made.routes) == len(expected)
    best = made.routes[0]
    assert (best.prefill, best.decode) == chosen(made)
    assert (best.first_token_s, best.total_s) == (made.first_token_s, made.total_s)
    assert all(0 < option.first_token_s < option.total_s < float("inf") for option in made.routes)
    assert made.reason.startswith("only way: ") == (len(expected) == 1)


def _is_overloaded(question: RouteRequest, nodes: dict[str, NodeView], option: Route) -> bool:
    decode = nodes[option.decode]
    whole = (question.prompt_tokens + question.max_tokens) * decode.kv_token_bytes
    full = whole > decode.kv_free_bytes or (decode.waiting > 0 and decode.waiting + decode.running >= decode.slots)
    prefill = nodes[option.prefill] if option.prefill else None
    return full or (prefill is not None and question.prompt_tokens * prefill.kv_token_bytes > prefill.kv_free_bytes)


@given(_QUESTIONS, _clusters())
@settings(deadline=None)
def test_the_fastest_route_with_free_memory_wins(question: RouteRequest, there: ClusterView) -> None:
    """Of warm ones: what is held against a cold node is in the order and not in the prediction."""
    there = msgspec.structs.replace(there, nodes=tuple(msgspec.structs.replace(n, warmth=1.0) for n in there.nodes))
    made = _answer(question, there)
    if isinstance(made, str):
        return
    nodes = {view.name: view for view in there.nodes}
    ranks = [(_is_overloaded(question, nodes, option), option.total_s) for option in made.routes]
    assert ranks == sorted(ranks)


@given(_QUESTIONS, _clusters(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_same_answer_in_any_order(question: RouteRequest, there: ClusterView, chance: random.Random) -> None:
    shuffled = list(there.nodes)
    chance.shuffle(shuffled)
    made = _answer(question, there)
    assert made == _answer(question, msgspec.structs.replace(there, nodes=tuple(shuffled)))
    assert made == _answer(question, there)


@given(_QUESTIONS, _clusters(), st.sampled_from(_NAMES), st.integers(0, 20_000))
@settings(deadline=None)
def test_more_cached_tokens_are_never_worse(question: RouteRequest, there: ClusterView, holder: str, more: int) -> None:
    held = question.cached | {holder: question.cached.get(holder, 0) + more}
    before, after = _answer(question, there), _answer(msgspec.structs.replace(question, cached=held), there)
    if isinstance(before, str) or isinstance(after, str):
        assert before == after
        return
    was = {(option.prefill, option.decode): option for option in before.routes}
    for option in after.routes:
        old = was[option.prefill, option.decode]
        assert option.first_token_s <= old.first_token_s * (1 + 1e-9)
        assert option.total_s <= old.total_s * (1 + 1e-9)
        if holder not in (option.prefill, option.decode):
            assert option == old


def test_a_refused_pair_transfers_nothing() -> None:
    question = RouteRequest(model="m", prompt_tokens=8000)
    made = plan(question, cluster(dgx(), mac(), mac("mac-2"), refused=frozenset({("dgx-1", "mac-1")})))
    assert chosen(made) == ("dgx-1", "mac-2")
    assert {(option.prefill, option.decode) for option in made.routes} == {
        ("dgx-1", "mac-2"),
        (None, "mac-1"),
        (None, "mac-2"),
    }


def test_each_choice_needs_memory() -> None:
    small = mac("small", kv_free_bytes=3000 * KV_TOKEN_BYTES, decode_rates=(Rate(size=1, tokens_per_s=600.0),))
    for choices, decode in ((1, "small"), (2, "mac-1")):
        assert ask(1000, small, mac(), max_tokens=1000, choices=choices).decode == decode


# Prompt logprobs


def test_prompt_logprobs_go_where_an_engine_computes_them() -> None:
    """The prefix cache does not help with tokens whose logprobs are wanted, and the node's engine has to be able."""
    able: Any = {"prompt_logprobs": True}
    assert chosen(ask(8000, dgx(**able), mac(), scored_tokens=0)) == ("dgx-1", "mac-1")
    assert chosen(ask(8000, dgx(), mac(**able), scored_tokens=0)) == (None, "mac-1"), "slower, but able"
    assert chosen(ask(10, dgx(**able), mac(), scored_tokens=0)) == ("dgx-1", "mac-1"), "short, but mac-1 is not able"
    cached = {"mac-1": 8000}
    assert chosen(ask(8000, dgx(**able), mac(**able), cached=cached)) == (None, "mac-1")
    made = ask(8000, dgx(**able), mac(**able), cached=cached, scored_tokens=0)
    assert chosen(made) == ("dgx-1", "mac-1")
    assert "8000 new tokens" in made.reason
    assert "2001 new tokens" in ask(8000, mac(**able), cached=cached, scored_tokens=6000).reason


def test_no_engine_computes_prompt_logprobs() -> None:
    with pytest.raises(PromptLogprobsUnsupported, match=r"no prompt logprobs \(llamacpp, mlx\): leave out") as caught:
        ask(10, dgx(engine="llamacpp"), mac(engine="mlx"), scored_tokens=0)
    assert caught.value.status == 501
    with pytest.raises(ClusterError, match="only dgx-1 can compute prompt logprobs, and cannot now"):
        ask(10, dgx(prompt_logprobs=True, usable=False), mac(), scored_tokens=0)
    with pytest.raises(ContextTooLong):
        ask(1000, mac(context_window=100), scored_tokens=0)


# Three ways: both machines, the decode node alone, a prefill node that writes answers too


def spark(name: str = "spark-1", **more: Any) -> NodeView:
    rates = {"decode_rates": (Rate(size=1, tokens_per_s=30.0),), "whole_answers": True, "imports": False, "slots": 64}
    return dgx(name, **(rates | more))


def test_the_plan_names_all_three_predictions() -> None:
    made = ask(8000, spark(), mac())
    assert chosen(made) == ("spark-1", "mac-1")
    pair_s, local_s, alone_s = made.total_s, 8000 / 625 + 256 / 60, 8000 / 4000 + 256 / 30
    assert made.reason == (
        f"spark-1 -> mac-1: 8000 new tokens; done in {pair_s:.2f} s by spark-1 -> mac-1,"
        f" {alone_s:.2f} s by spark-1 alone, {local_s:.2f} s by mac-1 alone"
    )
    ways = [(route.prefill, route.decode) for route in made.routes]
    assert ways == [("spark-1", "mac-1"), (None, "spark-1"), (None, "mac-1")]


def test_a_prefill_node_that_decodes_faster_serves_alone() -> None:
    fast = spark(decode_rates=(Rate(size=1, tokens_per_s=240.0),))
    made = ask(8000, fast, mac())
    assert chosen(made) == (None, "spark-1")
    assert made.reason.startswith("spark-1 alone: 8000 new tokens; done in 3.07 s by spark-1 alone, ")
    assert ask(2, fast, mac(decode_rates=(Rate(size=1, tokens_per_s=300.0),))).decode == "mac-1"


def test_a_slow_link_makes_one_machine_the_better_way() -> None:
    there = cluster(spark(), mac(), links={("spark-1", "mac-1"): 1e7})
    assert chosen(plan(RouteRequest(model="m", prompt_tokens=8000), there)) == (None, "spark-1")


def test_the_fewer_tokens_an_answer_may_have_the_less_decode_counts() -> None:
    slow = mac(decode_rates=(Rate(size=1, tokens_per_s=35.0),))
    assert chosen(ask(8000, spark(), slow, max_tokens=1)) == (None, "spark-1"), "no handover for one token"
    assert chosen(ask(8000, spark(), slow, max_tokens=256)) == ("spark-1", "mac-1")


def test_without_a_decode_node_the_prefill_node_serves_if_it_can() -> None:
    assert chosen(ask(100, spark(), mac(usable=False))) == (None, "spark-1")
    assert ask(100, spark()).reason == "only way: spark-1 alone, 100 new tokens, 0.03 s"
    with pytest.raises(NoDecodeNode):
        ask(100, dgx(), mac(usable=False))


def test_nothing_is_handed_to_a_node_that_takes_no_kv() -> None:
    made = ask(8000, spark("spark-1"), spark("spark-2"))
    assert {(route.prefill, route.decode) for route in made.routes} == {(None, "spark-1"), (None, "spark-2")}


def test_structured_output_needs_our_own_sampler() -> None:
    fast = spark(decode_rates=(Rate(size=1, tokens_per_s=240.0),))
    assert chosen(ask(8000, fast, mac(), structured=True)) == ("spark-1", "mac-1")
    with pytest.raises(NoDecodeNode):
        ask(8000, fast, mac(usable=False), structured=True)


def test_a_seed_gives_the_same_answer_while_a_decode_node_is_left() -> None:
    fast = spark(decode_rates=(Rate(size=1, tokens_per_s=240.0),))
    made = ask(8000, fast, mac(), seeded=True)
    assert chosen(made) == ("spark-1", "mac-1")
    assert "by spark-1 alone (another sampler)" in made.reason
    assert chosen(ask(8000, fast, mac(usable=False), seeded=True)) == (None, "spark-1")


def test_kv_that_waits_to_be_fetched_does_not_fill_the_engines_own_memory() -> None:
    made = ask(8000, spark(kv_free_bytes=0), mac(usable=False))
    assert "(overloaded)" not in made.reason
    fast = spark(kv_free_bytes=0, decode_rates=(Rate(size=1, tokens_per_s=240.0),))
    assert chosen(ask(8000, fast, mac())) == (None, "spark-1")
    full = spark(waiting=1, running=64, decode_rates=fast.decode_rates)
    assert ask(8000, full, mac()).decode == "mac-1"
