"""What the stream of a decode node may be. Events are validated once, here, where they enter.

A node of another version, a broken proxy or a faulty machine may send anything. Every deviation from the protocol is a
failed leg: the request goes to another node, and what came before stays right.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import msgspec

from disaggregated_inference.api import (
    DecodeRequest,
    ModelInfo,
    Progress,
    PromptLogprobs,
    ReportedMetrics,
    StreamEvent,
    TopLogprob,
)
from disaggregated_inference.models import ModelTokenizer

_FINISH_REASONS = (None, "stop", "length")
_ABOVE_ZERO = 0.01  # a logprob may be rounded to slightly more than 0
_NUMBERS = (int, float)
_LARGEST = 1e15  # of a count, a time or a rate
_MAX_HELD = 64  # tokens without text: parts of characters that never end, which take ever longer to decode


class BadEvents(Exception):
    """The events of a stream break the protocol. `tainted`: earlier events of this attempt may be missing too."""

    def __init__(self, problem: str, *, tainted: bool = False) -> None:
        super().__init__(problem)
        self.tainted = tainted


class StreamCheck(ABC):
    """Of one attempt. `check` raises `BadEvents`."""

    def __init__(self) -> None:
        self.began = self._ended = False

    def check(self, events: Iterable[StreamEvent]) -> None:
        for event in events:
            self._check(event)

    def _check(self, event: StreamEvent) -> None:
        if self._ended:
            raise BadEvents("an event follows the end")
        if event.completion is not None or event.waiting or (event.node_metrics is not None and not event.done):
            raise BadEvents("an event has what only the end or the orchestrator sends")
        if _is_side_event(event):
            self._side_event(event)
        else:
            self.began = True
            self._output(event)

    def _side_event(self, event: StreamEvent) -> None:
        if event.progress:
            self._progress(event.progress)
        elif event.prompt_logprobs:
            self._prompt_logprobs(event.prompt_logprobs)
        else:
            self._ended = True
            if event.done:
                self._done(event.node_metrics)

    def _done(self, metrics: ReportedMetrics | None) -> None:
        if metrics is None:
            raise BadEvents("the end has no metrics")
        for name, value in zip(metrics.__struct_fields__, msgspec.structs.astuple(metrics), strict=True):
            if type(value) in _NUMBERS and not 0 <= value < _LARGEST and name != "seed":
                raise BadEvents(f"{name} is {value:g}")

    @abstractmethod
    def _output(self, event: StreamEvent) -> None: ...

    def _progress(self, progress: Progress) -> None:
        raise BadEvents("it reports progress that was not asked for")

    def _prompt_logprobs(self, piece: PromptLogprobs) -> None:
        raise BadEvents("it sends prompt logprobs that were not asked for")


class TextStreamCheck(StreamCheck):
    """Of a node that writes text: one choice, without token ids."""

    def __init__(self) -> None:
        super().__init__()
        self._finished = False

    def _output(self, event: StreamEvent) -> None:
        if event.token is not None or event.logprob is not None or event.top_logprobs:
            raise BadEvents("it sends tokens, and was asked for text")
        if event.choice or self._finished:
            raise BadEvents("text follows the end of its choice" if self._finished else f"choice {event.choice}")
        if not (event.text or event.thinking or event.tool_calls or event.finish_reason):
            raise BadEvents("an event is empty")
        _require_known(event.finish_reason)
        self._finished = event.finish_reason is not None

    def _done(self, metrics: ReportedMetrics | None) -> None:
        super()._done(metrics)
        if not self._finished:
            raise BadEvents("the end comes before the finish reason")


class TokenStreamCheck(StreamCheck):
    """Of a node that writes tokens. `written_text`: what earlier attempts brought of the text of `request.written`."""

    def __init__(
        self,
        request: DecodeRequest,
        model: ModelInfo | None,
        tokenizer: ModelTokenizer | None = None,
        written_text: str = "",
    ) -> None:
        super().__init__()
        self._request, self._prompt_tokens = request, len(request.tokens or ())
        self._vocabulary = (model.vocabulary if model else None) or 1 << 31
        self._numbers = _TokenNumbers(self._vocabulary, request.logprobs)
        eos = frozenset(model.eos_tokens) if model else frozenset()
        self._choices = [
            _ChoiceCheck(request, eos, _TextCheck(tokenizer, request, written_text) if tokenizer else None)
            for _ in range(request.n)
        ]
        self._first = self._choices[0]

    def check(self, events: Iterable[StreamEvent]) -> None:
        """Nearly every event is one more token of an answer, and nothing else."""
        for event in events:
            if self._ended or not (_is_plain_token(event) and self._takes(event)):
                self._check(event)

    def _takes(self, event: StreamEvent) -> bool:
        """The short way of a plain token: whether `_check` would let it pass. Then it is counted."""
        token, first = event.token, self._first
        if token is None or not 0 <= token < self._vocabulary or self._request.logprobs is not None:
            return False
        if first.finished or first.count + 1 >= first.limit or token in first.eos:
            return False
        if first.text and not first.text.takes(token, event.text):
            return False
        first.count += 1
        self.began = True
        return True

    def _output(self, event: StreamEvent) -> None:
        if event.token is None:
            raise BadEvents("an event is neither a token nor the end")
        if event.thinking or event.tool_calls:
            raise BadEvents("a token has tool calls or thoughts")
        if not 0 <= event.choice < len(self._choices):
            raise BadEvents(f"choice {event.choice} of {len(self._choices)}")
        self._numbers.check(event)
        self._choices[event.choice].take(event.token, event.text, event.finish_reason)

    def _progress(self, progress: Progress) -> None:
        if not self._request.progress or self.began:
            raise BadEvents("it reports progress that was not asked for, or after the first token")
        if not 0 <= progress.cache <= progress.processed <= progress.total == self._prompt_tokens:
            raise BadEvents(f"its progress is {progress.processed} of {progress.total} tokens")
        if not 0 <= progress.time_ms < _LARGEST:
            raise BadEvents(f"its progress took {progress.time_ms} ms")

    def _prompt_logprobs(self, piece: PromptLogprobs) -> None:
        wanted = self._request.prompt_logprobs
        if wanted is None or self.began or piece.start < 0:
            raise BadEvents("it sends prompt logprobs that were not asked for, or after the first token")
        for at, token in enumerate(piece.tokens, piece.start):
            if (token.logprob is None) != (at == 0):
                raise BadEvents(f"token {at} of the prompt has {'a' if at == 0 else 'no'} logprob")
            self._numbers.check_logprobs(token.logprob or 0.0, token.top_logprobs, wanted)

    def _done(self, metrics: ReportedMetrics | None) -> None:
        super()._done(metrics)
        assert metrics
        written = sum(choice.count for choice in self._choices)
        if not all(choice.finished for choice in self._choices):
            raise BadEvents("the end comes before the finish reason of a choice")
        if metrics.completion_tokens != written:
            raise BadEvents(f"it counts {metrics.completion_tokens} tokens, and sent {written}", tainted=True)
        if max(metrics.cached_tokens, metrics.prefill_cached_tokens) > self._prompt_tokens:
            raise BadEvents(f"{metrics.cached_tokens} tokens of {self._prompt_tokens} were cached")


class _TokenNumbers:
    """Token ids and logprobs."""

    def __init__(self, vocabulary: int, alternatives: int | None) -> None:
        self._vocabulary, self._alternatives = vocabulary, alternatives

    def check(self, event: StreamEvent) -> None:
        assert event.token is not None
        if not 0 <= event.token < self._vocabulary:
            raise BadEvents(f"token {event.token} is not in the vocabulary of {self._vocabulary} tokens")
        if self._alternatives is None:
            if event.logprob is not None or event.top_logprobs:
                raise BadEvents("a token has logprobs that were not asked for")
        elif event.logprob is None:
            raise BadEvents("a token has no logprob")
        else:
            self.check_logprobs(event.logprob, event.top_logprobs, self._alternatives)

    def check_logprobs(self, logprob: float, top: Sequence[TopLogprob], alternatives: int) -> None:
        if len(top) > alternatives:
            raise BadEvents(f"a token has {len(top)} alternatives, not {alternatives}")
        if not all(0 <= other.token < self._vocabulary for other in top):
            raise BadEvents(f"an alternative is not in the vocabulary of {self._vocabulary} tokens")
        for value in (logprob, *(other.logprob for other in top)):
            if not -math.inf < value < _ABOVE_ZERO:
                raise BadEvents(f"a logprob is {value:g}")


class _ChoiceCheck:
    """The tokens of one choice, in this attempt."""

    def __init__(self, request: DecodeRequest, eos: frozenset[int], text: "_TextCheck | None") -> None:
        self.count, self.finished = 0, False
        self.limit, self.text = request.max_tokens or 1 << 31, text
        self._free = request.format is None  # else a grammar ends the choice
        self._stops = bool(request.stop_strings)
        self.eos = eos if not request.ignore_eos and self._free else frozenset[int]()

    def take(self, token: int, text: str, finish_reason: str | None) -> None:
        self.count += 1
        if self.finished or self.count > self.limit:
            raise BadEvents("a token follows the end of its choice")
        _require_known(finish_reason)
        self.finished = finish_reason is not None
        self._require_reason(token, finish_reason)
        if self.text and self.text.is_decodable:
            by_string = self._free and finish_reason == "stop" and token not in self.eos
            self.text.take(token, text, finish_reason, by_string=by_string)

    def _require_reason(self, token: int, finish_reason: str | None) -> None:
        """An answer that ends too early is a wrong answer."""
        if finish_reason == "length" and self.count < self.limit:
            raise BadEvents(f"it ended by length after {self.count} of {self.limit} tokens", tainted=True)
        if finish_reason is None and (self.count == self.limit or token in self.eos):
            raise BadEvents("a choice goes on after its last token", tainted=self.count == self.limit)
        if finish_reason == "stop" and self._free and not self._stops and token not in self.eos:
            raise BadEvents(f"it stopped at token {token}, which ends no answer")


class _TextCheck:
    """The text of one choice must be that of its tokens. A node holds back what may become a stop string."""

    def __init__(self, tokenizer: ModelTokenizer, request: DecodeRequest, written_text: str) -> None:
        self._stream, self._stops = tokenizer.stream(), request.stop_strings
        written = "".join(map(self._stream.push, request.written))
        if not written.startswith(written_text):  # the caller's own books; a node is not to blame
            written_text = written
        self._owed = written.removeprefix(written_text)

    @property
    def is_decodable(self) -> bool:
        return self._stream.held < _MAX_HELD

    def takes(self, token: int, text: str) -> bool:
        """Whether this is known to be the whole text of a token, with nothing held back before it or after it. Then
        there is nothing to remember; else the token was not taken."""
        return not self._owed and self._stream.knows(token, text)

    def take(self, token: int, text: str, finish_reason: str | None, *, by_string: bool = False) -> None:
        """`by_string`: only a stop string can have ended the choice."""
        self._owed += self._stream.push(token)
        if finish_reason:
            self._owed += self._stream.flush()
        if not self._owed.startswith(text):
            raise BadEvents(f"the text {text[:40]!r} is not that of token {token}")
        self._owed = self._owed[len(text) :]
        if (self._owed or by_string) and not self._may_be_held_back(finish_reason):
            raise BadEvents(f"the text of token {token} is missing, or no stop string ends it")

    def _may_be_held_back(self, finish_reason: str | None) -> bool:
        if finish_reason is None:
            return len(self._owed) < max(map(len, self._stops), default=0)
        return finish_reason == "stop" and self._owed.startswith(self._stops)


def _require_known(finish_reason: str | None) -> None:
    if finish_reason not in _FINISH_REASONS:
        raise BadEvents(f"{finish_reason[:40]!r} is no finish reason" if finish_reason else "no finish reason")


def _is_plain_token(event: StreamEvent) -> bool:
    """Of the first choice, in the middle of an answer: only `token` and `text` differ from their defaults."""
    return not (
        event.choice
        or event.logprob is not None
        or event.top_logprobs
        or event.finish_reason is not None
        or event.thinking
        or event.tool_calls
        or event.waiting
        or event.done
        or event.progress is not None
        or event.prompt_logprobs is not None
        or event.completion is not None
        or event.node_metrics is not None
        or event.error is not None
    )


def _is_side_event(event: StreamEvent) -> bool:
    """Progress, prompt logprobs, the end or an error: one of them, and nothing else."""
    kinds = (event.progress is not None, event.prompt_logprobs is not None, event.done, event.error is not None)
    if not any(kinds):
        return False
    bare = msgspec.structs.replace(
        event, progress=None, prompt_logprobs=None, done=False, error=None, node_metrics=None
    )
    if sum(kinds) > 1 or bare != _EMPTY:
        raise BadEvents("an event is two things at once")
    return True


_EMPTY = StreamEvent()
