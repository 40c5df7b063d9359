"""Random text that a grammar allows."""

import random
from typing import Any

import numpy as np

from disaggregated_inference.models import ModelFiles
from disaggregated_inference.node.structured_output import GrammarMatcher


class Walk:
    """Writes what a guide allows: at random at first, then whatever closes what is open."""

    def __init__(self, model: ModelFiles, grammar: GrammarMatcher, seed: int, wander: int = 25) -> None:
        self.tokenizer, self.eos, self.grammar, self.wander = model.tokenizer, model.spec.eos_tokens, grammar, wander
        self.random = random.Random(seed)
        self.closing = [model.tokenizer.encode(text)[0] for text in ('"', "}", "]", "@", ".", "com", "null", ":", ",")]
        self.tokens: list[int] = []

    def text(self, most: int = 400) -> str:
        while not self.grammar.finished and len(self.tokens) < most:
            allowed = self.grammar.allow()
            assert allowed.any()
            if allowed[list(self.eos)].any() and self.random.random() < 0.5:
                break
            self.tokens.append(self.pick(allowed))
            self.grammar.accept(self.tokens[-1])
        return self.tokenizer.decode(self.tokens)

    def pick(self, allowed: np.ndarray[Any, Any]) -> int:
        allowed[list(self.eos)] = False
        closing = [token for token in self.closing if allowed[token]]
        if closing and (len(self.tokens) > self.wander or self.random.random() < 0.4):
            return closing[0] if len(self.tokens) > self.wander else self.random.choice(closing)
        return int(self.random.choice(np.flatnonzero(allowed)))
