"""A history of requests for the dashboard's tests: long and hostile names, failures, fallbacks, missing energy."""

import time
from collections.abc import Iterable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from disaggregated_inference.orchestrator import FALLBACK_WARNING, History
from tests.support.waiting import until

EVIL = "<img src=x onerror=alert(1)>\x1b[31m\u202e"
LONG = f"an-organisation-with-a-long-name/a-model-with-a-very-long-name-that-does-not-fit-8bit-2026{EVIL}"
PREFILL, DECODE = f"prefill-node-of-{LONG}", f"decode-node-of-{LONG}"


def record_of(number: int) -> dict[str, Any]:
    """One of ten fails, one is a fallback, and the energy of one is not known."""
    kind = number % 10
    usual: dict[str, Any] = {
        "number": number + 1,
        "request_id": f"r{number}",
        "time": time.time() - number,
        "model": LONG,
        "n": 1,
        "ok": True,
        "outcome": "ok",
        "prefill_node": PREFILL,
        "decode_node": DECODE,
        "plan": f"{EVIL} is faster",
        "kind": "disaggregated",
        "method": "disaggregated_torch",
        "prompt_tokens": 123456,
        "completion_tokens": 1234,
        "cached_tokens": 0,
        "total_time": 1234.5,
        "first_token_time": 12.3,
        "prefill_time": 12.1,
        "decode_time": 1222.2,
        "prefill_speed": 10203.0,
        "decode_speed": 1.01,
        "kv_bytes": 12_345_678_901,
        "exposed_transfer_time": 0.1,
        "prompt_tokens_recomputed": 100,
        "output_token_time": 0.99,
        "waterfall": [],
        "attempts": 1,
        "energy_j": 123456.7,
        "energy_source": "mixed",
        "cost": 1e-8,
        "cost_without": [f"price of {PREFILL}"],
    }
    usual["energy"] = [{"node": DECODE, "phase": "decode", "joules": 100000.0, "source": "measured"}]
    if kind == 2:
        failover = {"node": DECODE, "at_s": 1.5, "code": "unreachable", "message": EVIL, "detected_s": 0.25}
        usual |= {"failovers": [failover | {"stall_s": 0.75}], "attempts": 2, "predicted_first_token_time": 11.0}
        usual["waterfall"] = [{"name": "failed", "start_s": 0.0, "seconds": 1.5, "node": DECODE}]
    if kind == 0:
        usual |= {"ok": False, "outcome": "failed", "error": {"code": "node_failed", "message": EVIL}, "energy_j": None}
    if kind == 1:
        usual |= {
            "kind": "fallback",
            "method": "fallback",
            "warning": FALLBACK_WARNING,
            "warnings": [EVIL],
            "warning_reason": EVIL,
        }
    return usual


def write_history(path: Path, records: Iterable[dict[str, Any]], callers: Iterable[str] = ()) -> None:
    """Oldest first. All of them are in the file at the end."""
    written = list(zip(records, chain(callers, repeat("")), strict=False))
    history = History(len(written), str(path))
    for record, caller in written:
        history.add(record, caller=caller)

    def complete() -> bool:
        with history.reader() as found:
            return bool(found.kept()["requests"] == len(written))

    assert until(complete)
    history.close()
