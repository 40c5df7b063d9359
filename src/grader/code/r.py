"""Facts of R code, from its tokens. Comments and strings are no names; `if (FALSE)` blocks do not count."""

from collections.abc import Iterator

import msgspec

from grader.code.facts import CodeFacts, Fact, Use
from grader.code.r_tokens import RToken, partners, r_tokens

_LEFT = ("<-", "<<-", "=", ":=")
_RIGHT = ("->", "->>")
_NO_CALLS = frozenset(["if", "for", "while", "function", "repeat", "switch", "return", "in", "else"])
# Functions of dplyr, tidyr and ggplot2 whose bare names are columns.
_COLUMN_VERBS = frozenset(
    [
        "mutate",
        "transmute",
        "summarise",
        "summarize",
        "select",
        "filter",
        "arrange",
        "group_by",
        "rename",
        "count",
        "distinct",
        "pull",
        "slice_max",
        "slice_min",
        "aes",
        "pivot_longer",
        "pivot_wider",
        "data.frame",
        "tibble",
        "across",
        "unite",
        "separate",
        "drop_na",
        "subset",
        "with",
    ]
)
_SHOWING_CALLS = frozenset(["print", "round", "head", "tail", "cat", "paste", "sprintf", "format", "paste0"])
_CONSTANTS = frozenset(["TRUE", "FALSE", "NULL", "NA", "Inf", "NaN", "T", "F"])


def r_facts(source: str) -> CodeFacts:
    """Facts of one cell."""
    lines = source.splitlines()
    tokens = _alive(list(r_tokens(source)))
    found = [
        *_assignments(tokens),
        *_calls(tokens),
        *_columns(tokens),
        *_shown(tokens),
    ]
    uses = [Use(fact, name, line, lines[line - 1].strip() if line <= len(lines) else "") for fact, name, line in found]
    return CodeFacts(tuple(uses))


_Found = tuple[Fact, str, int]


def _alive(tokens: list[RToken]) -> list[RToken]:
    """Without blocks of `if (FALSE) {…}`."""
    alive, i, closes = [], 0, partners(tokens)
    while i < len(tokens):
        texts = [token.text for token in tokens[i : i + 5]]
        if texts[:2] == ["if", "("] and texts[2:3] in (["FALSE"], ["F"]) and texts[3:5] == [")", "{"]:
            i = closes.get(i + 4, len(tokens)) + 1
        else:
            alive.append(tokens[i])
            i += 1
    return alive


class _Around(msgspec.Struct):
    """What surrounds a token: brackets of calls, bodies of functions, brackets `[`, calls of column verbs; and where
    its statement begins."""

    in_call: int = 0
    in_function: int = 0
    in_index: int = 0
    in_verb: int = 0
    start: int = 0


def _surroundings(tokens: list[RToken]) -> Iterator[_Around]:
    """For each token, in one pass: hostile code may be deeply nested."""
    around, stack, pairs = _Around(), list[_Around](), partners(tokens)
    for i, token in enumerate(tokens):
        if token.kind == "close" and stack:
            around = stack.pop()
        yield around
        if token.kind == "open":
            stack.append(around)
            around = _inside(tokens, i, pairs, around)
        elif token.kind == "newline":
            around = msgspec.structs.replace(around, start=i + 1)


def _inside(tokens: list[RToken], i: int, pairs: dict[int, int], around: _Around) -> _Around:
    text, before = tokens[i].text, tokens[i - 1] if i else None
    is_verb = text == "(" and before is not None and before.kind == "name" and before.text in _COLUMN_VERBS
    return _Around(
        in_call=around.in_call + (text != "{"),
        in_function=around.in_function + (text == "{" and _opens_function(tokens, i, pairs)),
        in_index=around.in_index + (text == "["),
        in_verb=around.in_verb + is_verb,
        start=i + 1,
    )


def _opens_function(tokens: list[RToken], brace: int, pairs: dict[int, int]) -> bool:
    """The brace follows the parameters of `function(…)` or of a short lambda."""
    i = brace - 1
    if i >= 0 and tokens[i].kind == "newline":
        i -= 1
    opened = pairs.get(i, 0) if i >= 0 and tokens[i].text == ")" else 0
    return opened > 0 and tokens[opened - 1].text in ("function", "\\")


def _assignments(tokens: list[RToken]) -> Iterator[_Found]:
    for i, (token, around) in enumerate(zip(tokens, _surroundings(tokens), strict=True)):
        if token.kind != "operator" or around.in_function or (around.in_call and token.text in ("=", ":=")):
            continue
        target = None
        if token.text in _LEFT:
            target = _assigned(tokens, around.start, i)
        elif token.text in _RIGHT:
            target = _named(tokens, i + 1)
        if target is not None:
            yield "assign", target.text, target.line
            if token.text in _LEFT and _named_text(tokens, i + 1) in ("function", "\\"):
                yield "define", target.text, target.line


def _assigned(tokens: list[RToken], start: int, operator: int) -> RToken | None:
    """The variable on the left of the operator: of `x$a[1] <- …` it is x, of `a <- b <- …` it is b."""
    if start >= operator:
        return None
    first, last = tokens[start], tokens[operator - 1]
    alone = operator - start == 1
    if first.kind in ("name", "string") and (alone or tokens[start + 1].text in ("$", "[", "@")):
        return first
    chained = not alone and tokens[operator - 2].text in (*_LEFT, "{", ")", "else")
    return last if chained and last.kind == "name" else None


def _named(tokens: list[RToken], i: int) -> RToken | None:
    return tokens[i] if i < len(tokens) and tokens[i].kind == "name" else None


def _named_text(tokens: list[RToken], i: int) -> str:
    if i < len(tokens) and tokens[i].kind == "newline":
        i += 1
    return tokens[i].text if i < len(tokens) else ""


def _calls(tokens: list[RToken]) -> Iterator[_Found]:
    for i, token in enumerate(tokens[:-1]):
        if token.kind == "name" and tokens[i + 1].text == "(" and token.text not in _NO_CALLS:
            yield "call", token.text, token.line
            if i >= 2 and tokens[i - 1].text in ("::", ":::"):
                yield "call", f"{tokens[i - 2].text}::{token.text}", token.line


def _columns(tokens: list[RToken]) -> Iterator[_Found]:
    for i, (token, around) in enumerate(zip(tokens, _surroundings(tokens), strict=True)):
        after = tokens[i + 1] if i + 1 < len(tokens) else None
        if token.kind == "operator" and token.text in ("$", "@") and after is not None:
            yield "column", after.text, token.line
        elif _is_column(token, after, around):
            yield "column", token.text, token.line


def _is_column(token: RToken, after: RToken | None, around: _Around) -> bool:
    if token.kind == "string":
        return around.in_index > 0
    called = after is not None and after.text == "("
    return token.kind == "name" and around.in_verb > 0 and token.text not in _CONSTANTS and not called


def _shown(tokens: list[RToken]) -> Iterator[_Found]:
    """R shows the value of each statement that is a bare name, and what print, cat and the like get."""
    statement, depth = list[RToken](), 0
    for token in [*tokens, RToken("newline", "\n", 0)]:
        depth = max(0, depth + (token.kind == "open") - (token.kind == "close"))
        if token.kind == "newline" and depth == 0:
            yield from _statement_shown(statement)
            statement = []
        elif token.kind != "newline":
            statement.append(token)


def _statement_shown(statement: list[RToken]) -> Iterator[_Found]:
    if not statement or any(token.text in (*_LEFT[:2], *_RIGHT) for token in statement):
        return
    first = statement[0]
    is_chain = len(statement) > 1 and statement[1].text in ("$", "[", "%>%", "|>")
    if first.kind == "name" and (len(statement) == 1 or is_chain):
        yield "show", first.text, first.line
    elif first.text in _SHOWING_CALLS:
        for token in statement[1:]:
            if token.kind == "name":
                yield "show", token.text, token.line
