"""Errors in Ollama's shape."""

from typing import Any

from disaggregated_inference.errors import DisaggError


def error_body(error: Exception, id: str = "") -> dict[str, Any]:
    return {"error": str(error) if isinstance(error, DisaggError) else "internal error; see the gateway's log"}
