"""`disagg bench drift`: how much a hand-over changes the distribution of the next token, where it is not exact.

Engines with another quantization or another arithmetic have slightly different KV caches; so does a cache that was
rounded for the transfer. Each decode engine completes some prompts alone. The same tokens are then decoded from the
caches of the other engines, and the distributions at each position are compared.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from disaggregated_inference.bench.prompts import TEXTS, resolve_model
from disaggregated_inference.bench.report import progress, save_rows
from disaggregated_inference.engines import ENGINES, Engine, chunks, file_kind, load_engine, require_engine
from disaggregated_inference.engines import Sequence as Cache
from disaggregated_inference.kv import KVSlice, require_same_model
from disaggregated_inference.kv_transfer import codecs
from disaggregated_inference.models import ModelTokenizer

_KV_BYTES = 1 << 30

LogitRows = NDArray[np.float32]


class Drift(msgspec.Struct, frozen=True):
    """Drift of one pair over all positions of all prompts. KL divergence in nats from the decode engine alone."""

    prefill: str
    decode: str
    codec: str
    positions: int
    top1_agreement: float
    mean_kl: float
    max_kl: float


class _Prefill(NamedTuple):
    """A prefilled prompt: its cache, its exported slices, the logits of its last position."""

    cache: Cache
    slices: list[KVSlice]
    logits: LogitRows


def run(
    engines: Sequence[str], model_name: str, positions: int, threads: int, quick: bool, output: Path
) -> list[Drift]:
    chosen = engines or [name for name, packages in ENGINES.items() if packages]
    loaded = {name: _load(name, model_name, threads) for name in chosen}
    tokenizer = resolve_model(model_name, file_kind(chosen[0])).tokenizer
    prompts = [_prompt(tokenizer, text) for text in TEXTS[: 2 if quick else None]]
    drifts = bench_drift(loaded, prompts, min(positions, 16) if quick else positions)
    title = f"drift against the decode engine alone, {model_name}, {len(prompts)} prompts"
    _show(title, drifts)
    save_rows(output / "drift.json", title, msgspec.to_builtins(drifts))
    return drifts


def _load(name: str, model_name: str, threads: int) -> Engine:
    """torch and MLX in float32, so that rounding adds no drift; llama.cpp with its usual dtype."""
    require_engine(name)
    progress(f"loading {name}")
    options: dict[str, Any] = {"kv_bytes": _KV_BYTES}
    options |= {} if name == "llamacpp" else {"dtype": "float32"}
    options |= {} if name == "mlx" else {"threads": threads or None}
    return load_engine(name, resolve_model(model_name, file_kind(name)), **options)


def _prompt(tokenizer: ModelTokenizer, text: str) -> list[int]:
    if tokenizer.chat_template:
        return tokenizer.encode_chat([{"role": "user", "content": text}])
    return tokenizer.encode(text)


def bench_drift(engines: dict[str, Engine], prompts: Sequence[list[int]], positions: int) -> list[Drift]:
    samples: dict[tuple[str, str, str], list[tuple[bool, float]]] = defaultdict(list)
    for at, prompt in enumerate(prompts):
        progress(f"prompt {at + 1} of {len(prompts)}, {len(prompt)} tokens: prefill on {', '.join(engines)}")
        prefills = {name: _prefill(engine, prompt, positions) for name, engine in engines.items()}
        for name, engine in engines.items():
            progress(f"prompt {at + 1}: {name} decodes")
            for (source, codec), pair in _decode(engine, engines, prefills, positions).items():
                samples[source, name, codec] += pair
        for name, prefill in prefills.items():
            engines[name].close(prefill.cache)
    return [_summarize(*key, pairs) for key, pairs in samples.items()]


def _prefill(engine: Engine, prompt: list[int], positions: int) -> _Prefill:
    """In chunks, like a node; slices are copied, like in a transfer."""
    cache = engine.open(len(prompt) + positions)
    slices: list[KVSlice] = []
    for part in chunks(prompt, engine.chunk_tokens):
        logits = engine.prefill(cache, part, lambda piece: slices.append(_transfer("raw", piece)))
    return _Prefill(cache, slices, logits.numpy().copy())


def _transfer(codec: str, piece: KVSlice) -> KVSlice:
    """The slice as the receiver gets it."""
    piece.wait()
    arrays = [array.copy() for array in codecs.encode(codec, piece)]
    return codecs.decode(codec, piece.dtype, arrays, piece.layer, piece.start)


def _decode(
    engine: Engine, engines: dict[str, Engine], prefills: dict[str, _Prefill], positions: int
) -> dict[tuple[str, str], list[tuple[bool, float]]]:
    """By prefill engine and codec: whether the top token is the same, and the KL divergence, at each position."""
    keys = [(source, codec) for source in prefills for codec in codecs.CODECS]
    for source in prefills:
        require_same_model(engine.fingerprint, engines[source].fingerprint)
    caches = [_import(engine, prefills[source], codec) for source, codec in keys]
    own = prefills[engine.name]
    first = np.concatenate([own.logits, *(prefills[source].logits for source, _ in keys)])
    compared = [_compare(rows) for rows in _step_all(engine, [own.cache, *caches], first, positions)]
    for cache in caches:
        engine.close(cache)
    return {key: list(lane) for key, lane in zip(keys, zip(*compared, strict=True), strict=True)}


def _import(engine: Engine, prefill: _Prefill, codec: str) -> Cache:
    cache = engine.open(prefill.cache.capacity)
    for piece in prefill.slices:
        engine.place(cache, piece if codec == "raw" else _transfer(codec, piece))
    engine.commit(cache, prefill.slices[-1].stop)
    return cache


def _step_all(engine: Engine, caches: list[Cache], rows: LogitRows, positions: int) -> Iterator[LogitRows]:
    """The logits of all caches at each position of the first cache's completion, in one batch, so that batching affects
    all of them. The first logits came with the caches, as between nodes."""
    for at in range(positions):
        yield rows
        token = int(rows[0].argmax())
        if at + 1 == positions or token in engine.spec.eos_tokens:
            return
        rows = engine.step(caches, [token] * len(caches)).numpy()


def _compare(rows: LogitRows) -> list[tuple[bool, float]]:
    """The first row against each of the others."""
    logs = rows.astype(np.float64)
    logs -= logs.max(axis=-1, keepdims=True)
    logs -= np.log(np.exp(logs).sum(axis=-1, keepdims=True))
    alone, handed = logs[0], logs[1:]
    divergence = (np.exp(alone) * (alone - handed)).sum(axis=-1).clip(min=0)  # rounding can make 0 negative
    same = handed.argmax(axis=-1) == alone.argmax()
    return [(bool(agrees), float(kl)) for agrees, kl in zip(same, divergence, strict=True)]


def _summarize(prefill: str, decode: str, codec: str, pairs: list[tuple[bool, float]]) -> Drift:
    same, divergence = zip(*pairs, strict=True)
    count = len(pairs)
    return Drift(prefill, decode, codec, count, sum(same) / count, sum(divergence) / count, max(divergence))


def _show(title: str, drifts: list[Drift]) -> None:
    table = Table(title=title, title_justify="left")
    for name in ("prefill → decode", "codec", "positions", "same top token", "mean KL", "max KL"):
        table.add_column(name, justify="left" if name in ("prefill → decode", "codec") else "right")
    for drift in drifts:
        share = f"{drift.top1_agreement:.1%}"
        numbers = (str(drift.positions), share, f"{drift.mean_kl:.2g}", f"{drift.max_kl:.2g}")
        table.add_row(f"{drift.prefill} → {drift.decode}", drift.codec, *numbers)
    Console().print(table)
