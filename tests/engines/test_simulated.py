"""The simulated engine: it keeps the contract, its bytes are real, its times the profile's, and it says what it is."""

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from disaggregated_inference.api import SamplingParams
from disaggregated_inference.engines import Engine, Sequence, chunks, load_engine
from disaggregated_inference.engines.simulated import MACHINES, SimulatedEngine, parse_profile
from disaggregated_inference.errors import (
    BadRequest,
    KVMemoryFull,
    ModelNotFound,
    ModelUnsupported,
    SequenceBroken,
    SliceRefused,
)
from disaggregated_inference.kv import KVDType, KVSlice, require_same_model
from disaggregated_inference.kv_transfer import codecs
from disaggregated_inference.models import SIMULATED_MODELS, ModelFiles, ModelStore
from disaggregated_inference.models.simulated import config_of, write_folder
from disaggregated_inference.node.peer_check import distance
from disaggregated_inference.node.sampler import Sampler
from tests.support import engine_contract as contract
from tests.support.command import disagg
from tests.support.engines import LoadTiny
from tests.support.handoff import alone, prompt_of, read_prompt, receive, write_answer
from tests.support.node_process import Node

Load = Callable[..., Engine]
ANSWER = 24


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> ModelStore:
    return ModelStore(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def simulated(store: ModelStore) -> Load:
    """An engine of `simulated:` shape; of the same arguments always the same one."""

    @lru_cache
    def load(shape: str = "tiny", profile: str = "", dtype: KVDType | None = None, kv_bytes: int = 256 << 20) -> Engine:
        return load_engine("simulated", store.resolve(f"simulated:{shape}"), **_given(locals()))

    return load


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in ("profile", "dtype", "kv_bytes")}


# What it is.


def test_models_without_weights_have_a_hash(store: ModelStore, tmp_path: Path) -> None:
    here = [store.resolve(name) for name in SIMULATED_MODELS]
    there = [ModelStore(tmp_path).resolve(name.upper().replace("SIM", "sim", 1)) for name in SIMULATED_MODELS]
    for mine, theirs in zip(here, there, strict=True):
        assert mine.path != theirs.path
        require_same_model(mine.fingerprint, theirs.fingerprint)
    assert all(a.fingerprint.differences(b.fingerprint) for a in here for b in here if a is not b)
    assert [model.spec.kv_token_bytes("bfloat16") for model in here] == [98_304, 36_864, 512]
    assert [plan.window for plan in here[1].spec.layout.layers] == [128, 0] * 18
    assert store.resolve(str(here[0].path)).fingerprint == here[0].fingerprint
    assert {row.name: row.path for row in store.list()}["simulated:tiny"] == here[2].path
    with pytest.raises(ModelNotFound, match="simulated:tiny"):
        store.resolve("simulated:gpt-5")


def test_every_byte_is_a_token_and_every_word_comes_back(store: ModelStore) -> None:
    tokenizer = store.resolve("simulated:tiny").tokenizer
    for text in ("", "Hello  world\n\t", "naïve 漢字 🦜 \x00\x7f", "".join(map(chr, range(1, 600)))):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    words = list(range(260, 1024))
    assert tokenizer.encode(tokenizer.decode(words)) == words
    assert max(tokenizer.encode("".join(map(chr, range(1, 600))))) < 260
    assert tokenizer.decode([300, 5 + 255, 1023]) == "[0300][0260][1023]"
    assert len(tokenizer.encode_chat([{"role": "user", "content": "hello"}])) == 2 + len("user\nhello") + 11


def test_it_is_not_taken_for_a_real_engine(store: ModelStore, tiny_folder: Callable[[str], Path]) -> None:
    for engine in ("torch", "mlx"):
        with pytest.raises(ModelUnsupported, match="has no weights"):
            load_engine(engine, store.resolve("simulated:tiny"))
    with pytest.raises(ModelUnsupported, match="needs a real engine"):
        load_engine("simulated", ModelFiles("llama", tiny_folder("llama")))


def test_an_engine_has_a_name_and_its_log_says_what_it_is(store: ModelStore, caplog: pytest.LogCaptureFixture) -> None:
    engine = load_engine("simulated", store.resolve("simulated:gpt-oss-120b"), profile="m3-ultra", kv_bytes=1 << 26)
    assert engine.name == "simulated"
    assert "SIMULATED: no model is computed here; times are those of m3-ultra" in caplog.text
    assert "ESTIMATE" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--engine", "torch", "--profile", "m3-ultra"), "--profile needs --engine simulated"),
        (("--engine", "simulated", "--profile", "abacus"), "unknown profile 'abacus': choose dgx-spark"),
        (("--engine", "simulated", "--profile", "m3-ultra"), "no figures for tiny on m3-ultra"),
        (("--engine", "mlx"), "simulated:tiny has no weights"),
    ],
)
def test_mistakes_get_one_clear_line(arguments: tuple[str, ...], says: str, store: ModelStore) -> None:
    run = disagg("serve", "--model", "simulated:tiny", "--port", "0", "--kv-port", "0", *arguments, home=store.home)
    assert run.returncode == 1
    assert says in run.stderr
    assert "Traceback" not in run.stderr


# Times.


@pytest.mark.parametrize(
    ("machine", "shape", "prefill_s", "decode_tokens_per_s"),
    [
        ("dgx-spark", "gpt-oss-120b", (3.5, 16.9), (52.9, 42.8)),
        ("dgx-spark", "qwen3-30b-a3b", (3.0, 17.4), (48.0, 30.2)),
        ("m3-ultra", "gpt-oss-120b", (5.5, 32.5), (78.2, 65.5)),
        ("m3-ultra", "qwen3-30b-a3b", (4.7, 44.4), (65.1, 45.3)),
    ],
)
def test_profiles_go_through_the_published_points(
    machine: str, shape: str, prefill_s: tuple[float, float], decode_tokens_per_s: tuple[float, float]
) -> None:
    profile = parse_profile(machine, shape)
    for length, seconds, rate in zip((8192, 32768), prefill_s, decode_tokens_per_s, strict=True):
        assert profile.prefill_s(0, length) == pytest.approx(seconds)
        assert 1 / profile.batch_step_s(1, length) == pytest.approx(rate)
    halves = profile.prefill_s(0, 1000) + profile.prefill_s(1000, 5000)
    assert halves == pytest.approx(profile.prefill_s(0, 5000))


def test_batches_cost_what_was_measured() -> None:
    """llama-batched-bench on a Spark: 32 sequences; the points at 8,192 tokens were not used for the fit."""
    for shape, context, milliseconds in (
        ("gpt-oss-120b", 528, 102.4),
        ("gpt-oss-120b", 8208, 162.8),
        ("qwen3-30b-a3b", 528, 92.8),
        ("qwen3-30b-a3b", 8208, 223.7),
    ):
        profile = MACHINES["dgx-spark"][shape]
        assert 1000 * profile.batch_step_s(32, 32 * context) == pytest.approx(milliseconds, rel=0.1)
    assert MACHINES["h200"]["qwen3-30b-a3b"].batch_step_s(32, 32 * 1500) == pytest.approx(0.01316, rel=0.01)
    for shapes in MACHINES.values():
        for profile in shapes.values():
            steps = [profile.batch_step_s(batch, 100 * batch) for batch in (1, 2, 8, 64, 256)]
            assert all(0 < a < b for a, b in pairwise(steps))
            assert min(profile.prefill_token_s, profile.prefill_depth_s, profile.context_token_s) > 0


def test_profiles_by_hand() -> None:
    custom = parse_profile("custom:prefill=2000,decode=50,answer=100", "tiny")
    assert (custom.prefill_s(500, 1500), custom.batch_step_s(64, 10**6)) == (0.5, 0.02)
    assert custom.answer_tokens == 100
    faster = parse_profile("dgx-spark:prefill=6265", "gpt-oss-120b")
    assert faster.prefill_s(0, 6265) == pytest.approx(1)
    assert faster.batch_step_s(1, 8192) == parse_profile("dgx-spark", "gpt-oss-120b").batch_step_s(1, 8192)
    assert parse_profile("instant", "tiny").prefill_s(0, 10**6) == 0
    for wrong in (
        "custom",
        "custom:prefill=5",
        "custom:prefill=5,decode=x",
        "custom:speed=5",
        "m3-ultra",
        "",
        "tiny:a",
    ):
        with pytest.raises(BadRequest):
            parse_profile(wrong, "tiny")


def test_time_passes_as_the_profile_says(simulated: Load) -> None:
    engine = simulated(profile="custom:prefill=1000,decode=100")
    sequence, at = engine.open(400), []
    begun = time.perf_counter()
    logits = engine.prefill(sequence, prompt_of(200), lambda piece: at.append(time.perf_counter() - begun))
    assert [seconds >= 0.05 * (layer + 1) for layer, seconds in enumerate(at)] == [True] * 4
    token = logits.greedy()
    begun = time.perf_counter()
    for _ in range(10):
        token = engine.step([sequence], token).greedy()
    token.tolist()
    assert time.perf_counter() - begun >= 0.1
    engine.close(sequence)


def test_a_step_is_launched_not_awaited(simulated: Load) -> None:
    """As on a GPU: the next one may be launched before the tokens of the last are read. One would take 100 s here."""
    engine = simulated(profile="custom:prefill=1000000,decode=0.01")
    sequence = engine.open(20)
    tokens = engine.step([sequence], [5]).greedy()
    assert len(engine.step([sequence], tokens).greedy()) == 1
    engine.close(sequence)


# The contract.


@pytest.fixture(scope="session")
def tiny_like(tmp_path_factory: pytest.TempPathFactory) -> LoadTiny:
    """In the place of the tiny models of the contract suite: the same sizes, without weights."""
    root = tmp_path_factory.mktemp("simulated")
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sliding = {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2}

    @lru_cache
    def load(architecture: str) -> Engine:
        config = sizes | {"model_type": architecture, "max_position_embeddings": 4096}
        config |= sliding if architecture == "gpt_oss" else {}
        folder = write_folder(root / architecture, config_of(architecture, config) | {"vocab_size": 512})
        model = ModelFiles(architecture, folder)
        return load_engine("simulated", model, dtype="float32", kv_bytes=64 << 20)

    return lambda name, architecture: load(architecture)


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_the_contract_of_each_architecture(architecture: str, tiny_like: LoadTiny) -> None:
    contract.check_no_near_ties(architecture, tiny_like)
    contract.check_batched_decode_equals_one_by_one(architecture, "simulated", tiny_like)
    contract.check_kept_prefix_takes_only_the_rest(architecture, "simulated", "simulated", tiny_like)
    contract.check_export_in_the_middle_of_an_answer(architecture, "simulated", "simulated", tiny_like)
    contract.check_bad_slices_are_refused_and_leave_the_engine_usable(architecture, "simulated", tiny_like)
    contract.check_a_chunk_that_fails_half_way_breaks_its_sequence_only(architecture, "simulated", tiny_like)
    contract.check_rollback_to_the_last_committed_chunk(architecture, "simulated", tiny_like)
    contract.check_a_second_turn_after_decoding_in_a_batch(architecture, "simulated", tiny_like)


def test_the_contract_of_the_engine(tiny_like: LoadTiny) -> None:
    contract.check_single_rows_of_the_logits("simulated", tiny_like)
    contract.check_room_is_kept("simulated", tiny_like)
    contract.check_bad_tokens_and_batches_are_refused_and_change_nothing("simulated", tiny_like)


@pytest.mark.parametrize("chunk", contract.CHUNKS)
@pytest.mark.parametrize("shape", ["tiny", "gpt-oss-120b"])
def test_a_hand_over_is_token_exact(shape: str, chunk: int, simulated: Load) -> None:
    far, near = simulated(shape), simulated(shape, kv_bytes=255 << 20)
    for length in (1, 2, 127, 128, 129, 300, 500):
        expected = alone(near, prompt_of(length, 1024), ANSWER)
        slices, logits = read_prompt(far, prompt_of(length, 1024), chunk)
        before = near.counters.prompt_tokens
        assert write_answer(near, receive(near, slices, length), logits, ANSWER) == expected
        assert near.counters.prompt_tokens == before
    assert near.kv_held_bytes == far.kv_held_bytes == 0


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("target", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32"])
def test_rows_are_exact_in_every_dtype_and_codec(source: KVDType, target: KVDType, codec: str, simulated: Load) -> None:
    far, near = simulated("gpt-oss-120b", dtype=source), simulated("gpt-oss-120b", dtype=target)
    slices, logits = read_prompt(far, prompt_of(200), 70)
    arrived = [codecs.decode(codec, s.dtype, codecs.encode(codec, s), s.layer, s.start) for s in slices]
    assert all(np.isfinite(piece.keys).all() for piece in arrived if piece.keys.dtype != np.uint16)
    assert write_answer(near, receive(near, arrived, 200), logits, ANSWER) == alone(near, prompt_of(200), ANSWER)


def _swapped(slices: list[KVSlice], a: int, b: int) -> list[KVSlice]:
    changed = list(slices)
    changed[a], changed[b] = replace(slices[b], layer=slices[a].layer), replace(slices[a], layer=slices[b].layer)
    return changed


def _with(slices: list[KVSlice], at: int, **changes: Any) -> list[KVSlice]:
    return [replace(piece, **changes) if index == at else piece for index, piece in enumerate(slices)]


@pytest.mark.parametrize("shape", ["tiny", "gpt-oss-120b"])
def test_wrong_rows_are_refused(shape: str, simulated: Load) -> None:
    engine = simulated(shape)
    slices, logits = read_prompt(engine, prompt_of(100), 100)
    other, _ = read_prompt(engine, prompt_of(100, seed=1), 100)
    last, one = len(slices) - 1, slices[2]
    damaged = one.keys.copy()
    damaged[50].reshape(-1)[3] += 1
    wrong = {
        "two layers": _swapped(slices, 0, 2),
        "K for V": _with(slices, 1, keys=slices[1].values, values=slices[1].keys),
        "a row too far": _with(slices, 2, keys=np.roll(one.keys, 1, axis=0)),
        "no rows": _with(slices, last, values=np.zeros_like(slices[last].values)),
        "one layer of another prompt": _with(slices, 3, keys=other[3].keys, values=other[3].values),
        "a damaged row": _with(slices, 2, keys=damaged),
        "nothing at all": [replace(s, keys=np.zeros_like(s.keys), values=np.zeros_like(s.values)) for s in slices],
    }
    for what, pieces in wrong.items():
        sequence = engine.open(200)
        for piece in pieces:
            engine.place(sequence, piece)
        with pytest.raises(SliceRefused, match="not"):
            engine.commit(sequence, 100)
        with pytest.raises(SequenceBroken):
            engine.step([sequence], [5])
        engine.close(sequence)
        assert what
    mistaken = write_answer(engine, receive(engine, other, 100), logits, ANSWER)
    assert mistaken[0] == logits.greedy().tolist()[0]
    assert mistaken[1:] != alone(engine, prompt_of(100), ANSWER)[1:]


def test_a_chunk_of_another_prompt_gives_another_answer(simulated: Load) -> None:
    """Its rows are whole and at their place: only the hash, over everything before, can tell."""
    engine = simulated("gpt-oss-120b")
    prompt, layers = prompt_of(300), len(engine.spec.layout.layers)
    slices, logits = read_prompt(engine, prompt, 150)
    others, _ = read_prompt(engine, [prompt[0] + 1, *prompt[1:]], 150)
    mix = [*slices[:layers], *others[layers:]]
    assert write_answer(engine, receive(engine, mix, 300), logits, 8)[1:] != alone(engine, prompt, 8)[1:]


def test_sixty_four_sequences_join_and_leave(simulated: Load) -> None:
    engine = simulated("gpt-oss-120b", kv_bytes=1 << 30)
    lengths = [20 + 5 * index for index in range(64)]
    answers = [5 + (7 * index) % 40 for index in range(64)]
    expected = [alone(engine, prompt_of(n), count) for n, count in zip(lengths, answers, strict=True)]
    running: dict[int, Sequence] = {}
    written: dict[int, list[int]] = {}
    for step in range(80):
        if step < 64:
            running[step] = engine.open(lengths[step] + answers[step])
            written[step] = engine.prefill(running[step], prompt_of(lengths[step])).greedy().tolist()
        for index in [i for i in running if len(written[i]) == answers[i]]:
            engine.close(running.pop(index))
        order = sorted(running, key=lambda i: (step * i) % 7)
        if order:
            chosen = engine.step([running[i] for i in order], [written[i][-1] for i in order]).greedy().tolist()
            for i, token in zip(order, chosen, strict=True):
                written[i].append(token)
        assert engine.kv_held_bytes <= sum(engine.kv_cost(sequence.capacity) for sequence in running.values())
    while running:
        for index in [i for i in running if len(written[i]) == answers[i]]:
            engine.close(running.pop(index))
        for i, sequence in running.items():
            written[i] += engine.step([sequence], written[i][-1:]).greedy().tolist()
    assert [written[index] for index in range(64)] == expected
    assert engine.kv_held_bytes == 0


def test_memory_is_taken_and_returned(store: ModelStore) -> None:
    engine = load_engine("simulated", store.resolve("simulated:gpt-oss-120b"), kv_bytes=36_864 * 1000)
    assert engine.kv_limit_bytes == 36_864 * 1000
    sequences = [engine.open(250) for _ in range(4)]
    with pytest.raises(KVMemoryFull, match="0 of 1000 free"):
        engine.open(1)
    engine.close(sequences[0])
    engine.close(sequences[2])
    with pytest.raises(KVMemoryFull, match="not contiguous"):
        engine.open(251)
    for capacity in (250, 100, 150):
        sequences.append(engine.open(capacity))
    for sequence in sequences:
        engine.close(sequence)
    assert engine.kv_held_bytes == 0
    slices, _ = read_prompt(engine, prompt_of(300), 77)
    sequence = engine.open(300)
    for piece in slices:
        engine.place(sequence, piece)
        assert engine.kv_held_bytes <= engine.kv_cost(300)
    engine.rollback(sequence)
    assert engine.kv_held_bytes == 36_864 * 300 + 18 * 128 * 2048
    engine.close(sequence)
    engine.unload()
    assert not engine.loaded
    assert engine.kv_held_bytes == 0
    fresh = load_engine("simulated", store.resolve("simulated:gpt-oss-120b"), kv_bytes=1 << 26)
    fresh.replace(engine)
    assert fresh.counters is engine.counters
    assert len(alone(fresh, prompt_of(100), 8)) == 8


def test_slices_are_views_of_the_memory(simulated: Load) -> None:
    engine = simulated()
    sequence = engine.open(100)
    slices: list[KVSlice] = []
    engine.prefill(sequence, prompt_of(100), slices.append)
    assert isinstance(engine, SimulatedEngine)
    assert all(np.shares_memory(piece.keys, engine.arena._rows) for piece in slices)
    engine.close(sequence)


def test_another_model_is_far_away_for_a_canary(simulated: Load, tiny_like: LoadTiny) -> None:
    here, there = simulated(dtype="float32"), tiny_like("", "llama")
    rows = [read_prompt(engine, prompt_of(48), 48)[0] for engine in (here, there)]
    for mine, other in zip(*rows, strict=True):
        assert distance(mine.keys.reshape(48, -1), mine.keys.reshape(48, -1)) == 0
        assert distance(mine.keys.reshape(48, -1), other.keys.reshape(48, -1)) > 0.3


# What it says.


def test_scores_can_be_sampled_from(simulated: Load) -> None:
    engine = simulated()
    sequence = engine.open(100)
    row = engine.prefill(sequence, prompt_of(50)).numpy()[0]
    engine.close(sequence)
    assert (row.dtype, row.shape) == (np.float32, (1024,))
    for rules in (
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.5, top_k=40),
    ):
        seeded = [msgspec.structs.replace(rules, seed=seed) for seed in range(60)]
        drawn = [[Sampler(each, [], (1,)).choose(row).token for each in seeded] for _ in range(2)]
        assert drawn[0] == drawn[1]
        assert len(set(drawn[0])) > 5
        assert min(drawn[0]) >= 260
        assert int(row.argmax()) in drawn[0]


def test_answers_end_where_the_profile_says(simulated: Load) -> None:
    engine, endless = simulated(profile="instant:answer=20"), simulated()
    lengths = []
    for seed in range(80):
        tokens = alone(engine, prompt_of(30, seed=seed), 200)
        lengths.append(tokens.index(1) if 1 in tokens else 200)
        assert tokens[: lengths[-1]] == alone(endless, prompt_of(30, seed=seed), 200)[: lengths[-1]]
    assert 14 < sum(lengths) / len(lengths) < 27
    assert all(1 not in alone(endless, prompt_of(30, seed=seed), 200) for seed in range(20))


# As people run it.


@pytest.fixture(scope="module")
def pair(store: ModelStore) -> Iterator[tuple[Node, Node]]:
    shared = ("--engine", "simulated", "--model", "simulated:tiny", "--profile", "instant:answer=100")
    with ThreadPoolExecutor() as pool:
        started = [
            pool.submit(Node, "prefill", *shared, "--chunk", "77", DISAGG_HOME=str(store.home)),
            pool.submit(Node, "decode", *shared, DISAGG_HOME=str(store.home)),
        ]
    prefill, decode = (future.result() for future in started)
    yield prefill, decode
    assert [prefill.stop(), decode.stop()] == [0, 0]


@pytest.mark.slow
def test_two_processes_one_answer(pair: tuple[Node, Node], store: ModelStore) -> None:
    prefill, decode = pair
    assert (prefill.ready["backend"], decode.ready["backend"]) == ("simulated", "simulated")
    engine = load_engine("simulated", store.resolve("simulated:tiny"), profile="instant:answer=100", kv_bytes=1 << 24)
    for length in (1, 300, 2000):
        prompt = prompt_of(length, 1024)
        expected = alone(engine, prompt, 64)
        read = prefill.ask("/prefill", {"tokens": prompt, "wait": False})[1]
        asked = {"context": read["context"], "max_new_tokens": 64, "ignore_eos": True}
        status, answer = decode.ask("/decode", asked)
        assert (status, answer["tokens"]) == (200, expected)
        assert answer["metrics"]["prompt_tokens_recomputed"] == 0
        assert answer["metrics"]["kv_bytes"] == 512 * length
    assert decode.ask("/status")[1]["prompt_tokens_computed"] == 0
    assert decode.ask("/status")[1]["backend"] == "simulated"
    assert any("SIMULATED" in line["message"] for line in decode.logged())


def test_kept_prefixes_chats_and_forms(pair: tuple[Node, Node]) -> None:
    """Whatever a node does with an engine, it can do with this one."""
    prefill, decode = pair
    prompt = prompt_of(500, 1024, seed=3)
    for tokens, cached in ((prompt, 0), ([*prompt[:300], 7, 8, 9], 300)):
        read = prefill.ask("/prefill", {"tokens": tokens})[1]
        answer = decode.ask("/decode", {"context": read["context"], "max_new_tokens": 16, "ignore_eos": True})[1]
        assert answer["metrics"]["cached_tokens"] == cached
        alone = decode.ask("/generate", {"tokens": tokens, "max_new_tokens": 16, "ignore_eos": True})[1]
        assert answer["tokens"] == alone["tokens"]
    chat = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_new_tokens": 400, "n": 2}
    answer = decode.ask("/generate", chat | {"temperature": 0.7, "seed": 5})[1]
    assert re.fullmatch(r"(\[\d{4}\])+", answer["generated_text"])
    assert {choice["finish_reason"] for choice in answer["choices"]} <= {"stop", "length"}
    form = {"format": {"type": "regex", "pattern": "[a-z]{5} [0-9]{3}"}, "prompt": "hello", "max_new_tokens": 50}
    text = decode.ask("/generate", form)[1]["generated_text"]
    assert (len(text), text[:5].isalpha(), text[6:].isdigit()) == (9, True, True)
    assert decode.ask("/status")[1]["integrity_faults"] == 0


@pytest.mark.slow
def test_a_prompt_takes_its_time_over_the_wire(store: ModelStore) -> None:
    """Both roles in one process; half of what the profile says is already more than any overhead here."""
    shared = ("--engine", "simulated", "--model", "simulated:tiny", "--profile", "custom:prefill=1000,decode=50")
    node = Node("both", *shared, DISAGG_HOME=str(store.home))
    begun = time.perf_counter()
    answer = node.ask("/generate", {"tokens": prompt_of(1000), "max_new_tokens": 11})[1]
    assert time.perf_counter() - begun >= 1.0 + 10 * 0.02
    assert answer["metrics"]["prefill_time"] >= 1.0
    assert node.stop() == 0


def test_reading_in_pieces_equals_reading_at_once(simulated: Load) -> None:
    engine, prompt = simulated("gpt-oss-120b"), prompt_of(400)
    pieces, whole = engine.open(400), engine.open(400)
    for part in chunks(prompt, 33):
        engine.prefill(pieces, part)
    engine.prefill(whole, prompt)
    for a, b in zip(engine.export(pieces, 100), engine.export(whole, 100), strict=True):
        assert (a.layer, a.start, a.stop) == (b.layer, b.start, b.stop)
        assert np.array_equal(a.copy().keys, b.keys)
        assert np.array_equal(a.values, b.values)
    engine.close(pieces)
    engine.close(whole)
