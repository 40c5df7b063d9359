"""How all commands report errors: as text and as JSON."""

import errno
import json
import sys
from pathlib import Path

from disaggregated_inference.errors import DisaggError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT, errno.EEXIST)


def as_data(error: Exception) -> dict[str, str]:
    """`os_error` is the code for errors of the operating system."""
    return {"code": error.code if isinstance(error, DisaggError) else "os_error", "message": message_of(error)}


def message_of(error: Exception) -> str:
    """With the variable to set, where the home folder of this program cannot be written."""
    if not isinstance(error, OSError):
        return str(error)
    if error.errno in _FULL:
        return f"{error}; free space on that disk, or set DISAGG_HOME to a folder on another one"
    if error.errno in _REFUSED and error.filename and _concerns_home(Path(str(error.filename))):
        return f"{error}; set DISAGG_HOME to a folder that you can write to"
    return str(error)


def _concerns_home(path: Path) -> bool:
    from disaggregated_inference.models import default_home

    home = default_home().absolute()
    return path == home or home in path.absolute().parents or path.absolute() in home.parents


def print_error(error: Exception, arguments: list[str]) -> None:
    """One line on standard error; with --json also one on standard output, which would otherwise be empty."""
    from disaggregated_inference.cli.screen import plain

    if _wants_json(arguments):
        print(json.dumps({"error": as_data(error)}), flush=True)
    sys.stderr.write(f"error: {plain(message_of(error))}\n")


def print_usage_error(error: BaseException | None, arguments: list[str]) -> None:
    """With --json: repeat as JSON what Typer already wrote to standard error."""
    if _wants_json(arguments) and (message := getattr(error, "format_message", None)):
        print(json.dumps({"error": {"code": "usage", "message": message()}}), flush=True)


def _wants_json(arguments: list[str]) -> bool:
    """Arguments after `--` are not options."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options
