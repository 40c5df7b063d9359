"""Alarms: signs that disaggregation does not happen although requests are answered.

A decode node that reads prompts itself gives right answers, only slower: no error shows it.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from disaggregated_inference.api import Alarm
from disaggregated_inference.orchestrator import FALLBACK_WARNING, HistoryFilter, HistoryReader, ModelVerdict

Record = dict[str, Any]
_FEW = 10  # requests; with fewer a share says little

_COLUMNS = {
    "answered": "SUM(ok)",
    "disaggregated": "SUM(ok AND kind = 'disaggregated')",
    "fallback": "SUM(ok AND kind = 'fallback')",
    "prompt_tokens": "SUM(CASE WHEN kind = 'disaggregated' THEN prompt_tokens END)",
    "recomputed": "SUM(CASE WHEN kind = 'disaggregated' THEN prompt_tokens_recomputed END)",
    "transfers": "SUM(kv_bytes > 0)",
    "slow_transfers": "SUM(kv_bytes > 0 AND exposed_transfer_time > 1)",
}

_RECOMPUTED = Alarm(
    name="prompt_recomputed",
    unit="%",
    limit=1,
    what="prompt tokens that decode nodes computed again although the KV was handed over",
)
_FALLBACK = Alarm(
    name="fallback_share", unit="%", limit=5, what="answers whose prompt no prefill node read, because of a failure"
)
_SLOW = Alarm(name="slow_transfers", unit="%", limit=5, what="KV transfers that a request waited over 1 s for")
_PREFILL = Alarm(name="prefill_down", unit="models", limit=0, what="models that no prefill node serves at the moment")
_WHY = {
    "prompt_recomputed": "decode nodes compute prompts twice: look at `prompt_tokens_recomputed` of the requests",
    "fallback_share": f"look at `warning_reason` of requests with the warning {FALLBACK_WARNING!r}",
    "slow_transfers": "the link is slower than the prefill: compare its measured rate with its line rate",
}


def alarms(reader: HistoryReader, wanted: HistoryFilter, models: Mapping[str, ModelVerdict]) -> tuple[Alarm, ...]:
    """`models`: the verdict of each, as in the orchestrator's status."""
    found: Record = next(iter(reader.grouped(wanted, "0", _COLUMNS).values()), {})
    return (
        _share(_RECOMPUTED, found, "recomputed", "prompt_tokens", enough="disaggregated"),
        _share(_FALLBACK, found, "fallback", "answered", enough="answered"),
        _share(_SLOW, found, "slow_transfers", "transfers", enough="transfers"),
        _prefill_down(models),
    )


def _share(alarm: Alarm, found: Record, part: str, whole: str, enough: str) -> Alarm:
    if not found.get(whole) or (found.get(enough) or 0) < _FEW:
        return alarm
    measured = 100 * (found[part] or 0) / found[whole]
    return _judged(alarm, measured, _WHY[alarm.name])


def _prefill_down(models: Mapping[str, ModelVerdict]) -> Alarm:
    down = [name for name, verdict in models.items() if verdict == ModelVerdict.PREFILL_DOWN]
    return _judged(_PREFILL, len(down), f"decode nodes read all prompts of {', '.join(down)}: start a prefill node")


def _judged(alarm: Alarm, measured: float, why: str) -> Alarm:
    high = measured > alarm.limit
    state: Literal["ok", "alarm"] = "alarm" if high else "ok"
    return msgspec.structs.replace(alarm, measured=measured, state=state, why=why if high else "")
