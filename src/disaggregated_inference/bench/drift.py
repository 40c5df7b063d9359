"""`disagg bench drift`: how far a hand-over moves the next token's distribution, where it cannot be exact.

Engines that hold a model in another quantization, or compute with it in another way, have caches that differ a little.
So does a cache that was rounded on the wire. Each decode engine answers some prompts alone; the same answer is fed,
token by token, to the caches that others have read for it, and the distributions at each position are compared.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from disaggregated_inference.bench.report import save_rows
from disaggregated_inference.bench.texts import TEXTS
from disaggregated_inference.cli.progress import steps
from disaggregated_inference.engines import ENGINES, Engine, chunks, file_kind, load_engine, require_engine
from disaggregated_inference.engines import Sequence as Cache
from disaggregated_inference.kv import KVSlice, require_same_model
from disaggregated_inference.kv_transfer import codecs
from disaggregated_inference.models import ModelStore
from disaggregated_inference.models.tokenizer import ModelTokenizer

_KV_BYTES = 1 << 30

Progress = Callable[[str], None]
Rows = NDArray[np.float32]


class Drift(msgspec.Struct, frozen=True):
    """Of one pair, over all positions of all prompts; KL in nats, from the decode engine alone."""

    prefill: str
    decode: str
    codec: str
    positions: int
    top1_agreement: float
    mean_kl: float
    max_kl: float


class _Reading(NamedTuple):
    """A prompt in an engine: its cache there, the slices that left, the logits of its last position."""

    cache: Cache
    slices: list[KVSlice]
    logits: Rows


def run(
    engines: Sequence[str], model_name: str, positions: int, threads: int, quick: bool, output: Path
) -> list[Drift]:
    console = Console()

    def progress(text: str) -> None:
        console.print(text, style="dim", highlight=False)

    chosen = engines or [name for name, packages in ENGINES.items() if packages]
    loaded = {name: _load(name, model_name, threads, progress) for name in chosen}
    tokenizer = ModelStore().resolve(model_name, kind=file_kind(chosen[0])).tokenizer
    prompts = [_prompt(tokenizer, text) for text in TEXTS[: 2 if quick else None]]
    found = bench_drift(loaded, prompts, min(positions, 16) if quick else positions, progress)
    title = f"drift against the decode engine alone, {model_name}, {len(prompts)} prompts"
    _show(console, title, found)
    path = output / "drift.json"
    save_rows(path, title, msgspec.to_builtins(found))
    progress(f"saved {path}")
    return found


def _load(name: str, model_name: str, threads: int, progress: Progress) -> Engine:
    """torch and MLX in float32, so that their rounding is not the drift; llama.cpp as people run it."""
    require_engine(name)
    progress(f"loading {name}")
    with steps() as fetching:
        model = ModelStore().resolve(model_name, fetching, file_kind(name))
    options: dict[str, Any] = {"kv_bytes": _KV_BYTES}
    options |= {} if name == "llamacpp" else {"dtype": "float32"}
    options |= {} if name == "mlx" else {"threads": threads or None}
    return load_engine(name, model, **options)


def _prompt(tokenizer: ModelTokenizer, text: str) -> list[int]:
    if tokenizer.chat_template:
        return tokenizer.encode_chat([{"role": "user", "content": text}])
    return tokenizer.encode(text)


def bench_drift(
    engines: dict[str, Engine], prompts: Sequence[list[int]], positions: int, progress: Progress
) -> list[Drift]:
    seen: dict[tuple[str, str, str], list[tuple[bool, float]]] = defaultdict(list)
    for at, prompt in enumerate(prompts):
        progress(f"prompt {at + 1} of {len(prompts)}, {len(prompt)} tokens: {', '.join(engines)} read it")
        readings = {name: _read(engine, prompt, positions) for name, engine in engines.items()}
        for name, engine in engines.items():
            progress(f"prompt {at + 1}: {name} writes")
            for (reader, codec), told in _written(engine, engines, readings, positions).items():
                seen[reader, name, codec] += told
        for name, reading in readings.items():
            engines[name].close(reading.cache)
    return [_summed(*key, told) for key, told in seen.items()]


def _read(engine: Engine, prompt: list[int], positions: int) -> _Reading:
    """In chunks, as a node does; slices are copied, as a wire would."""
    cache = engine.open(len(prompt) + positions)
    slices: list[KVSlice] = []
    for part in chunks(prompt, engine.chunk_tokens):
        logits = engine.prefill(cache, part, lambda piece: slices.append(_through("raw", piece)))
    return _Reading(cache, slices, logits.numpy().copy())


def _through(codec: str, piece: KVSlice) -> KVSlice:
    """What arrives of a slice that is sent."""
    piece.wait()
    arrays = [array.copy() for array in codecs.encode(codec, piece)]
    return codecs.decode(codec, piece.dtype, arrays, piece.layer, piece.start)


def _written(
    engine: Engine, engines: dict[str, Engine], readings: dict[str, _Reading], positions: int
) -> dict[tuple[str, str], list[tuple[bool, float]]]:
    """By reader and codec: whether the likeliest token is the same, and the KL divergence, at each position."""
    keys = [(reader, codec) for reader in readings for codec in codecs.CODECS]
    for reader in readings:
        require_same_model(engine.fingerprint, engines[reader].fingerprint)
    caches = [_received(engine, readings[reader], codec) for reader, codec in keys]
    own = readings[engine.name]
    first = np.concatenate([own.logits, *(readings[reader].logits for reader, _ in keys)])
    told = [_compared(rows) for rows in _followed(engine, [own.cache, *caches], first, positions)]
    for cache in caches:
        engine.close(cache)
    return {key: list(lane) for key, lane in zip(keys, zip(*told, strict=True), strict=True)}


def _received(engine: Engine, reading: _Reading, codec: str) -> Cache:
    cache = engine.open(reading.cache.capacity)
    for piece in reading.slices:
        engine.place(cache, piece if codec == "raw" else _through(codec, piece))
    engine.commit(cache, reading.slices[-1].stop)
    return cache


def _followed(engine: Engine, caches: list[Cache], rows: Rows, positions: int) -> Iterator[Rows]:
    """The logits of all at each position of the answer of the first. One batch: whatever that does, it does to all.

    The first row of each travelled with its cache, as between nodes."""
    for at in range(positions):
        yield rows
        token = int(rows[0].argmax())
        if at + 1 == positions or token in engine.spec.eos_tokens:
            return
        rows = engine.step(caches, [token] * len(caches)).numpy()


def _compared(rows: Rows) -> list[tuple[bool, float]]:
    """The first row against each of the others."""
    logs = rows.astype(np.float64)
    logs -= logs.max(axis=-1, keepdims=True)
    logs -= np.log(np.exp(logs).sum(axis=-1, keepdims=True))
    alone, handed = logs[0], logs[1:]
    divergence = (np.exp(alone) * (alone - handed)).sum(axis=-1).clip(min=0)  # rounding can make nothing a little less
    same = handed.argmax(axis=-1) == alone.argmax()
    return [(bool(agrees), float(kl)) for agrees, kl in zip(same, divergence, strict=True)]


def _summed(reader: str, writer: str, codec: str, told: list[tuple[bool, float]]) -> Drift:
    same, divergence = zip(*told, strict=True)
    count = len(told)
    return Drift(reader, writer, codec, count, sum(same) / count, sum(divergence) / count, max(divergence))


def _show(console: Console, title: str, found: list[Drift]) -> None:
    table = Table(title=title, title_justify="left")
    for name in ("prefill → decode", "codec", "positions", "same top token", "mean KL", "max KL"):
        table.add_column(name, justify="left" if name in ("prefill → decode", "codec") else "right")
    for drift in found:
        share = f"{drift.top1_agreement:.1%}"
        numbers = (str(drift.positions), share, f"{drift.mean_kl:.2g}", f"{drift.max_kl:.2g}")
        table.add_row(f"{drift.prefill} → {drift.decode}", drift.codec, *numbers)
    console.print(table)
