"""`disagg bench engines`: each engine compared with its bare library in one run; then every engine prefills for every
engine (see node_pairs.py)."""

import gc
import importlib
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from disaggregated_inference.bench.node_pairs import bench_pairs
from disaggregated_inference.bench.prompts import resolve_model, row_prompts, token_prompt
from disaggregated_inference.bench.report import Report, Row, compared, in_turn, progress
from disaggregated_inference.engines import ENGINES, Engine, Sequence, chunks, file_kind, load_engine, require_engine
from disaggregated_inference.errors import BadRequest, DisaggError
from disaggregated_inference.kv import KVSlice
from disaggregated_inference.models import ModelFiles, simulated

# The attention and expert shape of Qwen3-Coder-30B-A3B.
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
_SIZES = {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "tie_word_embeddings": False}
_POSITIONS = {"max_position_embeddings": 40960, "rope_theta": 1000000.0}
SHAPES = {"qwen3-30b-a3b": simulated.SHAPES["qwen3-30b-a3b"] | _EXPERTS | _SIZES | _POSITIONS}

Sizes = tuple[int, ...]


def bench_model(name: str, model: ModelFiles, options: dict[str, Any], quick: bool) -> Report:
    """All measurements of one engine on a model of this machine."""
    progress(f"{name}: loading {model.name}")
    load_engine(name, model, **options)  # imports the library, which is not loading time
    started = time.perf_counter()
    engine = load_engine(name, ModelFiles(model.name, model.path), **options)
    loading = time.perf_counter() - started
    gc.collect()
    report = Report(f"{name} engine, {model.name}, {engine.dtype}")
    report.add(Row("load the model (libraries imported)", loading, "s", goal=3, at_most=True))
    prompts, rounds = ((256,), 3) if quick else ((128, 512), 15)
    measure(engine, report, prompts, (1, 4, 16), rounds, 8)
    return report


def bench_shape(shape: str, device: str, quick: bool) -> Report:
    """The torch engine with random weights of a big model's shape: needs the memory, not the files."""
    progress(f"torch: making random weights of shape {shape} on {device}")
    baseline = importlib.import_module("disaggregated_inference.engines.torch.baseline")
    engine = baseline.random_engine(SHAPES[shape], device, kv_bytes=24 << 30)
    report = Report(f"torch engine, random weights of shape {shape}, {engine.dtype} on {device}")
    measure(engine, report, (1500, 8192, 32768), (1, 4, 16, 32), 3 if quick else 5, 32, context=1500)
    return report


def measure(
    engine: Engine, report: Report, prompts: Sizes, batches: Sizes, rounds: int, steps: int, context: int = 32
) -> None:
    bare = baseline_of(engine)
    for length in prompts:
        progress(f"{engine.name}: prefill of {length} tokens")
        _prefill_rows(engine, bare, report, length, rounds)
    for batch in batches:
        progress(f"{engine.name}: decode at batch {batch}")
        _decode_row(engine, bare, report, context, batch, steps, rounds)
    progress(f"{engine.name}: export and import")
    _transfer_rows(engine, bare, report, min(prompts[-1], 8192), rounds)


def baseline_of(engine: Engine) -> Any:
    """The bare library of an engine, with the same methods for all engines."""
    module = importlib.import_module(f"disaggregated_inference.engines.{engine.name}.baseline")
    return module.Baseline(engine)


def _decode_row(engine: Engine, bare: Any, report: Report, context: int, batch: int, steps: int, rounds: int) -> None:
    prompts = row_prompts(context, batch, engine.spec.vocabulary)
    ours, theirs = in_turn(
        rounds,
        lambda: decode_seconds(engine, prompts, steps),
        lambda: bare.decode_seconds(prompts, steps),
    )
    report.add(compared(f"decode, batch {batch}", batch * steps, "tok/s", ours, theirs, bare.label, bare.decode_goal))


def _prefill_rows(engine: Engine, bare: Any, report: Report, length: int, rounds: int) -> None:
    tokens = token_prompt(length, vocabulary=engine.spec.vocabulary)
    plain, streamed, theirs = in_turn(
        rounds,
        lambda: prefill_seconds(engine, tokens),
        lambda: prefill_seconds(engine, tokens, stream=True),
        lambda: bare.prefill_seconds(tokens),
    )
    off, on = f"prefill {length}, export off", f"prefill {length}, export on"
    report.add(compared(off, length, "tok/s", plain, theirs, bare.label))
    report.add(compared(on, length, "tok/s", streamed, theirs, bare.label, 0.97))
    report.add(compared(on, length, "tok/s", streamed, plain, "export off"))


def prefill_seconds(engine: Engine, tokens: list[int], chunk: int = 0, stream: bool = False) -> float:
    """Until the token and, with `stream`, all slices are on the host. `chunk` 0: all tokens at once."""
    sequence = engine.open(len(tokens))
    slices: list[KVSlice] = []
    started = time.perf_counter()
    for part in chunks(tokens, chunk or len(tokens)):
        logits = engine.prefill(sequence, part, slices.append if stream else None)
    logits.greedy().tolist()
    for piece in slices:
        piece.wait()
    seconds = time.perf_counter() - started
    engine.close(sequence)
    return seconds


def decode_seconds(engine: Engine, prompts: list[list[int]], steps: int) -> float:
    """The loop of a node for greedy requests: it launches the next step before it reads the last token."""
    filled = [_filled(engine, prompt, len(prompt) + steps + 2) for prompt in prompts]
    sequences = [sequence for sequence, _ in filled]
    tokens = engine.step(sequences, [token for _, token in filled]).greedy()
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


def _filled(engine: Engine, prompt: list[int], capacity: int) -> tuple[Sequence, int]:
    """A sequence that holds the prompt, and the token after it."""
    sequence = engine.open(capacity)
    for part in chunks(prompt, 2048):
        logits = engine.prefill(sequence, part)
    [token] = logits.greedy().tolist()
    return sequence, token


def _transfer_rows(engine: Engine, bare: Any, report: Report, length: int, rounds: int) -> None:
    """Export and import of slices, compared with a copy of the same bytes. All three allocate memory first."""
    source, _ = _filled(engine, token_prompt(length, vocabulary=engine.spec.vocabulary), length)
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
    """Copy into new memory, as a KV transfer would: an engine may export views of its own memory."""
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


def run(
    engines: list[str],
    model: str,
    shape: str,
    device: str,
    threads: int,
    quick: bool,
    output: Path,
    only_pairs: bool = False,
) -> list[Report]:
    """Every report is saved before the next measurement begins."""
    if shape and shape not in SHAPES:
        raise DisaggError(f"unknown shape {shape!r}; there are {', '.join(SHAPES)}")
    if shape and only_pairs:
        raise BadRequest("--shape has no weights for two engines: leave out --pairs or --shape")
    reports = _reports(engines, model, shape, device, threads or None, quick, only_pairs)
    return [report.publish(output / f"engines-{name}.json") for name, report in reports]


def _reports(
    engines: list[str], model: str, shape: str, device: str, threads: int | None, quick: bool, only_pairs: bool
) -> Iterator[tuple[str, Report]]:
    if shape:
        yield f"torch-{shape}", bench_shape(shape, device or "cuda", quick)
        return
    options: dict[str, dict[str, Any]] = {
        "torch": {"device": device or None, "threads": threads},
        "llamacpp": {"threads": threads},
    }
    chosen = engines or [name for name, packages in ENGINES.items() if packages]
    for name in chosen:
        require_engine(name)
    for name in () if only_pairs else chosen:
        yield name, bench_model(name, resolve_model(model, file_kind(name)), options.get(name, {}), quick)
    yield "pairs", bench_pairs(chosen, model, 500, 1 if quick else 3)
