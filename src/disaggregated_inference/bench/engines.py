"""`disagg bench engines`: does our contract cost speed? Each engine against its bare library, in one run; then every
engine reads for every engine (see pairs.py)."""

import gc
import importlib
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from disaggregated_inference.bench.pairs import bench_pairs
from disaggregated_inference.bench.report import Report, Row, compared, in_turn
from disaggregated_inference.cli.progress import steps
from disaggregated_inference.engines import ENGINES, Engine, Sequence, chunks, file_kind, load_engine, require_engine
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.kv import KVSlice
from disaggregated_inference.models import ModelFiles, ModelStore

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
    prompts, rounds = ((256,), 3) if quick else ((128, 512), 15)
    measure(engine, report, prompts, (1, 4, 16), rounds, 8, progress)
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
    rounds: int,
    steps: int,
    progress: Progress,
    context: int = 32,
) -> None:
    bare = importlib.import_module(f"disaggregated_inference.engines.{engine.name}.baseline").Baseline(engine)
    for length in prompts:
        progress(f"{engine.name}: prefill of {length} tokens")
        _prefill_rows(engine, bare, report, length, rounds)
    for batch in batches:
        progress(f"{engine.name}: decode at batch {batch}")
        _decode_row(engine, bare, report, context, batch, steps, rounds)
    progress(f"{engine.name}: export and import")
    _transfer_rows(engine, bare, report, min(prompts[-1], 8192), rounds)


def _decode_row(engine: Engine, bare: Any, report: Report, context: int, batch: int, steps: int, rounds: int) -> None:
    ours, theirs = in_turn(
        rounds,
        lambda: decode_seconds(engine, context, batch, steps),
        lambda: bare.decode_seconds(context, batch, steps),
    )
    report.add(compared(f"decode, batch {batch}", batch * steps, "tok/s", ours, theirs, bare.label, bare.decode_goal))


def _prefill_rows(engine: Engine, bare: Any, report: Report, length: int, rounds: int) -> None:
    tokens = [(31 * i) % 400 + 10 for i in range(length)]
    plain, streamed, theirs = in_turn(
        rounds,
        lambda: _prefill_seconds(engine, tokens, stream=False),
        lambda: _prefill_seconds(engine, tokens, stream=True),
        lambda: bare.prefill_seconds(tokens),
    )
    off, on = f"prefill {length}, export off", f"prefill {length}, export on"
    report.add(compared(off, length, "tok/s", plain, theirs, bare.label))
    report.add(compared(on, length, "tok/s", streamed, theirs, bare.label, 0.97))
    report.add(compared(on, length, "tok/s", streamed, plain, "export off"))


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


def _transfer_rows(engine: Engine, bare: Any, report: Report, length: int, rounds: int) -> None:
    """Slices out of the engine and into it against a copy of the same bytes: all three find room for them first."""
    source = _filled(engine, length, length)
    slices = [piece.copy() for piece in engine.export(source)]
    size = sum(piece.size_bytes for piece in slices)

    def place() -> None:
        sequence = engine.open(length)
        for piece in slices:
            engine.place(sequence, piece)
        engine.commit(sequence, length)
        engine.close(sequence)

    peak = bare.peak_bytes(place)
    out, into, copied = in_turn(
        rounds,
        lambda: _seconds(lambda: _gather(engine.export(source), size)),
        lambda: _seconds(place),
        lambda: _seconds(lambda: _gather(slices, size)),
    )
    engine.close(source)
    for way, seconds in (("export", out), ("import", into)):
        report.add(compared(f"{way} of {size / 1e6:.0f} MB", size / 1e9, "GB/s", seconds, copied, "memory copy"))
    if peak is not None:
        report.add(Row("memory taken by the import", peak / 1e6, "MB", size / 1e6, "the KV", 1.05, at_most=True))


def _gather(slices: Iterable[KVSlice], size: int) -> None:
    """Into new memory: an engine that hands out views of its own has its bytes read here, as a wire would."""
    target, at = np.empty(size, np.uint8), 0
    for piece in slices:
        piece.wait()
        for rows in (piece.keys, piece.values):
            target[at : at + rows.nbytes] = rows.reshape(-1).view(np.uint8)
            at += rows.nbytes


def _seconds(action: Callable[[], None]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _bench_named(name: str, model_name: str, device: str, threads: int, quick: bool, progress: Progress) -> Report:
    with steps() as fetching:
        model = ModelStore().resolve(model_name, fetching, file_kind(name))
    options: dict[str, dict[str, Any]] = {
        "torch": {"device": device or None, "threads": threads or None},
        "llamacpp": {"threads": threads or None},
    }
    return bench_model(name, model, options.get(name, {}), quick, progress)


def run(
    engines: list[str], model_name: str, shape: str, device: str, threads: int, quick: bool, output: Path
) -> list[Report]:
    """The command: measure, show and save."""
    console = Console()
    if shape and shape not in SHAPES:
        raise DisaggError(f"no shape {shape!r}; there are {', '.join(SHAPES)}")

    def progress(text: str) -> None:
        console.print(text, style="dim", highlight=False)

    found: list[Report] = []
    for name, report in _reports(engines, model_name, shape, device, threads, quick, progress):
        found.append(report)
        report.show(console)
        path = output / f"engines-{name}.json"
        report.save(path)
        progress(f"saved {path}\n")
    return found


def _reports(
    engines: list[str], model_name: str, shape: str, device: str, threads: int, quick: bool, progress: Progress
) -> Iterator[tuple[str, Report]]:
    """One after the other: what has been measured is kept, whatever comes next."""
    if shape:
        yield f"torch-{shape}", bench_shape(shape, device or "cuda", quick, progress)
        return
    chosen = engines or [name for name, packages in ENGINES.items() if packages]
    for name in chosen:
        require_engine(name)
    for name in chosen:
        yield name, _bench_named(name, model_name, device, threads, quick, progress)
    yield "pairs", bench_pairs(chosen, model_name, 500, 1 if quick else 3, progress)
