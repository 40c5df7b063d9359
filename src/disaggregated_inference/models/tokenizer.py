"""Tokenizer and chat template of a model, with the Rust tokenizers only: no torch, no transformers."""

import codecs
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from disaggregated_inference.errors import BadRequest, ContextTooLong, MessagesRefused, ModelDamaged, ModelUnsupported
from disaggregated_inference.models.chat_template import compile_template, with_reasoning_names
from disaggregated_inference.models.harmony import MARKS, harmony_pieces

Message = dict[str, Any]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

_UTF8 = codecs.getincrementaldecoder("utf-8")
_SHORT_CHARS = 2000  # below it, the batch costs more than the work
_ONE_BYTE = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's form of a single byte
_MAX_TEXTS = 1 << 15  # tokens whose text is remembered


def _bytes_of_characters() -> dict[str, int]:
    """The alphabet of byte-level tokenizers: printable bytes stand for themselves, the others are moved."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(moved)}


_BYTE_OF = _bytes_of_characters()


class ModelTokenizer:
    """A model's tokenizer and chat template."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str = "", special: dict[str, str] | None = None) -> None:
        self._tokenizer = tokenizer
        self.chat_template = chat_template
        self.special = special or {}

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelTokenizer":
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelDamaged(f"{folder} has no tokenizer.json")
        settings = read_json(folder / "tokenizer_config.json")
        special = {name: _token_text(value) for name, value in settings.items() if name.endswith("_token") and value}
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust side raises no narrower class
            raise ModelDamaged(f"{path}: {error}") from error
        return cls(tokenizer, _read_template(folder, settings), special)

    @classmethod
    def from_json(cls, text: str, chat_template: str, special: dict[str, str]) -> "ModelTokenizer":
        """From `json`, `chat_template` and `special` of another process."""
        try:
            return cls(Tokenizer.from_str(text), chat_template, special)
        except Exception as error:  # the Rust side raises no narrower class
            raise ModelDamaged(f"invalid tokenizer: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Special tokens in the text are recognised; none are added."""
        return self._encode([text])

    def encode_within(self, text: str, window: int) -> list[int]:
        """Refuses text that cannot fit before tokenizing it, which takes seconds for megabytes."""
        return self._encode([text], window)

    def _encode(self, pieces: list[str], window: int | None = None) -> list[int]:
        size = sum(map(len, pieces))
        least = size // self.longest_token_bytes if window else 0
        if window and least > window:
            raise ContextTooLong(least, window, "at least ", prompt_tokens=least)
        try:
            if size < _SHORT_CHARS:
                encoded = [self._tokenizer.encode(piece, add_special_tokens=False) for piece in pieces]
            else:  # a batch releases the GIL: a long text takes seconds
                encoded = self._tokenizer.encode_batch(pieces, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:  # half of a surrogate pair, from broken JSON escapes
            raise BadRequest("the text is not valid Unicode: it cannot be encoded as UTF-8") from error
        return [token for piece in encoded for token in piece.ids]

    @cached_property
    def longest_token_bytes(self) -> int:
        """The most text that one token can stand for."""
        return 4 * max(map(len, self._tokenizer.get_vocab()))

    def encode_chat(self, messages: Sequence[Message], window: int | None = None, **options: Any) -> list[int]:
        """The tokens of the prompt. Refuses what cannot fit into the window."""
        return self._encode(self.chat_pieces(messages, options), window)

    def render_chat(self, messages: Sequence[Message], **options: Any) -> str:
        """The prompt from the chat template. `options` are the template's variables: `tools`, `reasoning_effort`."""
        return "".join(self.chat_pieces(messages, options))

    def chat_pieces(self, messages: Sequence[Message], options: dict[str, Any]) -> list[str]:
        """The prompt in pieces that are tokenized one by one."""
        if not self.chat_template and not self.harmony:
            raise ModelUnsupported("this model has no chat template; send a plain prompt")
        from jinja2 import TemplateError

        plain = [_plain(message) for message in messages]
        try:
            return harmony_pieces(plain, options) if self.harmony else [self._from_template(plain, options)]
        except (TemplateError, TypeError, ValueError, AttributeError, LookupError, RecursionError) as error:
            raise MessagesRefused(f"the model's chat template refuses these messages: {error}") from error

    def _from_template(self, messages: list[Message], options: dict[str, Any]) -> str:
        defaults = self.special | {"add_generation_prompt": True, "tools": None, "documents": None}
        text: str = self._template.render(**(defaults | options), messages=with_reasoning_names(messages))
        return text

    @cached_property
    def harmony(self) -> bool:
        """Whether the model reads and writes messages on channels, as GPT-OSS does."""
        return all(self.token_id(mark) is not None for mark in MARKS)

    def decode(self, tokens: Iterable[int], special: bool = False) -> str:
        """`special`: include special tokens, such as those around a message."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=not special)
        return text

    def token_id(self, text: str) -> int | None:
        """The id of a token by its exact text, such as `<|end|>`."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token: possibly a part of a character, or the name of a special token."""
        written = self._tokenizer.id_to_token(token) or ""
        if token in self._added:
            return written.encode()
        if self._byte_level:
            return bytes(_BYTE_OF[character] for character in written if character in _BYTE_OF)
        if match := _ONE_BYTE.fullmatch(written):
            return bytes.fromhex(match[1])
        return written.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    @cached_property
    def _byte_level(self) -> bool:
        return "ByteLevel" in json.dumps(json.loads(self.json).get("decoder"))

    def stream(self) -> "TextStream":
        return TextStream(self._tokenizer, self._text_bytes, self._special_ids, self._texts)

    def _text_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to a completion; none for special tokens."""
        return b"" if token in self._special_ids else self.token_bytes(token)

    @cached_property
    def _texts(self) -> dict[int, str] | None:
        """The text of tokens, as streams find it; None where it depends on the tokens before."""
        decoder = json.loads(self.json).get("decoder") or {}
        return {} if decoder.get("type") == "ByteLevel" else None

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(at for at, each in self._tokenizer.get_added_tokens_decoder().items() if each.special)

    @property
    def json(self) -> str:
        """The content of a tokenizer.json."""
        text: str = self._tokenizer.to_str()
        return text

    @cached_property
    def identity(self) -> str:
        """A hash of the ids' meanings. It ignores how text is split, because nodes exchange ids, and because there are
        many ways to store the same vocabulary."""
        meanings = sorted((at, text) for text, at in self._tokenizer.get_vocab().items())
        return _hash(json.dumps([self._byte_level, meanings], ensure_ascii=False))

    @cached_property
    def text_identity(self) -> str:
        """A hash of how ids become text. Copies of one model may differ in it: other tokens count as special."""
        added = sorted((at, str(each), each.special) for at, each in self._tokenizer.get_added_tokens_decoder().items())
        return _hash(json.dumps([json.loads(self.json).get("decoder"), added], ensure_ascii=False, sort_keys=True))

    @property
    def template_identity(self) -> str:
        return _hash(self.chat_template.strip())

    @cached_property
    def _template(self) -> Any:
        return compile_template(self.chat_template)


class TextStream:
    """Converts tokens to text one by one, never splitting a character.

    `texts`: what whole tokens of this tokenizer are, learned by all its streams. None: a token has another text after
    other tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        bytes_of: Callable[[int], bytes],
        special: frozenset[int],
        texts: dict[int, str] | None = None,
    ) -> None:
        self._tokenizer, self._bytes_of, self._special, self._texts = tokenizer, bytes_of, special, texts
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held: list[int] = []

    @property
    def held(self) -> int:
        """Tokens whose text has not come yet. Each further token takes as much longer."""
        return len(self._held)

    def knows(self, token: int, text: str) -> bool:
        """Whether `push` would return this text, and the stream be the same as before."""
        return not self._held and self._texts is not None and self._texts.get(token) == text

    def push(self, token: int) -> str:
        if self._held:
            return self._step(token)
        if self._texts is None:
            return "" if token in self._special else self._step(token)
        return self._texts.get(token) or self._learn(token, self._texts)

    def _learn(self, token: int, texts: dict[int, str]) -> str:
        """The text of a token that no other is held before."""
        if token in self._special:  # has no text; the library would decode it again and again
            return ""
        self._stream = DecodeStream(skip_special_tokens=True)  # the last one has not seen the known tokens
        text = self._step(token)
        if text and len(texts) < _MAX_TEXTS:
            texts[token] = text
        return text

    def _step(self, token: int) -> str:
        text = self._stream.step(self._tokenizer, token) or ""
        self._held.clear() if text else self._held.append(token)
        return text

    def flush(self) -> str:
        """The remaining text after the last token; an incomplete character becomes U+FFFD."""
        held, self._held = self._held, []
        if not self._tokenizer.decode(held).endswith("\ufffd"):  # only special tokens
            return ""
        return _UTF8("replace").decode(b"".join(map(self._bytes_of, held)))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelDamaged(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise ModelDamaged(f"{path} is not a JSON object")
    return found


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _plain(message: Message) -> Message:
    """Content as one string, as templates expect it; OpenAI's content parts are joined."""
    content = message.get("content")
    if message.get("images"):
        raise MessagesRefused("images: this model accepts text only; remove them")
    if isinstance(content, list):
        texts = [part["text"] for part in content if _is_text(part)]
        if len(texts) < len(content):
            raise MessagesRefused("content parts must be {'type': 'text', 'text': ...}: these models accept text only")
        content = "".join(texts)
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(message.get("role"), str) or not isinstance(content, str):
        raise MessagesRefused("every message needs a role and a content, both strings")
    return message | {"content": content}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _token_text(value: Any) -> str:
    return value["content"] if isinstance(value, dict) else str(value)


def _read_template(folder: Path, settings: dict[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    template = settings.get("chat_template") or ""
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default", "")
    return str(template)
