"""What torch and transformers do without us: the other side of every ratio in `disagg bench engine`."""

import time
from typing import Any

import torch

from disaggregated_inference.engines.torch.engine import TorchEngine
from disaggregated_inference.engines.torch.passes import ATTENTION_NAME


class Baseline:
    """The same weights under transformers' own attention and cache."""

    label = "transformers"

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine

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
    def decode_tokens_per_second(self, context: int, batch: int, steps: int) -> float:
        """The plain loop: a growing cache, one launch per kernel."""
        model = self.engine.model
        ids = torch.randint(10, 400, (batch, context), device=self.engine.device)
        self._use(self._attention())
        try:
            output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
            started = self._now()
            for step in range(steps + 1):
                if step == 1:
                    started = self._now()  # the first step pays for warm-up
                tokens = output.logits[:, -1:].argmax(-1)
                output = model(input_ids=tokens, past_key_values=output.past_key_values, use_cache=True)
            return batch * steps / (self._now() - started)
        finally:
            self._use(ATTENTION_NAME)

    def _attention(self) -> str:
        return "eager" if self.engine.spec.architecture == "gpt_oss" else "sdpa"

    def _use(self, attention: str) -> None:
        self.engine.model.config._attn_implementation = attention

    def _now(self) -> float:
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def random_engine(shape: dict[str, Any], device: str, kv_bytes: int, sequences: int = 64) -> TorchEngine:
    """An engine with random weights of a given config: speed needs the shape, not the knowledge."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from disaggregated_inference.kv.fingerprint import Weights
    from disaggregated_inference.models import spec_from_config

    settings = dict(shape)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    spec = spec_from_config(shape)
    nobody = Weights(norms="random", format="random", sample="random")
    return TorchEngine(
        model, spec, spec.fingerprint(tokenizer="", chat_template="", weights=nobody), kv_bytes, sequences
    )
