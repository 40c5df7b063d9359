"""A tokenizer for R: enough to tell names from comments and strings. It takes any text."""

import re
from collections.abc import Iterator
from typing import Literal

import msgspec

RKind = Literal["name", "string", "number", "operator", "open", "close", "newline"]

_RAW_STRING = re.compile(r"""[rR](["'])(-*)([\(\[\{])""")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\f\r\xa0]+)
  | (?P<comment>\#[^\n]*)
  | (?P<newline>\n|;)
  | (?P<string>"(?:[^"\\]|\\.)*(?:"|\Z)|'(?:[^'\\]|\\.)*(?:'|\Z))
  | (?P<backtick>`[^`]*(?:`|\Z))
  | (?P<number>0[xX][0-9a-fA-F]+L?|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?[Li]?)
  | (?P<name>(?:[^\W\d_]|\.(?!\d))[\w.]*)
  | (?P<operator><<-|->>|<-|->|\|>|%[^%\n]*%|:::|::|==|!=|<=|>=|&&|\|\||:=|.)
    """,
    re.VERBOSE | re.DOTALL,
)


class RToken(msgspec.Struct, frozen=True):
    """`text` of a string is its content, of a name in backticks the name."""

    kind: RKind
    text: str
    line: int


def r_tokens(source: str) -> Iterator[RToken]:
    position, line = 0, 1
    while position < len(source):
        token, length = _next(source, position, line)
        line += source.count("\n", position, position + length)
        position += length
        if token is not None:
            yield token


def _next(source: str, position: int, line: int) -> tuple[RToken | None, int]:
    raw = _RAW_STRING.match(source, position)
    if raw:
        end = source.find(_CLOSING[raw[3]] + raw[2] + raw[1], raw.end())
        stop = end if end >= 0 else len(source)
        return RToken("string", source[raw.end() : stop], line), stop - position + (len(raw[2]) + 2 if end >= 0 else 0)
    found = _TOKEN.match(source, position)
    assert found is not None, "the last alternative takes any character"
    return _token(found.lastgroup or "", found.group(), line), len(found.group())


def _token(group: str, text: str, line: int) -> RToken | None:
    if group in ("space", "comment"):
        return None
    if group == "string":
        return RToken("string", text[1:-1] if len(text) > 1 and text[-1] == text[0] else text[1:], line)
    if group == "backtick":
        return RToken("name", text.strip("`"), line)
    if group == "operator" and text in "([{":
        return RToken("open", text, line)
    if group == "operator" and text in ")]}":
        return RToken("close", text, line)
    return RToken(group, text, line)  # type: ignore[arg-type]


def partners(tokens: list[RToken]) -> dict[int, int]:
    """For each bracket, the index of its partner. An open one without a partner closes at the end of the list."""
    found, stack = dict[int, int](), list[int]()
    for i, token in enumerate(tokens):
        if token.kind == "open":
            stack.append(i)
        elif token.kind == "close" and stack:
            found[i] = stack.pop()
            found[found[i]] = i
    return {**dict.fromkeys(stack, len(tokens)), **found}
