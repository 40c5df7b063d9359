"""Fingerprints of code by winnowing (Schleimer, Wilkerson, Aiken 2003): k-grams of tokens, the least hash per window.

Names and strings are one token each, so that renaming changes nothing. Comments are left out."""

import io
import keyword
import tokenize
from collections.abc import Iterator, Sequence

import xxhash

from grader.code import r_tokens, without_magics
from grader.notebook import Cell, Notebook

K = 12  # tokens: shorter matches are chance
WINDOW = 6
_R_WORDS = frozenset(("if", "else", "for", "while", "function", "in", "next", "break", "TRUE", "FALSE", "NULL"))

Place = tuple[int, int]  # cell, line


def fingerprints(notebook: Notebook) -> dict[int, Place]:
    """Hash of each chosen k-gram, with the place of its first token."""
    tokens = [(text, (cell.index, line)) for cell in notebook.code_cells for text, line in _tokens(notebook, cell)]
    grams = [(_hash([text for text, _ in tokens[i : i + K]]), tokens[i][1]) for i in range(len(tokens) - K + 1)]
    chosen = dict[int, Place]()
    for i in range(max(1, len(grams) - WINDOW + 1) if grams else 0):
        value, place = min(grams[i : i + WINDOW], key=lambda gram: gram[0])
        chosen.setdefault(value, place)
    return chosen


def _hash(texts: Sequence[str]) -> int:
    return xxhash.xxh64_intdigest("\x00".join(texts).encode())


def _tokens(notebook: Notebook, cell: Cell) -> Iterator[tuple[str, int]]:
    return _r(cell.source) if notebook.language == "r" else _python(cell.source)


def _r(source: str) -> Iterator[tuple[str, int]]:
    for token in r_tokens(source):
        if token.kind == "name" and token.text not in _R_WORDS:
            yield "name", token.line
        elif token.kind in ("string", "number"):
            yield token.kind, token.line
        elif token.kind != "newline":
            yield token.text, token.line


def _python(source: str) -> Iterator[tuple[str, int]]:
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER, tokenize.INDENT, tokenize.DEDENT)
    try:
        for token in tokenize.generate_tokens(io.StringIO(without_magics(source)).readline):
            if token.type in skipped:
                continue
            line = token.start[0]
            if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
                yield "name", line
            elif token.type in (tokenize.STRING, tokenize.NUMBER):
                yield tokenize.tok_name[token.type], line
            else:
                yield token.string, line
    except (tokenize.TokenError, SyntaxError):
        return  # what was read before the mistake counts
