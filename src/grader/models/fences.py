"""Student text inside a prompt: between two random marks, every line numbered, nothing in it that ends the frame.

A mark is made of a secret and of the text itself. A student cannot know it, and the same text gives the same prompt
again.
"""

import hashlib
import hmac
import re
import unicodedata

# What chat templates of known models use to start a turn or a channel. The gap makes plain text of them.
_CONTROL = re.compile(
    r"<\|[^\n|>]{0,40}\|?>|</?s>|\[/?INST\]|<</?SYS>>|</?(?:start|end)_of_turn>|</?think(?:ing)?>|</?tool_(?:call|response)>",
    re.IGNORECASE,
)
_INVISIBLE = {"Cf", "Cc", "Co", "Cs"}  # format, control, private use, surrogates: unseen by a reader, read by a model
_KEPT = {"\n", "\t"}
_SPACES = re.compile(r"\s+")


def mark_for(secret: bytes, text: str) -> str:
    """Sixteen hexadecimal digits."""
    return hmac.new(secret, text.encode("utf-8", "replace"), hashlib.sha256).hexdigest()[:16]


def escape(text: str) -> str:
    """Without control tokens and invisible characters."""
    seen = "".join(c for c in text if c in _KEPT or unicodedata.category(c) not in _INVISIBLE)
    return _CONTROL.sub(lambda found: found.group().replace("<", "< ").replace("[", "[ "), seen)


def fence(text: str, mark: str) -> str:
    """The whole block. A line of the student never stands at the start of a line."""
    lines = escape(text).splitlines() or [""]
    body = "\n".join(f"{number}| {line.replace(mark, '')}" for number, line in enumerate(lines, 1))
    return f"BEGIN STUDENT WORK {mark}\n{body}\nEND STUDENT WORK {mark}"


def plain_spaces(text: str) -> str:
    """For comparing quotes: runs of white space count as one, case stays."""
    return _SPACES.sub(" ", escape(text)).strip()
