"""What went wrong, for people and for programs: one shape for all commands."""

import json
import sys

from disaggregated_inference.errors import DisaggError


def as_data(error: Exception) -> dict[str, str]:
    """`os_error`: what the system says about files and connections."""
    return {"code": error.code if isinstance(error, DisaggError) else "os_error", "message": str(error)}


def say(error: Exception, arguments: list[str]) -> None:
    """One line on standard error; where JSON was asked for, on standard output too, which would else be empty."""
    if _wants_json(arguments):
        print(json.dumps({"error": as_data(error)}), flush=True)
    sys.stderr.write(f"error: {error}\n")


def say_usage(error: BaseException | None, arguments: list[str]) -> None:
    """Of a command line that Typer did not understand: it has said so on standard error already."""
    if _wants_json(arguments) and (words := getattr(error, "format_message", None)):
        print(json.dumps({"error": {"code": "usage", "message": words()}}), flush=True)


def _wants_json(arguments: list[str]) -> bool:
    """Of all commands, as they were typed: what stands behind `--` is no option."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options
