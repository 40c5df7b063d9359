"""Requests of all kinds, drawn with a seed, for tests with many requests at once."""

import random
from dataclasses import dataclass
from typing import Any

from disaggregated_inference.api import GenerationParams
from disaggregated_inference.node.generation import Generation
from tests.support.handoff import prompt_of
from tests.support.node_pair import Pair

SAMPLINGS: list[dict[str, Any]] = [
    dict(),
    dict(),
    dict(temperature=0.8, seed=7),
    dict(temperature=1.2, top_p=0.9, top_k=40, seed=11),
    dict(repetition_penalty=1.3),
    dict(frequency_penalty=0.5, presence_penalty=0.5, temperature=0.7, seed=3),
    dict(logit_bias={5: 20.0}, logprobs=3),
    dict(min_tokens=6, temperature=1.0, min_p=0.05, seed=9),
]


@dataclass(frozen=True)
class MixedRequest:
    origin: str  # remote: prefill on the prefill node; local: on the decode node
    prompt: list[int]
    params: GenerationParams

    def begin(self, pair: Pair) -> Generation:
        prefill, decode = pair
        if self.origin == "local":
            return decode.generate_local(self.prompt, self.params)
        context, _ = prefill.submit(self.prompt)
        return decode.generate_from_kv(context, self.params)


def mixed(count: int, seed: int = 0) -> list[MixedRequest]:
    draw = random.Random(seed)
    requests: list[MixedRequest] = []
    for number in range(count):
        origin = draw.choice(["remote", "local", "again"]) if requests else "remote"
        length = draw.choice([3, 20, 90, 130, 300, 500])
        prompt = prompt_of(length, seed=number)
        if origin == "again":
            prompt = [*draw.choice(requests).prompt, *prompt[: draw.choice([1, 40])]]
        params = GenerationParams(
            max_tokens=draw.choice([1, 2, 9, 24]), timeout_s=120, queue_s=120, **draw.choice(SAMPLINGS)
        )
        requests.append(MixedRequest(draw.choice(["remote", "local"]) if origin == "again" else origin, prompt, params))
    return requests
