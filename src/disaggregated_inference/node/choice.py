"""One choice of a generation: its next token, the text of its tokens, and when it is finished."""

from collections.abc import Sequence as Items

from disaggregated_inference.api import ChoiceTokenEvent, TokenEvent
from disaggregated_inference.engines import Sequence
from disaggregated_inference.models import ModelTokenizer
from disaggregated_inference.node.generation import Generation
from disaggregated_inference.node.sampler import LogitRow, SampledToken, Sampler
from disaggregated_inference.node.stop_strings import StopStrings
from disaggregated_inference.node.structured_output import GrammarMatcher


class Choice:
    """`sequence` holds the KV of the prompt and of `tokens`, the completion, without its last token."""

    def __init__(
        self,
        generation: Generation,
        number: int,
        prompt: Items[int],
        tokenizer: ModelTokenizer,
        eos_tokens: tuple[int, ...],
        grammar: GrammarMatcher | None,
    ) -> None:
        params = generation.params
        self.generation, self.number = generation, number
        self.sampler = Sampler(params, list(prompt), eos_tokens, params.choice + number)
        self.sequence: Sequence | None = None
        self.joined = (0.0, 0.0)  # the clocks of the batch at that moment
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        self.greedy = params.greedy and grammar is None
        self._grammar, self._eos = grammar, eos_tokens
        self._text, self._stops = tokenizer.stream(), StopStrings(params.stop_strings)
        for token in params.written:  # from another node: penalties, stop strings and min_tokens count them
            self.sampler.note(token)
            self._text_of(token)
        if grammar:
            grammar.replay(params.written)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None or self.generation.cancel_error is not None

    def tokens_left(self) -> int:
        return self.generation.max_tokens - len(self.tokens)

    def sample(self, row: LogitRow) -> None:
        """The next token from the logits, by the request's sampling params. An error fails this choice alone."""
        try:
            self._add(self.sampler.choose(row, self._grammar.allow() if self._grammar else None))
        except Exception as error:
            self.error = error

    def add_greedy(self, token: int) -> None:
        """A token that the device chose."""
        self.add(SampledToken(token))

    def add(self, sampled: SampledToken) -> None:
        """A token that an engine with a sampler of its own chose."""
        try:
            self._add(sampled)
        except Exception as error:
            self.error = error

    def _add(self, sampled: SampledToken) -> None:
        token, params = sampled.token, self.generation.params
        self.tokens.append(token)
        self.sampler.note(token)
        ended = token in self._eos and not params.ignore_eos
        if self._grammar:  # an end token ends the completion only where the grammar is complete
            self._grammar.accept(token)
            ended = self._grammar.finished
        text = self._text_of(token)
        if ended or self._stops.found is not None:
            self.finish_reason = "stop"
        elif not self.tokens_left():
            self.finish_reason = "length"
        if self.finish_reason:
            text += self._last_text()
        self.generation.metrics.completion_tokens += 1
        event = ChoiceTokenEvent if params.n > 1 else TokenEvent
        self.generation.put(
            event(
                token=token,
                text=text,
                choice=self.number,
                logprob=sampled.logprob,
                top_logprobs=sampled.top_logprobs,
                finish_reason=self.finish_reason,
            )
        )

    def _text_of(self, token: int) -> str:
        return self._stops.push(self._text.push(token), self._stops_count)

    def _last_text(self) -> str:
        """The text that was held back; a stop string may end in it."""
        text = self._stops.push(self._text.flush(), self._stops_count) + self._stops.flush()
        if self._stops.found is not None:
            self.finish_reason = "stop"
        return text

    @property
    def _stops_count(self) -> bool:
        """A stop string counts where its end is at `min_tokens` or later."""
        return self.sampler.written >= self.generation.params.min_tokens
