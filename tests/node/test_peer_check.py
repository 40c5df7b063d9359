"""The peer check: the limits of the comparison, and the end of refused KV."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from disaggregated_inference.api import GenerationParams
from disaggregated_inference.errors import PeerRefused
from disaggregated_inference.kv import KVSlice, Weights, WeightSample
from disaggregated_inference.node import peer_check as proofs
from disaggregated_inference.node.peer_check import CANARY_TOKENS, CanaryResult, require_same
from tests.support.handoff import prompt_of
from tests.support.node_pair import Pair
from tests.support.waiting import until

FINE, FIVE_BITS, UNKNOWN = 0.06, 0.12, 1.0  # roundings of weights


def _reading(rows: float = 0.0, logits: float = 0.0) -> CanaryResult:
    """At this relative distance from the result without arguments."""
    ones = np.ones((CANARY_TOKENS, 2, 4), np.float32)
    piece = KVSlice(0, 0, "float32", ones * np.float32(1 + rows), ones)
    return CanaryResult([piece], np.ones((2, 8), np.float32) * np.float32(1 + logits))


@pytest.mark.parametrize(
    ("rounding", "rows", "logits", "same"),
    [
        (FINE, 0.29, 0.29, True),
        (FINE, 0.31, 0.0, False),
        (FIVE_BITS, 0.7, 0.24, True),
        (UNKNOWN, 0.7, 0.24, True),
        (UNKNOWN, 0.81, 0.0, False),
        (UNKNOWN, 0.0, 0.31, False),
        (UNKNOWN, float("nan"), 0.0, False),
    ],
)
def test_coarse_weights_have_a_higher_limit(rounding: float, rows: float, logits: float, same: bool) -> None:
    if same:
        assert require_same(_reading(), _reading(rows, logits), rounding) == pytest.approx(max(rows, logits), rel=1e-3)
    else:
        with pytest.raises(PeerRefused, match="differ by"):
            require_same(_reading(), _reading(rows, logits), rounding)


def test_the_node_with_the_coarser_weights_sets_the_limit(
    nodes: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On either node: the sender reports its rounding."""
    asked: list[float] = []

    def allowed(ours: CanaryResult, theirs: CanaryResult, rounding: float, limit: float) -> float:
        asked.append(rounding)
        return require_same(ours, theirs, rounding, limit)

    monkeypatch.setattr(proofs, "require_same", allowed)
    for coarse in (0, 1):
        pair = nodes()
        engine = pair[coarse].engine
        weights = Weights("n", "gguf:Q4_0", "s", (WeightSample(tensor="v", rounding=0.25, values=b""),))
        monkeypatch.setattr(engine, "fingerprint", msgspec.structs.replace(engine.fingerprint, weights=weights))
        other = pair[1 - coarse].engine
        norms = msgspec.structs.replace(other.fingerprint.weights, norms="n")
        monkeypatch.setattr(other, "fingerprint", msgspec.structs.replace(other.fingerprint, weights=norms))
        list(pair[1].generate_from_kv(pair[0].submit(prompt_of(20))[0], GenerationParams(max_tokens=2)))
    assert asked == [0.25, 0.25]


def test_a_refused_prefill_node_frees_the_kv(nodes: Callable[..., Pair]) -> None:
    """After the first request, which runs the peer check, and after the next, which knows its result."""
    prefill, decode = nodes()
    decode.kv_source.peer_checks.limit = -1.0
    for _ in range(2):
        context, reading = prefill.submit(prompt_of(300))
        reading.result(10)
        assert len(prefill.tickets) == 1
        with pytest.raises(PeerRefused):
            list(decode.generate_from_kv(context, GenerationParams(max_tokens=4)))
        assert until(lambda: len(prefill.tickets) == 0 and not prefill.jobs)
