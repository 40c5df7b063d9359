"""From a file people write to structs, with errors they can act on: the file, the place in it, a remedy."""

import difflib
import ipaddress
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from disaggregated_inference.errors import ConfigError

_Kind = TypeVar("_Kind", bound=msgspec.Struct)

_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_REMEDIES = {
    "host": 'write a name or address alone, such as "169.254.150.103"',
    "port": "write a port such as 8001",
    "model": 'write the model it serves, such as "qwen"',
    "role": 'leave it out, or write "both"',
    "token": 'write the token, or "${NAME}" to have it from the environment',
    "kv_addresses": 'write a list such as ["10.0.0.1", "192.168.100.1:9000"]',
    "power_w": "write watts such as 240",
    "gbps": "write gigabits per second such as 10",
    "aliases": 'write a list such as ["qwen"]',
    "context_window": "write a number of tokens such as 32768",
    "defaults": 'write an object such as {"temperature": 0.2}',
    "local": 'write "auto", "never" or "always"',
    "prefill": "write the name of a prefill server",
    "decode": "write the name of a decode server",
}
_HOW = "compare with `disagg config example`"
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_ADDRESS = re.compile(r"(?:\[([^\]]+)\]|([^\[\]:]+))(?::([0-9]{1,5}))?")


def parse(path: Path) -> Any:
    """What a JSON or TOML file holds. Its name may lie about which it is; the second guess counts when it works."""
    text = _text(path)
    is_json = text.lstrip().startswith("{") or path.suffix.lower() != ".toml"
    first, second = (_from_json, tomllib.loads) if is_json else (tomllib.loads, _from_json)
    try:
        return first(text)
    except (ValueError, RecursionError) as error:
        try:
            return second(text)
        except (ValueError, RecursionError):
            raise ConfigError(f"{path}: {_syntax(error, is_json)}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8 text") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        how = "check the path (DISAGG_CONFIG, if you gave none) or make one: `disagg config example > cluster.json`"
        raise ConfigError(f"{path}: cannot be read: {reason}; {how}") from None


def _from_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_each_once)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The last of two lists of servers would win, and nobody would know."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{shown(next(key for key in keys if keys.count(key) > 1))} stands twice in one object")
    return found


def _syntax(error: Exception, is_json: bool) -> str:
    if isinstance(error, json.JSONDecodeError):
        how = "JSON has double quotes, no comments, and no comma after a last item"
        return f"line {error.lineno}, column {error.colno}: {error.msg}; {how}"
    return f"not {'JSON' if is_json else 'TOML'}: {error}; {_HOW}"


class Reader:
    """Reads one file, whose name stands in front of all it says. Subclasses know what is in it."""

    def __init__(self, file: str, environ: Mapping[str, str]) -> None:
        self.file, self.environ = file, environ
        self.warnings: list[str] = []

    def error(self, place: str, text: str) -> ConfigError:
        return ConfigError(": ".join(part for part in (self.file or "config", place, text) if part))

    def wrong(self, place: str, expected: str, value: Any, field: str = "") -> ConfigError:
        got = "something else" if field == "token" else shown(value)
        return self.error(place, f"expected {expected}, got {got}; {_REMEDIES.get(field, _HOW)}")

    def warn(self, place: str, text: str) -> None:
        self.warnings.append(str(self.error(place, text)))

    def require_plain(self, raw: Any) -> None:
        """Half a surrogate pair, or an object in a dict, would only fail later and elsewhere."""
        if not isinstance(raw, dict):
            raise self.wrong("", 'an object with "prefill_servers" and "decode_servers"', raw)
        try:
            msgspec.json.encode(raw)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise self.error("", f"has a value that is not plain data: {error}; write text and numbers") from None

    def warn_unknown(self, raw: dict[str, Any], known: Sequence[str], place: str) -> None:
        for key in raw:
            if key not in known:
                self.warn(f"{place}.{key}".lstrip("."), "unknown key, ignored" + did_you_mean(str(key), known))

    def struct(self, kind: type[_Kind], raw: Any, place: str, **defaults: Any) -> _Kind:
        if not isinstance(raw, dict):
            raise self.wrong(place, "an object", raw)
        known = kind.__struct_fields__
        self.warn_unknown(raw, known, place)
        given = defaults | {key: value for key, value in raw.items() if key in known}
        try:
            return msgspec.convert(given, kind)
        except msgspec.ValidationError as error:
            unknown = [str(key) for key in raw if key not in known]
            raise self._refused(str(error), given, unknown, place) from None

    def _refused(self, message: str, given: dict[str, Any], unknown: list[str], place: str) -> ConfigError:
        """msgspec says: Expected `int` <= 65535 - at `$.port`."""
        problem, _, path = message.partition(" - at ")
        if missing := re.search(r"missing required field `(\w+)`", problem):
            return self._missing(f"{place}.{missing[1]}", missing[1], unknown)
        name, index = re.findall(r"\$\.(\w+)(?:\[(\d+)\])?", path)[0]
        value, at = (given[name][int(index)], f"[{index}]") if index else (given[name], "")
        return self.wrong(f"{place}.{name}{at}", _expected(problem), value, name)

    def _missing(self, place: str, name: str, unknown: list[str]) -> ConfigError:
        near = difflib.get_close_matches(name, unknown, 1)
        hint = f"; is {shown(near[0])} meant to be it?" if near else ""
        return self.error(place, f"missing; {_REMEDIES.get(name, _HOW)}{hint}")

    def items(self, raw: dict[str, Any], key: str) -> list[tuple[str, Any]]:
        """What a list holds, each with its place."""
        items = raw.get(key, [])
        if not isinstance(items, list | tuple):
            raise self.wrong(key, "a list", items)
        return [(f"{key}[{index}]", item) for index, item in enumerate(items)]

    def secret(self, text: Any, place: str) -> str:
        """A token, or the environment's. No message ever repeats it."""
        if not isinstance(text, str):
            raise self.wrong(place, "a string", text, "token")
        for name in _VARIABLE.findall(text):
            if not self.environ.get(name):
                raise self.error(place, f"{name} is not set in the environment; export {name}=... first")
        token = _VARIABLE.sub(lambda found: self.environ[found[1]], text).strip()
        if not (token.isascii() and token.isprintable()):
            raise self.error(place, "has characters that a header cannot carry; use printable ASCII")
        return token


def _expected(problem: str) -> str:
    found = re.match(r"Expected `(\w+)[^`]*`(?:, got.*| (.*))?", problem)
    return f"{_WORDS.get(found[1], found[1])} {found[2] or ''}".rstrip() if found else "another value"


def spoken(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_host(text: str) -> bool:
    if ":" not in text and not re.fullmatch(r"[\d.]+", text):
        return re.fullmatch(r"[\w-][\w.-]*", text) is not None
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return not re.search(r"[\s/]", text)  # what follows a % may be anything to ipaddress


def is_address(text: str) -> bool:
    """HOST or HOST:PORT; a v6 host with a port stands in brackets."""
    match = _ADDRESS.fullmatch(text)
    host, port = (match[1] or match[2], match[3]) if match else (text, None)
    return is_host(host) and (port is None or 0 < int(port) < 65536)


def shown(value: Any) -> str:
    if isinstance(value, dict | list | tuple):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def did_you_mean(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {shown(near[0])}?" if near else ""
