"""`disagg bench engine`: does our contract cost speed? Each engine against its bare library, in one run."""

import gc
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from disaggregated_inference.bench.report import Report, Row, best_seconds
from disaggregated_inference.engines import ENGINES, Engine, Sequence, chunks, load_engine
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.kv import KVSlice
from disaggregated_inference.models import ModelFiles, ModelStore
from disaggregated_inference.progress import steps

# The attention and expert shape of Qwen3-Coder-30B-A3B.
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
SHAPES = {"qwen3-30b-a3b": QWEN3_30B_A3B}

Progress = Callable[[str], None]


def bench_model(name: str, model: ModelFiles, options: dict[str, Any], quick: bool, progress: Progress) -> Report:
    """All measurements of one engine on a model of this machine."""
    progress(f"{name}: loading {model.name}")
    load_engine(name, model, **options)  # the libraries' own imports are not the model's loading time
    started = time.perf_counter()
    engine = load_engine(name, ModelFiles(model.name, model.path), **options)
    loading = time.perf_counter() - started
    gc.collect()
    report = Report(f"{name} engine, {model.name}, {engine.dtype}")
    report.add(Row("load the model (libraries imported)", loading, "s", goal=3, at_most=True))
    measure(engine, report, (128, 512), (1, 4, 16), 2 if quick else 5, 8 if quick else 16, progress)
    return report


def bench_shape(shape: str, device: str, quick: bool, progress: Progress) -> Report:
    """The torch engine at a big model's shape with random weights: for machines with the memory, not the files."""
    progress(f"torch: making random weights of shape {shape} on {device}")
    baseline = importlib.import_module("disaggregated_inference.engines.torch.baseline")
    engine = baseline.random_engine(SHAPES[shape], device, kv_bytes=24 << 30)
    report = Report(f"torch engine, random weights of shape {shape}, {engine.dtype} on {device}")
    measure(engine, report, (1500, 8192, 32768), (1, 4, 16, 32), 3 if quick else 5, 32, progress, context=1500)
    return report


def measure(
    engine: Engine,
    report: Report,
    prompts: tuple[int, ...],
    batches: tuple[int, ...],
    repeats: int,
    steps: int,
    progress: Progress,
    context: int = 64,
) -> None:
    bare = importlib.import_module(f"disaggregated_inference.engines.{engine.name}.baseline").Baseline(engine)
    for length in prompts:
        progress(f"{engine.name}: prefill of {length} tokens")
        _prefill_rows(engine, bare, report, length, repeats)
    for batch in batches:
        progress(f"{engine.name}: decode at batch {batch}")
        _decode_row(engine, bare, report, context, batch, steps, repeats)
    progress(f"{engine.name}: import")
    _import_rows(engine, bare, report, min(prompts[-1], 8192), repeats)


def _decode_row(engine: Engine, bare: Any, report: Report, context: int, batch: int, steps: int, repeats: int) -> None:
    ours, theirs = best_seconds(
        repeats,
        lambda: decode_seconds(engine, context, batch, steps),
        lambda: bare.decode_seconds(context, batch, steps),
    )
    tokens = batch * steps
    report.add(Row(f"decode, batch {batch}", tokens / ours, "tok/s", tokens / theirs, bare.label, bare.decode_goal))


def _prefill_rows(engine: Engine, bare: Any, report: Report, length: int, repeats: int) -> None:
    tokens = [(31 * i) % 400 + 10 for i in range(length)]
    plain, streamed, theirs = best_seconds(
        repeats,
        lambda: _prefill_seconds(engine, tokens, stream=False),
        lambda: _prefill_seconds(engine, tokens, stream=True),
        lambda: bare.prefill_seconds(tokens),
    )
    report.add(Row(f"prefill {length}, plain", length / plain, "tok/s", length / theirs, bare.label))
    report.add(Row(f"prefill {length}, slices handed out", length / streamed, "tok/s", length / plain, "plain", 0.95))


def _prefill_seconds(engine: Engine, tokens: list[int], stream: bool) -> float:
    """Until the logits are on the host and, when streaming, every slice is too."""
    sequence = engine.open(len(tokens))
    slices: list[KVSlice] = []
    started = time.perf_counter()
    logits = engine.prefill(sequence, tokens, slices.append if stream else None)
    logits.greedy().tolist()
    for piece in slices:
        piece.wait()
    seconds = time.perf_counter() - started
    engine.close(sequence)
    return seconds


def decode_seconds(engine: Engine, context: int, batch: int, steps: int) -> float:
    """The loop a node runs for greedy requests: the next step is launched before the last token is read."""
    sequences = [_filled(engine, context, context + steps + 2) for _ in range(batch)]
    tokens = engine.step(sequences, [11] * batch).greedy()
    tokens.tolist()
    started = time.perf_counter()
    for _ in range(steps):
        following = engine.step(sequences, tokens).greedy()
        tokens.tolist()
        tokens = following
    tokens.tolist()
    seconds = time.perf_counter() - started
    for sequence in sequences:
        engine.close(sequence)
    return seconds


def _filled(engine: Engine, length: int, capacity: int) -> Sequence:
    sequence = engine.open(capacity)
    for part in chunks([(31 * i) % 400 + 10 for i in range(length)], 2048):
        engine.prefill(sequence, part)
    return sequence


def _import_rows(engine: Engine, bare: Any, report: Report, length: int, repeats: int) -> None:
    """Slices into the engine against a copy of the same bytes into new memory: both have to find room first."""
    source = _filled(engine, length, length)
    slices = [_copy(piece) for piece in engine.export(source)]
    engine.close(source)
    size = sum(piece.size_bytes for piece in slices)

    def place() -> None:
        sequence = engine.open(length)
        for piece in slices:
            engine.place(sequence, piece)
        engine.commit(sequence, length)
        engine.close(sequence)

    def copy() -> None:
        target = np.empty(size, np.uint8)
        at = 0
        for piece in slices:
            for rows in (piece.keys, piece.values):
                target[at : at + rows.nbytes] = rows.reshape(-1).view(np.uint8)
                at += rows.nbytes

    peak = bare.peak_bytes(place)
    ours, plain = best_seconds(repeats, lambda: _seconds(place), lambda: _seconds(copy))
    report.add(Row(f"import of {size / 1e6:.0f} MB", size / ours / 1e9, "GB/s", size / plain / 1e9, "memory copy"))
    if peak is not None:
        report.add(Row("memory taken by the import", peak / 1e6, "MB", size / 1e6, "the KV", 1.05, at_most=True))


def _seconds(action: Callable[[], None]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _copy(piece: KVSlice) -> KVSlice:
    piece.wait()
    return KVSlice(piece.layer, piece.start, piece.dtype, piece.keys.copy(), piece.values.copy())


def run(
    engines: list[str], model_name: str, shape: str, device: str, threads: int, quick: bool, output: Path
) -> list[Report]:
    """The command: measure, show and save."""
    console = Console()
    if shape and shape not in SHAPES:
        raise DisaggError(f"no shape {shape!r}; there are {', '.join(SHAPES)}")

    def progress(text: str) -> None:
        console.print(text, style="dim", highlight=False)

    if shape:
        reports = {f"engine-torch-{shape}": bench_shape(shape, device or "cuda", quick, progress)}
    else:
        with steps() as fetching:
            model = ModelStore().resolve(model_name, fetching)
        reports = {}
        for name in engines or [name for name, packages in ENGINES.items() if packages]:
            options = {"device": device or None, "threads": threads or None} if name == "torch" else {}
            reports[f"engine-{name}"] = bench_model(name, model, options, quick, progress)
    for name, report in reports.items():
        report.show(console)
        report.save(output / f"{name}.json")
        console.print(f"saved {output / name}.json\n", style="dim", highlight=False)
    return list(reports.values())
