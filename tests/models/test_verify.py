"""Whether two copies are one model: by a sample, byte by byte, and where they are stored differently."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from disaggregated_inference.engines import load_engine
from disaggregated_inference.errors import ModelNotFound, ModelUnsupported
from disaggregated_inference.models import ModelFiles, ModelStore, compare_models, describe_model, describe_models
from disaggregated_inference.models.gguf import GGUFFile
from disaggregated_inference.models.verify import ModelComparison
from disaggregated_inference.models.weights_hash import FIRST_ROW
from tests.support.engines import LLAMACPP, LLAMACPP_OPTIONS, twin_of
from tests.support.gguf_twins import write_twin

Folder = Callable[[str], Path]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return ModelStore(tmp_path / "home")


@pytest.fixture
def copy(tiny_folder: Folder, tmp_path: Path) -> Path:
    """With the GGUF of the same weights in it."""
    twin_of(tiny_folder("twin_llama"))
    return shutil.copytree(tiny_folder("twin_llama"), tmp_path / "copy")


def _verified(store: ModelStore, mine: Path | str, theirs: Path | str, full: bool = False) -> ModelComparison:
    here, there = describe_models((str(mine), str(theirs)), store)
    return compare_models(here, there, full)


def _changed(folder: Path, by: float, part: str = "") -> None:
    """Norms stay: fine-tunes can share them."""
    noise, weights = np.random.default_rng(1), load_file(folder / "model.safetensors")
    others = {
        name: (values * (1 + by * noise.standard_normal(values.shape))).astype(np.float32)
        for name, values in weights.items()
        if "norm" not in name and part in name
    }
    save_file(weights | others, folder / "model.safetensors", {"format": "pt"})


def _multiplied(folder: Path, name: str, by: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {name: weights[name] * by}, folder / "model.safetensors", {"format": "pt"})


class TestFull:
    def test_one_bit_in_the_middle(self, store: ModelStore, copy: Path, tiny_folder: Folder) -> None:
        mine, theirs = twin_of(tiny_folder("twin_llama")), twin_of(copy)
        tensor = GGUFFile(mine).tensors["blk.1.ffn_up.weight"]
        content = bytearray(mine.read_bytes())
        content[tensor.begin + tensor.size_bytes // 2] ^= 1
        theirs.write_bytes(content)
        said = _verified(store, mine, theirs)
        assert said == (
            "the same model: the norms and a sample of every tensor are equal; --full compares every byte",
            [],
        )
        assert _verified(store, mine, theirs, full=True).differences == [
            "weights: model.layers.1.mlp.up_proj.weight differs"
        ]
        assert _verified(store, mine, mine, full=True) == ("the same model: every byte of the tensors is equal", [])

    def test_of_a_folder(self, store: ModelStore, copy: Path, tiny_folder: Folder) -> None:
        file = copy / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-3000] ^= 1
        file.write_bytes(content)
        assert not _verified(store, tiny_folder("twin_llama"), copy).differences
        assert len(_verified(store, tiny_folder("twin_llama"), copy, full=True).differences) == 1

    def test_where_there_are_no_bytes_to_compare(self, store: ModelStore, copy: Path, tmp_path: Path) -> None:
        with pytest.raises(ModelUnsupported, match="these are stored differently"):
            _verified(store, copy, twin_of(copy), full=True)
        (tmp_path / "there.json").write_text(json.dumps(describe_model(ModelFiles("x", copy))))
        with pytest.raises(ModelUnsupported, match=r"those of .*there\.json are not here"):
            _verified(store, copy, tmp_path / "there.json", full=True)


class TestStoredDifferently:
    @pytest.mark.parametrize("by", [0.02, 0.7])
    def test_norms_are_not_all(self, by: float, store: ModelStore, copy: Path) -> None:
        said = _verified(store, twin_of(copy), copy)
        assert said.differences == []
        assert "stored differently (gguf:F32 and F32): KV may move between them" in said.summary
        assert "samples of 30 other tensors" in said.summary
        _changed(copy, by)
        said = _verified(store, twin_of(copy), copy)
        assert said.summary == "not the same model"
        assert "weights: lm_head.weight differs by 0." in said.differences[0]

    def test_a_value_that_no_fingerprint_carries(self, store: ModelStore, copy: Path) -> None:
        """And one that is the same from either side: in sizes of the one it would be rounding, of the other not."""
        file, up = twin_of(copy), "model.layers.2.mlp.up_proj.weight"
        for by, expected in ((1.0142, []), (1.02, [f"weights: {up} differs by 0.0196 of its size"])):
            _multiplied(copy, up, np.float32(by))
            mine, theirs = (ModelFiles("x", path).fingerprint for path in (file, copy))
            assert mine.differences(theirs) == []
            for pair in ((file, copy), (copy, file)):
                said = _verified(store, *pair).differences
                assert [line.split(",")[0] for line in said] == expected
            _multiplied(copy, up, np.float32(1 / by))

    @pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"])
    def test_each_kind_is_carried(self, part: str, copy: Path) -> None:
        """Also Q and K, whose rows have another order in the GGUF of a llama."""
        file, rng = twin_of(copy), np.random.default_rng(3)
        names = [name for name in load_file(copy / "model.safetensors") if f"{part}.weight" in name]
        for name in names:
            _multiplied(copy, name, 1 + 0.1 * rng.standard_normal(64).astype(np.float32))
        mine, theirs = (ModelFiles("x", path).fingerprint for path in (file, copy))
        assert [part in line for line in mine.differences(theirs)] == [True]

    def test_a_llama_s_gguf_leaves_the_first_row_of_q_and_k_in_place(self, copy: Path) -> None:
        here, there = (
            {tensor.name: np.frombuffer(tensor.data, np.float32).reshape(tensor.shape) for tensor in model.tensors()}
            for model in (ModelFiles("x", twin_of(copy)), ModelFiles("x", copy))
        )
        names = [name for name in there if name.endswith(FIRST_ROW)]
        assert len(names) == 8
        for name in names:
            assert (here[name][0] == there[name][0]).all()
            assert (here[name][1] != there[name][1]).any()

    @pytest.mark.parametrize("layers", ["layers.0.", "layers."])
    def test_a_dead_row_says_nothing(self, layers: str, store: ModelStore, copy: Path, tmp_path: Path) -> None:
        """Too small for the scales of a quantization: those of the middle, and in one layer the first, too."""
        weights = load_file(copy / "model.safetensors")
        for name in (name for name in weights if "proj" in name and layers in name):
            weights[name][len(weights[name]) * 5 // 8] *= np.float32(1e-6)
            weights[name][0] *= np.float32(1e-6 if "layers.0." in name else 1)
        save_file(weights, copy / "model.safetensors", {"format": "pt"})
        quantized = _quantized(write_twin(copy, twin_of(copy)), tmp_path / "q", gguf.GGMLQuantizationType.Q8_0)
        assert _verified(store, quantized, copy).differences == []

    @pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
    def test_experts(self, architecture: str, store: ModelStore, tiny_folder: Folder, tmp_path: Path) -> None:
        """GPT-OSS keeps them in an order of its own."""
        folder = shutil.copytree(tiny_folder(f"twin_{architecture}"), tmp_path / "folder")
        file, known = twin_of(tiny_folder(f"twin_{architecture}")), architecture == "qwen3_moe"
        assert _verified(store, file, folder).summary.endswith("experts were not compared") is not known
        _changed(folder, 0.1, "experts")
        assert bool(ModelFiles("x", file).fingerprint.differences(ModelFiles("x", folder).fingerprint)) is known
        _changed(folder, 0.1, "mlp.gate.weight" if known else "mlp.router.weight")
        assert "mlp.router.weight differs" in str(_verified(store, file, folder).differences)

    def test_of_a_node_there_is_a_sample(self, store: ModelStore, copy: Path, tmp_path: Path) -> None:
        """What a fingerprint carries is enough to refuse: nodes compare no files."""

        def there() -> ModelComparison:
            told = {"fingerprint": msgspec.to_builtins(ModelFiles("x", copy).fingerprint)}
            (tmp_path / "there.json").write_text(json.dumps(told))
            return _verified(store, twin_of(copy), tmp_path / "there.json")

        assert there().summary.endswith("the norms are equal, and samples of 23 other tensors except for rounding")
        _changed(copy, 0.1)
        assert "differs by 0.1" in there().differences[0]
        assert len(there().differences) == 4

    @pytest.mark.parametrize("kind", ["MXFP4", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16"])
    def test_rounding_is_no_difference(self, kind: str, store: ModelStore, copy: Path, tmp_path: Path) -> None:
        quantized = _quantized(twin_of(copy), tmp_path / "q", gguf.GGMLQuantizationType[kind])
        said = _verified(store, quantized, copy)
        assert len(ModelFiles("x", quantized).fingerprint.weights.values) == 23
        assert (said.differences, "samples of 30 other tensors" in said.summary) == ([], True)
        _changed(copy, 0.5)
        assert _verified(store, quantized, copy).differences

    def test_quantized_to_the_same_types_by_other_scales(self, store: ModelStore, copy: Path, tmp_path: Path) -> None:
        """As an importance matrix chooses them: other bytes, and the same model."""
        four_bits, twin = gguf.GGMLQuantizationType.Q4_0, twin_of(copy)
        mine = _quantized(twin, tmp_path / "mine", four_bits)
        for by, same in ((0.02, True), (0.7, False)):
            _changed(copy, by)
            theirs = _quantized(write_twin(copy, twin), tmp_path / f"theirs{by}", four_bits)
            said = _verified(store, mine, theirs)
            assert (said.differences == []) is same
            assert same is ("stored differently (both gguf:F32+Q4_0): KV may move" in said.summary)

    def test_a_padded_vocabulary(self, store: ModelStore, copy: Path) -> None:
        weights = load_file(copy / "model.safetensors")
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = np.pad(weights[name], ((0, 128), (0, 0)))
        save_file(weights, copy / "model.safetensors", {"format": "pt"})
        assert _verified(store, twin_of(copy), copy).differences == []
        _changed(copy, 0.1, "lm_head")
        assert "lm_head" in _verified(store, twin_of(copy), copy).differences[0]

    def test_what_cannot_be_read_is_said(self, store: ModelStore, copy: Path) -> None:
        weights = load_file(copy / "model.safetensors")
        packed = {name: each if "norm" in name else each.view(np.uint32) for name, each in weights.items()}
        save_file(packed, copy / "model.safetensors", {"format": "pt"})
        assert _verified(store, twin_of(copy), copy).summary.endswith("only the norms could be compared")


def _quantized(source: Path, folder: Path, kind: gguf.GGMLQuantizationType) -> Path:
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source.with_name(name), folder)
    file, writer = GGUFFile(source), gguf.GGUFWriter(folder / "q.gguf", "llama")
    for key, value in file.metadata.items():
        writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(value, gguf.GGUFValueType.get_type(value))
    for name in file.tensors:
        values = np.ascontiguousarray(file.load(name))
        plain = values.ndim == 1
        stored = values if plain else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, stored, raw_dtype=None if plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "q.gguf"


def test_a_buffer_of_old_checkpoints_is_no_weight(copy: Path) -> None:
    before, weights = ModelFiles("x", copy).fingerprint, load_file(copy / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    assert ModelFiles("x", copy).fingerprint == before


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_what_is_carried_is_small(architecture: str, tiny_folder: Folder) -> None:
    values = ModelFiles("x", tiny_folder(f"twin_{architecture}")).fingerprint.weights.values
    assert len(msgspec.json.encode(values)) < 6000
    assert {each.rounding for each in values} == {0.01}


@pytest.mark.skipif(not LLAMACPP, reason="needs llama.cpp")
def test_a_llamacpp_node_that_rotates_its_own_way_has_the_same_model(
    store: ModelStore, tiny_folder: Folder, tmp_path: Path
) -> None:
    folder = tiny_folder("gpt_oss")
    file = ModelFiles("x", twin_of(folder))
    print_of = load_engine("llamacpp", file, **LLAMACPP_OPTIONS).fingerprint
    assert print_of.rope_frequencies != file.fingerprint.rope_frequencies
    (tmp_path / "node.json").write_text(json.dumps({"fingerprint": msgspec.to_builtins(print_of)}))
    (tmp_path / "there.json").write_text(json.dumps(describe_model(file)))
    for mine in (file.path, folder, tmp_path / "there.json"):
        said = _verified(store, mine, tmp_path / "node.json")
        assert said.differences == []
        assert "with other llama.cpp nodes only" in said.summary
    assert "llama.cpp nodes only" in _verified(store, file.path, folder).summary
    assert "llama.cpp" not in _verified(store, file.path, file.path).summary


def test_an_address_needs_no_scheme_and_comes_before_a_model(store: ModelStore, tiny_folder: Folder) -> None:
    with pytest.raises(ModelNotFound, match=r"http://127\.0\.0\.1:9 does not answer"):
        _verified(store, "smollm2", "127.0.0.1:9")
    assert not store.root.exists(), "nothing was fetched"
    store.add("model:9", tiny_folder("llama"))
    assert not _verified(store, "model:9", "disaggregated:model:9").differences
