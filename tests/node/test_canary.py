"""How far two nodes may be from each other on the canary prompt, and what becomes of a cache that is refused."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from disaggregated_inference.errors import PeerRefused
from disaggregated_inference.kv import KVSlice
from disaggregated_inference.kv.fingerprint import Sampled, Weights
from disaggregated_inference.node import peer_check as proofs
from disaggregated_inference.node.canary import TOKENS, Reading, require_same
from tests.conftest import Pair, until
from tests.support.handoff import prompt_of

FINE, FIVE_BITS, UNKNOWN = 0.06, 0.12, 1.0  # roundings of weights


def _reading(rows: float = 0.0, logits: float = 0.0) -> Reading:
    """So far from one without arguments."""
    ones = np.ones((TOKENS, 2, 4), np.float32)
    piece = KVSlice(0, 0, "float32", ones * np.float32(1 + rows), ones)
    return Reading([piece], np.ones((2, 8), np.float32) * np.float32(1 + logits))


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
def test_coarse_weights_may_move_rows_further(rounding: float, rows: float, logits: float, same: bool) -> None:
    if same:
        assert require_same(_reading(), _reading(rows, logits), rounding) == pytest.approx(max(rows, logits), rel=1e-3)
    else:
        with pytest.raises(PeerRefused, match="differ by"):
            require_same(_reading(), _reading(rows, logits), rounding)


def test_the_coarser_side_decides(nodes: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is: the sender says how coarse it is."""
    asked: list[float] = []

    def allowed(ours: Reading, theirs: Reading, rounding: float) -> float:
        asked.append(rounding)
        return require_same(ours, theirs, rounding)

    monkeypatch.setattr(proofs, "require_same", allowed)
    for coarse in (0, 1):
        pair = nodes()
        engine = pair[coarse].engine
        weights = Weights("n", "gguf:Q4_0", "s", (Sampled(tensor="v", rounding=0.25, values=b""),))
        monkeypatch.setattr(engine, "fingerprint", msgspec.structs.replace(engine.fingerprint, weights=weights))
        other = pair[1 - coarse].engine
        norms = msgspec.structs.replace(other.fingerprint.weights, norms="n")
        monkeypatch.setattr(other, "fingerprint", msgspec.structs.replace(other.fingerprint, weights=norms))
        list(pair[1].fetch_and_write(pair[0].begin(prompt_of(20))[0], 2))
    assert asked == [0.25, 0.25]


def test_a_cache_that_is_refused_is_not_kept(nodes: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the first request, which reads the canary, nor by the next, for which the verdict is known."""
    monkeypatch.setattr("disaggregated_inference.node.canary.LIMIT", -1.0)
    prefill, decode = nodes()
    for _ in range(2):
        context, reading = prefill.begin(prompt_of(300))
        reading.result(10)
        assert len(prefill.book) == 1
        with pytest.raises(PeerRefused):
            list(decode.fetch_and_write(context, 4))
        assert until(lambda: len(prefill.book) == 0 and not prefill._attempts)
