"""Moments and durations as people write them: 15m, 24h, 7d, 2026-11-17, 2026-11-17T08:30."""

import re
from datetime import datetime

DURATION_SHAPE = "a number with s, m, h or d, such as 15m or 24h"
MOMENT_SHAPE = f"how long ago ({DURATION_SHAPE}), a date such as 2026-11-17T08:30, or seconds since 1970"

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)([smhd]?)", re.ASCII)
_SECONDS = re.compile(r"\d{1,12}(?:\.\d{1,9})?", re.ASCII)


def duration_s(text: str) -> float | None:
    """Without a unit: seconds. None: it is no duration."""
    found = _DURATION.fullmatch(text)
    return float(found[1]) * _UNITS_S[found[2] or "s"] if found else None


def moment(text: str, now: float) -> float | None:
    """Seconds since 1970. A number with a unit is so long ago, one without is that moment, a date without a zone is
    this machine's. None: it is no moment."""
    if _SECONDS.fullmatch(text):
        return float(text)
    if (ago_s := duration_s(text)) is not None:
        return now - ago_s
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
