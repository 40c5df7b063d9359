"""A text and what it may hide: other letters, invisible signs, encodings. All variants are searched."""

import base64
import binascii
import codecs
import html
import re
import unicodedata
import urllib.parse
from collections.abc import Iterator

MAX_CHARS = 60_000  # of disguised text; plain text is searched whole
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff\ufe00-\ufe0f]")
_TAGS = re.compile("[\U000e0020-\U000e007e]+")
_LOOKALIKES = str.maketrans(
    "\u0430\u0435\u043e\u0440\u0441\u0456\u0445\u0443\u0455\u0458\u0501\u04cf\u03bf\u03b1\u03b5\u03b9\u03c1",
    "aeopcixysjdloaeip",
)
_LEET = str.maketrans({"0": "o", "1": "i", "3": "e", "4": "a", "5": "s", "7": "t", "@": "a", "$": "s"})
_BASE64 = re.compile(r"[A-Za-z0-9+/]{24,}={0,2}")
_HEX = re.compile(r"(?:[0-9a-fA-F]{2}){16,}")
_ESCAPES = re.compile(r"(?:\\x[0-9a-fA-F]{2}){8,}")
_SPACED = re.compile(r"(?:\b\w\b[ .\-_]){4,}\w\b")
_MARKUP = re.compile(r"[\s#>*_`~\"'\\-]+")


def folded(text: str) -> str:
    """One line of small letters: width, invisible signs, lookalikes, markup and line breaks make no difference."""
    plain = unicodedata.normalize("NFKC", _INVISIBLE.sub("", text)).casefold()
    return _MARKUP.sub(" ", plain)


def disguises(text: str) -> Iterator[str]:
    """Folded variants of the text, the plain one first."""
    yield folded(text)
    part = text[:MAX_CHARS]
    if re.search("[\u0370-\u052f]", part):
        yield folded(part.casefold().translate(_LOOKALIKES))
    for decoded in _decoded(part):
        yield folded(decoded)
    if any(digit in part for digit in "0134@$"):
        yield folded(part.translate(_LEET))
    yield folded(codecs.encode(part, "rot13"))
    yield folded(part[::-1])


def _decoded(text: str) -> Iterator[str]:
    if "&" in text:
        yield html.unescape(text)
    if "%" in text:
        yield urllib.parse.unquote(text)
    for found in _TAGS.findall(text):
        yield "".join(chr(ord(sign) - 0xE0000) for sign in found)
    for found in _ESCAPES.findall(text):
        yield bytes.fromhex(found.replace("\\x", "")).decode(errors="replace")
    for found in _HEX.findall(text):
        yield bytes.fromhex(found).decode(errors="replace")
    for found in _BASE64.findall(text):
        with_pad = found + "=" * (-len(found) % 4)
        try:
            yield base64.b64decode(with_pad).decode(errors="replace")
        except binascii.Error:
            continue
    spaced = _SPACED.findall(text)
    if spaced:
        yield " ".join(re.sub(r"[ .\-_]", "", word) for word in spaced)
