"""Code without its comments and the content of its strings, for rules that match patterns."""

import io
import tokenize

from grader.code.r_tokens import r_tokens
from grader.notebook import Language


def plain_code(source: str, language: Language) -> str:
    """Tokens joined by spaces, one line per line of code: `x = mean(y)` is `x = mean ( y )`."""
    return _r(source) if language == "r" else _python(source)


def _r(source: str) -> str:
    parts = ['""' if token.kind == "string" else token.text for token in r_tokens(source)]
    return _lines(parts)


def _python(source: str) -> str:
    parts = list[str]()
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type in (tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
                continue
            is_line = token.type in (tokenize.NEWLINE, tokenize.NL)
            parts.append("\n" if is_line else '""' if token.type == tokenize.STRING else token.string)
    except (tokenize.TokenError, SyntaxError, IndentationError):
        pass  # what was read before the mistake counts
    return _lines(parts)


def _lines(parts: list[str]) -> str:
    return "\n".join(" ".join(line.split()) for line in " ".join(parts).split("\n"))
