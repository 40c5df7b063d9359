"""transformers alone, as the baseline of `disagg bench engines`."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from disaggregated_inference.engines.torch import fused_kernels
from disaggregated_inference.engines.torch.attention import has_flash
from disaggregated_inference.engines.torch.engine import TorchEngine, require_device
from disaggregated_inference.engines.torch.forward_pass import ATTENTION_NAME


class TorchBaseline:
    """The same weights with transformers' attention and cache."""

    label = "transformers"
    decode_goal = 0.95

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        if engine.device.type == "cuda":
            self.decode_goal = 2.0  # CUDA graphs must beat the plain loop

    @torch.inference_mode()
    def prefill_seconds(self, tokens: list[int]) -> float:
        model, ids = self.engine.model, torch.tensor([tokens], device=self.engine.device)
        self._use(self._attention())
        try:
            started = self._now()
            model(input_ids=ids, use_cache=True, logits_to_keep=1)
            return self._now() - started
        finally:
            self._use(ATTENTION_NAME)

    @torch.inference_mode()
    def decode_seconds(self, prompts: list[list[int]], steps: int) -> float:
        """The plain loop: a growing cache, one launch per kernel."""
        model, ids = self.engine.model, torch.tensor(prompts, device=self.engine.device)
        self._use(self._attention())
        try:
            output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
            started = self._now()
            for step in range(steps + 1):
                if step == 1:
                    started = self._now()  # the first step pays for warm-up
                tokens = output.logits[:, -1:].argmax(-1)
                output = model(input_ids=tokens, past_key_values=output.past_key_values, use_cache=True)
            return self._now() - started
        finally:
            self._use(ATTENTION_NAME)

    def peak_bytes(self, action: Callable[[], None]) -> int | None:
        """Peak memory during `action`, above what was held before. The arena was allocated at the start."""
        if self.engine.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            action()
            return int(torch.cuda.max_memory_allocated() - before)
        return _peak_resident_bytes(action)

    def _attention(self) -> str:
        return "eager" if self.engine.spec.architecture == "gpt_oss" else "sdpa"

    def _use(self, attention: str) -> None:
        model = self.engine.model
        model.config._attn_implementation = attention
        if attention == ATTENTION_NAME and has_flash(model.device, model.dtype):
            fused_kernels.install(model)
        else:
            fused_kernels.remove(model)

    def _now(self) -> float:
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _peak_resident_bytes(action: Callable[[], None]) -> int | None:
    """Resident memory of the process, sampled every millisecond; None if the system does not report it."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return None

    def resident() -> int:
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    before, samples, finished = resident(), [0], threading.Event()

    def watch() -> None:
        while not finished.wait(0.001):
            samples.append(resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    action()
    samples.append(resident())
    finished.set()
    watcher.join()
    return max(samples) - before


def random_engine(shape: dict[str, Any], device: str, kv_bytes: int, sequences: int = 64) -> TorchEngine:
    """An engine with random weights of a given config: speed depends on the shape, not on the weights' values.

    Hidden states must stay different, though. With transformers' initial weights, attention averages them away within a
    few layers, and all tokens use the same few experts (measured: 22 of 128): half the work of a real model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from disaggregated_inference.kv import Weights
    from disaggregated_inference.models import spec_from_config

    require_device(device)
    settings = dict(shape)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
        model.model.embed_tokens.weight.data.mul_(1000)
    spec = spec_from_config(shape)
    weights = Weights(norms="random", format="random", sample="random")
    return TorchEngine(
        model, spec, spec.fingerprint(tokenizer="", chat_template="", weights=weights), kv_bytes, sequences
    )


Baseline = TorchBaseline  # the benchmarks load it by this name
