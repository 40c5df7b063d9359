"""`python -m disaggregated_inference.bench.vllm_pages SHAPE`, run by vLLM's own Python on the GPU it is about: the KV
cache that arrives over the wire equals vLLM's pages, bit for bit. It needs `xxhash` beside vLLM.

vLLM runs in this process, so that its pages can be read: by each layer's own slot mapping, at the moment when vLLM
calls the connector. The connector itself goes by the scheduler's block tables. A node and a receiver run beside it.
The prompts come one by one, then all at once, twice each: with few `--blocks`, some wait and some are computed again.
"""

import argparse
import os
import queue
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}

import numpy as np
import torch
from vllm.model_executor.layers.attention.attention import get_attention_context

from disaggregated_inference.bench.prompts import token_prompt
from disaggregated_inference.bench.vllm_shapes import write_shape
from disaggregated_inference.bench.vllm_weights import install
from disaggregated_inference.kv_transfer import Hello, KVFetch, Paths, Sink
from disaggregated_inference.node import KVMemory, Scheduler, Trust
from disaggregated_inference.timeouts import VllmBorderTimeouts
from disaggregated_inference.vllm_connector import connector
from disaggregated_inference.vllm_connector.pages import CpuPages
from disaggregated_inference.vllm_node import (
    LOGITS_PROCESSOR,
    Computed,
    ConnectorServer,
    Staging,
    VllmEngine,
    VllmPrefillNode,
    kv_transfer_config,
)

_KV_BYTES = 8 << 30  # of vLLM, on a GPU: for a few layers


class PageRows(NamedTuple):
    """Keys and values of one layer from position `start` on, as bits."""

    start: int
    keys: np.ndarray
    values: np.ndarray

    @property
    def stop(self) -> int:
        return self.start + len(self.keys)


Layers = dict[int, list[PageRows]]


class Requests:
    """In the place of vLLM's HTTP API: the main thread computes what the node asks for."""

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[tuple[str, list[int], Future[Computed]]] = queue.SimpleQueue()

    def start(self, ticket: str, tokens: list[int], salt: str = "") -> "Future[Computed]":
        done: Future[Computed] = Future()
        self.waiting.put((ticket, list(tokens), done))
        return done

    def take(self) -> "list[tuple[str, list[int], Future[Computed]]]":
        """Those that come within half a second. Empty at the end."""
        jobs = [self.waiting.get()]
        with suppress(queue.Empty):
            while jobs[-1][0]:
                jobs.append(self.waiting.get(timeout=0.5))
        return [job for job in jobs if job[0]]

    def close(self) -> None:
        pass


class WatchedConnector(connector.DisaggConnector):
    """Keeps what the pages hold when vLLM announces a layer: for each layer, the same list of parts of prompts."""

    pages: ClassVar[Layers] = {}

    unannounced: ClassVar[int] = 0  # layers that a graph of the whole model computed, which no hook sees

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._names, self._announced = tuple(kv_caches), set[str]()

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._announced.add(layer_name)
        self._keep(layer_name, kv_layer, attn_metadata)
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        for name in self._names:
            if name not in self._announced:
                attn_metadata, _, pages, _ = get_attention_context(name)
                if attn_metadata is not None:
                    self._keep(name, pages, attn_metadata)
                    WatchedConnector.unannounced += 1
        self._announced.clear()
        super().wait_for_save()

    @staticmethod
    def _keep(name: str, pages: Any, attn_metadata: Any) -> None:
        slots = attn_metadata.slot_mapping[: attn_metadata.num_actual_tokens]
        keys, values = _read(pages, slots)
        held = WatchedConnector.pages.setdefault(connector.layer_number(name), [])
        held += [PageRows(start, keys[at], values[at]) for start, at in _prompts_in(attn_metadata)]


def _prompts_in(attn_metadata: Any) -> Iterator[tuple[int, slice]]:
    """For each request of the step, its first position and its rows."""
    bounds, lengths = (each.tolist() for each in (attn_metadata.query_start_loc, attn_metadata.seq_lens))
    for first, last, length in zip(bounds, bounds[1:], lengths, strict=False):
        if last > first:
            yield length - (last - first), slice(first, last)


def _read(pages: torch.Tensor, slots: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of these slots, as bits."""
    if pages.device.type == "cpu":
        keys, values = CpuPages(pages.shape[2]).gather(pages, [(slots // pages.shape[2], slots % pages.shape[2])])[0]
    else:
        _, two, block, _, _ = pages.shape
        assert two == 2, f"pages of {tuple(pages.shape)}"
        keys, values = (pages[slots // block, half, slots % block] for half in (0, 1))
    return _bits(keys), _bits(values)


def _bits(rows: torch.Tensor) -> np.ndarray:
    kind = torch.int16 if rows.element_size() == 2 else torch.int32
    found: np.ndarray = rows.contiguous().view(kind).cpu().numpy()
    return found


def _fetch(node: VllmPrefillNode, tokens: list[int]) -> Layers:
    received: Layers = {}
    context, reading = node.submit(tokens)

    def place(piece: Any) -> None:
        keys, values = (
            np.array(part).view(np.int16 if part.itemsize == 2 else np.int32) for part in (piece.keys, piece.values)
        )
        received.setdefault(piece.layer, []).append(PageRows(piece.start, keys, values))

    fingerprint = node.engine.fingerprint
    hello = Hello(ticket=context.ticket, secret=context.secret, fetch="check", fingerprint=fingerprint)
    sink = Sink(place=place, commit=lambda length: None, logits=lambda logits: None)
    addresses = Paths().ordered(context.addresses)
    KVFetch(hello, fingerprint.layout, fingerprint.vocabulary, context.tokens, addresses, sink, 4).run()
    reading.result()
    return received


def check(node: VllmPrefillNode, lengths: Sequence[int]) -> str:
    """Prompts of these lengths at once. Compares every row that arrives."""
    WatchedConnector.pages = {}
    vocabulary = node.engine.spec.vocabulary
    prompts = [token_prompt(length, 1000 * number + length, vocabulary) for number, length in enumerate(lengths)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        arrived = list(threads.map(partial(_fetch, node), prompts))
    compared = sum(_compare(node, *each) for each in zip(arrived, lengths, strict=True))
    computed = sum(len(rows.keys) for rows in WatchedConnector.pages[0])
    again = f", {computed - sum(lengths)} tokens computed twice" if computed > sum(lengths) else ""
    return f"{compared / 1e6:.1f} MB equal, bit for bit{again}"


def _compare(node: VllmPrefillNode, arrived: Layers, length: int) -> int:
    """A layer that keeps all its rows tells which of vLLM's parts are this prompt's."""
    plans = node.engine.spec.layout.layers
    assert set(arrived) == set(range(len(plans))), "layers are missing"
    reference = next(layer for layer, plan in enumerate(plans) if not plan.window)
    held = WatchedConnector.pages[reference]
    own = [at for at, rows in enumerate(held) if _equal_rows(arrived[reference], rows).all()]
    for layer, plan in enumerate(plans):
        needed = np.zeros(length, bool)
        needed[plan.first_row(0, length) :] = True
        for rows in arrived[layer]:
            found = np.zeros(len(rows.keys), bool)
            for at in own:
                part = WatchedConnector.pages[layer][at]
                first, last = max(part.start, rows.start), min(part.stop, rows.stop)
                if first < last:
                    found[first - rows.start : last - rows.start] |= _equal_rows([rows], part)[first - part.start :][
                        : last - first
                    ]
            assert found.all(), f"layer {layer} differs at {rows.start + int(np.argmin(found))} of {length}"
            needed[rows.start : rows.stop] = False
        assert not needed.any(), f"layer {layer} lacks {needed.sum()} of {length} rows"
    return sum(rows.keys.nbytes + rows.values.nbytes for each in arrived.values() for rows in each)


def _equal_rows(arrived: list[PageRows], held: PageRows) -> np.ndarray:
    """Which of the held rows arrived, bit for bit."""
    equal = np.zeros(len(held.keys), bool)
    for rows in arrived:
        first, last = max(held.start, rows.start), min(held.stop, rows.stop)
        if first < last:
            theirs, ours = slice(first - rows.start, last - rows.start), slice(first - held.start, last - held.start)
            same = (rows.keys[theirs] == held.keys[ours]) & (rows.values[theirs] == held.values[ours])
            equal[ours] |= same.all(axis=(1, 2))
    return equal


def _llm(model: Any, socket: Path, chunk: int, longest: int, blocks: int, decodes: bool) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    install()
    settings = kv_transfer_config(socket, decodes=decodes)
    module = "disaggregated_inference.bench.vllm_pages"
    settings |= {"kv_connector": WatchedConnector.__name__, "kv_connector_module_path": module}
    # bfloat16 on a CPU with AMX packs keys in a way that the connector does not know.
    options: dict[str, Any] = {"enforce_eager": True, "dtype": "float32"}
    if torch.cuda.is_available():
        mode = "FULL_AND_PIECEWISE" if decodes else "PIECEWISE"
        options = {"compilation_config": {"cudagraph_capture_sizes": [1, 8, 512], "cudagraph_mode": mode}}
        # Given, not measured: several of these checks share one GPU.
        options |= {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": _KV_BYTES}
    return LLM(
        model=str(model.path),
        load_format="dummy",
        max_model_len=longest + 16,
        max_num_batched_tokens=chunk,
        max_num_seqs=16,
        num_gpu_blocks_override=blocks or None,
        enable_prefix_caching=False,
        kv_transfer_config=KVTransferConfig(**settings),
        logits_processors=[LOGITS_PROCESSOR],
        **options,
    )


def main() -> None:
    sys.modules["disaggregated_inference.bench.vllm_pages"] = sys.modules[
        "__main__"
    ]  # vLLM imports the connector by this name
    parser = argparse.ArgumentParser()
    parser.add_argument("shape")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--lengths", default="1,20,1500,8192,8193,16000")
    parser.add_argument("--blocks", type=int, default=0, help="of vLLM's KV memory; 0: as many as fit")
    parser.add_argument("--decodes", action="store_true", help="with full graphs, as a vLLM that also writes answers")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="disagg-check-") as folder:
        model = write_shape(arguments.shape, Path(folder) / arguments.shape, arguments.layers)
        staging, requests = Staging(4 << 30), Requests()
        border = ConnectorServer(Path(folder) / "s", model.spec, staging)
        lengths = [int(each) for each in arguments.lengths.split(",")]
        llm = _llm(model, border.path, arguments.chunk, max(lengths), arguments.blocks, arguments.decodes)
        engine = border.wait_attached(60)
        scheduler = Scheduler(lambda: VllmEngine(model, engine.dtype, staging, engine.scheduler.max_tokens))
        memory = KVMemory(scheduler, prefix_bytes=0)
        timeouts = VllmBorderTimeouts()
        node = VllmPrefillNode(border, requests, memory, (("127.0.0.1", 0),), 60, Trust(), timeouts)  # type: ignore[arg-type]
        found: list[str] = []
        checks = threading.Thread(target=_check_all, args=(node, lengths, found, requests))
        checks.start()
        _compute(llm, requests)
        checks.join()
    found_late = f"layers of steps that no hook saw: {WatchedConnector.unannounced}"
    print(*found, found_late, sep="\n", flush=True)
    os._exit(0 if len(found) == len(lengths) + 1 and all("equal" in line for line in found) else 1)


def _check_all(node: VllmPrefillNode, lengths: list[int], found: list[str], requests: Requests) -> None:
    for name, together in [(f"prompt of {each}", [each]) for each in lengths] + [("all at once, twice", lengths * 2)]:
        try:
            found.append(f"{name}: {check(node, together)}")
        except Exception as error:
            found.append(f"{name}: {type(error).__name__}: {error}")
    requests.waiting.put(("", [], Future()))


def _compute(llm: Any, requests: Requests) -> None:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    while jobs := requests.take():
        prompts = [TokensPrompt(prompt_token_ids=tokens) for _, tokens, _ in jobs]
        extras = [{"kv_transfer_params": {"disagg_ticket": ticket}} for ticket, _, _ in jobs]
        options = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        params = [SamplingParams(extra_args=extra, **options) for extra in extras]
        llm.generate(prompts, params, use_tqdm=False)
        for _, _, done in jobs:
            done.set_result(Computed())


if __name__ == "__main__":
    main()
