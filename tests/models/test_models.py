"""Names to files, files to facts."""

import json
import shutil
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disaggregated_inference.engines import load_engine
from disaggregated_inference.errors import (
    ContextTooLong,
    MessagesRefused,
    ModelDamaged,
    ModelError,
    ModelExists,
    ModelNotFound,
    ModelUnsupported,
)
from disaggregated_inference.models import ModelFiles, ModelStore, rope_from_config, spec_from_config
from disaggregated_inference.models.gguf import GGUFFile

Folder = Callable[[str], Path]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return ModelStore(tmp_path / "home")


@pytest.mark.parametrize("name", ["smollm2:135m", "smollm2", "SmolLM2", "disaggregated:smollm2:135m"])
def test_the_embedded_model_by_its_names(name: str, smollm2: ModelFiles) -> None:
    assert ModelStore().resolve(name).path == smollm2.path


def test_paths_and_given_names(store: ModelStore, tiny_folder: Folder, smollm2_gguf: Path) -> None:
    folder = tiny_folder("qwen3")
    assert store.resolve(str(folder)).spec.architecture == "qwen3"
    assert store.resolve(str(smollm2_gguf)).kind == "gguf"
    store.add("mine:1b", folder)
    assert ModelStore(store.home).resolve("mine:1b").path == folder
    assert "mine:1b" in {row.name for row in store.list()}
    store.add("smollm2", folder)  # a name the user gave comes before ours
    assert store.resolve("smollm2").path == folder


def test_a_copy_is_listed_once(store: ModelStore, tiny_folder: Folder) -> None:
    copy = store.add("org/mine", tiny_folder("llama"), copy=True)
    rows = [row for row in store.list() if row.path == copy.path]
    assert [(row.name, row.note) for row in rows] == [("org/mine", "imported, safetensors")]
    store.remove("org/mine")
    assert not [row for row in store.list() if row.path == copy.path]


class TestRemoving:
    """Only what `import --copy` made is ours to delete."""

    def test_what_lies_in_the_store_and_was_only_named_stays(
        self, store: ModelStore, tiny_folder: Folder, smollm2_gguf: Path
    ) -> None:
        precious = store.root / "Precious-7B"
        shutil.copytree(tiny_folder("llama"), precious)
        (store.root / "mine.gguf").symlink_to(smollm2_gguf)
        kept = store.add("kept", tiny_folder("llama"), copy=True)
        store.add("folder", precious)
        store.add("file", store.root / "mine.gguf")
        assert store.remove("folder") == store.remove("file") == []
        assert kept.path.is_dir()
        assert precious.is_dir()
        assert (store.root / "mine.gguf").exists()
        assert store.remove("kept") == [kept.path]
        assert not kept.path.exists()

    def test_nothing_but_a_folder_right_below_the_root(self, store: ModelStore, tiny_folder: Folder) -> None:
        """Whatever somebody wrote into models.json."""
        store.root.mkdir(parents=True)
        (store.root / "one.gguf").write_bytes(b"GGUF")
        outside = shutil.copytree(tiny_folder("llama"), store.home / "outside")
        odd = {"gguf": str(store.root / "one.gguf"), "safetensors": str(outside), "copied": ["gguf", "safetensors"]}
        (store.home / "models.json").write_text(json.dumps({"odd": odd}))
        assert store.remove("odd") == []
        assert (store.root / "one.gguf").exists()
        assert outside.is_dir()

    def test_a_copy_is_never_forgotten(self, store: ModelStore, tiny_folder: Folder) -> None:
        copy = store.add("x", tiny_folder("llama"), copy=True)
        with pytest.raises(ModelExists, match=r"x has a copy in .*models/x: `disagg models remove x` first"):
            store.add("x", tiny_folder("qwen3"))
        store.add("x", copy.path)  # itself
        store.add("again", copy.path)
        with pytest.raises(ModelExists, match="remove again first"):
            store.remove("x")
        assert store.remove("again") == []
        assert store.remove("x") == [copy.path]
        store.add("x", tiny_folder("qwen3"))

    def test_many_import_at_once(self, store: ModelStore, tiny_folder: Folder) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: store.add(f"n{number}", tiny_folder("llama")), range(16)))
        assert sorted(store.names) == sorted(f"n{number}" for number in range(16))
        assert {path.name for path in store.home.iterdir()} == {"models.json", "models.lock"}


def test_names_as_programs_write_them(store: ModelStore, tiny_folder: Folder) -> None:
    assert store.add("disaggregated:foo", tiny_folder("llama")).name == "foo"
    assert list(store.names) == ["foo"]
    assert store.resolve("disaggregated:foo").path == store.resolve("foo").path
    store.remove("disaggregated:foo")
    assert store.names == {}


@pytest.mark.parametrize("content", ["{", "[]", '{"x": "/tmp"}', '{"x": {"gguf": 5}}', '{"x": {"copied": ["gguf"]}}'])
def test_names_of_the_wrong_shape(store: ModelStore, content: str) -> None:
    store.home.mkdir(exist_ok=True)
    (store.home / "models.json").write_text(content)
    with pytest.raises(ModelDamaged, match=r"models\.json"):
        store.list()
    with pytest.raises(ModelDamaged, match=r"models\.json"):
        store.remove("x")


@pytest.mark.parametrize(
    ("said", "engines"),
    [
        ({}, ("torch", "mlx")),
        ({"quantization": {"group_size": 64, "bits": 4}}, ("mlx",)),
        ({"quantization": {"bits": 4}, "quantization_config": {"bits": 4}}, ("mlx",)),
        ({"quantization_config": {"quant_method": "awq"}}, ("torch", "mlx")),
        ({"quantization_config": {"quant_method": "mxfp4"}}, ("torch", "mlx")),
        ({"quantization_config": {"quant_method": "fp8"}}, ("torch",)),
    ],
)
def test_which_engines_load_it(
    said: dict[str, Any], engines: tuple[str, ...], tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text()) | said
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert ModelFiles("x", folder).engines == engines
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # transformers says that it needs accelerate
    without = [name for name in engines if name != "torch" or "fp" not in str(said)]
    assert list(ModelFiles("x", folder).engines) == without


def test_an_engine_says_what_it_cannot_load(tiny_folder: Folder, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    for said, engine, says in (
        ({"quantization": {"bits": 4}}, "torch", "torch cannot load .*, which is quantized as mlx; mlx can"),
        ({"quantization_config": {"quant_method": "fp8"}}, "mlx", "mlx cannot load .*, which is quantized as fp8"),
    ):
        (folder / "config.json").write_text(json.dumps(config | said))
        with pytest.raises(ModelUnsupported, match=says):
            load_engine(engine, ModelFiles("x", folder))


def test_a_folder_in_the_store_or_right_here(
    store: ModelStore, tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_folder("llama"), store.root / "org" / "model")
    assert store.resolve("org/model").path == store.root / "org" / "model"
    assert "org/model" in {row.name for row in store.list()}
    monkeypatch.chdir(store.root / "org")
    assert store.resolve("model").path == store.root / "org" / "model"


def test_aliases_find_the_hugging_face_cache(store: ModelStore, tiny_folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="hf download Qwen/Qwen3-Coder-30B-A3B-Instruct"):
        store.resolve("qwen3-coder:30b")
    repository = tmp_path / "hub" / "models--Qwen--Qwen3-Coder-30B-A3B-Instruct"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc123")
    shutil.copytree(tiny_folder("qwen3_moe"), repository / "snapshots" / "abc123")
    for name in ("qwen3-coder:30b", "disaggregated:qwen3-coder:30b", "Qwen/Qwen3-Coder-30B-A3B-Instruct"):
        assert store.resolve(name).path == repository / "snapshots" / "abc123"
    assert "Qwen/Qwen3-Coder-30B-A3B-Instruct" in {row.name for row in store.list()}


def test_what_is_too_long_says_what_to_do(smollm2: ModelFiles) -> None:
    words = "100031 tokens do not fit the context window of 8192 tokens"
    assert str(ContextTooLong(100031, 8192)) == f"{words}: shorten the prompt, or lower max_tokens"
    apart = str(ContextTooLong(100031, 8192, prompt_tokens=31))
    assert apart == f"{words} (31 for the prompt, 100000 for the completion): shorten the prompt, or lower max_tokens"
    assert str(ContextTooLong(100031, 8192, advice="wait")) == f"{words}: wait"
    with pytest.raises(ContextTooLong, match=r"^at least [0-9]+ tokens do not .* tokens: shorten the prompt$"):
        smollm2.tokenizer.encode_within("x" * 10_000_000, 8192)


def test_a_wrong_name_says_what_there_is(store: ModelStore, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no model 'smolm2'.*smollm2:135m, qwen3-coder:30b"):
        store.resolve("smolm2")
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        store.resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelUnsupported, match="safetensors"):
        store.resolve(str(tmp_path))
    (tmp_path / "fake.gguf").write_bytes(b"no such thing")
    with pytest.raises(ModelDamaged, match="not a GGUF"):
        store.add("fake", tmp_path / "fake.gguf")
    assert store.names == {}


def test_unknown_architecture_names_the_known_ones() -> None:
    with pytest.raises(ModelUnsupported, match=r"'mamba'.*llama.*qwen3_moe.*gpt_oss"):
        spec_from_config({"model_type": "mamba"})
    with pytest.raises(ModelUnsupported, match="lacks 'num_hidden_layers'"):
        spec_from_config({"model_type": "llama", "num_attention_heads": 4, "hidden_size": 64})
    with pytest.raises(ModelUnsupported, match="use_sliding_window"):
        spec_from_config(
            {"model_type": "qwen3", "num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2}
            | {"use_sliding_window": True}
        )


def test_spec_of_the_embedded_model(smollm2: ModelFiles) -> None:
    spec = smollm2.spec
    assert (spec.architecture, spec.context_window, spec.vocabulary, spec.eos_tokens) == ("llama", 8192, 49152, (2, 0))
    assert (len(spec.layout.layers), spec.layout.kv_heads, spec.layout.head_dim) == (30, 3, 64)
    assert spec.kv_token_bytes("float16") == 23_040
    assert spec.kv_bytes(1000, "float32") == 46_080_000


def test_gguf_and_safetensors_of_one_model_are_one_model(smollm2: ModelFiles, smollm2_gguf: Path) -> None:
    """Same spec, same tokenizer, same norms: a llama.cpp node and a torch node may talk."""
    raw = ModelFiles("gguf", smollm2_gguf)
    assert raw.spec == smollm2.spec
    assert smollm2.fingerprint.differences(raw.fingerprint) == []
    assert raw.fingerprint.weights.format != smollm2.fingerprint.weights.format


@pytest.mark.slow
def test_dequantization_equals_the_reference(smollm2_gguf: Path) -> None:
    ours, reference = GGUFFile(smollm2_gguf), gguf.GGUFReader(smollm2_gguf)
    assert len(ours.tensors) == len(reference.tensors)
    kinds: dict[int, Any] = {}
    for tensor in reference.tensors:
        kinds.setdefault(tensor.tensor_type, tensor)
    assert len(kinds) == 3
    for tensor in kinds.values():
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(ours.load(tensor.name), expected)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 60))
def test_a_damaged_gguf_is_a_typed_error(tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int) -> None:
    header = bytes.fromhex("47475546 03000000 0100000000000000 0100000000000000 0700000000000000") + b"general"
    path = tmp_path_factory.getbasetemp() / "noise.gguf"
    content = header[:at] + noise
    path.write_bytes(content)
    try:
        found = GGUFFile(path)
    except ModelError:
        return
    # Noise can happen to be a file: then it has what its header says. Any other error fails the test.
    assert len(found.tensors) == struct.unpack_from("<Q", content, 8)[0]


def test_llama_3_scaling_kept_in_a_gguf(tmp_path: Path) -> None:
    """A GGUF keeps it as a tensor of divisors; the frequencies are the same as from the config."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wanted = rope_from_config({"rope_theta": 500000.0, "rope_scaling": scaling}, 64)
    plain = rope_from_config({"rope_theta": 500000.0}, 64)
    divisors = np.array(plain.frequencies) / np.array(wanted.frequencies)
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_block_count(2)
    writer.add_context_length(131072)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(512)
    writer.add_head_count(4)
    writer.add_rope_freq_base(500000.0)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    rope = ModelFiles("tiny", tmp_path / "tiny.gguf").spec.rope
    assert np.allclose(rope.frequencies, wanted.frequencies, rtol=1e-6)


class TestDamage:
    """Files that are not what they should be end in a typed error, never in an answer and never in a traceback."""

    @pytest.fixture
    def copy(self, tiny_folder: Folder, tmp_path: Path) -> Path:
        shutil.copytree(tiny_folder("llama"), tmp_path / "copy")
        return tmp_path / "copy"

    @pytest.mark.parametrize("engine", ["torch", "mlx"])
    def test_a_missing_weight_is_not_made_up(self, copy: Path, engine: str) -> None:
        """transformers would fill it with random numbers and a warning."""
        from safetensors.torch import load_file, save_file

        weights = load_file(copy / "model.safetensors")
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, copy / "model.safetensors")
        with pytest.raises(ModelDamaged, match="up_proj"):
            load_engine(engine, ModelFiles("x", copy))

    def test_what_is_not_all_there_is_not_imported(self, copy: Path, store: ModelStore) -> None:
        from safetensors.torch import load_file, save_file

        weights = load_file(copy / "model.safetensors")
        (copy / "model.safetensors").unlink()
        names = sorted(weights)
        parts = {f"model-0000{at + 1}-of-00002.safetensors": names[at::2] for at in range(2)}
        for file, those in parts.items():
            save_file({name: weights[name] for name in those}, copy / file)
        index = {"weight_map": {name: file for file, those in parts.items() for name in those}}
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))
        store.add("whole", copy)
        second = copy / "model-00002-of-00002.safetensors"
        save_file({name: weights[name] for name in names[1::2] if "k_proj" not in name}, second)
        with pytest.raises(ModelDamaged, match=r"index\.json: .*k_proj.* missing"):
            store.add("x", copy)
        second.unlink()
        for _ in ("with and", "without an index"):
            with pytest.raises(ModelDamaged, match=r"model-00002-of-00002\.safetensors missing; download"):
                store.add("x", copy)
            (copy / "model.safetensors.index.json").unlink(missing_ok=True)
        (copy / "model-00001-of-00002.safetensors").rename(copy / "model.safetensors")
        with pytest.raises(ModelDamaged, match=r"layers\.[0-9.a-z_]+.* missing"):
            store.add("x", copy)

    @pytest.mark.parametrize("engine", ["torch", "mlx"])
    @pytest.mark.parametrize("keep", [4, 100, 5000, 200_000])
    def test_weights_cut_short(self, copy: Path, engine: str, keep: int) -> None:
        path = copy / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(ModelDamaged):
            load_engine(engine, ModelFiles("x", copy))

    @pytest.mark.parametrize(
        "content", ["[]", "not json", "\x00\xff", '{"model_type": "llama", "num_hidden_layers": "x"}']
    )
    def test_a_config_that_is_none(self, copy: Path, content: str) -> None:
        (copy / "config.json").write_bytes(content.encode("latin-1"))
        with pytest.raises(ModelError):
            ModelFiles("x", copy).spec  # noqa: B018

    def test_a_tokenizer_that_is_none(self, copy: Path) -> None:
        (copy / "tokenizer.json").write_text("{}")
        with pytest.raises(ModelDamaged, match=r"tokenizer\.json"):
            ModelFiles("x", copy).tokenizer  # noqa: B018

    def test_a_template_that_refuses(self, copy: Path) -> None:
        (copy / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
        with pytest.raises(MessagesRefused, match="roles must alternate"):
            ModelFiles("x", copy).tokenizer.render_chat([])

    def test_an_engine_refuses_a_gguf(self, smollm2_gguf: Path) -> None:
        for engine in ("torch", "mlx"):
            with pytest.raises(
                ModelUnsupported, match=f"a GGUF file, and {engine} loads a folder.*use --engine llamacpp"
            ):
                load_engine(engine, ModelFiles("x", smollm2_gguf))
