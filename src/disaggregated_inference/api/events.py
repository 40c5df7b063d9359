"""The events of a stream: tokens, progress, the end. The orchestrator passes the tokens of a node on as they are."""

from typing import Any

import msgspec

from disaggregated_inference.api.completion import Completion
from disaggregated_inference.api.responses import (
    DecodeMetrics,
    ErrorDetail,
    PromptLogprobs,
    ReportedMetrics,
    TextMetrics,
    TopLogprob,
    Usage,
)


class Progress(msgspec.Struct, frozen=True):
    """How much of a prompt the decode node has. The names are llama.cpp's: its clients show bars for them."""

    total: int
    cache: int  # tokens that it held before the request came
    processed: int  # tokens that it has now, those of `cache` included
    time_ms: int


class Delta(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a client's stream brings: the next piece of text of one choice. The last delta has the completion."""

    token: int | None = None
    text: str = ""
    choice: int = msgspec.field(default=0, name="index")
    logprob: float | None = None
    top_logprobs: tuple[TopLogprob, ...] = ()
    finish_reason: str | None = None
    thinking: str = ""  # of a text node, whose engine parses reasoning and tool calls itself
    tool_calls: tuple[dict[str, Any], ...] = ()
    progress: Progress | None = None  # before the first token, if the request asked for it; then nothing else is set
    prompt_logprobs: PromptLogprobs | None = None  # the same
    waiting: str = ""  # at any time: no decode node is there, and the request waits for one; never sent by a node
    completion: Completion | None = msgspec.field(default=None, name="request_metrics")  # never sent by a node

    @property
    def metrics(self) -> dict[str, Any] | None:
        """At the end: the whole answer with its metrics, as `generate` returns it."""
        return self.completion.answer() if self.completion else None


class StreamEvent(Delta, frozen=True, omit_defaults=True, gc=False):
    """One event of a decode node's stream, as the orchestrator reads it: a token, which goes to the client as it is,
    progress, the end with its metrics, or an error."""

    done: bool = False
    node_metrics: ReportedMetrics | None = msgspec.field(default=None, name="metrics")
    error: ErrorDetail | None = None


class TokenEvent(StreamEvent, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A token, as a node writes it: these fields are always sent."""

    token: int
    text: str


class ChoiceTokenEvent(TokenEvent, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The same, of a request with several choices."""

    choice: int = msgspec.field(name="index")


class TextEvent(StreamEvent, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A piece of text from a node whose engine does not show token ids."""

    token: None
    text: str


class DoneEvent(StreamEvent, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The last event of a stream, as a node writes it: `done` is always sent. The orchestrator reads the metrics of
    either kind of node as `ReportedMetrics`, whose fields are theirs (tests/api/test_structs.py)."""

    done: bool
    usage: Usage
    node_metrics: DecodeMetrics | TextMetrics = msgspec.field(name="metrics")  # type: ignore[assignment]
