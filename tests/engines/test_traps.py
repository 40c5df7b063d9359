"""Six ways in which a hand-off between torch and MLX goes wrong in silence. Each test first shows the trap is real."""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.models.rope_utils import initialize_rope
from mlx_lm.utils import load_model

from disaggregated_inference.engines.mlx import grouped, versions
from disaggregated_inference.engines.mlx.caches import SlidingLayer
from disaggregated_inference.engines.mlx.loading import readable_config
from disaggregated_inference.engines.mlx.rope import agrees, ensure_exact, measure
from disaggregated_inference.errors import EngineMismatch, EngineUnavailable
from disaggregated_inference.kv import KVSlice, LayerPlan
from disaggregated_inference.models import ModelFiles, Rope, rope_from_config
from tests.support.engines import LoadTiny
from tests.support.handoff import alone, forced_logits, prompt_of, read_prompt, receive, write_answer
from tests.support.tiny_models import WINDOW

Folder = Callable[[str], Path]


def test_a_newer_configs_rope_base_is_not_lost(tiny_folder: Folder, tiny_engine: LoadTiny) -> None:
    """A: mlx-lm does not read `rope_parameters`; Llama silently gets base 10000 and no scaling."""
    wanted = ModelFiles("tiny", tiny_folder("llama")).spec.rope
    bare, _ = load_model(tiny_folder("llama"))
    assert not agrees(bare.layers[0].self_attn.rope, wanted)
    for layer in tiny_engine("mlx", "llama").model.layers:  # type: ignore[attr-defined]
        assert agrees(layer.self_attn.rope, wanted)


def test_b_yarn_is_not_rounded_where_the_checkpoint_says_so(tiny_folder: Folder, tiny_engine: LoadTiny) -> None:
    """B: mlx-lm ignores `truncate: false`. Ours equals the frequencies torch really uses."""
    model = ModelFiles("tiny", tiny_folder("gpt_oss"))
    assert model.config["rope_parameters"]["truncate"] is False

    config = readable_config(model.config)
    stock = initialize_rope(16, config["rope_theta"], False, config["rope_scaling"])
    assert not agrees(stock, model.spec.rope)
    torch_frequencies = tiny_engine("torch", "gpt_oss").model.model.rotary_emb.inv_freq.cpu().numpy()  # type: ignore[attr-defined]
    for layer in tiny_engine("mlx", "gpt_oss").model.layers:  # type: ignore[attr-defined]
        frequencies, scale = measure(layer.self_attn.rope, 16)
        assert np.allclose(frequencies, torch_frequencies, rtol=1e-5, atol=0)
        assert scale == pytest.approx(model.spec.rope.scale, rel=1e-5)


def test_b_the_real_gpt_oss_frequencies_are_repaired() -> None:
    """The published config: 9 of 32 frequencies differ between transformers and stock mlx-lm."""
    scaling = {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    config = {"rope_theta": 150000.0, "rope_scaling": scaling, "max_position_embeddings": 131072}
    wanted = rope_from_config(config, 64)
    stock = initialize_rope(64, 150000.0, False, scaling)
    frequencies, scale = measure(stock, 64)
    wrong = ~np.isclose(frequencies, np.array(wanted.frequencies), rtol=1e-5, atol=0)
    assert wrong.sum() == 9
    assert scale == pytest.approx(wanted.scale)

    class Attention:
        rope = stock

    class Layer:
        self_attn = Attention()

    class Model:
        layers = (Layer(),)

    assert ensure_exact(Model, wanted) == 1
    assert agrees(Layer.self_attn.rope, wanted)
    assert ensure_exact(Model, wanted) == 0
    with pytest.raises(EngineMismatch):  # what no rotation can produce is refused, not approximated
        ensure_exact(Model, Rope((7.0, *wanted.frequencies[1:]), 1.0))


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 300])
def test_c_a_ring_gets_all_rows_of_its_window(length: int, tiny_engine: LoadTiny) -> None:
    """C: transformers keeps window - 1 rows; a ring of MLX with one row too few crashes or misplaces the next."""
    slices, _ = read_prompt(tiny_engine("torch", "gpt_oss"), prompt_of(length), length)
    assert slices[0].tokens == min(length, WINDOW)
    engine = tiny_engine("mlx", "gpt_oss")
    sequence = receive(engine, slices, length)
    ring = sequence.state[0].cache
    assert (ring.keys.shape[2], ring.offset, ring._idx) == (min(length, WINDOW), length, min(length, WINDOW))
    engine.close(sequence)


_GEMM = """
import sys, time
if sys.argv[1] == "ours":
    from disaggregated_inference.engines.mlx.blas import load_blas
    assert load_blas()
import mlx.core as mx
a, b = mx.random.normal((300, 576)), mx.random.normal((576, 768))
mx.eval(a, b)
best = 1e9
for _ in range(3):
    start = time.process_time(); mx.eval(a @ b); best = min(best, time.process_time() - start)
print(best)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="MLX brings a fast BLAS on macOS")
def test_d_mlx_on_linux_gets_a_real_blas() -> None:
    """D: the wheel's own BLAS is the reference implementation."""
    seconds = {
        which: float(subprocess.run([sys.executable, "-c", _GEMM, which], check=True, capture_output=True).stdout)
        for which in ("ours", "stock")
    }
    assert seconds["stock"] > 5 * seconds["ours"]


def test_e_slices_may_arrive_on_another_thread(tiny_engine: LoadTiny) -> None:
    """E: a lazy MLX array belongs to the thread that made it. What a receiver thread hands in must not be one."""
    lazy = _elsewhere(lambda: mx.ones(4) + 1)
    with pytest.raises(RuntimeError, match="Stream"):
        mx.eval(lazy)
    for architecture in ("llama", "gpt_oss"):
        engine = tiny_engine("mlx", architecture)
        prompt = prompt_of(300)
        slices, logits = read_prompt(tiny_engine("torch", architecture), prompt, 100)
        ring = _elsewhere(_ring_of_half_precision)
        assert float(ring.keys.astype(mx.float32).sum()) == 3 * 2 * 16
        sequence = _elsewhere(partial(receive, engine, slices, 300))
        assert write_answer(engine, sequence, logits, 16) == alone(engine, prompt, 16)


def _elsewhere(work: Callable[[], Any]) -> Any:
    """On a thread of its own, which leaves no MLX stream behind (see `MlxEngine.leave_thread`)."""
    with ThreadPoolExecutor(1) as receiver:
        result = receiver.submit(work).result()
        receiver.submit(mx.clear_streams).result()
    return result


def _ring_of_half_precision() -> RotatingKVCache:
    layer = SlidingLayer(LayerPlan(kind="sliding", window=4), "bfloat16")
    ones = np.full((3, 2, 16), 0x3F80, np.uint16)
    layer.place(KVSlice(0, 0, "bfloat16", ones, ones))
    layer.commit(3)
    return layer.cache


def test_f_positions_go_on_where_the_prompt_ended(tiny_engine: LoadTiny) -> None:
    """F: a sliding layer that counts only the rows it was given puts the next token at the wrong position."""
    for name in ("torch", "mlx"):
        engine = tiny_engine(name, "gpt_oss")
        prompt = prompt_of(300)
        slices, _ = read_prompt(engine, prompt, 64)
        sequence = receive(engine, slices, 300)
        assert sequence.length == 300
        after = engine.step([sequence], [7]).numpy()[0]
        whole = forced_logits(engine, [*prompt, 7], [])[-1]
        assert np.abs(after - whole).max() < 1e-3
        engine.close(sequence)


def test_unknown_mlx_lm_is_refused_by_number() -> None:
    with pytest.raises(EngineUnavailable, match=r"mlx-lm 0\.99\.1 .*pip install mlx-lm=="):
        versions.require_tested_version("0.99.1")
    assert versions.require_tested_version() in versions.TESTED_VERSIONS
    versions.require_known_caches()


def test_a_changed_cache_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm.models import cache

    class Renamed:
        def __init__(self) -> None:
            self.k = self.v = None

    monkeypatch.setattr(cache, "KVCache", Renamed)
    with pytest.raises(EngineUnavailable, match="Renamed has no keys, values, offset"):
        versions.require_known_caches()


def test_an_attention_that_does_not_know_groups_is_refused(
    tiny_engine: LoadTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused when loaded, not in the first step that happens to have sequences of two sizes."""
    from mlx_lm.models import llama

    model = tiny_engine("mlx", "llama").model  # type: ignore[attr-defined]
    installed = llama.scaled_dot_product_attention
    assert installed.__wrapped__.__module__ == "mlx_lm.models.base"
    grouped.install(model)
    assert llama.scaled_dot_product_attention is installed, "once is enough"
    monkeypatch.delattr(llama, "scaled_dot_product_attention")
    with pytest.raises(EngineUnavailable, match="cannot be grouped"):
        grouped.install(model)
