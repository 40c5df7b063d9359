"""A decode node with many requests at once: whatever the batch, everyone gets the answer they would have got alone."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from disaggregated_inference.engines import load_engine
from disaggregated_inference.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    KVMemoryFull,
    NodeBusy,
    RequestTooLarge,
)
from disaggregated_inference.kv_transfer import paths
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.node.decode import DecodeNode
from disaggregated_inference.node.generation import Generation, GenerationParams
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.prefill import PrefillNode
from disaggregated_inference.node.sampling import SamplingParams
from disaggregated_inference.node.scheduler import Scheduler
from tests.conftest import ENGINE_OPTIONS, LoadTiny, Pair, until
from tests.support.handoff import alone, prompt_of

SAMPLINGS = [
    SamplingParams(),
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=7),
    SamplingParams(temperature=1.2, top_p=0.9, top_k=40, seed=11),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(frequency_penalty=0.5, presence_penalty=0.5, temperature=0.7, seed=3),
    SamplingParams(logit_bias={5: 20.0}, logprobs=3),
    SamplingParams(min_tokens=6, temperature=1.0, min_p=0.05, seed=9),
]


@dataclass(frozen=True)
class Asked:
    origin: str  # remote, local, or again: a prompt that begins as an earlier one did
    prompt: list[int]
    rules: GenerationParams

    def begin(self, pair: Pair) -> Generation:
        prefill, decode = pair
        if self.origin == "local":
            return decode.read_and_write(self.prompt, rules=self.rules)
        context, _ = prefill.begin(self.prompt)
        return decode.fetch_and_write(context, rules=self.rules)


def mixed(count: int, seed: int = 0) -> list[Asked]:
    draw = random.Random(seed)
    asked: list[Asked] = []
    for number in range(count):
        origin = draw.choice(["remote", "local", "again"]) if asked else "remote"
        length = draw.choice([3, 20, 90, 130, 300, 500])
        prompt = prompt_of(length, seed=number)
        if origin == "again":
            prompt = [*draw.choice(asked).prompt, *prompt[: draw.choice([1, 40])]]
        rules = GenerationParams(
            max_tokens=draw.choice([1, 2, 9, 24]), sampling=draw.choice(SAMPLINGS), timeout_s=120, queue_s=120
        )
        asked.append(Asked(draw.choice(["remote", "local"]) if origin == "again" else origin, prompt, rules))
    return asked


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both nodes and all clients are threads of one process here: nobody is gone because they wait for each other."""
    for name in ("SILENCE_S", "PATIENCE_S"):
        monkeypatch.setattr(paths, name, 30.0)


def in_a_crowd(pair: Pair, requests: list[Asked], concurrency: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    delays = [draw.random() * 0.03 for _ in requests]

    def run(number: int) -> list[int]:
        time.sleep(delays[number])
        return list(requests[number].begin(pair))

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(run, range(len(requests))))


def left(pair: Pair) -> dict[str, int]:
    """What requests hold: nothing, once they have all ended."""
    prefill, decode = pair
    found = {"tickets": len(prefill.book), "attempts": len(prefill._attempts), "answers": decode.open_requests}
    for name, kv_memory in (("prefill", prefill.kv_memory), ("decode", decode.kv_memory)):
        found[f"{name} held"] = kv_memory.scheduler.call(lambda kv_memory=kv_memory: kv_memory.engine.kv_held_bytes)  # type: ignore[misc]
        found[f"{name} promised"] = kv_memory.admission.held_bytes + kv_memory.admission.held_slots
        found[f"{name} sequences"] = kv_memory.sequences
    return {name: count for name, count in found.items() if count}


def nothing_left(pair: Pair) -> bool:
    return not left(pair)


PAIRS = [("torch", "mlx"), ("mlx", "torch")] if "mlx" in ENGINE_OPTIONS else [("torch", "torch")]


@pytest.mark.parametrize(("reader", "writer"), PAIRS)
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gpt_oss"])
def test_token_exact_in_a_crowd(
    architecture: str, reader: str, writer: str, nodes: Callable[..., Pair], tiny_engine: LoadTiny
) -> None:
    """At 1, 16 and 64 at once; one by one, without kept prefixes, is what they are compared with."""
    requests = mixed(64)
    lonely = nodes(reader, writer, architecture)
    expected = [list(asked.begin(lonely)) for asked in requests]
    greedy = [at for at, asked in enumerate(requests) if asked.rules.sampling == SamplingParams()][:6]
    for at in greedy:
        asked = requests[at]
        assert expected[at] == alone(tiny_engine(writer, architecture), asked.prompt, asked.rules.max_tokens)
    for concurrency in (1, 16, 64):
        pair = nodes(reader, writer, architecture, prefix_bytes=64 << 20)
        assert in_a_crowd(pair, requests, concurrency) == expected
        assert pair[1].kv_memory.prefixes.seen().hits > 5, "prefixes were to be part of this"
        assert until(lambda: nothing_left(pair))  # noqa: B023
        if concurrency > 1:
            sizes = [rate.size for rate in pair[1].batch.rates.seen()]
            assert max(sizes) >= 4, f"nothing was batched: {sizes}"


def test_choices(nodes: Callable[..., Pair]) -> None:
    """n answers to one prompt: the first is the one that n = 1 gives, the others are others."""
    pair = nodes()
    for origin in ("local", "remote"):
        sampling = SamplingParams(temperature=1.5, seed=42)
        one = list(Asked(origin, prompt_of(100), GenerationParams(max_tokens=12, sampling=sampling)).begin(pair))
        answer = Asked(origin, prompt_of(100), GenerationParams(max_tokens=12, sampling=sampling, n=3)).begin(pair)
        pieces = list(answer.pieces())
        choices = [[piece.token for piece in pieces if piece.choice == n] for n in range(3)]
        assert choices[0] == one
        assert len({tuple(choice) for choice in choices}) == 3
        assert answer.metrics.completion_tokens == sum(map(len, choices))
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"] * 3
    assert until(lambda: nothing_left(pair))


def test_an_answer_goes_on_elsewhere(nodes: Callable[..., Pair]) -> None:
    """Mid-answer failover: prompt plus what was written, the same seed, and the rest is the same."""
    pair = nodes()
    prompt, sampling = prompt_of(100), SamplingParams(temperature=1.2, seed=5, frequency_penalty=0.4, min_tokens=30)
    whole = list(Asked("local", prompt, GenerationParams(max_tokens=30, sampling=sampling)).begin(pair))
    for cut in (1, 10, 29):
        rules = GenerationParams(max_tokens=30 - cut, sampling=sampling, written=tuple(whole[:cut]))
        assert list(Asked("remote", prompt + whole[:cut], rules).begin(pair)) == whole[cut:]
    with pytest.raises(BadRequest, match="end with the tokens in written"):
        Asked("local", prompt, GenerationParams(written=(3, 4))).begin(pair)


def test_stop_strings_end_an_answer(nodes: Callable[..., Pair]) -> None:
    pair = nodes()
    text = "".join(piece.text for piece in pair[1].read_and_write(prompt_of(60), 40).pieces())
    middle = text[len(text) // 2 : len(text) // 2 + 3]
    rules = GenerationParams(max_tokens=40, sampling=SamplingParams(stop=(middle,)))
    answer = pair[1].read_and_write(prompt_of(60), rules=rules)
    assert "".join(piece.text for piece in answer.pieces()) == text[: text.index(middle)]
    assert answer.metrics.finish_reason == "stop"


def slow(node: DecodeNode | PrefillNode, name: str, seconds: float | Callable[..., float]) -> None:
    """Make one of the engine's calls take its time, as a large model's would."""
    original = getattr(node.engine, name)

    def slowed(*arguments: Any) -> Any:
        time.sleep(seconds(*arguments) if callable(seconds) else seconds)
        return original(*arguments)

    setattr(node.engine, name, slowed)


def test_cancelled_in_every_phase(nodes: Callable[..., Pair]) -> None:
    """Within a second, on both nodes: queued, waiting for the prefill, transferring, reading, writing."""
    pair = nodes()
    prefill, decode = pair
    slow(prefill, "_prefill", 0.2)
    slow(decode, "_step", 0.02)
    slow(decode, "_prefill", 0.1)

    def ends(answer: Generation, error: type[Exception] = Cancelled) -> None:
        answer.cancel()
        with pytest.raises(error):
            list(answer)

    def transferring() -> Generation:
        context, _ = prefill.begin(prompt_of(2000))
        return decode.fetch_and_write(context, 10)

    def writing() -> Generation:
        answer = decode.read_and_write(prompt_of(5), 3000)
        assert until(lambda: answer.metrics.completion_tokens > 2)
        return answer

    def reading() -> Generation:
        answer = decode.read_and_write(prompt_of(2000), 10)
        assert until(lambda: decode.engine.counters.prompt_tokens > 0)
        return answer

    for phase in (transferring, writing, reading):
        for delay in (0.0, 0.1, 0.5):
            answer = phase()
            time.sleep(delay)
            started = time.monotonic()
            ends(answer)
            assert until(lambda: nothing_left(pair), 6), f"{phase.__name__} left something behind"
            assert time.monotonic() - started < 6
    # In the queue: all the memory is promised to someone else.
    claim = decode.kv_memory.admission.ask(
        decode.kv_memory.admission.limit_bytes, 1, lambda claim: None, lambda error: None, 0
    )
    queued = decode.read_and_write(prompt_of(5), 10)
    assert decode.kv_memory.admission.waiting == 1
    ends(queued)
    assert until(lambda: decode.kv_memory.admission.waiting == 0)
    decode.kv_memory.admission.release(claim)
    assert until(lambda: nothing_left(pair))


def test_who_leaves_a_slow_reader_need_not_wait_for_a_whole_chunk(nodes: Callable[..., Pair]) -> None:
    """A chunk that suits a fast machine takes a slow one seconds: it reads as much as it can in less than one."""
    pair = prefill, decode = nodes()
    prefill.chunk_tokens = decode.intake.chunk_tokens = 1024
    for node in pair:
        slow(node, "_prefill", lambda sequence, tokens, emit: len(tokens) / 250)
    assert len(list(decode.read_and_write(prompt_of(64), 1))) == 1
    prefill.begin(prompt_of(64))[1].result()
    prefill.book.cancel(next(iter(prefill._attempts)))
    answer = decode.read_and_write(prompt_of(2000), 10)
    time.sleep(0.3)
    left_at = time.monotonic()
    answer.cancel()
    assert until(lambda: nothing_left(pair))
    assert time.monotonic() - left_at < 3  # asked on the engine's thread: a chunk of 1,024 would take four seconds
    context, _ = prefill.begin(prompt_of(2000))
    time.sleep(0.3)
    left_at = time.monotonic()
    prefill.book.cancel(context.ticket)
    assert until(lambda: nothing_left(pair))
    assert time.monotonic() - left_at < 3


def test_cancelled_while_a_peer_is_being_proven(nodes: Callable[..., Pair]) -> None:
    """The first contact, with a prefill node that is busy: the client need not wait for the canary to leave."""
    prefill, decode = nodes()
    slow(prefill, "_prefill", 10.0)
    context, _ = prefill.begin(prompt_of(100))
    answer = decode.fetch_and_write(context, 4)
    others = [decode.fetch_and_write(prefill.begin(prompt_of(100))[0], 4) for _ in range(2)]
    time.sleep(0.4)
    for each in (answer, *others):
        each.cancel()
    assert until(lambda: decode.open_requests == 0, 6.0)
    assert until(lambda: nothing_left((prefill, decode)), 60)


def test_every_wait_has_an_end(nodes: Callable[..., Pair]) -> None:
    prefill, decode = nodes()
    slow(decode, "_step", 0.02)
    with pytest.raises(DeadlineExceeded, match="not done within"):
        list(decode.read_and_write(prompt_of(5), rules=GenerationParams(max_tokens=3000, timeout_s=0.5)))
    everything = decode.kv_memory.admission.limit_bytes
    claim = decode.kv_memory.admission.ask(everything, 1, lambda claim: None, lambda error: None, 0)
    started = time.monotonic()
    with pytest.raises(KVMemoryFull):
        list(decode.read_and_write(prompt_of(5), rules=GenerationParams(max_tokens=10, queue_s=0.3)))
    assert 0.2 < time.monotonic() - started < 3
    with pytest.raises(NodeBusy):
        decode.read_and_write(prompt_of(5), rules=GenerationParams(max_tokens=10, queue_s=0))
    decode.kv_memory.admission.release(claim)
    slow(prefill, "_prefill", 0.3)
    _, reading = prefill.begin(prompt_of(2000), timeout_s=0.5)
    with pytest.raises(DeadlineExceeded):
        reading.result(5)
    assert until(lambda: nothing_left((prefill, decode)))


def test_a_budget_for_eight(tiny_folder: Any, tiny_engine: LoadTiny) -> None:
    """A hundred at once where there is room for eight: all are served, none beyond the budget."""
    model = ModelFiles("llama", tiny_folder("llama"))
    for name in ENGINE_OPTIONS:
        scheduler = Scheduler(partial(load_engine, name, model, **ENGINE_OPTIONS[name]))
        cost = scheduler.engine.kv_cost(120 + 8)
        kv_memory = KVMemory(scheduler, kv_bytes=8 * cost, prefix_bytes=0)
        node = DecodeNode(kv_memory, model.tokenizer)
        seen: list[int] = []
        original = node.batch.step

        def watched(seen: list[int] = seen, original: Any = original, kv_memory: KVMemory = kv_memory) -> None:
            seen.append(kv_memory.engine.kv_held_bytes)
            original()

        node.batch.step = watched  # type: ignore[method-assign]
        prompts = [prompt_of(120, seed=number) for number in range(100)]
        answers = [node.read_and_write(prompt, rules=GenerationParams(max_tokens=8, queue_s=100)) for prompt in prompts]
        assert kv_memory.admission.waiting > 80
        tokens = [list(answer) for answer in answers]
        for number in (0, 50, 99):
            assert tokens[number] == alone(tiny_engine(name, "llama"), prompts[number], 8)
        assert max(seen) <= 8 * cost
        assert kv_memory.admission.peak_bytes <= 8 * cost
        assert kv_memory.peak_held_bytes <= 8 * cost
        assert until(lambda: kv_memory.held_bytes == 0 and kv_memory.admission.held_bytes == 0)  # noqa: B023
        few = KVMemory(scheduler, kv_bytes=8 * cost, prefix_bytes=0, most_waiting=10)
        crowded = DecodeNode(few, model.tokenizer)
        outcomes = [_outcome(crowded, prompt) for prompt in prompts]
        assert outcomes.count("refused") > 0
        assert outcomes.count("refused") + outcomes.count("begun") == 100
        with pytest.raises(RequestTooLarge, match="can never fit"):
            crowded.read_and_write(prompt_of(2000), 100)
        assert until(lambda: few.admission.held_bytes == 0, 10)  # noqa: B023
        for each in (kv_memory, few):
            assert each.faults == 0
            each.close_all()
        scheduler.stop()


def test_who_waits_for_one_piece_keeps_nobody_from_the_rest(tiny_folder: Any, tiny_engine: LoadTiny) -> None:
    """Three hold a third of the memory each, the first and the last go: two thirds are free, but not in one piece."""
    model = ModelFiles("llama", tiny_folder("llama"))
    scheduler = Scheduler(partial(load_engine, "torch", model, **ENGINE_OPTIONS["torch"] | {"kv_bytes": 6001 << 10}))
    kv_memory = KVMemory(scheduler, prefix_bytes=0)
    node, admission = DecodeNode(kv_memory, model.tokenizer), kv_memory.admission
    cost = kv_memory.engine.kv_cost(2000)
    claims = [admission.ask(cost, 1, lambda claim: None, lambda error: None, 0) for _ in range(3)]
    holds = [(claim, scheduler.call(lambda: kv_memory.open(2000))) for claim in claims]

    def end(number: int) -> None:
        claim, sequence = holds[number]
        scheduler.call(lambda: kv_memory.close(sequence))
        admission.release(claim)

    end(0)
    end(2)
    assert 3 * admission.held_bytes == admission.limit_bytes
    large = node.read_and_write(prompt_of(2990), rules=GenerationParams(max_tokens=10, timeout_s=600, queue_s=600))
    assert until(lambda: admission.waiting == 1)
    small = node.read_and_write(prompt_of(20), rules=GenerationParams(max_tokens=3, timeout_s=600, queue_s=60))
    assert list(small) == alone(tiny_engine("torch", "llama"), prompt_of(20), 3)
    assert until(lambda: admission.waiting == 1), "it was tried once more, in vain"
    assert large.metrics.completion_tokens == 0
    end(1)
    assert list(large) == alone(tiny_engine("torch", "llama"), prompt_of(2990), 10)
    assert until(lambda: not kv_memory.held_bytes and not admission.held_bytes)
    node.close()
    kv_memory.close_all()
    scheduler.stop()


def _outcome(node: DecodeNode, prompt: list[int]) -> str:
    try:
        node.read_and_write(prompt, rules=GenerationParams(max_tokens=8, queue_s=100))
    except NodeBusy:
        return "refused"
    return "begun"


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_the_second_turn_moves_only_what_is_new(architecture: str, nodes: Callable[..., Pair]) -> None:
    """Both nodes remember: the bytes of turn two are those of its new tokens, and the answer is the same."""
    pair = nodes(architecture=architecture, prefix_bytes=64 << 20)
    decode = pair[1]
    fresh = nodes(architecture=architecture)
    prompt = prompt_of(2000)
    first = Asked("remote", prompt, GenerationParams(max_tokens=50)).begin(pair)
    said = list(first)
    second = [*prompt, *said, *prompt_of(100, seed=3)]
    answer = Asked("remote", second, GenerationParams(max_tokens=20)).begin(pair)
    assert list(answer) == list(Asked("remote", second, GenerationParams(max_tokens=20)).begin(fresh))
    layout = decode.engine.spec.layout
    new = len(second) - answer.metrics.cached_tokens
    assert new <= 101, "the last token of an answer is never fed, everything else is held"
    rows = sum(min(new, plan.window or new) for plan in layout.layers)
    assert answer.metrics.kv_bytes <= 1.05 * rows * layout.row_bytes("float32")
    assert answer.metrics.prompt_tokens_recomputed == 0
    assert answer.metrics.prefill_cached_tokens == 2000
    assert until(lambda: nothing_left(pair))


def test_a_prompt_that_is_all_there(nodes: Callable[..., Pair]) -> None:
    """The same prompt again: no slice moves, the logits alone do."""
    pair = nodes(prefix_bytes=64 << 20)
    asked = Asked("remote", prompt_of(300), GenerationParams(max_tokens=16))
    first = list(asked.begin(pair))
    again = asked.begin(pair)
    assert list(again) == first
    assert (again.metrics.cached_tokens, again.metrics.kv_bytes) == (300, 0)
    local = Asked("local", prompt_of(300), GenerationParams(max_tokens=16)).begin(pair)
    assert list(local) == first
    assert (local.metrics.cached_tokens, local.metrics.prompt_tokens_recomputed) == (299, 1)


def test_streams_go_on_while_a_long_prompt_is_read(nodes: Callable[..., Pair]) -> None:
    """A local prompt is read in small pieces between steps once someone is writing."""
    _, decode = nodes()
    slow(decode, "_step", 0.01)
    running = decode.read_and_write(prompt_of(10), 400)
    assert until(lambda: running.metrics.completion_tokens > 5)
    slow(decode, "_prefill", 0.01)
    sizes: list[int] = []
    original = decode.engine._prefill

    def seen(sequence: Any, tokens: Any, emit: Any) -> Any:
        sizes.append(len(tokens))
        return original(sequence, tokens, emit)

    decode.engine._prefill = seen  # type: ignore[method-assign]
    before = running.metrics.completion_tokens
    assert list(decode.read_and_write(prompt_of(900), 1))
    assert len(sizes) >= 18
    assert running.metrics.completion_tokens - before >= len(sizes) // 2, "one step between two pieces"
    running.cancel()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_who_joins_for_a_few_tokens_does_not_wait_for_the_others(count: int, nodes: Callable[..., Pair]) -> None:
    _, decode = nodes()
    expected = list(decode.read_and_write(prompt_of(20), count))
    slow(decode, "_step", 0.01)
    running = decode.read_and_write(prompt_of(10), 400)
    assert until(lambda: running.metrics.completion_tokens > 5)
    assert list(decode.read_and_write(prompt_of(20), count)) == expected
    assert running.metrics.completion_tokens < 300
    running.cancel()


def test_unload_and_load(nodes: Callable[..., Pair], tiny_engine: LoadTiny) -> None:
    for writer in ENGINE_OPTIONS:
        _, decode = nodes(writer, writer)
        kv_memory = decode.kv_memory
        expected = alone(tiny_engine(writer, "llama"), prompt_of(50), 8)
        running = decode.read_and_write(prompt_of(5), 2000)
        with pytest.raises(NodeBusy, match="in use"):
            kv_memory.scheduler.call(kv_memory.unload)
        running.cancel()
        assert until(lambda: kv_memory.sequences == 0)  # noqa: B023
        for _ in range(3):
            kv_memory.scheduler.call(kv_memory.unload)
            assert not kv_memory.engine.loaded
            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(lambda _: list(decode.read_and_write(prompt_of(50), 8)), range(8)))  # noqa: B023
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
        return list(node.read_and_write(prompt_of(50), 8))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [expected] * 8
    assert loads[0] == 2, "one load for all who came"
    kv_memory.close_all()
    scheduler.stop()
