"""Two sides that disagree in any one thing must never exchange a cache."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from disaggregated_inference.errors import FingerprintMismatch
from disaggregated_inference.kv import (
    UNKNOWN_ROUNDING,
    Fingerprint,
    LayerPlan,
    Weights,
    WeightSample,
    require_same_model,
)
from disaggregated_inference.models import ModelFiles
from tests.support.engines import LoadTiny
from tests.support.fingerprints import REFERENCE, floats

LAYOUT = REFERENCE.layout


MUTATIONS: dict[str, Any] = {
    "architecture": {"architecture": "llama"},
    "kv_heads": {"layout": msgspec.structs.replace(LAYOUT, kv_heads=4)},
    "head_dim": {"layout": msgspec.structs.replace(LAYOUT, head_dim=128)},
    "layer count": {"layout": msgspec.structs.replace(LAYOUT, layers=LAYOUT.layers * 2)},
    "layer order": {"layout": msgspec.structs.replace(LAYOUT, layers=LAYOUT.layers[::-1])},
    "window": {"layout": msgspec.structs.replace(LAYOUT, layers=(LayerPlan("sliding", 127), LayerPlan()))},
    "rope frequency": {"rope_frequencies": (1.0, 0.1001, 0.01)},
    "rope length": {"rope_frequencies": (1.0, 0.1)},
    "rope scale": {"rope_scale": 1.0},
    "vocabulary": {"vocabulary": 1001},
    "tokenizer": {"tokenizer": "aab"},
    "chat template": {"chat_template": "bbc"},
    "norms": {"weights": Weights(norms="nnm", format="BF16", sample="sss")},
    "sample": {"weights": Weights(norms="nnn", format="BF16", sample="sst")},
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_any_mutation_is_detected(what: str) -> None:
    other = msgspec.structs.replace(REFERENCE, **MUTATIONS[what])
    with pytest.raises(FingerprintMismatch, match="do not hold the same model"):
        require_same_model(REFERENCE, other)
    assert len(REFERENCE.differences(other)) == 1


def test_every_field_is_mutated_above() -> None:
    assert {key for change in MUTATIONS.values() for key in change} == set(Fingerprint.__struct_fields__)


def _weights(stored_as: str, values: bytes, rounding: float = 0.1) -> Weights:
    return Weights("nnn", stored_as, stored_as, (WeightSample(tensor="v", rounding=rounding, values=values),))


@pytest.mark.parametrize(
    ("theirs", "same"),
    [
        (floats(1, 2), True),
        (floats(1.1, 2.1), True),
        (floats(1.3, 2.3), False),
        (floats(-1, -2), False),
        (floats(0, 0), False),
        (floats(math.nan, 2), False),
        (floats(math.inf, 2), False),
        (floats(1, 2, 3), False),
        (b"odd", False),
        (b"", False),
    ],
)
def test_values_tell_apart_what_is_stored_differently(theirs: bytes, same: bool) -> None:
    mine, other = (
        msgspec.structs.replace(REFERENCE, weights=weights)
        for weights in (_weights("BF16", floats(1, 2), 0.01), _weights("gguf:Q4_0", theirs))
    )
    over_the_wire = msgspec.json.decode(msgspec.json.encode(other), type=Fingerprint)
    for here, there in ((mine, over_the_wire), (over_the_wire, mine)):
        said = here.differences(there)
        assert (said == []) is same
        assert same or "weights: v differs by" in said[0]


def test_values_that_one_side_does_not_tell() -> None:
    other = msgspec.structs.replace(REFERENCE, weights=Weights("nnn", "mlx", "other"))
    for values in (floats(1, 2), b"odd"):
        mine = msgspec.structs.replace(REFERENCE, weights=_weights("BF16", values))
        assert mine.differences(other) == other.differences(mine) == []


def _sampled(stored_as: str, rounding: float, *layers: bytes) -> Fingerprint:
    values = tuple(WeightSample(f"model.layers.{at}.v", rounding, each) for at, each in enumerate(layers))
    return msgspec.structs.replace(REFERENCE, weights=Weights("nnn", stored_as, stored_as, values))


def _both_ways(mine: Fingerprint, theirs: Fingerprint) -> list[str]:
    assert mine.differences(theirs) == theirs.differences(mine)
    return mine.differences(theirs)


def test_the_layers_of_one_kind_are_judged_together() -> None:
    """A row that is nearly zero, and all of it lost to rounding, is no difference; a whole layer is one."""
    dead, mine = floats(1e-4, 1e-4), floats(1, 2)
    here = _sampled("BF16", 0.01, mine, dead, mine)
    assert _both_ways(here, _sampled("gguf:Q8_0", 0.02, mine, floats(0, 0), mine)) == []
    said = _both_ways(here, _sampled("gguf:Q8_0", 0.02, mine, dead, floats(1.2, 2.4)))
    assert said == ["weights: model.layers.*.v differs by 0.128 of its size, where rounding explains 0.0224"]


def test_what_rounding_explains_on_two_sides_adds_up() -> None:
    here = _sampled("gguf:Q5_0", 0.12, floats(100, 0))
    assert _both_ways(here, _sampled("gguf:Q5_1", 0.12, floats(100, 16.9))) == []
    assert "differs by 0.175 of its" in _both_ways(here, _sampled("gguf:Q5_1", 0.12, floats(100, 17.75)))[0]


def test_what_cannot_be_read_is_not_compared() -> None:
    unread = _sampled("mlx", UNKNOWN_ROUNDING, b"", b"")
    assert _both_ways(_sampled("BF16", 0.01, floats(1, 2), floats(3, 4)), unread) == []
    assert unread.weights.rounding == UNKNOWN_ROUNDING


@pytest.mark.parametrize(
    ("stored_as", "theirs", "same"),
    [
        ("gguf:F32+Q4_K", _weights("", floats(1.1, 2.1)), True),
        ("gguf:F32+Q4_K", _weights("", floats(1.5, 2.5)), False),
        ("gguf:F32+Q4_K", _weights("", b"", 1.0), False),
        ("gguf:F32+Q4_K", Weights("nnn", "", ""), False),
        ("gguf:F16+F32", _weights("", floats(1.0, 2.0)), False),
        ("BF16", _weights("", floats(1.0, 2.0)), False),
    ],
)
def test_other_bytes_of_the_same_quantization(stored_as: str, theirs: Weights, same: bool) -> None:
    """Scales can be chosen in more ways than one; where nothing else can be compared, bytes decide."""
    here, there = (
        msgspec.structs.replace(REFERENCE, weights=msgspec.structs.replace(weights, format=stored_as, sample=sample))
        for weights, sample in ((_weights("", floats(1, 2)), "one"), (theirs, "other"))
    )
    assert (here.differences(there) == []) is (there.differences(here) == []) is same


def test_a_gguf_with_another_template_says_what_to_do() -> None:
    weights = Weights(norms="nnn", format="gguf:F32+Q8_0", sample="other")
    other = msgspec.structs.replace(REFERENCE, chat_template="bbc", weights=weights)
    with pytest.raises(FingerprintMismatch, match=r"chat_template.*tokenizer_config\.json.*beside the GGUF"):
        require_same_model(REFERENCE, other)


def test_what_may_differ() -> None:
    """Quantization, and the last bits of a frequency computed elsewhere."""
    quantized = Weights(norms="nnn", format="mxfp4", sample="other")
    rounded = tuple(f * (1 + 1e-7) for f in REFERENCE.rope_frequencies)
    other = msgspec.structs.replace(REFERENCE, weights=quantized, rope_frequencies=rounded)
    assert REFERENCE.differences(other) == []
    require_same_model(REFERENCE, other)


def test_survives_the_wire() -> None:
    assert msgspec.json.decode(msgspec.json.encode(REFERENCE), type=Fingerprint) == REFERENCE


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_engines_agree_on_one_folder(architecture: str, tiny_engine: LoadTiny) -> None:
    mine, theirs = (tiny_engine(name, architecture).fingerprint for name in ("torch", "mlx"))
    assert mine.differences(theirs) == []


def test_other_weights_of_the_same_shape_are_another_model(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    from tests.support.tiny_models import save_tiny

    mine = ModelFiles("a", tiny_folder("qwen3")).fingerprint
    theirs = ModelFiles("b", save_tiny("qwen3", tmp_path / "other", seed=99)).fingerprint
    assert [line.split(":")[0] for line in mine.differences(theirs)] == ["weights"]


def test_a_fine_tune_that_keeps_the_norms_is_told_apart(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    copy = tmp_path / "tuned"
    shutil.copytree(tiny_folder("qwen3"), copy)
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.weight"] += 0.01
    save_file(weights, copy / "model.safetensors")
    mine, theirs = (ModelFiles("x", path).fingerprint for path in (tiny_folder("qwen3"), copy))
    assert mine.weights.norms == theirs.weights.norms
    assert mine.differences(theirs)
