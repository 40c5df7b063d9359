"""Names of students never reach a model. Works on any piece of a notebook alike: a quote must be found again in it."""

import builtins
import keyword
import re
import unicodedata
from collections.abc import Iterator

_STUDENT = "[student]"
_BETWEEN = r"[ \t_.,-]{0,3}"
_WORD = re.compile(r"[^\W\d_]+")
_GAP = re.compile(r"[ \t_.,'-]{0,3}")
_MOST_WORDS = 4  # of one name
# Names that are words too: only as a name is written, so that the work of a student called Max keeps its `max`.
_ENGLISH = """
ai all and are art ash autumn back bar bay bell berg best bill black blue book brook brown but can case chance chase
clay code cole cook cross dale data dates dawn day dean dot drew east faith field fish for ford forest fox frank glen
gold good grace gray grant green hall hand hart heath hill his home hope how hunt joy key king lake lane law long love
lowe major man mark mars mason max may mean miles mill moon nash new north not note numpy oak old one page pages park
parks pearl penny plot poole pope post power price prince ray read reed reese rich rivers rob rock root rose row ruby
rush sage sales sand set sharp she show sky small son sort spring star stark stone storm strong summer sunny swift
table tab test the this top trace violet wall ward waters way weeks west white who will winter wise wood woods work
young
"""
_WORDS = frozenset(_WORD.findall(_ENGLISH)) | {one.lower() for one in (*dir(builtins), *keyword.kwlist)}


def without_names(text: str, names: tuple[str, ...]) -> str:
    """Names of students as `[student]`: whole names in any case and joined in any way, their parts as names are
    written, in capitals, and in lower case where they are no code."""
    for name in sorted({one.strip() for one in names if len(one.strip()) > 2}, key=len, reverse=True):
        text = _without_whole(text, name)
        for part in re.findall(r"[^\W\d_]{3,}", name):
            if part[0].isupper():
                text = _without_part(text, part)
        if re.fullmatch(r"[^\W\d_]{5,}", name) and name.islower():
            text = _without_joined(text, name)
    return text


def _without_whole(text: str, name: str) -> str:
    if name.lower() in _WORDS:
        return _replaced(text, name.capitalize())
    words = [re.escape(word) for word in name.split()]
    return _replaced(text, _BETWEEN.join(words), re.IGNORECASE)


def _without_part(text: str, part: str) -> str:
    text = _replaced(text, part)
    if part.lower() in _WORDS:
        return text
    text = _replaced(text, part.upper())
    # Code: after a dot, a quote, a bracket, a call or a sign; before a call, an index, an attribute or a sign.
    before, after = r"(?<![.'\"`\[=])(?<!\w\()(?<![=+/<>%] )", r"(?![(\['\"`\]]|\.\w| ?[=+/<>%]| in \w)"
    return _replaced(text, f"{before}{part.lower()}{after}")


def _replaced(text: str, pattern: str, flags: int = 0) -> str:
    return re.sub(rf"(?<!\w){pattern}(?!\w)", _STUDENT, text, flags=flags)


def _without_joined(text: str, key: str) -> str:
    """`doejane`, as Canvas joins them: neighbouring words that make the key in either order, and a lone word that
    begins or ends it, as names are written."""
    words, kept, last = list(_WORD.finditer(text)), [], 0
    for number, word in enumerate(words):
        if word.start() < last:
            continue
        run = next(_runs(text, words[number : number + _MOST_WORDS], key), None)
        end = run or (word.end() if _is_end_of(word.group(), key) else 0)
        if end:
            kept += [text[last : word.start()], _STUDENT]
            last = end
    return "".join([*kept, text[last:]])


def _runs(text: str, words: list[re.Match[str]], key: str) -> Iterator[int]:
    """Where the words from the first on that make the key end."""
    for count in range(2, len(words) + 1):
        if not _GAP.fullmatch(text, words[count - 2].end(), words[count - 1].start()):
            return
        parts = [_plain(one.group()) for one in words[:count]]
        if any("".join(parts[n:] + parts[:n]) == key for n in range(count)):
            yield words[count - 1].end()


def _is_end_of(word: str, key: str) -> bool:
    plain = _plain(word)
    if len(plain) < 3 or plain == key or plain in _WORDS or word.islower():
        return False
    return key.startswith(plain) or key.endswith(plain)


def _plain(word: str) -> str:
    """In lower case and without accents."""
    return "".join(one for one in unicodedata.normalize("NFKD", word.lower()) if not unicodedata.combining(one))
