"""The name that a request has in answers, logs and history."""

import re
import secrets
from typing import Any

from starlette.requests import Request

_SANE_ID = re.compile(r"[\w.:-]{1,100}", re.ASCII)


def request_id_of(request: Request) -> str:
    """The caller's, or a new one; the same whenever it is asked for."""
    state: dict[str, Any] = request.scope.setdefault("state", {})
    if "request_id" not in state:
        given = request.headers.get("x-request-id") or request.headers.get("x-correlation-id") or ""
        state["request_id"] = given if _SANE_ID.fullmatch(given) else secrets.token_hex(8)
    name: str = state["request_id"]
    return name
