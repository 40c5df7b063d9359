"""Whole answers by vLLM itself: for `POST /generate` of a prefill node, and for when no decode node is left.

The events are those of every node: a token id, its text, its finish reason. Text and stop strings come from this
project's tokenizer, as on the nodes that other engines run on.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing

from disaggregated_inference.api import DEFAULT_NODE_TOKENS, DecodeMetrics, GenerationParams
from disaggregated_inference.errors import (
    BadRequest,
    Cancelled,
    ContextTooLong,
    DeadlineExceeded,
    DisaggError,
    EngineFailed,
    NodeBusy,
    TokensRefused,
)
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.node import Admitted, Choice, Generation, RateMeter, RequestInfo, SampledToken
from disaggregated_inference.vllm_node.client import ChoicePiece, CompletionPiece, VllmClient
from disaggregated_inference.vllm_node.sampling import completion_body, logprobs_of, require_possible

OnEnd = Callable[[Generation, BaseException | None], None]

_MEASURED_TURNS = 5  # at most, and at least two
_MEASURED_PROMPTS = (64, 512)  # tokens, for the prefill rates at the start
_AT_ONCE_S = 0.001
_MEASURED_TOKENS = 33  # of the answer that shows the decode rate at the start


class WholeAnswers:
    """On the event loop. `name` gives vLLM's own name of the model; `window` the tokens of prompt and completion."""

    def __init__(
        self,
        client: VllmClient,
        model: ModelFiles,
        name: Callable[[], str],
        window: int = 0,
        slots: int = 64,
        queue: int = 256,
    ) -> None:
        self._client, self._model, self._name = client, model, name
        self.window = min(window or model.spec.context_window, model.spec.context_window)
        self.slots, self._queue = slots, queue
        self.rates = RateMeter()
        self.written_tokens = 0  # of finished answers
        self.on_end: OnEnd = lambda generation, error: None
        self._open: dict[Generation, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def running(self) -> int:
        """Choices of open answers: vLLM has more than `slots` of them wait."""
        return min(self.slots, sum(generation.params.n for generation in list(self._open)))

    def start(
        self, tokens: list[int], params: GenerationParams, info: RequestInfo = RequestInfo(), heartbeat_s: float = 0.1
    ) -> Generation:
        """Its first item is `Admitted`, when vLLM has taken the request."""
        self._require_valid(tokens, params)
        if len(self._open) >= self.slots + self._queue:
            raise NodeBusy(f"this vLLM already has {len(self._open)} requests: try again later")
        params = params.seeded()
        metrics = DecodeMetrics(len(tokens), seed=params.seed if params.temperature else None)
        generation = Generation(params, metrics, info, heartbeat_s)
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(self._run(generation, tokens))
        self._open[generation] = task

        def stop(error: DisaggError) -> None:
            loop.call_soon_threadsafe(task.cancel)

        generation.on_cancel(stop)
        return generation

    def _require_valid(self, tokens: Sequence[int], params: GenerationParams) -> None:
        require_possible(params)
        spec = self._model.spec
        if not tokens:
            raise BadRequest("the prompt is empty")
        if not 0 <= min(tokens) <= max(tokens) < spec.vocabulary:
            raise TokensRefused(f"token ids must be between 0 and {spec.vocabulary - 1}")
        params.require_vocabulary(spec.vocabulary)
        needed = len(tokens) + (params.max_tokens or DEFAULT_NODE_TOKENS)
        if needed > self.window:
            raise ContextTooLong(needed, self.window, prompt_tokens=len(tokens))

    async def _run(self, generation: Generation, tokens: list[int]) -> None:
        error: BaseException | None = None
        answer = _OpenAnswer(generation, self._model, tokens)
        try:
            async with asyncio.timeout(max(0.0, generation.deadline - time.monotonic())):
                await self._generate(answer)
        except asyncio.CancelledError:
            error = generation.cancel_error or Cancelled("this node is stopping")
        except TimeoutError:
            limit_s = generation.params.timeout_s
            error = DeadlineExceeded(
                f"the request was not done within {limit_s:g} s: lower max_tokens, or raise timeout_s"
            )
        except DisaggError as failed:
            error = failed
        except Exception as failed:
            error = EngineFailed(f"vLLM's response cannot be used: {type(failed).__name__}: {failed}")
        finally:
            self._finish(answer, error)

    async def _generate(self, answer: "_OpenAnswer") -> None:
        params, eos = answer.generation.params, self._model.spec.eos_tokens
        body = completion_body(params, self._name(), answer.prompt, answer.generation.max_tokens, eos)
        async with aclosing(self._client.complete(body)) as pieces:
            async for piece in pieces:
                answer.take(piece)
                if answer.stopped_early:
                    return

    def _finish(self, answer: "_OpenAnswer", error: BaseException | None) -> None:
        generation, metrics = answer.generation, answer.generation.metrics
        self._open.pop(generation, None)
        error = error or answer.problem()
        answer.complete_metrics()
        self.written_tokens += metrics.completion_tokens
        choices = generation.params.n
        batch = self.running + choices  # the others wrote at the same speed
        if not error:
            self.rates.record(batch, answer.later_tokens * batch // choices, metrics.decode_time)
        generation.put(error)
        self.on_end(generation, error)

    async def measure(self, prefill_rates: RateMeter) -> None:
        """The rates of this machine, so that the router plans the first requests with them. The first answer warms
        up; no prompt is in vLLM's prefix cache."""
        tokens = [index % 50 for index in range(_MEASURED_PROMPTS[0])]
        for turn in range(_MEASURED_TURNS):
            if turn > 1 and self.rates.stats():  # tokens that come all at once have no speed
                break
            self.rates = RateMeter()
            await self._measured(tokens, min(_MEASURED_TOKENS, self.window - len(tokens)))
        for length in _MEASURED_PROMPTS:
            if length < self.window:
                seconds = await self._measured([index % 50 for index in range(length)], 1)
                prefill_rates.record(length, length, seconds)
        self.written_tokens = 0

    async def _measured(self, tokens: list[int], max_tokens: int) -> float:
        """Seconds to the first token."""
        salt = secrets.token_hex(8)
        generation = self.start(tokens, GenerationParams(max_tokens=max_tokens, ignore_eos=True, cache_salt=salt))
        await self._open[generation]
        for _ in generation:
            """Raises what went wrong."""
        return generation.metrics.prefill_time

    def cancel_all(self) -> None:
        for generation in list(self._open):
            generation.cancel(Cancelled("this node is stopping"))


class _OpenAnswer:
    """One request while vLLM writes."""

    def __init__(self, generation: Generation, model: ModelFiles, prompt: list[int]) -> None:
        self.generation, self.prompt = generation, prompt
        numbers, eos = range(generation.params.n), model.spec.eos_tokens
        self._choices = [Choice(generation, number, prompt, model.tokenizer, eos, None) for number in numbers]
        self._reasons: dict[int, str] = {}  # vLLM's own finish reasons
        self._sent_at, self._first_at, self._admitted = time.perf_counter(), 0.0, False
        self.later_tokens = 0  # without those that came at once with the first: they show no speed
        generation.metrics.prompt_tokens_recomputed = len(prompt)

    @property
    def stopped_early(self) -> bool:
        """By stop strings, which vLLM does not know: it would go on writing."""
        return len(self._reasons) < len(self._choices) and all(choice.finish_reason for choice in self._choices)

    def take(self, piece: CompletionPiece) -> None:
        if not self._admitted:
            self._admitted = True
            self.generation.put(Admitted())
            self.generation.report_progress(0)
        for part in piece.choices:
            self._take_tokens(part)
        if piece.usage and piece.usage.prompt_tokens_details:
            metrics = self.generation.metrics
            metrics.cached_tokens = piece.usage.prompt_tokens_details.cached_tokens or 0
            metrics.prompt_tokens_recomputed = len(self.prompt) - metrics.cached_tokens

    def _take_tokens(self, part: ChoicePiece) -> None:
        choice = self._choices[part.index]
        if part.finish_reason:
            self._reasons[part.index] = part.finish_reason
        for at, token in enumerate(part.token_ids or ()):
            if choice.finish_reason:  # by a stop string, a moment ago
                return
            now = time.perf_counter()
            if not self._first_at:
                self._first_at = now
                self.generation.report_progress(len(self.prompt))
            self.later_tokens += now - self._first_at > _AT_ONCE_S
            choice.add(SampledToken(token, *logprobs_of(part, at, self.generation.params.logprobs)))
            if choice.error:
                raise choice.error

    def problem(self) -> EngineFailed | None:
        """An answer that ends too early is a wrong answer."""
        if all(choice.finish_reason for choice in self._choices):
            return None
        reasons = ", ".join(self._reasons.values()) or "none"
        return EngineFailed(f"vLLM ended its answer too early: its finish reason is {reasons}")

    def complete_metrics(self) -> None:
        metrics, now = self.generation.metrics, time.perf_counter()
        metrics.total_time = now - self.generation.arrived_at
        metrics.admission_time = max(0.0, self._sent_at - self.generation.created_at)
        if self._first_at:
            metrics.first_token_time = self._first_at - self.generation.arrived_at
            metrics.prefill_time, metrics.decode_time = self._first_at - self._sent_at, now - self._first_at
            later = max(0, metrics.completion_tokens - len(self._choices))
            metrics.decode_speed = later / metrics.decode_time if metrics.decode_time else 0.0
        reasons = (choice.finish_reason for choice in self._choices if choice.finish_reason)
        metrics.finish_reason = next(reasons, "error")
