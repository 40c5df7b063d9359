"""Headings of markdown cells, and the text under each."""

import re
import unicodedata
from collections.abc import Iterable, Iterator

import msgspec

# Students choose the text: every pattern here takes time in proportion to it, whatever it is.
_ATX = re.compile(r" {0,3}(#{1,6})\s+(.*)$")
_FENCE = re.compile(r"\s*(```|~~~)")
_HTML_TAG = re.compile(r"<[^<>\n]*>")
_SIGNS = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]")
_INSIDE = "'\u2019-"
_COMMENT = re.compile(r"<!--.*?(-->|\Z)", re.DOTALL)


class Line(msgspec.Struct, frozen=True):
    """A line of a markdown cell, counted from 1. `level` is 0 for text, else the heading's level."""

    number: int
    text: str
    level: int = 0


class Passage(msgspec.Struct, frozen=True):
    """Text of one markdown cell under one heading path."""

    cell: int
    line: int
    section: tuple[str, ...]
    text: str


def visible(markdown: str) -> str:
    """Markdown without HTML comments, which a reader does not see; line numbers stay."""
    return _COMMENT.sub(lambda found: "\n" * found.group().count("\n"), markdown)


def markdown_lines(markdown: str) -> Iterator[Line]:
    fenced = False
    for number, text in enumerate(visible(markdown).splitlines(), 1):
        fenced ^= bool(_FENCE.match(text))
        heading = None if fenced else _ATX.match(text)
        yield Line(number, _title(heading[2]), len(heading[1])) if heading else Line(number, text)


def _title(text: str) -> str:
    """Without the signs that may close a heading."""
    return text.rstrip().rstrip("#").rstrip()


def deeper(path: tuple[tuple[int, str], ...], line: Line) -> tuple[tuple[int, str], ...]:
    """The heading path after this heading: it closes all of its own level and below."""
    return (*(entry for entry in path if entry[0] < line.level), (line.level, line.text))


def passages(cells: Iterable[tuple[int, str]]) -> Iterator[Passage]:
    """Text under each heading, in order; a heading stays open across cells."""
    path: tuple[tuple[int, str], ...] = ()
    for index, markdown in cells:
        start, texts = 1, list[str]()
        for line in markdown_lines(markdown):
            if line.level:
                if texts:
                    yield Passage(index, start, _titles(path), "\n".join(texts))
                path, start, texts = deeper(path, line), line.number, []
            else:
                texts.append(line.text)
        yield Passage(index, start, _titles(path), "\n".join(texts))


def _titles(path: tuple[tuple[int, str], ...]) -> tuple[str, ...]:
    return tuple(title for _, title in path)


def words_of(text: str) -> list[str]:
    """Words that a reader counts, in any script: no markup and no HTML tags. Each Chinese or Japanese sign counts."""
    words, word = list[str](), ""
    for char in _HTML_TAG.sub(" ", visible(text)) + " ":
        kind = unicodedata.category(char)[0]
        if _SIGNS.match(char):
            words += [word, char]
            word = ""
        elif kind in "LNM" or (char in _INSIDE and word):
            word += char
        else:
            words.append(word)
            word = ""
    return [word.rstrip(_INSIDE) for word in words if word.rstrip(_INSIDE)]


def title_words(title: str) -> tuple[str, ...]:
    return tuple(word.casefold() for word in words_of(title))


def names_section(title: str, wanted: str) -> bool:
    """The wanted words stand together in the heading: `Load data` is in `Part 1: Load Data`, `Q1` not in `Q10`."""
    have, need = title_words(title), title_words(wanted)
    return bool(need) and any(have[i : i + len(need)] == need for i in range(len(have) - len(need) + 1))


def in_section(section: Iterable[str], wanted: str) -> bool:
    return any(names_section(title, wanted) for title in section)
