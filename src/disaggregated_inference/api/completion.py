"""What a client gets: the answer to a request, or to many at once."""

from typing import Any

import msgspec

from disaggregated_inference.api.record import RequestRecord, plain
from disaggregated_inference.api.responses import ErrorDetail, GeneratedChoice, PromptLogprob


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The typed result of `complete`: the choices, and the record of the request."""

    choices: tuple[GeneratedChoice, ...]
    record: RequestRecord
    prompt_logprobs: tuple[PromptLogprob, ...] = ()  # all of them, or none

    @property
    def text(self) -> str:
        return self.choices[0].text

    def answer(self) -> dict[str, Any]:
        """As plain values: the first choice, all of them if there are several, and the metrics."""
        choices = plain(self.choices)
        if not choices:
            return {"response": None} | self.record.metrics()
        prompt = {"prompt_logprobs": plain(self.prompt_logprobs)} if self.prompt_logprobs else {}
        first = {"response": choices[0]["text"]} | {k: v for k, v in choices[0].items() if k not in ("text", "index")}
        return first | ({"choices": choices} if len(choices) > 1 else {}) | prompt | self.record.metrics()


class MergedCompletions(msgspec.Struct, frozen=True, kw_only=True):
    """The typed result of `complete_many`: `results` in the order of the requests, an error for one that failed."""

    results: tuple[Completion | ErrorDetail, ...]
    wall_time: float  # of all of them

    @property
    def records(self) -> list[RequestRecord]:
        """Of the requests that were answered."""
        return [result.record for result in self.results if isinstance(result, Completion)]

    @property
    def errors(self) -> list[ErrorDetail]:
        return [result for result in self.results if isinstance(result, ErrorDetail)]

    @property
    def sequential_time(self) -> float:
        """What they would have taken one after the other, each with the cluster to itself."""
        times = ((record.sequential_time, record.total_time) for record in self.records)
        return sum(total_s if alone_s is None else alone_s for alone_s, total_s in times)

    @property
    def speedup(self) -> float:
        return self.sequential_time / self.wall_time if self.wall_time else 0.0

    def answer(self) -> dict[str, Any]:
        """As plain values."""
        tokens = sum(record.completion_tokens for record in self.records)
        return {
            "results": [_plain(result) for result in self.results],
            "wall_time": self.wall_time,
            "sequential_time": self.sequential_time,
            "speedup": self.speedup,
            "completion_tokens": tokens,
            "total_tokens": sum(record.total_tokens for record in self.records),
            "tokens_per_sec": tokens / self.wall_time if self.wall_time else 0.0,
            "errors": len(self.errors),
        }


def _plain(result: Completion | ErrorDetail) -> dict[str, Any]:
    return {"response": None, "error": plain(result)} if isinstance(result, ErrorDetail) else result.answer()
