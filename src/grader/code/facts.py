"""What code does, found by parsing: names assigned, functions defined and called, columns used, values shown."""

from typing import Literal

import msgspec

Fact = Literal["assign", "define", "call", "column", "show"]


class Use(msgspec.Struct, frozen=True):
    """One fact with its place. `show`: the cell's output displays this variable."""

    fact: Fact
    name: str
    line: int
    quote: str = ""


class CodeFacts(msgspec.Struct, frozen=True):
    """Facts of one cell. `problem` is set when the code does not parse: then there are no facts."""

    uses: tuple[Use, ...] = ()
    problem: str = ""
    problem_line: int = 0

    def find(self, fact: Fact, name: str) -> Use | None:
        return next((use for use in self.uses if use.fact == fact and use.name == name), None)
