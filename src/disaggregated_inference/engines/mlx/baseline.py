"""mlx-lm alone, as the baseline of `disagg bench engines`."""

import time
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step

from disaggregated_inference.engines.mlx.engine import MlxEngine


class MlxBaseline:
    label = "mlx-lm"
    decode_goal = 0.95

    def __init__(self, engine: MlxEngine) -> None:
        self.engine = engine

    def prefill_seconds(self, tokens: list[int]) -> float:
        started = time.perf_counter()
        next(generate_step(mx.array(tokens), self.engine.model, max_tokens=1, prefill_step_size=len(tokens)))
        return time.perf_counter() - started

    def decode_seconds(self, prompts: list[list[int]], steps: int) -> float:
        """mlx-lm's single-stream generator for a batch of 1, its batch generator for larger ones."""
        return self._one(prompts[0], steps) if len(prompts) == 1 else self._many(prompts, steps)

    def peak_bytes(self, action: Callable[[], None]) -> int:
        """Peak memory of MLX during `action`, above what it held before."""
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        action()
        return int(mx.get_peak_memory() - before)

    def _one(self, prompt: list[int], steps: int) -> float:
        stream = generate_step(mx.array(prompt), self.engine.model, max_tokens=steps + 2)
        next(stream)
        started = time.perf_counter()
        for _ in range(steps):
            next(stream)
        return time.perf_counter() - started

    def _many(self, prompts: list[list[int]], steps: int) -> float:
        generator = BatchGenerator(
            self.engine.model, completion_batch_size=len(prompts), prefill_batch_size=len(prompts)
        )
        generator.insert(prompts, max_tokens=[steps + 40] * len(prompts))
        while len(generator.next()[1]) < len(prompts):
            pass
        started = time.perf_counter()
        for _ in range(steps):
            generator.next()
        seconds = time.perf_counter() - started
        generator.close()
        return seconds


Baseline = MlxBaseline  # the benchmarks load it by this name
