"""What two machines must agree on: clocks and models."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from disaggregated_inference.cluster import Server
from disaggregated_inference.doctor.findings import Finding, found, ok
from disaggregated_inference.kv import Fingerprint
from disaggregated_inference.models import ModelDescription, compare_models

_SKEW_S, _LARGE_SKEW_S = 1.0, 60.0


def judge_clock_skew(skew_s: float, uncertainty_s: float) -> Finding:
    beyond_s = max(0.0, abs(skew_s) - uncertainty_s)
    direction = "ahead of" if skew_s > 0 else "behind"
    words = f"the clock is {abs(skew_s):.1f} s {direction} this machine's (measured to {uncertainty_s:.1f} s)"
    if beyond_s < _SKEW_S:
        return ok("clock-skew", f"the clock agrees with this machine's to {max(abs(skew_s), uncertainty_s):.2f} s")
    return found("error" if beyond_s > _LARGE_SKEW_S else "warning", "clock-skew", words)


def compare_pairs(pairs: Iterable[tuple[Server, Server]], models: Mapping[str, Any]) -> Iterator[Finding]:
    """Every prefill with every decode node of its model, as far as their machines described the files."""
    for prefill, decode in pairs:
        here, there = (_description(server.name, models.get(server.name)) for server in (prefill, decode))
        if here and there:
            yield judge_models(here, there)


def _description(place: str, described: Mapping[str, Any] | None) -> ModelDescription | None:
    if not described:
        return None
    kinds = msgspec.convert(described["fingerprint"], Fingerprint), described.get("fingerprint_in_llamacpp")
    return ModelDescription(place, kinds[0], in_llamacpp=msgspec.convert(kinds[1], Fingerprint | None))


def judge_models(here: ModelDescription, there: ModelDescription) -> Finding:
    comparison = compare_models(here, there)
    words = f"{here.place} and {there.place}: {comparison.summary}"
    if not comparison.differences:
        return ok("model-same", words)
    return found("error", "model-same", f"{words}: {'; '.join(comparison.differences)}")
