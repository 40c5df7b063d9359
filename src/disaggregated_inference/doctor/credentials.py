"""Tokens, keys and certificates: who can read them, and when they expire."""

import datetime
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from disaggregated_inference.cluster import read_file
from disaggregated_inference.doctor.findings import Finding, found, ok
from disaggregated_inference.doctor.plan import ExpectedMachine
from disaggregated_inference.errors import ConfigError
from disaggregated_inference.identity import VARIABLE, Identity
from disaggregated_inference.models import default_home

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_SHORT_TOKEN = 16
_SOON_DAYS = 30


def check_secrets(plan: ExpectedMachine) -> Iterator[Finding]:
    files = [path for path in _secret_files(plan) if path.exists()]
    open_files = [path for path in files if path.stat().st_mode & _OTHERS]
    for path in open_files:
        yield found("error", "secrets", f"other users of this machine can read {path}", f"chmod go= {path}")
    yield from _short_tokens()
    if not open_files:
        words = f"{len(files)} files and folders with tokens or keys, readable by their owner alone"
        yield ok("secrets", words if files else "no files with tokens or keys")


def _secret_files(plan: ExpectedMachine) -> Iterator[Path]:
    if named := os.environ.get("DISAGG_TOKEN_FILE"):
        yield Path(named).expanduser()
    if plan.source and has_token(Path(plan.source)):
        yield Path(plan.source)
    for folder in (default_home() / "keys", _identity_folder(plan)):
        if folder and folder.is_dir():
            yield folder
            yield from (path for path in folder.rglob("*") if path.name.endswith(("key.pem", ".key", "token")))
    if plan.secrets and (secrets := Path(plan.secrets).expanduser()).is_dir():
        yield from (secrets, *(path for path in secrets.rglob("*") if path.is_file()))


def has_token(path: Path) -> bool:
    """Whether a cluster file contains a token itself, not the name of a variable."""
    try:
        content = read_file(path)
    except ConfigError:
        return False
    if not isinstance(content, dict):
        return False
    servers = [*content.get("prefill_servers", ()), *content.get("decode_servers", ())]
    tokens = [each.get("token") for each in [content, *servers] if isinstance(each, dict)]
    return any(isinstance(token, str) and token and not token.startswith("${") for token in tokens)


def _short_tokens() -> Iterator[Finding]:
    token = os.environ.get("DISAGG_TOKEN", "")
    if token and len(token) < _SHORT_TOKEN:
        mend = "export DISAGG_TOKEN=$(openssl rand -hex 32)"
        yield found("warning", "secrets", f"DISAGG_TOKEN has only {len(token)} characters and can be guessed", mend)


def _identity_folder(plan: ExpectedMachine) -> Path | None:
    folder = plan.identity or os.environ.get(VARIABLE, "")
    return Path(folder).expanduser() if folder else None


def check_certificate(plan: ExpectedMachine) -> Iterator[Finding]:
    folder = _identity_folder(plan)
    if folder is None:
        return
    try:
        me = Identity(folder).me
    except ConfigError as error:
        yield found("error", "certificate", str(error))
        return
    days = (me.expires_at - datetime.datetime.now(datetime.UTC)).days
    words = f"the certificate of {me.name} is valid for {days} more days"
    if days < _SOON_DAYS:
        yield found("warning", "certificate", words, f"disagg cluster keys rotate {me.name}, then copy it again")
    else:
        yield ok("certificate", words)


def check_cluster_file(plan: ExpectedMachine) -> Iterator[Finding]:
    for warning in plan.warnings:
        yield found("warning", "cluster-file", warning)
    if plan.source and not plan.warnings:
        yield ok("cluster-file", f"{plan.source} has no faults")
