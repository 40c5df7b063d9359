"""The short way of plain tokens through the check lets pass what the long way does, and nothing else."""

from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disaggregated_inference.api import (
    Completion,
    DecodeRequest,
    ErrorDetail,
    ModelInfo,
    Progress,
    PromptLogprobs,
    ReportedMetrics,
    RequestRecord,
    StreamEvent,
    TopLogprob,
)
from disaggregated_inference.models import ModelFiles, ModelTokenizer
from disaggregated_inference.models.tokenizer import TextStream
from disaggregated_inference.orchestrator.stream_check import BadEvents, StreamCheck, TokenStreamCheck

SIZE = 300  # tokens of the vocabulary that is drawn from: the first have a byte each, which may be half a character


class LongWay(TokenStreamCheck):
    def check(self, events: Iterable[StreamEvent]) -> None:
        StreamCheck.check(self, events)


def texts_of(tokenizer: ModelTokenizer, tokens: Iterable[int]) -> list[str]:
    stream = tokenizer.stream()
    return [stream.push(token) for token in tokens]


CHANGES: list[dict[str, object]] = [
    {},
    {"finish_reason": "length"},
    {"finish_reason": "stop"},
    {"finish_reason": "done"},
    {"text": "~"},
    {"text": ""},
    {"token": None},
    {"token": None, "text": "", "error": ErrorDetail()},
    {"token": -1},
    {"token": SIZE},
    {"choice": 1},
    {"choice": 2},
    {"logprob": -0.5},
    {"top_logprobs": (TopLogprob(1, -0.5),)},
    {"thinking": "hm"},
    {"tool_calls": ({},)},
    {"waiting": "for it"},
    {"done": True},
    {"node_metrics": ReportedMetrics()},
    {"progress": Progress(total=3, cache=0, processed=3, time_ms=1)},
    {"prompt_logprobs": PromptLogprobs(start=0, tokens=())},
    {"completion": Completion(choices=(), record=RequestRecord())},
    {"error": ErrorDetail()},
]
requests = st.builds(
    DecodeRequest,
    tokens=st.just([1, 2, 3]),
    max_tokens=st.sampled_from([5, 100, 100]),
    n=st.sampled_from([1, 2]),
    logprobs=st.sampled_from([None, None, 0]),
    ignore_eos=st.sampled_from([True, True, False]),
    stop=st.sampled_from([(), ("ab",)]),
)


def outcome(check: TokenStreamCheck, events: list[StreamEvent]) -> tuple[object, ...]:
    """The problem, if there is one, and what was taken before it."""
    problem = ""
    try:
        for event in events:
            check.check([event])
    except BadEvents as error:
        problem = f"{error}, tainted: {error.tainted}"
    return problem, check.began, [choice.count for choice in check._choices]


@pytest.mark.parametrize("change", CHANGES, ids=str)
@settings(max_examples=40, deadline=None)
@given(
    tokens=st.lists(st.integers(0, SIZE - 1), min_size=3, max_size=8),
    wanted=requests,
    at=st.integers(0, 2),
    judges_text=st.sampled_from([True, True, False]),
)
def test_both_ways_agree(
    smollm2: ModelFiles,
    change: dict[str, object],
    tokens: list[int],
    wanted: DecodeRequest,
    at: int,
    judges_text: bool,
) -> None:
    tokenizer = smollm2.tokenizer
    texts = texts_of(tokenizer, tokens)
    events = [StreamEvent(token=token, text=text) for token, text in zip(tokens, texts, strict=True)]
    events[at] = msgspec.structs.replace(events[at], **change)
    model = ModelInfo(context_window=1000, vocabulary=SIZE, eos_tokens=tuple(range(40, 60)))
    short, long = (
        outcome(kind(wanted, model, tokenizer if judges_text else None), events) for kind in (TokenStreamCheck, LongWay)
    )
    assert short == long


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, SIZE - 1), max_size=20))
def test_remembered_texts_are_those_of_the_library(smollm2: ModelFiles, tokens: list[int]) -> None:
    tokenizer = smollm2.tokenizer
    library = TextStream(tokenizer._tokenizer, tokenizer._text_bytes, tokenizer._special_ids)
    for _ in range(2):  # the second time, all are known
        assert texts_of(tokenizer, tokens) == [library.push(token) for token in tokens]
        library = TextStream(tokenizer._tokenizer, tokenizer._text_bytes, tokenizer._special_ids)
