"""The exposed part of a transfer, over slow lines: reported as long as it really was."""

import logging
import time
from collections.abc import Callable

import msgspec
import pytest

from disaggregated_inference.api import GenerationParams
from disaggregated_inference.errors import PeerGone
from disaggregated_inference.node.context import PrefillContext
from disaggregated_inference.timeouts import NodeTimeouts
from tests.support.handoff import prompt_of
from tests.support.node_pair import ONE_PROCESS, PROVEN_ANYWHERE, Pair
from tests.support.tcp_proxy import Fault, FaultyProxy

pytestmark = pytest.mark.slow

PROMPT = prompt_of(300)
KV_BYTES = 300 * 4 * 2 * 2 * 16 * 4  # tokens, layers, K and V, heads, dims, float32
PAUSE_S = 0.08  # after 16 KB: each of two connections carries 0.2 MB/s
SLOW_S = 0.1  # a transfer that is exposed for longer is logged
LIMITS = msgspec.structs.replace(ONE_PROCESS, slow_transfer_s=SLOW_S)
PARAMS = GenerationParams(max_tokens=4)


def through(proxy: FaultyProxy, context: PrefillContext) -> PrefillContext:
    return msgspec.structs.replace(context, addresses=(proxy.address,))


@pytest.fixture
def pair(nodes: Callable[..., Pair]) -> Pair:
    """Checked by a canary prompt beforehand."""
    prefill, decode = nodes(timeouts=LIMITS, trusts=PROVEN_ANYWHERE)
    list(decode.generate_from_kv(prefill.submit(PROMPT[:9])[0], PARAMS))
    return prefill, decode


@pytest.mark.parametrize(("fault", "at"), [("none", 0), ("cut", KV_BYTES // 2)])
def test_a_slow_line_is_exposed_from_the_end_of_computing(
    pair: Pair, fault: Fault, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """On a slow line the logits are late too: they are behind the slices that the sender's socket holds."""
    prefill, decode = pair
    with FaultyProxy(prefill.kv_addresses[0], fault, at, heals=True, pause_s=PAUSE_S) as proxy:
        context, computed = prefill.submit(PROMPT)
        computed_at: list[float] = []
        computed.add_done_callback(lambda _: computed_at.append(time.perf_counter()))
        with caplog.at_level(logging.WARNING):
            generation = decode.generate_from_kv(through(proxy, context), PARAMS)
            list(generation)
        ended_at, metrics = time.perf_counter(), generation.metrics
        assert proxy.struck.is_set() == (fault != "none")
        assert metrics.resumed > 0 or fault == "none"
    really_s = proxy.last_at - computed_at[0]  # at least: the last bytes had still to arrive
    assert really_s > SLOW_S, "the line was slow"
    assert really_s <= metrics.exposed_transfer_time <= metrics.total_time - metrics.decode_time
    assert metrics.decode_time <= ended_at - proxy.last_at, "decoding begins after the last slice"
    [warning] = [record for record in caplog.records if "longer than the prefill" in record.message]
    assert f"{metrics.exposed_transfer_time:.1f} s longer" in warning.message


def test_a_prefill_of_long_ago_is_exposed_from_the_request_on(pair: Pair) -> None:
    prefill, decode = pair
    context, computed = prefill.submit(PROMPT)
    computed.result(20)
    time.sleep(0.1)
    generation = decode.generate_from_kv(context, PARAMS)
    list(generation)
    metrics = generation.metrics
    waited_s = metrics.admission_time + metrics.canary_time + metrics.decode_time
    assert metrics.exposed_transfer_time == pytest.approx(metrics.total_time - waited_s)


@pytest.mark.parametrize("offset_s", [-1e9, 1e9])
def test_a_sender_that_reports_nonsense_leaves_the_figure_within_the_request(pair: Pair, offset_s: float) -> None:
    prefill, decode = pair
    context, computed = prefill.submit(PROMPT)
    computed.result(20)
    prefill.jobs[context.ticket].outbox.computed_at += offset_s
    generation = decode.generate_from_kv(context, PARAMS)
    tokens = list(generation)
    assert len(tokens) == 4
    assert 0 <= generation.metrics.exposed_transfer_time <= generation.metrics.total_time


def test_a_line_that_falls_silent_on_every_connection_is_given_up(nodes: Callable[..., Pair]) -> None:
    """Every connection stays open and brings nothing after its first slices, and the node answers probes."""
    limits = msgspec.structs.replace(ONE_PROCESS.transfer, silence_s=0.1, max_silence_s=0.6)
    prefill, decode = nodes(timeouts=NodeTimeouts(transfer=limits), streams=1, trusts=PROVEN_ANYWHERE)
    list(decode.generate_from_kv(prefill.submit(PROMPT[:9])[0], PARAMS))
    with FaultyProxy(prefill.kv_addresses[0], "mute each", 4000) as proxy:
        context, _ = prefill.submit(PROMPT)
        with pytest.raises(PeerGone, match=r"silent|does not answer"):  # that late, on a busy machine
            list(decode.generate_from_kv(through(proxy, context), PARAMS))
        assert 1 <= proxy.muted <= 2, "a second connection is tried, no third"
    prefill.tickets.cancel(context.ticket)


def test_the_speed_of_a_prefill_counts_what_was_computed(nodes: Callable[..., Pair]) -> None:
    prefill, _ = nodes(prefix_bytes=1 << 24)
    first = prefill.submit(PROMPT)[1].result(20)
    second = first
    for number in range(50):  # the prefix is saved behind the prefill
        second = prefill.submit([*PROMPT, 5 + number])[1].result(20)
        if second.cached_tokens:
            break
        time.sleep(0.05)
    assert first.cached_tokens == 0
    assert first.prefill_speed * first.prefill_time == pytest.approx(300)
    assert second.cached_tokens > 200
    assert second.prefill_speed * second.prefill_time == pytest.approx(301 - second.cached_tokens)
