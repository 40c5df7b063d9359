"""`python -m disaggregated_inference.bench.vllm_pages SHAPE`, run by vLLM's own Python on the GPU it is about: the KV
cache that arrives over the wire equals vLLM's pages, bit for bit.

vLLM runs in this process, so that its pages can be read: by each layer's own slot mapping, at the moment when vLLM
calls the connector. The connector itself goes by the scheduler's block tables. A node and a receiver run beside it.
"""

import argparse
import os
import queue
import sys
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}

import numpy as np
import torch

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
    Border,
    Computed,
    Staging,
    VllmEngine,
    VllmPrefillNode,
    kv_transfer_config,
)

Rows = dict[int, list[tuple[np.ndarray, np.ndarray]]]  # by layer, in the order of the prompt


class Requests:
    """In the place of vLLM's HTTP API: the main thread computes what the node asks for."""

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[tuple[str, list[int], Future[Computed]]] = queue.SimpleQueue()

    def start(self, ticket: str, tokens: list[int], salt: str = "") -> "Future[Computed]":
        done: Future[Computed] = Future()
        self.waiting.put((ticket, list(tokens), done))
        return done

    def close(self) -> None:
        pass


class WatchedConnector(connector.DisaggConnector):
    """Keeps what the pages hold when vLLM announces a layer."""

    pages: ClassVar[Rows] = {}

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        number = connector.layer_number(layer_name)
        slots = attn_metadata.slot_mapping[: attn_metadata.num_actual_tokens]
        WatchedConnector.pages.setdefault(number, []).append(_read(kv_layer, slots))
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)


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


def _fetch(node: VllmPrefillNode, tokens: list[int]) -> tuple[Rows, int]:
    received: Rows = {}
    context, reading = node.submit(tokens)

    def place(piece: Any) -> None:
        keys, values = (
            np.array(part).view(np.int16 if part.itemsize == 2 else np.int32) for part in (piece.keys, piece.values)
        )
        received.setdefault(piece.layer, []).append((keys, values))

    fingerprint = node.engine.fingerprint
    hello = Hello(ticket=context.ticket, secret=context.secret, fetch="check", fingerprint=fingerprint)
    sink = Sink(place=place, commit=lambda length: None, logits=lambda logits: None)
    addresses = Paths().ordered(context.addresses)
    fetched = KVFetch(hello, fingerprint.layout, fingerprint.vocabulary, context.tokens, addresses, sink, 4).run()
    reading.result()
    return received, fetched.payload_bytes


def check(node: VllmPrefillNode, length: int) -> int:
    """Compares every row that a decode node needs; returns how many bytes were compared."""
    WatchedConnector.pages = {}
    tokens = token_prompt(length, length, node.engine.spec.vocabulary)
    received, _ = _fetch(node, tokens)
    plans = node.engine.spec.layout.layers
    assert set(received) == set(WatchedConnector.pages) == set(range(len(plans)))
    compared = 0
    for layer, plan in enumerate(plans):
        for half in (0, 1):
            held = np.concatenate([each[half] for each in WatchedConnector.pages[layer]])
            came = np.concatenate([each[half] for each in received[layer]])
            assert len(held) == length, f"vLLM announced {len(held)} of {length} rows of layer {layer}"
            last = min(plan.window or length, len(came))
            assert last >= min(plan.window or length, length)
            assert np.array_equal(held[-last:], came[-last:]), f"layer {layer} differs"
            compared += came[-last:].nbytes
    return compared


def _llm(model: Any, socket: Path, chunk: int) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    install()
    settings = kv_transfer_config(socket, decodes=False)
    module = "disaggregated_inference.bench.vllm_pages"
    settings |= {"kv_connector": WatchedConnector.__name__, "kv_connector_module_path": module}
    options: dict[str, Any] = {"enforce_eager": True}
    if torch.cuda.is_available():
        options = {"compilation_config": {"cudagraph_capture_sizes": [1, 8, 512], "cudagraph_mode": "PIECEWISE"}}
    return LLM(
        model=str(model.path),
        load_format="dummy",
        max_model_len=20000,
        max_num_batched_tokens=chunk,
        max_num_seqs=8,
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
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="disagg-check-") as folder:
        model = write_shape(arguments.shape, Path(folder) / arguments.shape, arguments.layers)
        staging, requests = Staging(4 << 30), Requests()
        border = Border(Path(folder) / "s", model.spec, staging)
        llm = _llm(model, border.path, arguments.chunk)
        engine = border.wait_attached(60)
        scheduler = Scheduler(lambda: VllmEngine(model, engine.dtype, staging, engine.scheduler.max_tokens))
        memory = KVMemory(scheduler, prefix_bytes=0)
        timeouts = VllmBorderTimeouts()
        node = VllmPrefillNode(border, requests, memory, (("127.0.0.1", 0),), 60, Trust(), timeouts)  # type: ignore[arg-type]
        found: list[str] = []
        lengths = [int(each) for each in arguments.lengths.split(",")]
        checks = threading.Thread(target=_check_all, args=(node, lengths, found, requests))
        checks.start()
        _compute(llm, requests)
        checks.join()
    print(*found, sep="\n", flush=True)
    os._exit(0 if len(found) == len(lengths) and all("equal" in line for line in found) else 1)


def _check_all(node: VllmPrefillNode, lengths: list[int], found: list[str], requests: Requests) -> None:
    for length in lengths:
        try:
            found.append(f"prompt of {length}: {check(node, length) / 1e6:.1f} MB equal, bit for bit")
        except Exception as error:
            found.append(f"prompt of {length}: {type(error).__name__}: {error}")
    requests.waiting.put(("", [], Future()))


def _compute(llm: Any, requests: Requests) -> None:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    while (job := requests.waiting.get())[0]:
        ticket, tokens, done = job
        extra = {"kv_transfer_params": {"disagg_ticket": ticket}}
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False, extra_args=extra)
        llm.generate([TokensPrompt(prompt_token_ids=tokens)], params, use_tqdm=False)
        done.set_result(Computed())


if __name__ == "__main__":
    main()
