"""What the checks of the Python clients share. These files run in the clients' environments, one process a client.

A check is a function that raises if something is wrong, and may return a remark for the table. The model is too small
to be clever: checks look at what comes back and in which shape.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

URL = os.environ["GATEWAY_URL"]
MODEL = "qwen"  # an alias
EXPECTED = os.environ["EXPECTED"]  # the gateway's answer to QUESTION by plain HTTP, in MAX_TOKENS greedy tokens
QUESTION = "Why is the sky blue?"
MAX_TOKENS = 12
KEY = "none"


class City(BaseModel):
    name: Literal["Paris", "Rome", "Oslo"]
    large: bool


CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]}, "large": {"type": "boolean"}},
    "required": ["name", "large"],
    "additionalProperties": False,
}


def same(text: str) -> None:
    """Every client gets the same greedy text."""
    assert text == EXPECTED, f"{text!r} is not {EXPECTED!r}"


def joined(pieces: Iterable[str]) -> None:
    """The pieces of a stream make the text of the plain answer."""
    found = [piece for piece in pieces if piece]
    same("".join(found))
    assert len(found) > 1, f"one piece: {found}"


def one_call(calls: Iterable[tuple[str, Any]], name: str = "save_city") -> None:
    """One call, whose arguments fit the schema."""
    found = list(calls)
    assert [call for call, _ in found] == [name], found
    City.model_validate(json.loads(found[0][1]) if isinstance(found[0][1], str) else found[0][1])


def run_command(name: str, *arguments: str, cwd: str | None = None, **environ: str) -> str:
    """What a command of this environment prints. If it fails, the reason is the last thing it says."""
    command = [str(Path(sys.executable).with_name(name)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=os.environ | environ)
    print(done.stderr, file=sys.stderr)
    lines = [line for line in done.stderr.splitlines() if line.strip() and "%|" not in line]
    assert done.returncode == 0, lines[-1:]
    return done.stdout


def report(package: str, **checks: Callable[[], str | None]) -> None:
    """Run the checks of a client; one line of JSON for its version and one for each check."""
    _write(version=importlib.metadata.version(package))
    for name, check in checks.items():
        try:
            _write(check=name, note=check() or "")
        except Exception as error:
            traceback.print_exc()
            first = next(iter(str(error).splitlines()), "")
            _write(check=name, error=f"{type(error).__name__}: {first}")


def _write(**fields: str) -> None:
    print("\n" + json.dumps(fields), flush=True)
