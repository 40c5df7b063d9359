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
from disaggregated_inference.orchestrator.stream_check import BadEvents, StreamCheck, TextStreamCheck, TokenStreamCheck

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


TEXT = StreamEvent(text=" one")
METRICS = ReportedMetrics()
FINISH, END = StreamEvent(text="", finish_reason="stop"), StreamEvent(done=True, node_metrics=METRICS)
BEYOND = {"decode_time": -1.0, "completion_tokens": -1, "prompt_tokens": 10**15, "total_time": 1e300}
TEXT_LIES: dict[str, tuple[list[StreamEvent], str]] = {
    "a token": ([StreamEvent(text=" one", token=5)], "it sends tokens, and was asked for text"),
    "a logprob": ([StreamEvent(text=" one", logprob=-0.5)], "it sends tokens, and was asked for text"),
    "alternatives": ([StreamEvent(text=" one", top_logprobs=(TopLogprob(1, -0.5),))], "it sends tokens, and was asked"),
    "another choice": ([TEXT, StreamEvent(text=" two", choice=1)], "choice 1"),
    "a negative choice": ([TEXT, StreamEvent(text=" two", choice=-1)], "choice -1"),
    "an empty event": ([TEXT, StreamEvent()], "an event is empty"),
    "an unknown finish reason": ([TEXT, StreamEvent(finish_reason="done")], "'done' is no finish reason"),
    "text after the finish": ([TEXT, FINISH, TEXT], "text follows the end of its choice"),
    "thoughts after the finish": ([TEXT, FINISH, StreamEvent(thinking="hm")], "text follows the end of its choice"),
    "two finishes": ([TEXT, FINISH, FINISH], "text follows the end of its choice"),
    "no finish": ([TEXT, END], "the end comes before the finish reason"),
    "only the end": ([END], "the end comes before the finish reason"),
    "the end without metrics": ([TEXT, FINISH, StreamEvent(done=True)], "the end has no metrics"),
    "two ends": ([TEXT, FINISH, END, END], "an event follows the end"),
    "text after the end": ([TEXT, FINISH, END, TEXT], "an event follows the end"),
    "text after an error": ([TEXT, StreamEvent(error=ErrorDetail()), TEXT], "an event follows the end"),
    "text that is also the end": ([StreamEvent(text=" one", done=True)], "an event is two things at once"),
    "metrics before the end": ([StreamEvent(text=" one", node_metrics=ReportedMetrics())], "what only the end"),
    "a finish by the orchestrator": ([TEXT, StreamEvent(waiting="for it")], "what only the end or the orchestrator"),
    "progress": ([StreamEvent(progress=Progress(3, 0, 3, 1))], "progress that was not asked for"),
    "prompt logprobs": ([StreamEvent(prompt_logprobs=PromptLogprobs(start=0, tokens=()))], "logprobs that were not"),
} | {
    f"{name} of {value:g}": (
        [TEXT, FINISH, StreamEvent(done=True, node_metrics=msgspec.structs.replace(METRICS, **{name: value}))],
        f"{name} is ",
    )
    for name, value in BEYOND.items()
}


@pytest.mark.parametrize("name", TEXT_LIES)
def test_lies_of_a_node_that_writes_text(name: str) -> None:
    events, problem = TEXT_LIES[name]
    check = TextStreamCheck()
    check.check(events[:-1])
    with pytest.raises(BadEvents, match=problem):
        check.check(events[-1:])


def test_what_a_node_that_writes_text_may_send() -> None:
    check = TextStreamCheck()
    check.check([StreamEvent(thinking="hm"), TEXT, StreamEvent(tool_calls=({"name": "look"},))])
    assert check.began
    check.check([StreamEvent(text="!", finish_reason="length"), END])
