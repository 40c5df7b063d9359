"""The bearer token of the nodes: from the environment or a file. No message repeats it."""

import os
from collections.abc import Mapping
from pathlib import Path

from disaggregated_inference.errors import ConfigError

VARIABLES = ("DISAGG_TOKEN", "DISAGG_TOKEN_FILE", "DISAGG_IDENTITY")  # of nodes beyond loopback
_MAX_BYTES = 4096


def read_token(given: str = "", file: str = "", environ: Mapping[str, str] = os.environ) -> str:
    """The first of: `file` (the command line), DISAGG_TOKEN, the file that DISAGG_TOKEN_FILE names. Empty if there is
    none. `given`, a token on the command line itself, is refused: every user of the machine can read it there."""
    if given:
        raise ConfigError(
            "--token is refused: everyone on this machine can read it in the process list; set DISAGG_TOKEN or give"
            " --token-file FILE, and change this token if others use the machine"
        )
    if file:
        return token_of_file(file, "--token-file")
    if token := environ.get("DISAGG_TOKEN"):
        return _checked(token, "DISAGG_TOKEN")
    named = environ.get("DISAGG_TOKEN_FILE")
    return token_of_file(named, "DISAGG_TOKEN_FILE") if named else ""


def without_token(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for a node on loopback that needs neither token nor identity."""
    return {name: value for name, value in environ.items() if name not in VARIABLES}


def is_header_text(token: str) -> bool:
    return token.isascii() and token.isprintable()


def token_of_file(path: str, source: str) -> str:
    try:
        with Path(path).expanduser().open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{source}: {path} cannot be read: {reason}; name a file that contains the token") from None
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{source}: {path} has more than {_MAX_BYTES} bytes; write only the token there")
    return _checked(content.decode("utf-8", "replace"), f"{source}: {path}")


def _checked(text: str, source: str) -> str:
    token = text.strip()
    if not token:
        raise ConfigError(f"{source} is empty; write the token there, or leave it out")
    if not is_header_text(token):
        raise ConfigError(f"{source} has characters that an HTTP header cannot carry; use one line of printable ASCII")
    return token
