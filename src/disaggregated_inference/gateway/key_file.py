"""The file with a gateway's keys: their hashes, names and limits, never the keys themselves."""

import hashlib
import json
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from disaggregated_inference.cluster.reader import parse
from disaggregated_inference.errors import BadRequest, ConfigError

HOW = "make one with `disagg gateway key NAME --file keys.json`"
_PREFIX = "sk-disagg-"


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As a file has it. A field nobody knows is refused: a misspelt `models` would allow all of them.

    The hash is a plain SHA-256. Slow ones with salt are for passwords, which can be guessed; a key is 256 random bits,
    which cannot, and it is compared with every request."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    key_hash: Annotated[str, msgspec.Meta(pattern="^(sha256:)?[0-9a-fA-F]{64}$")]
    models: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] | None = None
    per_minute: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | None = None
    comment: str = ""

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.key_hash.removeprefix("sha256:"))


def read_keys(path: str | Path | None) -> tuple[Key, ...]:
    """A file without keys is a mistake: it would let everyone in."""
    if path is None:
        return ()
    if not Path(path).expanduser().is_file():
        raise ConfigError(f"{path}: no such file; {HOW}")
    found = keys_of(_entries(parse(Path(path).expanduser()), str(path)), str(path))
    if not found:
        raise ConfigError(f"{path}: no keys in it; {HOW}")
    return found


def _entries(content: Any, place: str) -> Any:
    """A list, or an object (which is all that TOML has) with the list under `keys`."""
    if isinstance(content, dict) and set(content) <= {"keys"}:
        return content.get("keys", [])
    if isinstance(content, list):
        return content
    raise ConfigError(f'{place}: expected {{"keys": [...]}}; {HOW}')


def keys_of(entries: Any, place: str) -> tuple[Key, ...]:
    try:
        found = msgspec.convert(entries, tuple[Key, ...])
    except msgspec.ValidationError as error:
        hint = "only hashes are kept here, never keys; " if '"key"' in str(error) or "`key`" in str(error) else ""
        raise ConfigError(f"{place}: {error}; {hint}{HOW}") from None
    for what in ("name", "digest"):
        if len({getattr(key, what) for key in found}) < len(found):
            raise ConfigError(f"{place}: two keys have the same {'name' if what == 'name' else 'key_hash'}; keep one")
    return found


def new_key(name: str, file: str | Path, models: Iterable[str] = (), per_minute: float | None = None) -> str:
    """A new key, which is nowhere but here: the file gets its hash. Show it once."""
    path = Path(file).expanduser()
    if path.suffix.lower() == ".toml":
        raise BadRequest(f"{path}: keys are added to JSON files; name one that ends in .json")
    key = _PREFIX + secrets.token_urlsafe(32)
    entry: dict[str, Any] = {"name": name, "key_hash": "sha256:" + hashlib.sha256(key.encode()).hexdigest()}
    entry |= {"models": list(models)} if (models := tuple(models)) else {}
    entry |= {"per_minute": per_minute} if per_minute is not None else {}
    entries = [*(_entries(parse(path), str(path)) if path.exists() else []), entry]
    keys_of(entries, str(path))
    _write(path, json.dumps({"keys": entries}, indent=2) + "\n")
    return key


def _write(path: Path, text: str) -> None:
    """Whole or not at all, and a new one for its owner's eyes: it says who may do what."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.touch(path.stat().st_mode & 0o777 if path.exists() else 0o600)
    try:
        partial.write_text(text, "utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
