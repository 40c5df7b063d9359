"""How all commands report errors: as text and as JSON."""

import json
import sys

from disaggregated_inference.errors import DisaggError


def as_data(error: Exception) -> dict[str, str]:
    """`os_error` is the code for errors of the operating system."""
    return {"code": error.code if isinstance(error, DisaggError) else "os_error", "message": str(error)}


def print_error(error: Exception, arguments: list[str]) -> None:
    """One line on standard error; with --json also one on standard output, which would otherwise be empty."""
    if _wants_json(arguments):
        print(json.dumps({"error": as_data(error)}), flush=True)
    sys.stderr.write(f"error: {error}\n")


def print_usage_error(error: BaseException | None, arguments: list[str]) -> None:
    """With --json: repeat as JSON what Typer already wrote to standard error."""
    if _wants_json(arguments) and (message := getattr(error, "format_message", None)):
        print(json.dumps({"error": {"code": "usage", "message": message()}}), flush=True)


def _wants_json(arguments: list[str]) -> bool:
    """Arguments after `--` are not options."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options
