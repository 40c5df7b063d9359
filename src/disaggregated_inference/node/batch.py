"""All answers that are being written, one token each at a time. Runs on the engine's thread.

Greedy answers are stepped ahead: the next step is given to the device before the tokens of the last one are read, so
the device does not wait for Python. Who is over by then has one token too many computed, which nobody sees.
"""

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from disaggregated_inference.engines import Engine, Logits, Tokens
from disaggregated_inference.node.choice import Choice
from disaggregated_inference.node.rates import RateMeter

log = logging.getLogger(__name__)


class _Flight(NamedTuple):
    """Tokens that the device is still choosing, and for whom."""

    members: list[Choice]
    tokens: Tokens


class DecodeBatch:
    def __init__(self, engine: Engine, done: Callable[[Choice, BaseException | None], None]) -> None:
        self._engine, self._done = engine, done
        self.members: list[Choice] = []
        self._flight: _Flight | None = None
        self.rates = RateMeter()
        self.steps = 0
        self.step_s = 0.0  # of the last one

    def join(self, choice: Choice) -> None:
        self.members.append(choice)

    def step(self) -> None:
        """One token for everyone."""
        try:
            self._leave()
            if self.members:
                self._step()
                self._leave()
        except Exception as error:
            log.exception("a decode step failed")
            self._fail(error)

    def _step(self) -> None:
        started, members = time.perf_counter(), self._due()
        if not members:
            return
        before = self._flight
        inputs = before.tokens if before else [choice.tokens[-1] for choice in members]
        logits = self._engine.step([choice.sequence for choice in members if choice.sequence], inputs)
        self._flight = None
        if all(choice.plain for choice in members):
            self._flight = _Flight(members, logits.greedy())
        self._settle(before)
        if not self._flight:
            self._choose(members, logits)
        self.steps += 1
        self.step_s = time.perf_counter() - started
        self.rates.note(len(members), len(members), self.step_s)

    def _due(self) -> list[Choice]:
        """Who is stepped now. Tokens in flight are fed unread only to the very batch that they are for; who gets its
        last one from there is not stepped again."""
        flying = set(self._flight.members) if self._flight else set()
        due = [choice for choice in self.members if choice not in flying or choice.left() > 1]
        if self._flight and self._flight.members != due:
            self._settle(self._flight)
            self._flight = None
            self._leave()
            due = list(self.members)
        return due

    def _choose(self, members: list[Choice], logits: Logits) -> None:
        """Where someone has rules of their own, everyone's tokens are chosen before the next step."""
        tokens = logits.greedy().tolist()
        special = [at for at, choice in enumerate(members) if not choice.plain]
        rows = dict(zip(special, logits.numpy(special), strict=True))
        for at, choice in enumerate(members):
            choice.choose(rows[at]) if at in rows else choice.take(tokens[at])

    def _settle(self, flight: _Flight | None) -> None:
        if flight:
            for choice, token in zip(flight.members, flight.tokens.tolist(), strict=True):
                if not choice.over:
                    choice.take(token)

    def _leave(self) -> None:
        """Those who are over go. What is in flight for them is nobody's."""
        over = [choice for choice in self.members if choice.over]
        if over:
            self.members = [choice for choice in self.members if not choice.over]
            self._flight = self._flight if self.members else None
            for choice in over:
                self._tell(choice, choice.error or choice.answer.gave_up)

    def _fail(self, error: Exception) -> None:
        failed, self.members, self._flight = self.members, [], None
        for choice in failed:
            self._tell(choice, error)

    def _tell(self, choice: Choice, error: BaseException | None) -> None:
        """One request's end must not become another's."""
        try:
            self._done(choice, error)
        except Exception:
            log.exception("an answer could not be ended")
