"""Parses one JSON object while it comes. Strict, so that the part so far can still become valid JSON."""

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

from disaggregated_inference.gateway.tool_parsers.text_buffer import BLANKS, MalformedCall, TextBuffer, Waits

_SPACE = re.compile(rf"[{BLANKS}]+")
_WORD = re.compile(rf'[^{BLANKS}{{}}\[\],:"]+')
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_QUOTE = re.compile('"')
_IN_STRING = re.compile(r'(?:[^"\\\x00-\x1f]+|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))+')
_CUT_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_MARK = re.compile(r"[{}\[\]:,]")

# The next thing may be: a value; an item or "]"; a key; a member or "}"; a colon; a comma or a closing bracket.
_OPENS = {"{": "member", "[": "item"}
_CLOSES = {"}": ("{", "member"), "]": ("[", "item")}

Take = Callable[[str, str | None], None]


class JsonObjectReader:
    """`take` gets every piece of text, and the outermost key whose value the piece belongs to, or None."""

    def __init__(self, source: TextBuffer, take: Take) -> None:
        self._source, self._take = source, take
        self._open: list[str] = []
        self._next = "value"
        self._key: str | None = None
        self._keys: set[str] = set()

    def read(self) -> Waits[None]:
        if (yield from self._source.peek()) != "{":
            raise MalformedCall
        self._mark("{")
        while self._open:
            yield from self._piece((yield from self._source.peek()))

    def _piece(self, first: str) -> Waits[None]:
        if first in BLANKS:
            self._emit(_SPACE, self._key if len(self._open) > 1 else None)
        elif first == '"':
            yield from self._string()
        elif first in "{}[]:,":
            self._mark(first)
        else:
            yield from self._scalar()

    def _mark(self, mark: str) -> None:
        key, follows = self._outer_key, self._after(mark)
        self._emit(_MARK, key)
        self._next = follows

    def _after(self, mark: str) -> str:
        """What may follow this mark. Raises where the mark itself must not stand."""
        if mark in _OPENS and self._next in ("value", "item"):
            self._open.append(mark)
            return _OPENS[mark]
        if mark in _CLOSES and (self._open[-1], self._next) in (_CLOSES[mark], (_CLOSES[mark][0], "comma")):
            self._open.pop()
            return "comma"
        if mark == "," and self._next == "comma":
            return "key" if self._open[-1] == "{" else "value"
        if mark == ":" and self._next == "colon":
            return "value"
        raise MalformedCall

    def _scalar(self) -> Waits[None]:
        while _WORD.fullmatch(self._source.ahead) and not self._source.ended:
            yield
        word = _WORD.match(self._source.ahead)
        if self._next not in ("value", "item") or not (word and _SCALAR.fullmatch(word[0])):
            raise MalformedCall
        self._emit(_WORD, self._outer_key)
        self._next = "comma"

    def _string(self) -> Waits[None]:
        """A long string is passed on while it comes."""
        if self._next in ("comma", "colon"):
            raise MalformedCall
        is_key, key = self._next in ("key", "member"), self._outer_key
        whole = self._emit(_QUOTE, key)
        while (yield from self._source.peek()) != '"':
            if piece := self._emit(_IN_STRING, key):
                whole += piece if is_key else ""
            elif _CUT_ESCAPE.fullmatch(self._source.ahead) and not self._source.ended:
                yield
            else:
                raise MalformedCall
        whole += self._emit(_QUOTE, key)
        self._next = self._after_key(whole) if is_key else "comma"

    def _after_key(self, text: str) -> str:
        if len(self._open) == 1:
            self._key = str(json.loads(text))
            if self._key in self._keys:  # twice the same key
                raise MalformedCall
            self._keys.add(self._key)
        return "colon"

    def _emit(self, pattern: re.Pattern[str], key: str | None) -> str:
        text = self._source.take(pattern)
        if text:
            self._take(text, key)
        return text

    @property
    def _outer_key(self) -> str | None:
        """The outermost key whose value the next piece belongs to."""
        return self._key if len(self._open) > 1 or self._next == "value" else None


def strict_json(text: str) -> Any:
    """Without NaN, which Python accepts. Too deep nesting is a ValueError too."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
