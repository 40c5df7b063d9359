"""Continuous batching: every decode step gives each running choice one token, and choices join and leave between steps.

Runs on the scheduler's thread. A greedy batch is stepped ahead: the next step is given to the device before the tokens
of the last one are read, so the device does not wait for Python. A choice that finished meanwhile has one token too
many computed, which is dropped.
"""

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from disaggregated_inference.engines import Engine, Logits, Tokens
from disaggregated_inference.node.choice import Choice
from disaggregated_inference.node.rates import RateMeter

log = logging.getLogger(__name__)


class _InFlight(NamedTuple):
    """Tokens that the device is still computing."""

    choices: list[Choice]
    tokens: Tokens


class DecodeBatch:
    """`on_finish` is called for each choice that leaves the batch, with its error."""

    def __init__(self) -> None:
        self.on_finish: Callable[[Choice, BaseException | None], None] = lambda choice, error: None
        self.running: list[Choice] = []
        self._in_flight: _InFlight | None = None
        self.rates = RateMeter()
        self.steps = 0
        self.step_s = 0.0  # duration of the last step
        self._busy_s = self._share_s = 0.0  # of all steps; each divided by its choices

    def join(self, choice: Choice) -> None:
        choice.joined = (self._busy_s, self._share_s)
        self.running.append(choice)

    def step(self, engine: Engine) -> None:
        """One token for each running choice."""
        try:
            self._remove_finished()
            if self.running:
                self._step(engine)
                self._remove_finished()
        except Exception as error:
            log.exception("a decode step failed")
            self._fail_all(error)

    def _step(self, engine: Engine) -> None:
        started, choices = time.perf_counter(), self._next_choices()
        if not choices:
            return
        before = self._in_flight
        inputs = before.tokens if before else [choice.tokens[-1] for choice in choices]
        sequences = [choice.sequence for choice in choices if choice.sequence]
        logits = engine.step(sequences, inputs)
        self._in_flight = None
        if all(choice.greedy for choice in choices):
            self._in_flight = _InFlight(choices, logits.greedy())
        self._deliver(before)
        if not self._in_flight:
            self._sample(choices, logits)
        self.steps += 1
        self.step_s = time.perf_counter() - started
        self.rates.record(len(choices), len(choices), self.step_s)
        self._busy_s += self.step_s
        self._share_s += self.step_s / len(choices)

    def _next_choices(self) -> list[Choice]:
        """Tokens in flight are fed unread only to exactly the choices that they belong to. A choice whose last token
        is in flight is not stepped again."""
        in_flight = set(self._in_flight.choices) if self._in_flight else set()
        choices = [choice for choice in self.running if choice not in in_flight or choice.tokens_left() > 1]
        if self._in_flight and self._in_flight.choices != choices:
            self._deliver(self._in_flight)
            self._in_flight = None
            self._remove_finished()
            choices = list(self.running)
        return choices

    def _sample(self, choices: list[Choice], logits: Logits) -> None:
        """Where a choice needs its logits, all tokens are chosen before the next step."""
        tokens = logits.greedy().tolist()
        sampled = [at for at, choice in enumerate(choices) if not choice.greedy]
        rows = dict(zip(sampled, logits.numpy(sampled), strict=True))
        for at, choice in enumerate(choices):
            choice.sample(rows[at]) if at in rows else choice.add_greedy(tokens[at])

    def _deliver(self, in_flight: _InFlight | None) -> None:
        if in_flight:
            for choice, token in zip(in_flight.choices, in_flight.tokens.tolist(), strict=True):
                if not choice.finished:
                    choice.add_greedy(token)

    def _remove_finished(self) -> None:
        finished = [choice for choice in self.running if choice.finished]
        if finished:
            self.running = [choice for choice in self.running if not choice.finished]
            self._in_flight = self._in_flight if self.running else None
            for choice in finished:
                self._finish(choice, choice.error or choice.generation.cancel_error)

    def _fail_all(self, error: Exception) -> None:
        failed, self.running, self._in_flight = self.running, [], None
        for choice in failed:
            self._finish(choice, error)

    def _finish(self, choice: Choice, error: BaseException | None) -> None:
        """An exception here must not fail other requests."""
        busy_s, share_s = self._busy_s - choice.joined[0], self._share_s - choice.joined[1]
        choice.generation.metrics.batch_size = busy_s / share_s if share_s else 0.0
        try:
            self.on_finish(choice, error)
        except Exception:
            log.exception("cannot finish a choice")
