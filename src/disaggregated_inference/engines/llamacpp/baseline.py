"""llama.cpp alone, as the baseline of `disagg bench engines`.

The loop of its examples: one context, batches filled and decoded, the greedy token read in place.
"""

import time
from collections.abc import Callable

from disaggregated_inference.engines.llamacpp.engine import LlamaEngine


class LlamaBaseline:
    label = "llama.cpp"
    decode_goal = 0.95

    def __init__(self, engine: LlamaEngine) -> None:
        self.engine, self._context = engine, engine.model

    def prefill_seconds(self, tokens: list[int]) -> float:
        started = time.perf_counter()
        logits = self._context.evaluate(tokens, range(len(tokens)), [0] * len(tokens), wanted=1)
        logits.argmax()
        seconds = time.perf_counter() - started
        self._context.forget(0)
        return seconds

    def decode_seconds(self, prompts: list[list[int]], steps: int) -> float:
        context, batch, tokens = len(prompts[0]), len(prompts), list[int]()
        for number, prompt in enumerate(prompts):
            logits = self._context.evaluate(prompt, range(context), [number] * context, wanted=1)
            tokens.append(int(logits.argmax()))
        numbers = list(range(batch))
        tokens = self._context.evaluate(tokens, [context] * batch, numbers, batch).argmax(axis=-1).tolist()
        started = time.perf_counter()
        for at in range(context + 1, context + 1 + steps):
            tokens = self._context.evaluate(tokens, [at] * batch, numbers, batch).argmax(axis=-1).tolist()
        seconds = time.perf_counter() - started
        for number in numbers:
            self._context.forget(number)
        return seconds

    def peak_bytes(self, action: Callable[[], None]) -> None:
        """All of its cache is taken at the start: nothing to see."""
        action()


Baseline = LlamaBaseline  # the benchmarks load it by this name
