"""The CUDA half of the torch engine: flash attention over the arena, slices behind events, decode in graphs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from disaggregated_inference.engines import load_engine
from disaggregated_inference.engines.torch import fused_kernels
from disaggregated_inference.engines.torch.attention import attend
from disaggregated_inference.engines.torch.engine import TorchEngine
from disaggregated_inference.kv import KVSlice
from disaggregated_inference.models import ARCHITECTURES, ModelFiles
from tests.support.handoff import alone, forced_logits, prompt_of, read_prompt, receive

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize(("n", "total"), [(1, 1), (1, 700), (129, 129), (100, 700), (2048, 2048), (4000, 6048)])
def test_fused_attention_equals_plain(n: int, total: int, window: int, with_sinks: bool) -> None:
    """Every fused path (flash, cuDNN in one part and in two) against the formula in float32."""
    generator = torch.Generator("cuda").manual_seed(n + total)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    total = min(total, n + window - 1) if window else total  # a sliding layer has no more
    query, keys, values = draw(n, 8, 64), draw(total, 2, 64), draw(total, 2, 64)
    sinks = draw(8) if with_sinks else None
    exact = attend(query, keys, values, 0.125, window, sinks)
    fused = attend(query.bfloat16(), keys.bfloat16(), values.bfloat16(), 0.125, window, sinks).float()
    assert (fused - exact).abs().max() < 0.05
    assert (fused - exact).abs().mean() < 0.004


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_bfloat16_agrees_with_float32(architecture: str, tiny_folder: Callable[[str], Path]) -> None:
    """Prompt and graph decode. Mixtures of experts are left out: in bfloat16 a random router flips by itself."""
    model = ModelFiles(architecture, tiny_folder(architecture))
    exact = load_engine("torch", model, device="cuda", dtype="float32", kv_bytes=1 << 28)
    fast = load_engine("torch", model, device="cuda", dtype="bfloat16", kv_bytes=1 << 28)
    for length in (1, 127, 300, 1500):
        prompt = prompt_of(length)
        answer = alone(exact, prompt, 16)
        reference, logits = (forced_logits(engine, prompt, answer) for engine in (exact, fast))
        error = np.abs(logits - reference).mean() / np.abs(reference).mean()
        assert error < 0.1, f"{length} tokens: {error}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_chunks_streamed_and_batched_in_bfloat16(architecture: str, tiny_folder: Callable[[str], Path]) -> None:
    """In one engine and one dtype, a hand-off in chunks stays as close to the plain run as bfloat16 allows."""
    model = ModelFiles(architecture, tiny_folder(architecture))
    engine = load_engine("torch", model, device="cuda", dtype="bfloat16", kv_bytes=1 << 28)
    prompts = [prompt_of(n) for n in (300, 129, 64)]
    plain = [forced_logits(engine, prompt, [7, 9, 11]) for prompt in prompts]
    arrived = [receive(engine, read_prompt(engine, prompt, 77)[0], len(prompt)) for prompt in prompts]
    for step, token in enumerate((7, 9, 11), start=1):
        rows = engine.step(arrived, [token] * 3).numpy()
        for row, reference in zip(rows, plain, strict=True):
            assert np.abs(row - reference[step]).mean() / np.abs(reference[step]).mean() < 0.1


def _loaded(tiny_folder: Callable[[str], Path], architecture: str = "llama", **options: Any) -> TorchEngine:
    model = ModelFiles(architecture, tiny_folder(architecture))
    options = {"dtype": "bfloat16", "kv_bytes": 1 << 26} | options
    engine = load_engine("torch", model, device="cuda", **options)
    assert isinstance(engine, TorchEngine)
    return engine


def _rows(engine: TorchEngine, prompts: list[list[int]]) -> list[NDArray[np.float32]]:
    """One sequence, the prompts one after the other as chunks: the logits after each."""
    sequence = engine.open(sum(map(len, prompts)))
    rows = [engine.prefill(sequence, prompt).numpy() for prompt in prompts]
    engine.close(sequence)
    return rows


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3_moe"])
def test_short_chunks_run_in_graphs_and_equal_the_plain_pass(
    architecture: str, tiny_folder: Callable[[str], Path]
) -> None:
    """Lengths around the graphs' sizes, behind prefixes of any length, with and without slices."""
    engine = _loaded(tiny_folder, architecture)
    assert engine.chunk_graphs is not None
    graphs = engine.chunk_graphs
    lengths = [1, 31, 32, 33, 300, 129, 128, 1000, 1500]
    prompts = [prompt_of(length, seed=length) for length in lengths]
    fast = _rows(engine, prompts)
    assert set(graphs._sets) == {32, 64, 128, 256, 384, 1024, 1536}
    engine.chunk_graphs = None
    plain = _rows(engine, prompts)
    for length, row, reference in zip(lengths, fast, plain, strict=True):
        error = np.abs(row - reference).mean() / np.abs(reference).mean()
        assert error < (0.3 if architecture == "qwen3_moe" else 0.1), f"{length}: {error}"


def test_slices_of_a_graph_are_the_rows_it_wrote(tiny_folder: Callable[[str], Path]) -> None:
    engine = _loaded(tiny_folder)
    sequences = [engine.open(700), engine.open(700)]
    slices: list[list[KVSlice]] = [[], []]
    for at in (0, 1, 0, 1):  # two prompts in turn through the same graphs, nothing read in between
        part = prompt_of(300, seed=10 * at + sequences[at].length)
        engine.prefill(sequences[at], part, slices[at].append)
    for sequence, pieces in zip(sequences, slices, strict=True):
        held = list(engine.export(sequence))
        for piece in pieces:
            piece.wait()
            rows = slice(piece.start, piece.stop)
            np.testing.assert_array_equal(piece.keys, held[piece.layer].keys[rows])
            np.testing.assert_array_equal(piece.values, held[piece.layer].values[rows])


def test_a_model_that_cannot_be_captured_runs_without_graphs(tiny_folder: Callable[[str], Path]) -> None:
    engine = _loaded(tiny_folder)
    reference = _rows(engine, [prompt_of(100)])
    engine = _loaded(tiny_folder)
    engine.model.model.norm.register_forward_hook(lambda *_: torch.cuda.synchronize())  # not allowed in a capture
    rows = _rows(engine, [prompt_of(100), prompt_of(100)])
    assert engine.chunk_graphs is not None
    assert not engine.chunk_graphs.fits(100)
    assert np.abs(rows[0] - reference[0]).mean() / np.abs(reference[0]).mean() < 0.1


@pytest.mark.parametrize("guarded", [False, True])
def test_rows_are_not_reused_before_they_are_copied(
    guarded: bool, tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is held up on its stream while the sequence closes and another takes its rows."""
    engine = _loaded(tiny_folder)
    truth, _ = read_prompt(engine, prompt_of(300), 300)
    _rows(engine, [prompt_of(300, seed=9)])  # everything is captured before the race
    if not guarded:
        monkeypatch.setattr(engine.host_copies, "finish", lambda: None)
    assert engine.host_copies.stream is not None
    with torch.cuda.stream(engine.host_copies.stream):
        torch.cuda._sleep(1_000_000_000)
    first, slices = engine.open(300), list[KVSlice]()
    engine.prefill(first, prompt_of(300), slices.append)
    engine.close(first)
    second = engine.open(300)
    engine.prefill(second, prompt_of(300, seed=9))
    for piece in slices:
        piece.wait()
    same = [np.array_equal(piece.keys, right.keys) for piece, right in zip(slices, truth, strict=True)]
    assert all(same) if guarded else not all(same)


@pytest.mark.parametrize("guarded", [False, True])
def test_steps_may_be_launched_before_they_are_read(
    guarded: bool, tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is held up while several steps are prepared: each must find its own table, not the last one's."""
    engine = _loaded(tiny_folder)

    def run(delay: int) -> NDArray[np.float32]:
        sequence = engine.open(80)
        engine.prefill(sequence, prompt_of(64))
        engine.step([sequence], [5]).greedy().tolist()
        torch.cuda._sleep(delay)
        logits = [engine.step([sequence], [token]) for token in (6, 7, 8, 9)]
        rows = np.concatenate([row.numpy() for row in logits])
        engine.close(sequence)
        return rows

    calm = run(0)
    if not guarded:
        monkeypatch.setattr(engine._places, "_copied", [])
    assert np.array_equal(run(1_000_000_000), calm) is guarded


class TestFusedKernels:
    """Equal to transformers' formulas: they round in the same places, and only sums may differ in the last bit."""

    @pytest.fixture(autouse=True)
    def works(self) -> None:
        assert fused_kernels.work(torch.device("cuda"), torch.bfloat16)

    @pytest.mark.parametrize("shape", [(1, 2048), (77, 2048), (300, 32, 128), (5, 96)])
    def test_norm(self, shape: tuple[int, ...]) -> None:
        norm = LlamaRMSNorm(shape[-1]).to("cuda", torch.bfloat16)
        norm.weight.data.normal_()
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        assert torch.allclose(fused_kernels.rms_norm(x, norm.weight, norm.variance_epsilon), norm(x), rtol=0.01)

    @pytest.mark.parametrize("architecture", ["qwen3_moe"])
    @pytest.mark.parametrize("tokens", [1, 33, 500])
    def test_experts(self, tokens: int, architecture: str, tiny_folder: Callable[[str], Path]) -> None:
        engine = _loaded(tiny_folder, architecture)
        hidden = torch.randn(1, tokens, 64, device="cuda", dtype=torch.bfloat16)
        block = engine.model.model.layers[0].mlp
        with torch.inference_mode():
            assert engine.model.config._experts_implementation == fused_kernels.EXPERTS_NAME
            ours = block(hidden)
            fused_kernels.remove(engine.model)
            assert engine.model.config._experts_implementation != fused_kernels.EXPERTS_NAME
            theirs = block(hidden)
        assert torch.equal(ours, theirs)

    def test_join(self) -> None:
        a, b = (torch.randn(300, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        a_lse, b_lse = (torch.randn(8, 300, device="cuda") for _ in range(2))
        share = torch.sigmoid(b_lse - a_lse).transpose(0, 1).unsqueeze(-1)
        expected = torch.lerp(a.float(), b.float(), share)
        assert (fused_kernels.join(a, a_lse, b, b_lse).float() - expected).abs().max() < 0.02
