"""The key file: hashes, names and limits of API keys, never the keys themselves."""

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypedDict, Unpack

import msgspec

from disaggregated_inference.cluster import read_file
from disaggregated_inference.errors import BadRequest, ConfigError
from disaggregated_inference.private_files import private_opener

HOW = "make one with `disagg gateway key NAME --file keys.json`"
_PREFIX = "sk-disagg-"


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry. Unknown fields are refused: a misspelt `models` would allow all models.

    The hash is a plain SHA-256. Slow, salted hashes protect passwords, which can be guessed; a key is 256 random bits,
    and every request compares it."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    key_hash: Annotated[str, msgspec.Meta(pattern="^(sha256:)?[0-9a-fA-F]{64}$")]
    models: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] | None = None
    group: Annotated[str, msgspec.Meta(min_length=1, max_length=100)] | None = None
    per_minute: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | None = None
    concurrency: Annotated[int, msgspec.Meta(ge=1, le=10**6)] | None = None
    tokens_per_minute: Annotated[int, msgspec.Meta(ge=1, le=10**15)] | None = None
    tokens_per_day: Annotated[int, msgspec.Meta(ge=1, le=10**15)] | None = None
    operator: bool = False  # sees the requests of all keys
    comment: str = ""

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.key_hash.removeprefix("sha256:"))


def read_keys(path: str | Path | None) -> tuple[Key, ...]:
    """A file without keys is an error: it would allow everyone."""
    if path is None:
        return ()
    if not Path(path).expanduser().is_file():
        raise ConfigError(f"{path}: no such file; {HOW}")
    found = keys_of(_entries(read_file(Path(path).expanduser()), str(path)), str(path))
    if not found:
        raise ConfigError(f"{path}: it has no keys; {HOW}")
    return found


def _entries(content: Any, place: str) -> Any:
    """A list, or an object with the list under `keys`, which TOML needs."""
    if isinstance(content, dict) and set(content) <= {"keys"}:
        return content.get("keys", [])
    if isinstance(content, list):
        return content
    raise ConfigError(f'{place}: expected {{"keys": [...]}}; {HOW}')


def keys_of(entries: Any, place: str) -> tuple[Key, ...]:
    try:
        found = msgspec.convert(entries, tuple[Key, ...])
    except msgspec.ValidationError as error:
        listed = entries if isinstance(entries, list) else []
        has_keys = any(isinstance(entry, dict) and "key" in entry for entry in listed)
        hint = "the file has hashes, never keys; " if has_keys else ""
        raise ConfigError(f"{place}: {error}; {hint}{HOW}") from None
    for field, values in (("name", {key.name for key in found}), ("key_hash", {key.digest for key in found})):
        if len(values) < len(found):
            raise ConfigError(f"{place}: two keys have the same {field}; keep one")
    return found


class KeyLimits(TypedDict, total=False):
    """Fields of an entry. None counts as not given."""

    group: str | None
    per_minute: float | None
    concurrency: int | None
    tokens_per_minute: int | None
    tokens_per_day: int | None
    operator: bool | None


def new_key(name: str, file: str | Path, models: Iterable[str] = (), **limits: Unpack[KeyLimits]) -> str:
    """Returns a new key. The file gets its hash only: show the key once."""
    path = Path(file).expanduser()
    if path.suffix.lower() == ".toml":
        raise BadRequest(f"{path}: keys are added to JSON files; name one that ends in .json")
    key = _PREFIX + secrets.token_urlsafe(32)
    entry: dict[str, Any] = {"name": name, "key_hash": "sha256:" + hashlib.sha256(key.encode()).hexdigest()}
    entry |= {"models": list(models)} if (models := tuple(models)) else {}
    entry |= {field: value for field, value in limits.items() if value is not None}
    with _locked(path.parent):
        entries = [*(_entries(read_file(path), str(path)) if path.exists() else []), entry]
        keys_of(entries, str(path))
        _write(path, json.dumps({"keys": entries}, indent=2) + "\n")
    return key


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One writer at a time: of two that read the same file, the second would drop the first one's key."""
    number = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def _write(path: Path, text: str) -> None:
    """Atomically. Only the owner may read the file, whatever the rights of an earlier one were."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "w", encoding="utf-8", opener=private_opener) as file:
            file.write(text)
        partial.replace(path)
    except OSError as error:
        remedy = "make room there, or name a file in another folder with --file"
        raise ConfigError(f"cannot write {path}: {error.strerror}; {remedy}") from error
    finally:
        partial.unlink(missing_ok=True)
