"""llama.cpp as one of a pair, and the bytes of its states. The tiny twins have the same weights in every engine; the
cache of llama.cpp is in float16, as people run it."""

import ctypes
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from disaggregated_inference.engines import Engine, Sequence, load_engine
from disaggregated_inference.errors import (
    EngineMismatch,
    EngineUnavailable,
    FingerprintMismatch,
    KVMemoryFull,
    ModelDamaged,
    ModelUnsupported,
    SliceRefused,
)
from disaggregated_inference.kv import KVDType, as_dtype, require_same_model
from disaggregated_inference.models import ModelFiles
from tests.support.engines import ENGINE_OPTIONS, LLAMACPP, LLAMACPP_OPTIONS, LoadTiny, twin_of
from tests.support.handoff import alone, forced_logits, prompt_of, read_prompt, receive, write_answer

if not LLAMACPP:
    pytest.skip("no llama.cpp is installed", allow_module_level=True)

from disaggregated_inference.engines.llamacpp import LlamaEngine, library
from disaggregated_inference.engines.llamacpp.context import ContextSettings, ContextSize, LlamaContext
from disaggregated_inference.engines.llamacpp.library import load_library
from disaggregated_inference.engines.llamacpp.probe import probe
from disaggregated_inference.engines.llamacpp.state import StateCodec

ARCHITECTURES = ("llama", "qwen3", "qwen3_moe", "gpt_oss")
PAIRS = [(name, "llamacpp") for name in (*ENGINE_OPTIONS, "llamacpp")] + [("llamacpp", name) for name in ENGINE_OPTIONS]
ANSWER = 16
NOISE = 0.06  # of logits from -7 to 7: what half precision makes of the longest prompts here. A wrong cache makes units

# Length of the prompt and its seed: prompts whose answers have no two tokens nearly as likely (a test checks it).
PROMPTS = {
    "llama": ((1, 9), (129, 8), (300, 4), (1000, 2)),
    "qwen3": ((1, 0), (129, 1), (300, 8), (1000, 11)),
    "qwen3_moe": ((1, 9), (129, 11), (300, 12), (1000, 10)),
    "gpt_oss": ((1, 5), (129, 3), (300, 1)),
}
CASES = [(architecture, *prompt) for architecture, prompts in PROMPTS.items() for prompt in prompts]

LoadLlama = Callable[[str], LlamaEngine]
Folder = Callable[[str], Path]


@pytest.fixture
def llama(tiny_engine: LoadTiny) -> Iterator[LoadLlama]:
    """The engine with a twin in it; nothing may be left in it after a test."""
    used: list[LlamaEngine] = []

    def load(architecture: str) -> LlamaEngine:
        engine = tiny_engine("llamacpp", architecture)
        assert isinstance(engine, LlamaEngine)
        used.append(engine)
        return engine

    yield load
    for engine in used:
        assert not engine.live
        assert engine.kv_held_bytes == 0
        assert cells_used(engine) == 0


def cells_used(engine: LlamaEngine) -> int:
    """As llama.cpp counts, the spare sequence included."""
    return sum(engine.model.length(number) for number in range(engine.model.size.sequences))


def twin(tiny_engine: LoadTiny, name: str, architecture: str) -> Engine:
    return tiny_engine(name, "twin_" + architecture)


@pytest.mark.slow
class TestPairs:
    @pytest.mark.parametrize("pair", PAIRS, ids="-".join)
    @pytest.mark.parametrize(("architecture", "length", "seed"), CASES)
    def test_handoff_is_token_exact(
        self, architecture: str, length: int, seed: int, pair: tuple[str, str], tiny_engine: LoadTiny
    ) -> None:
        far, near = (twin(tiny_engine, name, architecture) for name in pair)
        prompt = prompt_of(length, seed=seed)
        expected = alone(near, prompt, ANSWER)
        slices, logits = read_prompt(far, prompt, 77)
        before = near.counters.prompt_tokens
        assert write_answer(near, receive(near, slices, length), logits, ANSWER) == expected
        assert near.counters.prompt_tokens == before, "the decode side read the prompt again"

    @pytest.mark.parametrize(("architecture", "length", "seed"), CASES)
    def test_no_near_ties(self, architecture: str, length: int, seed: int, tiny_engine: LoadTiny) -> None:
        """The oracle is worth something only if half precision cannot flip it."""
        engines = [twin(tiny_engine, name, architecture) for name in (next(iter(ENGINE_OPTIONS)), "llamacpp")]
        prompt = prompt_of(length, seed=seed)
        answer = alone(engines[0], prompt, ANSWER)
        logits, mirror = (forced_logits(engine, prompt, answer) for engine in engines)
        error = np.abs(logits - mirror).max()
        second, first = np.sort(logits, axis=-1)[:, -2:].T
        assert error < NOISE
        assert (first - second).min() > 2 * error

    @pytest.mark.parametrize("pair", PAIRS, ids="-".join)
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_half_way_through_an_answer_and_behind_a_prefix(
        self, architecture: str, pair: tuple[str, str], tiny_engine: LoadTiny
    ) -> None:
        """A sequence moves out of a batch after 20 tokens of its answer; then a chunk is read there, and moves after
        it. The logits are those of an engine that reads everything alone."""
        far, near = (twin(tiny_engine, name, architecture) for name in pair)
        tokens = prompt_of(270, seed=3)
        moving, other = far.open(270), far.open(60)
        far.prefill(moving, tokens[:150])
        far.prefill(other, prompt_of(30))
        for token in tokens[150:170]:
            far.step([other, moving], [7, token])
        arrived = near.open(300)
        for piece in (piece.copy() for piece in far.export(moving)):
            near.place(arrived, piece)
        near.commit(arrived, 170)
        far.prefill(moving, tokens[170:], lambda piece: near.place(arrived, piece.copy()))
        near.commit(arrived, 270)
        found = np.concatenate([near.step([arrived], [token]).numpy() for token in tokens[:8]])
        assert np.abs(found - forced_logits(near, tokens, tokens[:8])[1:]).max() < NOISE
        for engine, sequence in ((far, moving), (far, other), (near, arrived)):
            engine.close(sequence)

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_rows_are_those_of_the_others(self, architecture: str, tiny_engine: LoadTiny) -> None:
        """Of the first layer within the rounding of float16, in every token; of the last as near as its input is."""
        readers = [twin(tiny_engine, name, architecture) for name in (next(iter(ENGINE_OPTIONS)), "llamacpp")]
        ours, theirs = (read_prompt(engine, prompt_of(300), 300)[0] for engine in readers)
        assert [(piece.layer, piece.start, piece.keys.shape) for piece in ours] == [
            (piece.layer, piece.start, piece.keys.shape) for piece in theirs
        ]
        for mine, other in zip(ours, theirs, strict=True):
            for rows, half in ((mine.keys, other.keys), (mine.values, other.values)):
                assert half.dtype == np.float16
                limit = 2**-10 * np.abs(rows) + 1e-4 if mine.layer == 0 else 0.02 * np.abs(rows).max()
                assert np.all(np.abs(rows - half) <= limit), f"layer {mine.layer}"


class TestState:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    @pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
    def test_what_we_write_is_what_llamacpp_writes(self, architecture: str, length: int, llama: LoadLlama) -> None:
        """From the portable KV to bytes, and from these bytes, in a sequence, to the same bytes again."""
        engine = llama(architecture)
        sequence = engine.open(400)
        engine.prefill(sequence, prompt_of(length))
        dumped = engine.model.dump(sequence.state.number)
        rows = [[(piece.keys, piece.values)] for piece in engine.export(sequence)]
        assert np.array_equal(engine.codec.encode(rows, length, sequence.state.number), dumped)
        again = receive(engine, list(engine.export(sequence)), length)
        copy = engine.model.dump(again.state.number)
        assert np.array_equal(engine.codec.encode(rows, length, again.state.number), copy)
        for used in (sequence, again):
            engine.close(used)

    @pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_caches_in_other_dtypes(self, architecture: str, dtype: KVDType, tiny_folder: Folder) -> None:
        model = ModelFiles("twin", twin_of(tiny_folder("twin_" + architecture)))
        engine = load_engine("llamacpp", model, **LLAMACPP_OPTIONS | {"dtype": dtype})
        prompt = prompt_of(200)
        slices, logits = read_prompt(engine, prompt, 77)
        assert slices[0].dtype == engine.dtype == dtype
        assert write_answer(engine, receive(engine, slices, 200), logits, 8) == alone(engine, prompt, 8, chunk=77)

    @pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
    def test_any_damage_is_refused(self, architecture: str, llama: LoadLlama) -> None:
        """By our reader at every byte but those of rows and of sequences' numbers, which llama.cpp does not read
        either; and by both when something is missing."""
        engine = llama(architecture)
        sequence = engine.open(10)
        engine.prefill(sequence, prompt_of(5))
        state = engine.model.dump(sequence.state.number)
        rows = _row_bytes(engine.codec, state)
        unnoticed = [at for at in range(len(state)) if at not in rows and _reads(engine.codec, state, at)]
        assert len(unnoticed) == 4 + 4 * 5 * len(engine.codec.sections)
        for size in (0, 3, 8, 40, len(state) // 2, len(state) - 1):
            with pytest.raises(SliceRefused):
                list(engine.codec.decode(state[:size], 0, 5))
            with pytest.raises(SliceRefused, match="refused a state"):
                engine.model.restore(engine._spare, state[:size].copy())
        with pytest.raises(SliceRefused, match="extra bytes"):
            list(engine.codec.decode(np.append(state, np.uint8(0)), 0, 5))
        assert write_answer(engine, sequence, engine.prefill(sequence, [9]), 4) == alone(
            engine, [*prompt_of(5), 9], 4, chunk=5
        )

    def test_states_of_another_kind_are_refused(self, llama: LoadLlama, tiny_folder: Folder) -> None:
        """Without flash attention, with another type of rows: refused both ways, and the context stays usable."""
        engine = llama("llama")
        prompt = prompt_of(40)
        expected = alone(engine, prompt, 8)
        path, size = twin_of(tiny_folder("twin_llama")), ContextSize(512, 2)
        good = _state_of(engine.model, prompt)
        for setting, words in (
            (ContextSettings(flash=False), "transpos"),
            (ContextSettings(dtype="float32"), "type"),
            (ContextSettings(dtype="bfloat16"), "type"),
        ):
            other = LlamaContext(load_library(), path, size, setting)
            state = _state_of(other, prompt)
            with pytest.raises(SliceRefused, match=words):
                list(engine.codec.decode(state, 0, 40))
            for context, foreign in ((engine.model, state), (other, good)):
                with pytest.raises(SliceRefused, match=words):
                    context.restore(1, foreign)
                assert context.length(1) == 0
            assert np.array_equal(_state_of(other, prompt), state)
            assert alone(engine, prompt, 8) == expected

    @pytest.mark.parametrize("architecture", ["llama", "qwen3"])
    def test_the_wrong_basis_is_refused(
        self, architecture: str, llama: LoadLlama, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If we thought that a model's K were permuted where it is not, or the other way round, it would show."""
        engine = llama(architecture)
        spec = engine.spec
        assert probe(engine.model, spec, "float16", [spec.rope])[0] == engine.codec
        assumed = () if architecture == "llama" else ("qwen3",)
        monkeypatch.setattr("disaggregated_inference.engines.llamacpp.probe.PERMUTED", assumed)
        with pytest.raises(EngineMismatch, match="another basis"):
            probe(engine.model, spec, "float16", [spec.rope])

    @pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
    def test_states_of_both_versions(self, architecture: str, llama: LoadLlama) -> None:
        """Before version 4 there are no fields for rotations, as in llama-cpp-python 0.3.36; else the same bytes."""
        engine = llama(architecture)
        slices, _ = read_prompt(engine, prompt_of(200), 200)
        rows = [[(piece.keys, piece.values)] for piece in slices]
        other = replace(engine.codec, rotations=not engine.codec.rotations)
        state = other.encode(rows, 200, 3)
        longer = 8 * len(other.sections) * (1 if other.rotations else -1)
        assert len(state) - len(engine.codec.encode(rows, 200, 3)) == longer
        for ours, read in zip(slices, other.decode(state, 0, 200), strict=True):
            assert np.array_equal(ours.keys, read.keys)
            assert np.array_equal(ours.values, read.values)
        with pytest.raises(SliceRefused):
            list(engine.codec.decode(state, 0, 200))

    def test_another_layout_is_refused_with_the_version(
        self, llama: LoadLlama, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = llama("llama")
        monkeypatch.setattr(StateCodec, "size_bytes", lambda codec, cells: 12345 + codec.rotations)
        with pytest.raises(EngineUnavailable, match=rf"{library.load_library().name} writes states.*12346 or 12345"):
            probe(engine.model, engine.spec, "float16", [engine.spec.rope])

    def test_another_model_than_its_metadata_say_is_refused(self, llama: LoadLlama) -> None:
        import msgspec

        engine = llama("llama")
        other = msgspec.structs.replace(engine.spec, vocabulary=500)
        with pytest.raises(EngineMismatch, match=r"512\), expected .*500\)"):
            probe(engine.model, other, "float16", [other.rope])

    def test_what_half_precision_cannot_hold_is_refused(self, llama: LoadLlama) -> None:
        engine = llama("llama")
        slices, _ = read_prompt(engine, prompt_of(5), 5)
        wide = [replace(piece, dtype="float32", keys=as_dtype(piece.keys, "float16", "float32")) for piece in slices]
        huge = replace(wide[0], keys=wide[0].keys * 1e6, values=as_dtype(wide[0].values, "float16", "float32"))
        sequence = engine.open(10)
        with pytest.raises(SliceRefused, match="beyond the range of float16"):
            engine.place(sequence, huge)
        engine.close(sequence)


def _state_of(context: LlamaContext, prompt: list[int]) -> Any:
    spare = context.size.sequences - 1
    context.evaluate(prompt, range(len(prompt)), [spare] * len(prompt), wanted=1)
    state = context.dump(spare)
    context.forget(spare)
    return state


def _row_bytes(codec: StateCodec, state: Any) -> set[int]:
    """Where rows lie: found by writing the state again with all their bits turned."""
    rows = [[(_turned(piece.keys), _turned(piece.values))] for piece in codec.decode(state, 0, 5)]
    sequence = int(state[4:8].view(np.int32)[0])
    return set(np.flatnonzero(codec.encode(rows, 5, sequence) != state).tolist())


def _turned(rows: Any) -> Any:
    return (~rows.view(np.uint16)).view(np.float16)


def _reads(codec: StateCodec, state: Any, at: int) -> bool:
    """Whether a state with one byte changed is taken for a good one."""
    damaged = state.copy()
    damaged[at] ^= 0x41
    try:
        return bool(list(codec.decode(damaged, 0, 5)))
    except SliceRefused:
        return False


class TestServing:
    def test_logits_outlive_the_next_call(self, llama: LoadLlama) -> None:
        """They are looked at where llama.cpp has them; who still has them when it computes again has a copy."""
        engine = llama("llama")
        first, second = engine.open(64), engine.open(64)
        logits = engine.prefill(first, prompt_of(20))
        expected, token = logits.numpy().copy(), logits.greedy().tolist()
        others = engine.prefill(second, prompt_of(30, seed=5)).numpy()
        assert not np.array_equal(expected, others)
        assert np.array_equal(logits.numpy(), expected)
        assert logits.greedy().tolist() == token
        for sequence in (first, second):
            engine.close(sequence)

    @pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
    def test_sixteen_sequences_join_and_leave(self, architecture: str, llama: LoadLlama) -> None:
        """Read here or handed over, of all lengths, stepped in any order; each sees only its own tokens."""
        engine = llama(architecture)
        chance = np.random.default_rng(5)
        lengths = [1, 5, 30, 64, 100, 127, 128, 129, 140, 150, 210, 250, 300, 350, 500, 700]
        prompts = [prompt_of(length) for length in lengths]
        answers = [prompt_of(12, seed=length) for length in lengths]
        expected = [forced_logits(engine, *both)[1:] for both in zip(prompts, answers, strict=True)]
        waiting: list[int] = chance.permutation(16).tolist()
        running: dict[int, Sequence] = {}
        found: dict[int, list[NDArray[np.float32]]] = {index: [] for index in range(16)}
        while waiting or running:
            if waiting and (len(running) < 3 or chance.random() < 0.5):
                index = waiting.pop()
                running[index] = _begun(engine, prompts[index], index % 2 == 0)
            order = [index for index in chance.permutation(list(running)).tolist() if chance.random() < 0.9]
            if order:
                logits = engine.step([running[i] for i in order], [answers[i][len(found[i])] for i in order]).numpy()
                for i, row in zip(order, logits, strict=True):
                    found[i].append(row)
            assert engine.kv_held_bytes <= sum(engine.kv_cost(sequence.capacity) for sequence in running.values())
            for index in [i for i in running if len(found[i]) == 12]:
                engine.close(running.pop(index))
        errors = [np.abs(np.stack(found[i]) - rows).max(axis=1) for i, rows in enumerate(expected)]
        assert max(np.median(error) for error in errors) < NOISE
        assert np.mean(np.concatenate(errors) < NOISE) > 0.95  # once in a while a token goes to another expert

    @pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
    def test_memory_stays_within_its_cost_while_slices_arrive(self, architecture: str, llama: LoadLlama) -> None:
        engine = llama(architecture)
        slices, _ = read_prompt(engine, prompt_of(300), 100)
        sequence = engine.open(300)
        held = []
        for piece in slices:
            engine.place(sequence, piece)
            held.append(engine.kv_held_bytes)
            if piece.layer == 3:
                engine.commit(sequence, piece.stop)
                held.append(engine.kv_held_bytes)
        assert 0 < max(held) <= engine.kv_cost(300)
        assert held[-1] == engine.spec.kv_bytes(300, "float16")
        engine.close(sequence)

    def test_nothing_is_left_of_a_thousand_requests(self, llama: LoadLlama) -> None:
        engine = llama("gpt_oss")
        slices, logits = read_prompt(engine, prompt_of(20), 20)
        held: list[int] = []
        for number in range(1000):
            if number % 250 == 100:
                gc.collect()
                held.append(_resident_bytes())
            sequence = receive(engine, slices, 20, answer=10)
            tokens = engine.step([sequence], logits.greedy()).greedy()
            list(engine.export(sequence))
            if number % 3:
                engine.step([sequence], tokens)
            engine.close(sequence)
        assert cells_used(engine) == 0
        assert held[-1] - held[0] < 8 << 20

    def test_all_room_can_be_used(self, tiny_folder: Folder) -> None:
        """Sequences whose costs fit are served together, whatever holes those before them have left."""
        model = ModelFiles("twin", twin_of(tiny_folder("twin_gpt_oss")))
        engine = load_engine("llamacpp", model, threads=1, kv_bytes=512 * 256, sequences=6)
        assert isinstance(engine, LlamaEngine)
        assert engine.model.size.cells == 512
        prompt = prompt_of(80)
        expected = alone(engine, prompt, 5)
        slices, logits = read_prompt(engine, prompt, 80)
        first = [receive(engine, slices, 80, answer=5) for _ in range(6)]
        for sequence in first[::2]:
            engine.close(sequence)
        long = engine.open(257)
        with pytest.raises(KVMemoryFull, match=r"no memory for 1 tokens.*0 of 512"):
            engine.open(1)
        engine.prefill(long, prompt_of(252))
        found = [write_answer(engine, sequence, logits, 5) for sequence in first[1::2]]
        engine.close(long)
        found += [write_answer(engine, receive(engine, slices, 80, 5), logits, 5) for _ in range(3)]
        assert found == [expected] * 6
        assert cells_used(engine) == 0

    def test_unloaded_and_loaded_again(self, tiny_folder: Folder) -> None:
        model = ModelFiles("twin", twin_of(tiny_folder("twin_llama")))
        engine = load_engine("llamacpp", model, **LLAMACPP_OPTIONS)
        expected = alone(engine, prompt_of(30), 6)
        engine.unload()
        assert not engine.loaded
        assert engine.kv_held_bytes == 0
        again = load_engine("llamacpp", model, **LLAMACPP_OPTIONS)
        again.replace(engine)
        assert alone(again, prompt_of(30), 6) == expected
        assert again.counters.prompt_tokens == 60


def _begun(engine: Engine, prompt: list[int], here: bool) -> Sequence:
    if not here:
        return receive(engine, read_prompt(engine, prompt, 90)[0], len(prompt), 12)
    sequence = engine.open(len(prompt) + 12)
    engine.prefill(sequence, prompt)
    return sequence


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class TestModel:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_a_gguf_and_a_folder_of_one_model_are_the_same(self, architecture: str, tiny_engine: LoadTiny) -> None:
        mine, theirs = (twin(tiny_engine, name, architecture) for name in (next(iter(ENGINE_OPTIONS)), "llamacpp"))
        assert mine.fingerprint.differences(theirs.fingerprint) == []

    def test_other_weights_are_another_model(self, tiny_engine: LoadTiny, tiny_folder: Folder, tmp_path: Path) -> None:
        from tests.support.gguf_twins import write_twin
        from tests.support.tiny_models import save_tiny

        folder = save_tiny("twin_qwen3", tmp_path / "other", seed=99)
        other = ModelFiles("other", write_twin(folder, folder / "model.gguf")).fingerprint
        for mine in (ModelFiles("a", tiny_folder("twin_qwen3")), ModelFiles("b", twin_of(tiny_folder("twin_qwen3")))):
            assert [line.split(":")[0] for line in mine.fingerprint.differences(other)] == ["weights"]

    def test_where_llamacpp_rotates_otherwise_it_says_so(self, tiny_folder: Folder) -> None:
        """GPT-OSS's checkpoint asks for a range of YaRN that is not whole, and llama.cpp rounds it: its caches are its
        own. Among llama.cpp nodes they move."""
        folder = tiny_folder("gpt_oss")
        engine = load_engine("llamacpp", ModelFiles("rounded", twin_of(folder)), **LLAMACPP_OPTIONS)
        with pytest.raises(FingerprintMismatch, match="rope_frequencies"):
            require_same_model(engine.fingerprint, ModelFiles("exact", folder).fingerprint)
        slices, logits = read_prompt(engine, prompt_of(200), 77)
        prompt = prompt_of(200)
        assert write_answer(engine, receive(engine, slices, 200), logits, 8) == alone(engine, prompt, 8, chunk=77)

    def test_files_that_cannot_be_loaded(self, tiny_folder: Folder, tmp_path: Path) -> None:
        folder = tiny_folder("twin_llama")
        whole = twin_of(folder)
        with pytest.raises(ModelUnsupported, match=r"a folder of safetensors, and llamacpp loads a GGUF.*torch or mlx"):
            load_engine("llamacpp", ModelFiles("folder", folder), **LLAMACPP_OPTIONS)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_bytes((whole.parent / name).read_bytes())
        (tmp_path / "short.gguf").write_bytes(whole.read_bytes()[:-5000])
        with pytest.raises(ModelDamaged):
            load_engine("llamacpp", ModelFiles("short", tmp_path / "short.gguf"), **LLAMACPP_OPTIONS)

    def test_too_little_memory(self, tiny_folder: Folder) -> None:
        model = ModelFiles("twin", twin_of(tiny_folder("twin_llama")))
        with pytest.raises(KVMemoryFull, match="256 tokens"):
            load_engine("llamacpp", model, kv_bytes=1000)
        with pytest.raises(EngineUnavailable, match="1 to 255 sequences"):
            load_engine("llamacpp", model, sequences=256)


class TestLibrary:
    def test_structures_are_as_large_as_the_proven_build_has_them(self) -> None:
        assert [ctypes.sizeof(kind) for kind in (library.ModelParams, library.ContextParams)] == [80, 168]
        assert load_library().name.split()[1] in sum(library.TESTED_VERSIONS.values(), ())

    def test_builds_that_are_not_proven(self) -> None:
        with pytest.raises(
            EngineUnavailable, match=r"xllamacpp 2030\.1\.1 has not been tested.*pip install xllamacpp=="
        ):
            library.require_tested("xllamacpp", "2030.1.1")

    def test_parameters_that_moved(self) -> None:
        class Moved(ctypes.Structure):
            _fields_ = (("surprise", ctypes.c_uint32), *library.ContextParams._fields_)

        known = library.load_library()
        with pytest.raises(EngineUnavailable, match="have another layout"):
            library.bind(Path(known.call._name), "a llama.cpp of tomorrow", known.model_params, Moved)
