"""One choice of an answer: which token comes next, what text that makes, and when it is over."""

from collections.abc import Sequence as Items

from disaggregated_inference.engines import Sequence
from disaggregated_inference.models.tokenizer import ModelTokenizer
from disaggregated_inference.node.generation import Generation, TokenOutput
from disaggregated_inference.node.sampling import Row, SampledToken, Sampler
from disaggregated_inference.node.stop_strings import StopStrings
from disaggregated_inference.node.structured_output import GrammarMatcher


class Choice:
    """`sequence` holds the prompt and what was fed; `tokens` are those of the answer, the last one not yet fed."""

    def __init__(
        self,
        answer: Generation,
        number: int,
        prompt: Items[int],
        tokenizer: ModelTokenizer,
        eos_tokens: tuple[int, ...],
        grammar: GrammarMatcher | None,
    ) -> None:
        rules = answer.rules
        self.answer, self.number = answer, number
        self.sampler = Sampler(rules.sampling, list(prompt), eos_tokens, rules.choice + number)
        self.sequence: Sequence | None = None
        self.tokens: list[int] = []
        self.finish: str | None = None
        self.error: BaseException | None = None
        self.plain = rules.sampling.plain and grammar is None
        self._grammar, self._eos = grammar, eos_tokens
        self._text, self._stops = tokenizer.stream(), StopStrings(rules.sampling.stop)
        for token in rules.written:  # as they were written: what counts from a certain token on counts from there
            self.sampler.note(token)
            self._show(token)
        if grammar:
            grammar.replay(rules.written)

    @property
    def over(self) -> bool:
        return self.finish is not None or self.error is not None or self.answer.cancelled

    def left(self) -> int:
        """Tokens it may still write."""
        return self.answer.rules.max_tokens - len(self.tokens)

    def choose(self, row: Row) -> None:
        """By this request's own rules, from the logits of its last position. What goes wrong is this choice's alone."""
        try:
            self._take(self.sampler.choose(row, self._grammar.allow() if self._grammar else None))
        except Exception as error:
            self.error = error

    def take(self, token: int) -> None:
        """The device's own choice."""
        try:
            self._take(SampledToken(token))
        except Exception as error:
            self.error = error

    def _take(self, chosen: SampledToken) -> None:
        """The next token is known: it becomes text, and may be the last."""
        token, rules = chosen.token, self.answer.rules
        self.tokens.append(token)
        self.sampler.note(token)
        ended = token in self._eos and not rules.sampling.ignore_eos
        if self._grammar:  # it knows when the answer is complete: only then is an end token the end
            self._grammar.accept(token)
            ended = self._grammar.finished
        text = self._show(token)
        if ended or self._stops.found is not None:
            self.finish = "stop"
        elif not self.left():
            self.finish = "length"
        if self.finish:
            text += self._rest()
        self.answer.metrics.completion_tokens += 1
        self.answer.put(TokenOutput(token, text, self.number, chosen.logprob, chosen.top, self.finish))

    def _show(self, token: int) -> str:
        return self._stops.push(self._text.push(token), self._stops_count)

    def _rest(self) -> str:
        """No more will come: what was held back, which may be the end of a stop string."""
        text = self._stops.push(self._text.flush(), self._stops_count) + self._stops.flush()
        if self._stops.found is not None:
            self.finish = "stop"
        return text

    @property
    def _stops_count(self) -> bool:
        """Stop strings, too, count from `min_tokens` on: those that end there."""
        return self.sampler.written >= self.answer.rules.sampling.min_tokens
