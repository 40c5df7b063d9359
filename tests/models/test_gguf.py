"""GGUF files as people have them: a tokenizer inside, in several files, or in an Ollama's store."""

import ctypes
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from disaggregated_inference.engines import load_engine
from disaggregated_inference.errors import ModelDamaged, ModelNotFound, ModelUnsupported
from disaggregated_inference.models import ModelFiles, ModelStore, ModelTokenizer, ollama_store
from disaggregated_inference.models.gguf import GGUFFile, dequantize
from disaggregated_inference.models.gguf_tokenizer import PRE_TOKENIZERS, end_tokens, tokenizer_from_gguf
from tests.support.engines import LLAMACPP, LLAMACPP_OPTIONS, twin_of
from tests.support.gguf_twins import write_twin
from tests.support.handoff import alone, prompt_of

Folder = Callable[[str], Path]

NASTY = (
    "Hello, world! It's 12345.678 o'clock; WE'LL see, they'RE here. camelCaseWords HTTPServer2Go",
    "  two  spaces\n\n\ttabs\r\n  and   trailing   \n",
    "naïve café Ünïcödé Straße 你好世界。再见 こんにちは 안녕 Привет Ελληνικά עברית العربية हिन्दी",
    "🙂🏽👩‍👩‍👧 done… “quotes” — dashes/slashes\\back /path/to//file.py\n/",
    "def f(x):\n    return x**2  # comment\n\n\nclass A: pass\n",
    "1 12 123 1234 12345 ½ Ⅷ ٣٤٥ 1,000,000.00€ a1b2c3 x=10;y=-20",
    "<|im_start|>user\nhi<|im_end|>\n<tool_call>{}</tool_call> <|other|>",
    "'s 'S 'T I'd'Ve \u00a0nbsp\u2003em\u200bzero ",
    " ", "\n", "\n\n \n", "   x", "a", "",
)  # fmt: skip
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
USER = ("<tool_call>", "</tool_call>")


def _trained(texts: list[str]) -> tuple[dict[str, int], list[str]]:
    """A vocabulary and merges that are really used."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [" ".join(pair) for pair in model["merges"]]


@pytest.fixture(scope="module")
def vocabulary() -> tuple[dict[str, int], list[str]]:
    return _trained(
        [*NASTY * 3, Path("README.md").read_text(), *(path.read_text() for path in Path("docs").glob("*.md"))]
    )


def _write(path: Path, pre: str, vocabulary: tuple[dict[str, int], list[str]], **more: Any) -> Path:
    """As much of a model as its vocabulary needs."""
    known, merges = vocabulary
    tokens = sorted(known, key=known.__getitem__)
    named = [(token, 1) for token in tokens] + [(token, 3) for token in SPECIAL] + [(token, 4) for token in USER]
    named += [(f"[PAD{at}]", 5) for at in range(8)]
    writer = GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_context_length, 64), (writer.add_embedding_length, 32), (writer.add_block_count, 1),
        (writer.add_head_count, 2), (writer.add_feed_forward_length, 32), (writer.add_layer_norm_rms_eps, 1e-5),
    ):  # fmt: skip
        add(value)
    writer.add_tokenizer_model(more.get("model", "gpt2"))
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in named])
    writer.add_token_types([kind for _, kind in named])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(len(tokens))
    writer.add_eos_token_id(len(tokens) + 1)
    writer.add_chat_template("{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _as_llamacpp_does(path: Path, texts: tuple[str, ...]) -> list[list[int]]:
    from disaggregated_inference.engines.llamacpp.library import load_library

    library = load_library()
    call = library.call
    params = library.default_model_params()
    params.vocab_only = True
    model = call.llama_model_load_from_file(str(path).encode(), params)
    assert model
    vocabulary = call.llama_model_get_vocab(model)
    tokenize = call.llama_tokenize
    tokenize.restype = ctypes.c_int32
    pointer = ctypes.POINTER(ctypes.c_int32)
    whole = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, pointer, ctypes.c_int32, ctypes.c_bool, ctypes.c_bool)
    tokenize.argtypes = whole
    found = []
    for text in texts:
        raw, kv_memory = text.encode(), (ctypes.c_int32 * 4096)()
        count = tokenize(vocabulary, raw, len(raw), kv_memory, 4096, False, True)
        assert count >= 0
        found.append(list(kv_memory[:count]))
    call.llama_model_free(model)
    return found


@pytest.mark.skipif(not LLAMACPP, reason="needs llama.cpp")
@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_text_is_cut_as_llamacpp_cuts_it(pre: str, vocabulary: Any, tmp_path: Path) -> None:
    path = _write(tmp_path / "vocabulary.gguf", pre, vocabulary)
    tokenizer = tokenizer_from_gguf(GGUFFile(path))
    theirs = _as_llamacpp_does(path, NASTY)
    for text, tokens in zip(NASTY, theirs, strict=True):
        assert tokenizer.encode(text) == tokens, repr(text)
        assert tokenizer.decode(tokens, special=True) == text
    assert len({tuple(tokens) for tokens in theirs}) == len(NASTY)


def test_what_a_template_and_an_answer_need_is_there(vocabulary: Any, tmp_path: Path) -> None:
    file = GGUFFile(_write(tmp_path / "vocabulary.gguf", "qwen2", vocabulary))
    tokenizer, size = tokenizer_from_gguf(file), len(vocabulary[0])
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "<|im_start|>hi"
    assert tokenizer.decode(tokenizer.encode("<|im_start|>a<tool_call>")) == "a<tool_call>"
    assert end_tokens(file.metadata) == [size + 1, size + 2], "what it says, and <|endoftext|>"


def test_the_same_vocabulary_in_another_file_is_the_same_tokenizer(vocabulary: Any, tmp_path: Path) -> None:
    """As the original's tokenizer.json has it: no padding, its own way of cutting, other flags."""
    ours = tokenizer_from_gguf(GGUFFile(_write(tmp_path / "vocabulary.gguf", "qwen2", vocabulary)))
    known, merges = vocabulary
    original = Tokenizer(models.BPE(vocab=known, merges=[tuple(merge.split(" ")) for merge in merges]))
    original.pre_tokenizer = pre_tokenizers.ByteLevel()
    original.decoder = decoders.ByteLevel()
    original.add_special_tokens([*SPECIAL])
    original.add_tokens([*USER])
    assert ModelTokenizer(original).identity == ours.identity
    original.add_tokens(["one more"])
    assert ModelTokenizer(original).identity != ours.identity


def test_what_cannot_be_rebuilt_says_what_to_do(vocabulary: Any, tmp_path: Path) -> None:
    for pre, model in (("chatglm-bpe", "gpt2"), ("default", "llama")):
        path = _write(tmp_path / f"{model}.gguf", pre, vocabulary, model=model)
        with pytest.raises(ModelUnsupported, match=rf"'{model}'.*'{pre}'.*qwen2.*tokenizer\.json.*beside the file"):
            tokenizer_from_gguf(GGUFFile(path))


@pytest.fixture(scope="module")
def parts(tiny_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("parts")
    source = tiny_folder("twin_llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
    write_twin(source, folder / "model.gguf", split_max_tensors=8)
    return sorted(folder.glob("*.gguf"))


READ = [kind.name for kind in GGMLQuantizationType if kind in gguf.quants._type_traits]


@pytest.mark.parametrize("kind", READ)
def test_every_type_of_the_gguf_package_is_read(kind: str, tmp_path: Path) -> None:
    """Blocks of random bytes: every one is valid, and none is special."""
    number = GGMLQuantizationType[kind]
    block, block_bytes = GGML_QUANT_SIZES[number]
    width = max(512, block)
    raw = np.random.default_rng(number).integers(0, 256, (8, width // block * block_bytes), dtype=np.uint8)
    writer = GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("blk.0.attn_v.weight", raw, raw_dtype=number)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    with np.errstate(all="ignore"):
        ours = GGUFFile(tmp_path / "one.gguf").load("blk.0.attn_v.weight")
        expected = gguf.quants.dequantize(raw, number)
    assert ours.shape == (8, width)
    assert ours.tobytes() == expected.tobytes()


def test_types_that_are_not_read_are_named() -> None:
    with pytest.raises(ModelUnsupported, match=r"gguf \d.* does not dequantize Q8_K weights"):
        dequantize(np.zeros((1, 292), np.uint8), "Q8_K")
    assert dequantize(np.zeros((1, 8), np.uint8), "F16").tolist() == [[0.0] * 4]


def _changed(source: Path, target: Path, meta: dict[str, Any] | None = None, without: tuple[str, ...] = ()) -> Path:
    """A copy with other metadata, or without some tensors."""
    file, writer = GGUFFile(source), GGUFWriter(target, "llama")
    for key, value in (file.metadata | (meta or {})).items():
        kind = GGUFValueType.UINT32 if value == 4_000_000_000 else GGUFValueType.get_type(value)
        writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(value, kind)
    for name in file.tensors.keys() - set(without):
        writer.add_tensor(name, np.ascontiguousarray(file.load(name)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


ODD = [
    ("general.architecture", ["llama"]), ("llama.attention.head_count", [4, 4]), ("llama.attention.head_count", 0),
    ("llama.attention.head_count_kv", 0), ("llama.block_count", 4_000_000_000), ("llama.block_count", -1),
    ("llama.context_length", "many"), ("llama.embedding_length", 0), ("llama.rope.freq_base", "x"),
    ("llama.rope.scaling.factor", 0.0), ("llama.attention.layer_norm_rms_epsilon", "x"),
    ("tokenizer.chat_template", 5), ("tokenizer.ggml.pre", ["x"]), ("tokenizer.ggml.merges", 5),
    ("tokenizer.ggml.merges", [1, 2]), ("tokenizer.ggml.tokens", 5), ("tokenizer.ggml.tokens", [1, 2]),
    ("tokenizer.ggml.token_type", ["a"]), ("tokenizer.ggml.eos_token_id", "end"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), ODD)
def test_metadata_of_the_wrong_kind_names_the_field(
    key: str, value: object, tiny_folder: Folder, tmp_path: Path
) -> None:
    path = _changed(twin_of(tiny_folder("twin_llama")), tmp_path / "odd.gguf", {key: value})
    with pytest.raises(ModelDamaged, match=rf"odd\.gguf: its {key} is .*, and should be "):
        ModelStore(tmp_path).add("odd", path)


def test_what_only_looks_odd(tiny_folder: Folder, tmp_path: Path) -> None:
    source = twin_of(tiny_folder("twin_llama"))
    plain = _changed(source, tmp_path / "none.gguf", {"llama.rope.scaling.type": "none"}, ("rope_freqs.weight",))
    assert ModelFiles("x", plain).spec.rope.scale == 1.0
    beyond = _changed(source, tmp_path / "far.gguf", {"tokenizer.ggml.eos_token_id": 9_999_999})
    assert ModelFiles("x", beyond).spec.eos_tokens == ()
    experts = _changed(source, tmp_path / "mixtral.gguf", {"llama.expert_count": 8})
    with pytest.raises(ModelUnsupported, match="with experts"):
        ModelFiles("x", experts).spec  # noqa: B018


def test_what_is_missing_is_named(tiny_folder: Folder, tmp_path: Path) -> None:
    source, store = twin_of(tiny_folder("twin_llama")), ModelStore(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source.with_name(name), tmp_path)
    lost = ("blk.2.attn_q.weight", "output_norm.weight")
    with pytest.raises(ModelDamaged, match=r"output_norm\.weight, blk\.2\.attn_q\.weight missing"):
        store.add("x", _changed(source, tmp_path / "lost.gguf", without=lost))
    with pytest.raises(ModelDamaged, match="its metadata has 3 layers, but it has tensors of layer 3"):
        store.add("x", _changed(source, tmp_path / "more.gguf", {"llama.block_count": 3}))
    assert store.names == {}


def test_an_unknown_kind_of_tensor_is_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    content = bytearray(twin_of(tiny_folder("twin_llama")).read_bytes())
    name = b"output_norm.weight"
    kind_at = content.index(name) + len(name) + 4 + 8  # after one dimension
    content[kind_at] = 99
    (tmp_path / "odd.gguf").write_bytes(content)
    with pytest.raises(ModelUnsupported, match=r"output_norm\.weight is stored as ggml type 99"):
        GGUFFile(tmp_path / "odd.gguf")


def test_other_weights_behind_the_same_norms_are_another_model(tiny_folder: Folder, tmp_path: Path) -> None:
    mine = twin_of(tiny_folder("twin_llama"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(mine.with_name(name), tmp_path)
    content, tensor = bytearray(mine.read_bytes()), GGUFFile(mine).tensors["blk.1.ffn_up.weight"]
    content[tensor.begin + 100] ^= 1
    (tmp_path / "tuned.gguf").write_bytes(content)
    here, there = (ModelFiles("x", path).fingerprint for path in (mine, tmp_path / "tuned.gguf"))
    assert here.weights.norms == there.weights.norms
    assert "weights: gguf:F32" in here.differences(there)[0]


def test_a_file_that_ends_too_soon_is_refused_wherever_it_is_cut(tiny_folder: Folder, tmp_path: Path) -> None:
    content = twin_of(tiny_folder("twin_llama")).read_bytes()
    for size in (20, 500, len(content) // 2, len(content) - 40):
        (tmp_path / "cut.gguf").write_bytes(content[:size])
        with pytest.raises(ModelDamaged, match=r"cut\.gguf: .*(exceeds the file|truncated); download the file again"):
            GGUFFile(tmp_path / "cut.gguf")


class TestNames:
    def test_one_name_for_both_kinds_of_files(self, tiny_folder: Folder, tmp_path: Path) -> None:
        folder, store = tiny_folder("twin_llama"), ModelStore(tmp_path)
        store.add("mine", twin_of(folder))
        assert store.resolve("mine").kind == "gguf", "all there is"
        store.add("mine", folder)
        assert [store.resolve("mine", kind=kind).kind for kind in ("safetensors", "gguf")] == ["safetensors", "gguf"]
        assert store.engines("mine") == ["torch", "mlx", "llamacpp"]
        assert [row.note for row in store.list() if row.name == "mine"] == ["imported, gguf", "imported, safetensors"]

    def test_what_is_removed(self, tiny_folder: Folder, tmp_path: Path) -> None:
        store, source = ModelStore(tmp_path), twin_of(tiny_folder("twin_llama"))
        store.add("here", source)
        copy = store.add("copy", source, copy=True).path
        assert store.remove("here") == []
        assert store.remove("copy") == [copy.parent]
        assert source.is_file()
        assert not copy.exists()
        with pytest.raises(ModelNotFound, match="no imported model 'copy'; imported: none"):
            store.remove("copy")

    def test_what_was_imported_and_is_gone(self, tiny_folder: Folder, tmp_path: Path) -> None:
        store, file = ModelStore(tmp_path), tmp_path / "file.gguf"
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_folder("twin_llama") / name, tmp_path)
        shutil.copy(twin_of(tiny_folder("twin_llama")), file)
        store.add("mine", file)
        file.unlink()
        with pytest.raises(
            ModelNotFound, match=r"imported from .*file\.gguf, which does not exist.*models remove mine"
        ):
            store.resolve("mine", kind="gguf")
        assert [row.note for row in store.list() if row.name == "mine"] == ["imported, missing"]

    def test_a_gguf_in_the_hugging_face_cache(
        self, tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        repository = tmp_path / "models--someone--Tiny-GGUF"
        snapshot = repository / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("abc")
        shutil.copy(twin_of(tiny_folder("twin_llama")), snapshot / "tiny-Q8_0.gguf")
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        assert ModelStore(tmp_path).resolve("someone/Tiny-GGUF", kind="gguf").path == snapshot / "tiny-Q8_0.gguf"


class TestParts:
    def test_all_of_them_are_the_model(self, parts: list[Path], tiny_folder: Folder) -> None:
        assert len(parts) > 2
        whole, split = (ModelFiles("tiny", path) for path in (twin_of(tiny_folder("twin_llama")), parts[0]))
        assert whole.fingerprint == split.fingerprint
        assert split.size_bytes == sum(part.stat().st_size for part in parts)
        if LLAMACPP:
            prompt = prompt_of(60)
            answers = [alone(load_engine("llamacpp", each, **LLAMACPP_OPTIONS), prompt, 8) for each in (whole, split)]
            assert answers[0] == answers[1]

    def test_they_are_imported_together(self, parts: list[Path], tmp_path: Path) -> None:
        store = ModelStore(tmp_path)
        added = store.add("big", parts[0].parent, copy=True)
        assert sorted(path.name for path in added.path.parent.glob("*.gguf")) == [part.name for part in parts]
        assert store.resolve("big", kind="gguf").fingerprint == ModelFiles("x", parts[0]).fingerprint

    def test_a_part_that_is_another(self, parts: list[Path], tmp_path: Path) -> None:
        for part in parts:
            shutil.copy(part, tmp_path)
        shutil.copy(parts[0], tmp_path / parts[1].name)
        with pytest.raises(ModelDamaged, match=rf"{parts[1].name}: part 1 of .* by its name, part 0 of .*split\.no"):
            GGUFFile(tmp_path / parts[0].name)

    def test_a_part_that_is_not_there(self, parts: list[Path], tmp_path: Path) -> None:
        for part in parts[:-1]:
            shutil.copy(part, tmp_path)
        with pytest.raises(ModelDamaged, match=f"{parts[-1].name} is missing"):
            GGUFFile(tmp_path / parts[0].name)
        with pytest.raises(ModelUnsupported, match=f"not the first.*use {parts[0].name}"):
            GGUFFile(parts[1])
        for count, kind in (("many", GGUFValueType.STRING), (1 << 31, GGUFValueType.UINT32)):
            writer = GGUFWriter(tmp_path / "odd.gguf", "llama")
            writer.add_key_value("split.count", count, kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.close()
            with pytest.raises(ModelDamaged, match=r"split\.count in its header"):
                GGUFFile(tmp_path / "odd.gguf")
            (tmp_path / "odd.gguf").unlink()
        renamed = shutil.copy(parts[0], tmp_path / "model.gguf")
        with pytest.raises(ModelNotFound, match=r"2 GGUF models, name one of them: model-00001-of.*, model\.gguf"):
            ModelStore(tmp_path).add("both", tmp_path)
        with pytest.raises(ModelUnsupported, match="they must keep their names"):
            GGUFFile(Path(renamed))


class TestOllama:
    """Its store, as a real one lays it out."""

    @pytest.fixture
    def pulled(self, tmp_path: Path, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> Path:
        root = tmp_path / "ollama"
        blob = root / "blobs" / "sha256-0123abcd"
        blob.parent.mkdir(parents=True)
        blob.write_bytes(twin_of(tiny_folder("twin_llama")).read_bytes())
        weights = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:0123abcd", "size": 1}
        template = {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:ff", "size": 1}
        adapter = {"mediaType": "application/vnd.ollama.image.adapter", "digest": "sha256:ee", "size": 1}
        gone = weights | {"digest": "sha256:9999"}
        for name, layers in {
            "library/qwen3-coder/30b": [weights, template],
            "library/tuned/latest": [weights, adapter],
            "library/gone/latest": [gone],
            "someone/Thing/latest": [weights],
            "../hf.co/bartowski/Tiny-GGUF/Q4_1": [weights],
        }.items():
            path = root / "manifests" / "registry.example" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"schemaVersion": 2, "config": {}, "layers": layers}))
        (root / "manifests" / "registry.example" / "library" / "gone" / "damaged").write_text("{")
        monkeypatch.setenv("OLLAMA_MODELS", str(root))
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "nothing"))
        return blob

    def test_its_models_are_found_by_its_names(self, pulled: Path, tmp_path: Path) -> None:
        store = ModelStore(tmp_path)
        for name in (
            "qwen3-coder:30b",
            "qwen3-coder",
            "someone/thing",
            "Someone/Thing:latest",
            "hf.co/bartowski/Tiny-GGUF:Q4_1",
        ):
            found = store.resolve(name, kind="gguf")
            assert (found.path, found.kind, found.engines) == (pulled, "gguf", ("llamacpp",))
        assert store.resolve("qwen3-coder:30b").path == pulled, "for a program that inspects it"
        assert store.resolve("qwen3-coder:30b").config["model_type"] == "llama"
        listed = [(row.name, row.path) for row in store.list() if "Ollama" in row.note]
        names = ["hf.co/bartowski/tiny-gguf:q4_1", "qwen3-coder:30b", "someone/thing:latest"]
        assert listed == [(name, pulled) for name in names]
        for name in ("tuned", "gone", "gone:damaged", "qwen3-coder:7b", "../qwen3-coder:30b"):
            with pytest.raises(ModelNotFound, match=r"no GGUF of .*import.*ollama pull"):
                store.resolve(name, kind="gguf")
        with pytest.raises(ModelNotFound, match=r"or Ollama.*someone/thing:latest"):
            store.resolve("some/thing")

    def test_a_store_that_is_closed_to_us_is_empty(self, pulled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "glob", refused)
        assert list(ollama_store.pulled()) == []
