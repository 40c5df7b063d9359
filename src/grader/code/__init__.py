"""Code of students, read and never run: facts from Python's syntax tree and from R's tokens."""

from functools import lru_cache

from grader.code.facts import CodeFacts, Fact, Use
from grader.code.plain_code import plain_code
from grader.code.python import python_facts, python_names, without_magics
from grader.code.r import r_facts
from grader.code.r_tokens import RToken, r_tokens
from grader.notebook import Language

__all__ = [
    "CodeFacts",
    "Fact",
    "RToken",
    "Use",
    "code_facts",
    "code_names",
    "plain_code",
    "python_facts",
    "python_names",
    "r_facts",
    "r_tokens",
    "without_magics",
]


@lru_cache(maxsize=4096)
def code_facts(source: str, language: Language) -> CodeFacts:
    """Facts of one cell; of other languages none."""
    if language == "other":
        return CodeFacts(problem="The notebook's language is neither Python nor R.")
    return r_facts(source) if language == "r" else python_facts(source)


def code_names(source: str, language: Language) -> frozenset[str]:
    """All names that the code uses. Of other languages, and of code that does not parse, none."""
    if language == "r":
        return frozenset(token.text for token in r_tokens(source) if token.kind == "name")
    return python_names(source) if language == "python" else frozenset()
