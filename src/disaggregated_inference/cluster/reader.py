"""Reads files that people write into structs. Every error names the file, the place in it and what to write there.

The structs' types say what is allowed: the `description` of a type's `msgspec.Meta` ends up in the error message.
"""

import difflib
import ipaddress
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from disaggregated_inference.cluster.bearer_token import is_header_text, token_of_file
from disaggregated_inference.errors import ConfigError

_Struct = TypeVar("_Struct", bound=msgspec.Struct)

_EXAMPLE = "compare with `disagg config example`"
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_ADDRESS = re.compile(r"(?:\[([^\]]+)\]|([^\[\]:]+))(?::([0-9]{1,5}))?")


def read_file(path: Path) -> Any:
    """The content of a JSON or TOML file. The other format is tried if the first does not fit."""
    text = _text(path)
    is_json = text.lstrip().startswith("{") or path.suffix.lower() != ".toml"
    first, second = (_from_json, tomllib.loads) if is_json else (tomllib.loads, _from_json)
    try:
        return first(text)
    except (ValueError, RecursionError) as error:
        try:
            return second(text)
        except (ValueError, RecursionError):
            raise ConfigError(f"{path}: {_syntax_error(error, is_json)}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8 text") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        remedy = "check the path (or DISAGG_CONFIG), or create a file: `disagg config example > cluster.json`"
        raise ConfigError(f"{path}: cannot be read: {reason}; {remedy}") from None


def _from_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique_keys)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Without this, the last of two equal keys would win without a warning."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {quote(key)} appears twice in one object")
        found[key] = value
    return found


def _syntax_error(error: Exception, is_json: bool) -> str:
    if isinstance(error, json.JSONDecodeError):
        remedy = "JSON needs double quotes and allows no comments and no comma after the last item"
        return f"line {error.lineno}, column {error.colno}: {error.msg}; {remedy}"
    return f"not {'JSON' if is_json else 'TOML'}: {error}; {_EXAMPLE}"


class Reader:
    """Converts the content of one file; errors and warnings begin with the file's name."""

    def __init__(self, file: str, environ: Mapping[str, str]) -> None:
        self.file, self.environ = file, environ
        self.warnings: list[str] = []

    def error(self, place: str, text: str) -> ConfigError:
        return ConfigError(": ".join(part for part in (self.file or "config", place, text) if part))

    def invalid(self, place: str, hint: Any, value: Any) -> ConfigError:
        """`hint` is the type that `value` should have. The value of a token is never repeated."""
        got = "" if place.endswith("token") else f", got {quote(value)}"
        remedy = "" if hasattr(hint, "__metadata__") else f"; {_EXAMPLE}"
        return self.error(place, f"expected {_description(hint)}{got}{remedy}")

    def warn(self, place: str, text: str) -> None:
        self.warnings.append(str(self.error(place, text)))

    def require_plain_data(self, raw: Any) -> None:
        """A lone surrogate or a Python object would fail later, in another place."""
        try:
            msgspec.json.encode(raw)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise self.error("", f"has a value that is not plain data: {error}; write text and numbers") from None

    def struct(self, kind: type[_Struct], raw: Any, place: str) -> _Struct:
        if not isinstance(raw, dict):
            raise self.invalid(place, kind, raw)
        unknown = [str(key) for key in raw if key not in kind.__struct_fields__]
        for key in unknown:
            self.warn(_join(place, key), "unknown key, ignored" + did_you_mean(key, kind.__struct_fields__))
        values: dict[str, Any] = {}
        for field in msgspec.structs.fields(kind):
            at = _join(place, field.name)
            if field.name in raw:
                values[field.name] = self._value(field.type, raw[field.name], at)
            elif field.required:
                typo = difflib.get_close_matches(field.name, unknown, 1)
                hint = f"; is {quote(typo[0])} a typo?" if typo else ""
                raise self.error(at, f"missing; write {_description(field.type)}{hint}")
        return kind(**values)

    def _value(self, hint: Any, raw: Any, place: str) -> Any:
        """A value of the type `hint`. Lists and objects are read item by item, so that errors have a place."""
        plain = hint.__origin__ if hasattr(hint, "__metadata__") else hint
        if isinstance(plain, type) and issubclass(plain, msgspec.Struct):
            return self.struct(plain, raw, place)
        if get_origin(plain) is tuple and isinstance(raw, list | tuple):
            return tuple(self._value(get_args(plain)[0], item, f"{place}[{at}]") for at, item in enumerate(raw))
        if get_origin(plain) is dict and isinstance(raw, dict):
            return {key: self._value(get_args(plain)[1], item, f"{place}.{key}") for key, item in raw.items()}
        try:
            return msgspec.convert(raw, hint)
        except msgspec.ValidationError:
            raise self.invalid(place, hint, raw) from None

    def secret(self, text: str, place: str, file: str = "") -> str:
        """A token with `${NAME}` replaced from the environment, or that of a file. No message repeats it."""
        if text and file:
            raise self.error(f"{place}_file", "choose one of token and token_file")
        if file:
            return token_of_file(file, str(self.error(f"{place}_file", "")))
        for name in _VARIABLE.findall(text):
            if not self.environ.get(name):
                raise self.error(place, f"{name} is not set in the environment; export {name}=... first")
        token = _VARIABLE.sub(lambda found: self.environ[found[1]], text).strip()
        if not is_header_text(token):
            raise self.error(place, "has characters that an HTTP header cannot carry; use printable ASCII")
        return token


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _description(hint: Any) -> str:
    """What to write for a type: the description of its Meta; of a union, that of the first member."""
    if described := [meta.description for meta in getattr(hint, "__metadata__", ()) if meta.description]:
        return str(described[0])
    if get_origin(hint) in (tuple, dict) or isinstance(hint, type):
        return "a list" if get_origin(hint) is tuple else "an object"
    return _description(get_args(hint)[0])


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(text: str, port: int) -> tuple[str, int]:
    """HOST or HOST:PORT, of a checked file; `port`: where it has none."""
    match = _ADDRESS.fullmatch(text)
    return (match[1] or match[2], int(match[3] or port)) if match else (text, port)


def is_host(text: str) -> bool:
    if ":" not in text and not re.fullmatch(r"[\d.]+", text):
        return re.fullmatch(r"[\w-][\w.-]*", text) is not None
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return not re.search(r"[\s/]", text)  # ipaddress allows anything after a %


def is_address(text: str) -> bool:
    """HOST or HOST:PORT; an IPv6 host with a port needs brackets."""
    match = _ADDRESS.fullmatch(text)
    host, port = (match[1] or match[2], match[3]) if match else (text, None)
    return is_host(host) and (port is None or 0 < int(port) < 65536)


def quote(value: Any) -> str:
    """A value for a message: short, and without the content of lists and objects."""
    if isinstance(value, dict | list | tuple):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {quote(near[0])}?" if near else ""
