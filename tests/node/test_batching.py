"""Continuous batching: in any batch, every request gets the tokens that it would get alone."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from disaggregated_inference.api import GenerationParams
from disaggregated_inference.engines import Engine, load_engine
from disaggregated_inference.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    KVMemoryFull,
    NodeBusy,
    RequestTooLarge,
    TicketRefused,
)
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.node.decode import DecodeNode
from disaggregated_inference.node.generation import Generation
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.prefill import PrefillNode
from disaggregated_inference.node.scheduler import Scheduler
from disaggregated_inference.timeouts import NodeTimeouts, TransferTimeouts
from tests.support.engines import ENGINE_OPTIONS, LoadTiny
from tests.support.handoff import alone, prompt_of
from tests.support.mixed_requests import MixedRequest, mixed
from tests.support.node_pair import Pair, nothing_left
from tests.support.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def nodes(nodes: Callable[..., Pair]) -> Callable[..., Pair]:
    """Both nodes and all clients are threads of one process here: none is gone because the others are slow."""
    return partial(
        nodes, timeouts=NodeTimeouts(transfer=TransferTimeouts(silence_s=30.0, max_silence_s=90.0, dial_s=30.0))
    )


def in_a_crowd(pair: Pair, requests: list[MixedRequest], concurrency: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    delays = [draw.random() * 0.03 for _ in requests]

    def run(number: int) -> list[int]:
        time.sleep(delays[number])
        return list(requests[number].begin(pair))

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(run, range(len(requests))))


PAIRS = [("torch", "mlx"), ("mlx", "torch")] if "mlx" in ENGINE_OPTIONS else [("torch", "torch")]


@pytest.mark.parametrize(
    ("architecture", "reader", "writer", "crowds"),
    [
        ("llama", *PAIRS[0], (64,)),
        ("qwen3_moe", *PAIRS[-1], (64,)),
        ("gpt_oss", *PAIRS[0], (1, 64)),
        ("gpt_oss", *PAIRS[-1], (16,)),
    ],
)
def test_token_exact_with_many_requests(
    architecture: str,
    reader: str,
    writer: str,
    crowds: tuple[int, ...],
    nodes: Callable[..., Pair],
    tiny_engine: LoadTiny,
) -> None:
    """With 1, 16 and 64 requests at once, compared with one by one and no prefix cache."""
    requests = mixed(64)
    lonely = nodes(reader, writer, architecture)
    expected = [list(asked.begin(lonely)) for asked in requests]
    greedy = [at for at, asked in enumerate(requests) if asked.params.greedy][:6]
    for at in greedy:
        asked = requests[at]
        assert expected[at] == alone(tiny_engine(writer, architecture), asked.prompt, asked.params.max_tokens or 0)
    for concurrency in crowds:
        pair = nodes(reader, writer, architecture, prefix_bytes=64 << 20)
        assert in_a_crowd(pair, requests, concurrency) == expected
        assert pair[1].kv_memory.prefixes.stats().hits > 5, "the prefix cache was not used"
        assert until(lambda: nothing_left(pair))  # noqa: B023
        if concurrency > 1:
            sizes = [rate.size for rate in pair[1].scheduler.batch.rates.stats()]
            assert max(sizes) >= 4, f"nothing was batched: {sizes}"


def test_several_choices(nodes: Callable[..., Pair]) -> None:
    """The first of n choices is the one of n = 1; the others differ."""
    pair = nodes()
    for origin in ("local", "remote"):
        sampling: dict[str, Any] = {"temperature": 1.5, "seed": 42}
        one = list(MixedRequest(origin, prompt_of(100), GenerationParams(max_tokens=12, **sampling)).begin(pair))
        answer = MixedRequest(origin, prompt_of(100), GenerationParams(max_tokens=12, **sampling, n=3)).begin(pair)
        pieces = list(answer.events())
        choices = [[piece.token for piece in pieces if piece.choice == n] for n in range(3)]
        assert choices[0] == one
        assert len({tuple(choice) for choice in choices}) == 3
        assert answer.metrics.completion_tokens == sum(map(len, choices))
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"] * 3
    assert until(lambda: nothing_left(pair))


def test_a_generation_continues_on_another_node(nodes: Callable[..., Pair]) -> None:
    """Failover during a generation: prompt and completion so far, the same seed, the same rest."""
    pair = nodes()
    prompt = prompt_of(100)
    sampling: dict[str, Any] = {"temperature": 1.2, "seed": 5, "frequency_penalty": 0.4, "min_tokens": 30}
    whole = list(MixedRequest("local", prompt, GenerationParams(max_tokens=30, **sampling)).begin(pair))
    for cut in (1, 10, 29):
        rules = GenerationParams(max_tokens=30 - cut, **sampling, written=tuple(whole[:cut]))
        assert list(MixedRequest("remote", prompt + whole[:cut], rules).begin(pair)) == whole[cut:]
    with pytest.raises(BadRequest, match="end with the tokens in written"):
        MixedRequest("local", prompt, GenerationParams(written=(3, 4))).begin(pair)


def test_stop_strings_end_a_generation(nodes: Callable[..., Pair]) -> None:
    pair = nodes()
    text = "".join(
        piece.text for piece in pair[1].generate_local(prompt_of(60), GenerationParams(max_tokens=40)).events()
    )
    middle = text[len(text) // 2 : len(text) // 2 + 3]
    rules = GenerationParams(max_tokens=40, stop=(middle,))
    answer = pair[1].generate_local(prompt_of(60), rules)
    assert "".join(piece.text for piece in answer.events()) == text[: text.index(middle)]
    assert answer.metrics.finish_reason == "stop"


def slow(node: DecodeNode | PrefillNode, name: str, seconds: float | Callable[..., float]) -> None:
    """Make a method of the engine slow, as with a large model."""
    original = getattr(node.engine, name)

    def slowed(*arguments: Any) -> Any:
        time.sleep(seconds(*arguments) if callable(seconds) else seconds)
        return original(*arguments)

    setattr(node.engine, name, slowed)


def test_cancelled_in_every_phase(nodes: Callable[..., Pair]) -> None:
    """Memory becomes free on both nodes: waiting, transfer, prefill, decoding."""
    pair = nodes()
    prefill, decode = pair
    slow(prefill, "run_prefill", 0.2)
    slow(decode, "run_step", 0.02)
    slow(decode, "run_prefill", 0.1)

    def ends(answer: Generation, error: type[Exception] = Cancelled) -> None:
        answer.cancel()
        with pytest.raises(error):
            list(answer)

    def transferring() -> Generation:
        context, _ = prefill.submit(prompt_of(2000))
        return decode.generate_from_kv(context, GenerationParams(max_tokens=10))

    def writing() -> Generation:
        answer = decode.generate_local(prompt_of(5), GenerationParams(max_tokens=3000))
        assert until(lambda: answer.metrics.completion_tokens > 2)
        return answer

    def reading() -> Generation:
        answer = decode.generate_local(prompt_of(2000), GenerationParams(max_tokens=10))
        assert until(lambda: decode.engine.counters.prompt_tokens > 0)
        return answer

    for phase in (transferring, writing, reading):
        for delay in (0.0, 0.1, 0.5):
            answer = phase()
            time.sleep(delay)
            ends(answer)
            assert until(lambda: nothing_left(pair)), f"{phase.__name__} left something behind"
    # In the queue: all the memory is promised to someone else.
    claim = decode.kv_memory.admission.request(
        decode.kv_memory.admission.limit_bytes, 1, lambda claim: None, lambda error: None, 0
    )
    queued = decode.generate_local(prompt_of(5), GenerationParams(max_tokens=10))
    assert decode.kv_memory.admission.waiting == 1
    ends(queued)
    assert until(lambda: decode.kv_memory.admission.waiting == 0)
    decode.kv_memory.admission.release(claim)
    assert until(lambda: nothing_left(pair))


def test_cancelling_on_a_slow_engine_frees_memory_within_a_chunk(nodes: Callable[..., Pair]) -> None:
    """A slow engine gets small chunks: each takes less than a second."""
    pair = prefill, decode = nodes()
    prefill.chunked_prefill.chunk_tokens = decode.kv_source.chunk_tokens = 1024
    sizes: list[int] = []

    def seconds(sequence: Any, tokens: list[int], emit: Any, scoring: Any) -> float:
        sizes.append(len(tokens))
        return len(tokens) / 250

    for node in pair:
        slow(node, "run_prefill", seconds)
    assert len(list(decode.generate_local(prompt_of(64), GenerationParams(max_tokens=1)))) == 1
    prefill.submit(prompt_of(64))[1].result()
    prefill.tickets.cancel(next(iter(prefill.jobs)))
    answer = decode.generate_local(prompt_of(2000), GenerationParams(max_tokens=10))
    time.sleep(0.3)
    answer.cancel()
    assert until(lambda: nothing_left(pair))
    context, _ = prefill.submit(prompt_of(2000))
    time.sleep(0.3)
    prefill.tickets.cancel(context.ticket)
    assert until(lambda: nothing_left(pair))
    assert max(sizes) <= 250  # a chunk of 1,024 tokens would take four seconds
    assert sum(sizes) < 2 * 64 + 2 * 2000, "neither prompt was read to its end"


def test_cancelled_during_a_peer_check(nodes: Callable[..., Pair]) -> None:
    """The prefill node is busy: a cancelled request does not wait for the canary."""
    prefill, decode = nodes()
    busy = threading.Event()
    slow(prefill, "run_prefill", lambda *_: 0.0 * busy.wait(60))
    context, _ = prefill.submit(prompt_of(100))
    answer = decode.generate_from_kv(context, GenerationParams(max_tokens=4))
    others = [
        decode.generate_from_kv(prefill.submit(prompt_of(100))[0], GenerationParams(max_tokens=4)) for _ in range(2)
    ]
    time.sleep(0.4)
    for each in (answer, *others):
        each.cancel()
    assert until(lambda: decode.open_requests == 0, 30)
    busy.set()
    assert until(lambda: nothing_left((prefill, decode)), 60)


def test_every_wait_has_a_deadline(nodes: Callable[..., Pair]) -> None:
    prefill, decode = nodes()
    slow(decode, "run_step", 0.02)
    with pytest.raises(DeadlineExceeded, match="not done within"):
        list(decode.generate_local(prompt_of(5), GenerationParams(max_tokens=3000, timeout_s=0.5)))
    everything = decode.kv_memory.admission.limit_bytes
    claim = decode.kv_memory.admission.request(everything, 1, lambda claim: None, lambda error: None, 0)
    started = time.monotonic()
    with pytest.raises(KVMemoryFull):
        list(decode.generate_local(prompt_of(5), GenerationParams(max_tokens=10, queue_s=0.3)))
    assert time.monotonic() - started > 0.2
    with pytest.raises(NodeBusy):
        decode.generate_local(prompt_of(5), GenerationParams(max_tokens=10, queue_s=0))
    decode.kv_memory.admission.release(claim)
    slow(prefill, "run_prefill", 0.3)
    _, reading = prefill.submit(prompt_of(2000), timeout_s=0.5)
    with pytest.raises(DeadlineExceeded):
        reading.result(60)
    assert until(lambda: nothing_left((prefill, decode)))


def test_memory_for_eight_requests_serves_a_hundred(tiny_folder: Any, tiny_engine: LoadTiny) -> None:
    """All hundred requests are served, and memory stays within its limit."""
    model = ModelFiles("llama", tiny_folder("llama"))
    for name in ENGINE_OPTIONS:
        scheduler = Scheduler(partial(load_engine, name, model, **ENGINE_OPTIONS[name]))
        cost = scheduler.engine.kv_cost(120 + 8)
        kv_memory = KVMemory(scheduler, kv_bytes=8 * cost, prefix_bytes=0)
        node = DecodeNode(kv_memory, model.tokenizer)
        seen: list[int] = []
        original = node.scheduler.batch.step

        def watched(engine: Engine, seen: list[int] = seen, original: Any = original) -> None:
            seen.append(engine.kv_held_bytes)
            original(engine)

        node.scheduler.batch.step = watched  # type: ignore[method-assign]
        prompts = [prompt_of(120, seed=number) for number in range(100)]
        answers = [node.generate_local(prompt, GenerationParams(max_tokens=8, queue_s=100)) for prompt in prompts]
        assert kv_memory.admission.waiting > 80
        tokens = [list(answer) for answer in answers]
        for number in (0, 50, 99):
            assert tokens[number] == alone(tiny_engine(name, "llama"), prompts[number], 8)
        assert max(seen) <= 8 * cost
        assert kv_memory.admission.peak_bytes <= 8 * cost
        assert kv_memory.peak_held_bytes <= 8 * cost
        assert until(lambda: kv_memory.held_bytes == 0 and kv_memory.admission.held_bytes == 0)  # noqa: B023
        few = KVMemory(scheduler, kv_bytes=8 * cost, prefix_bytes=0, max_waiting=10)
        crowded = DecodeNode(few, model.tokenizer)
        outcomes = [_outcome(crowded, prompt) for prompt in prompts]
        assert outcomes.count("refused") > 0
        assert outcomes.count("refused") + outcomes.count("begun") == 100
        with pytest.raises(RequestTooLarge, match="can never fit"):
            crowded.generate_local(prompt_of(2000), GenerationParams(max_tokens=100))
        assert until(lambda: few.admission.held_bytes == 0, 10)  # noqa: B023
        for each in (kv_memory, few):
            assert each.faults == 0
            each.close_all()
        scheduler.stop()


def test_a_request_that_waits_for_one_piece_does_not_block_others(tiny_folder: Any, tiny_engine: LoadTiny) -> None:
    """Three sequences hold a third of the memory each. When the first and the last are closed, two thirds are free,
    but not in one piece."""
    model = ModelFiles("llama", tiny_folder("llama"))
    scheduler = Scheduler(partial(load_engine, "torch", model, **ENGINE_OPTIONS["torch"] | {"kv_bytes": 6001 << 10}))
    kv_memory = KVMemory(scheduler, prefix_bytes=0)
    node, admission = DecodeNode(kv_memory, model.tokenizer), kv_memory.admission
    cost = kv_memory.engine.kv_cost(2000)
    claims = [admission.request(cost, 1, lambda claim: None, lambda error: None, 0) for _ in range(3)]
    holds = [(claim, scheduler.call(lambda: kv_memory.open(2000))) for claim in claims]

    def end(number: int) -> None:
        claim, sequence = holds[number]
        scheduler.call(lambda: kv_memory.close(sequence))
        admission.release(claim)

    end(0)
    end(2)
    assert 3 * admission.held_bytes == admission.limit_bytes
    large = node.generate_local(prompt_of(2990), GenerationParams(max_tokens=10, timeout_s=600, queue_s=600))
    assert until(lambda: admission.waiting == 1)
    small = node.generate_local(prompt_of(20), GenerationParams(max_tokens=3, timeout_s=600, queue_s=60))
    assert list(small) == alone(tiny_engine("torch", "llama"), prompt_of(20), 3)
    assert until(lambda: admission.waiting == 1), "it was requeued"
    assert large.metrics.completion_tokens == 0
    end(1)
    assert list(large) == alone(tiny_engine("torch", "llama"), prompt_of(2990), 10)
    assert until(lambda: not kv_memory.held_bytes and not admission.held_bytes)
    node.close()
    kv_memory.close_all()
    scheduler.stop()


def test_a_prompt_is_admitted_only_when_its_memory_is_in_one_piece(tiny_folder: Any) -> None:
    """Its context must not go out before that: it would get decode memory that the holders of its own memory need."""
    model = ModelFiles("llama", tiny_folder("llama"))
    scheduler = Scheduler(partial(load_engine, "torch", model, **ENGINE_OPTIONS["torch"] | {"kv_bytes": 6001 << 10}))
    kv_memory = KVMemory(scheduler, prefix_bytes=0)
    node, admission = PrefillNode(kv_memory), kv_memory.prefill_admission
    holders = [node.submit(prompt_of(1900))[0].ticket for _ in range(3)]
    for ticket in holders:
        node.admitted(ticket).result(60)
    node.tickets.cancel(holders[0])
    node.tickets.cancel(holders[2])
    cost = kv_memory.engine.kv_cost(2900)
    assert until(lambda: admission.limit_bytes - admission.held_bytes > cost), "there is enough, in two pieces"
    large, computed = node.submit(prompt_of(2900), wait_s=600, timeout_s=600)
    small, _ = node.submit(prompt_of(20))
    node.admitted(small.ticket).result(60)
    assert not node.admitted(large.ticket).done()
    node.tickets.cancel(holders[1])
    node.admitted(large.ticket).result(60)
    assert computed.result(60).prompt_tokens == 2900
    cancelled, _ = node.submit(prompt_of(3300), wait_s=600, timeout_s=600)  # too large for what is left: it waits
    admitted = node.admitted(cancelled.ticket)
    node.tickets.cancel(cancelled.ticket)
    assert isinstance(admitted.exception(60), TicketRefused)
    for ticket in (large.ticket, small.ticket):
        node.tickets.cancel(ticket)
    assert until(lambda: not kv_memory.held_bytes and not admission.held_bytes)
    node.close()
    kv_memory.close_all()
    scheduler.stop()


def _outcome(node: DecodeNode, prompt: list[int]) -> str:
    try:
        node.generate_local(prompt, GenerationParams(max_tokens=8, queue_s=100))
    except NodeBusy:
        return "refused"
    return "begun"


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_the_second_chat_message_transfers_only_new_tokens(architecture: str, nodes: Callable[..., Pair]) -> None:
    """Both nodes have prefix caches: the second prompt transfers its new tokens only, with the same completion."""
    pair = nodes(architecture=architecture, prefix_bytes=64 << 20)
    decode = pair[1]
    fresh = nodes(architecture=architecture)
    prompt = prompt_of(2000)
    first = MixedRequest("remote", prompt, GenerationParams(max_tokens=50)).begin(pair)
    said = list(first)
    second = [*prompt, *said, *prompt_of(100, seed=3)]
    answer = MixedRequest("remote", second, GenerationParams(max_tokens=20)).begin(pair)
    assert list(answer) == list(MixedRequest("remote", second, GenerationParams(max_tokens=20)).begin(fresh))
    layout = decode.engine.spec.layout
    new = len(second) - answer.metrics.cached_tokens
    assert new <= 101, "everything is cached but the last completion token, which was never fed"
    rows = sum(min(new, plan.window or new) for plan in layout.layers)
    assert answer.metrics.kv_bytes <= 1.05 * rows * layout.row_bytes("float32")
    assert answer.metrics.prompt_tokens_recomputed == 0
    assert answer.metrics.prefill_cached_tokens == 2000
    assert until(lambda: nothing_left(pair))


def test_a_fully_cached_prompt_transfers_no_slice(nodes: Callable[..., Pair]) -> None:
    """The same prompt again: only the logits are transferred."""
    pair = nodes(prefix_bytes=64 << 20)
    asked = MixedRequest("remote", prompt_of(300), GenerationParams(max_tokens=16))
    first = list(asked.begin(pair))
    again = asked.begin(pair)
    assert list(again) == first
    assert (again.metrics.cached_tokens, again.metrics.kv_bytes) == (300, 0)
    local = MixedRequest("local", prompt_of(300), GenerationParams(max_tokens=16)).begin(pair)
    assert list(local) == first
    assert (local.metrics.cached_tokens, local.metrics.prompt_tokens_recomputed) == (299, 1)


def test_running_requests_do_not_stall_during_a_long_prefill(nodes: Callable[..., Pair]) -> None:
    """While requests are running, a local prompt is computed in small chunks between the steps."""
    _, decode = nodes()
    slow(decode, "run_step", 0.01)
    running = decode.generate_local(prompt_of(10), GenerationParams(max_tokens=400))
    assert until(lambda: running.metrics.completion_tokens > 5)
    slow(decode, "run_prefill", 0.01)
    sizes: list[int] = []
    original = decode.engine.run_prefill

    def seen(sequence: Any, tokens: Any, emit: Any, scoring: Any) -> Any:
        sizes.append(len(tokens))
        return original(sequence, tokens, emit, scoring)

    decode.engine.run_prefill = seen  # type: ignore[method-assign]
    before = running.metrics.completion_tokens
    assert list(decode.generate_local(prompt_of(900), GenerationParams(max_tokens=1)))
    assert len(sizes) >= 18
    assert running.metrics.completion_tokens - before >= len(sizes) // 2, "one step between two chunks"
    running.cancel()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_short_request_does_not_wait_for_long_ones(count: int, nodes: Callable[..., Pair]) -> None:
    _, decode = nodes()
    expected = list(decode.generate_local(prompt_of(20), GenerationParams(max_tokens=count)))
    slow(decode, "run_step", 0.01)
    running = decode.generate_local(prompt_of(10), GenerationParams(max_tokens=400))
    assert until(lambda: running.metrics.completion_tokens > 5)
    assert list(decode.generate_local(prompt_of(20), GenerationParams(max_tokens=count))) == expected
    assert running.metrics.completion_tokens < 300
    running.cancel()


def test_unload_and_load(nodes: Callable[..., Pair], tiny_engine: LoadTiny) -> None:
    for writer in ENGINE_OPTIONS:
        _, decode = nodes(writer, writer)
        kv_memory = decode.kv_memory
        expected = alone(tiny_engine(writer, "llama"), prompt_of(50), 8)
        running = decode.generate_local(prompt_of(5), GenerationParams(max_tokens=2000))
        with pytest.raises(NodeBusy, match="in use"):
            kv_memory.scheduler.call(kv_memory.unload)
        running.cancel()
        assert until(lambda: kv_memory.sequences == 0)  # noqa: B023
        for _ in range(3):
            kv_memory.scheduler.call(kv_memory.unload)
            assert not kv_memory.engine.loaded
            with ThreadPoolExecutor(8) as pool:
                started = [decode.generate_local(prompt_of(50), GenerationParams(max_tokens=8)) for _ in range(8)]
                answers = list(pool.map(list[int], started))
            assert answers == [expected] * 8
            assert kv_memory.engine.loaded


def test_idle_models_are_unloaded(tiny_folder: Any, tiny_engine: LoadTiny) -> None:
    model, loads = ModelFiles("llama", tiny_folder("llama")), [0]

    def load() -> Any:
        loads[0] += 1
        return load_engine("torch", model, **ENGINE_OPTIONS["torch"])

    scheduler = Scheduler(load)
    kv_memory = KVMemory(scheduler)
    kv_memory.unload_when_idle(0.3)
    node = DecodeNode(kv_memory, model.tokenizer)
    assert until(lambda: not kv_memory.engine.loaded)
    expected = alone(tiny_engine("torch", "llama"), prompt_of(50), 8)
    gate = threading.Barrier(8)

    def ask(_: int) -> list[int]:
        gate.wait()
        return list(node.generate_local(prompt_of(50), GenerationParams(max_tokens=8)))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [expected] * 8
    assert loads[0] == 2, "one load for all requests"
    kv_memory.close_all()
    scheduler.stop()
