"""What happens when vLLM, the receiver or the client goes: a typed error in time, everything freed, the next one right.

One tiny vLLM with few blocks, which sliding and full layers share. A long prompt takes many steps of 40 tokens, so that
there is time to strike."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

import msgspec
import pytest

from disaggregated_inference.api import FALLBACK_WARNING, GenerationParams
from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.cluster.config import Policies
from disaggregated_inference.errors import DisaggError, EngineFailed, EngineUnavailable, ModelNotFound, PeerFailed
from disaggregated_inference.kv_transfer import MIN_PART_BYTES, format_address
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.node import DecodeNode, Generation, PrefillContext
from disaggregated_inference.timeouts import VllmBorderTimeouts
from disaggregated_inference.vllm_connector.messages import MAX_PACKET_BYTES, ExportedRows
from disaggregated_inference.vllm_node.prefill import VllmPrefill
from tests.support.handoff import prompt_of
from tests.support.orchestrator_cluster import answered
from tests.support.tcp_proxy import Fault, FaultyProxy
from tests.support.vllm_http import cluster_over_http, gateway_over_http, vllm_over_http
from tests.support.vllm_nodes import DecodeNodes, VllmHome, expected, hand_over, open_home
from tests.support.vllm_server import BUSY_S, VllmForker, frozen
from tests.support.waiting import until as until_soon

pytestmark = pytest.mark.slow

until = partial(until_soon, seconds=BUSY_S)

LONG = 3060  # steps of 40: the last but one ends at 3040, which is 99 %
_BLOCKS = 120  # of 32 tokens: one long prompt fits, two do not


@pytest.fixture(scope="module")
def model(vllm_forker: VllmForker, vllm_folder: Callable[[str], Path]) -> ModelFiles:
    """With both kinds of layers, where vLLM computes it on the CPU."""
    name = "gpt_oss" if vllm_forker.computes_gpt_oss else "llama"
    return ModelFiles(name, vllm_folder(name))


@pytest.fixture(scope="module")
def home(vllm_forker: VllmForker, model: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmHome]:
    limits: tuple[str, ...] = ("--max-model-len", "3500", "--max-num-batched-tokens", "77", "--max-num-seqs", "16")
    # Two prompts share a step, and vLLM takes the second one before it knows that there are blocks for all of it.
    limits += ("--long-prefill-token-threshold", "40", "--no-scheduler-reserve-full-isl")
    limits += ("--enable-log-requests", "--max-log-len", "0")  # the log says which were aborted
    blocks = ("--num-gpu-blocks-override", str(_BLOCKS), "--block-size", "32")
    folder, size = tmp_path_factory.mktemp("faults"), 128 << 20
    home = open_home(vllm_forker, model, folder, *limits, *blocks, staging_bytes=size, lease_s=3.0)
    yield home
    home.close()


@pytest.fixture(scope="module")
def decode(model: ModelFiles) -> Iterator[DecodeNode]:
    made = DecodeNodes(model)
    yield made["torch"]
    made.close()


@pytest.fixture(autouse=True)
def nothing_left(home: VllmHome, decode: DecodeNode) -> Iterator[None]:
    """After every test: the next request is right, and nothing is held by anyone."""
    yield
    if home.node.trouble():
        home.restart()
    prompt = prompt_of(100, seed=99)
    assert list(hand_over(home, decode, prompt, 4)) == expected(decode, prompt, 4)
    node = home.node
    assert until(lambda: not node.tickets and not node.jobs)
    assert until(lambda: node.scheduler.call(lambda: node.engine.kv_held_bytes) == 0)
    assert until(lambda: node.kv_memory.reserved_bytes == 0)
    assert until(lambda: not prefill_of(home).uncounted), "vLLM told of every ticket how it ended"
    assert until(lambda: home.server.metric("vllm:num_requests_running") == 0)
    assert until(lambda: home.server.metric("vllm:kv_cache_usage_perc") == 0)


@contextmanager
def striking(
    home: VllmHome, part: float, strike: Callable[[], object], last: bool = False, stop: bool = False
) -> Iterator[threading.Event]:
    """Strike when this part of a prompt has arrived, and the event is set: until then nothing more arrives. `last`:
    what vLLM had sent before it was struck is lost too. `stop`: from the part's arrival until the strike is over,
    vLLM's engine stands still, so that it cannot be done before; its HTTP API lives."""
    engine = home.server.engine() if stop else []
    prefill, armed, struck = prefill_of(home), threading.Event(), threading.Event()
    exported, logits_ready = prefill.exported, prefill.logits_ready

    def export(worker: int, rows: ExportedRows) -> None:
        if struck.is_set() and last:
            return
        exported(worker, rows)
        running = prefill._running.get(rows.ticket)
        length = running.job.sequence.length if running and running.job.sequence else 0
        if running and running.job.ticket and not struck.is_set() and length >= part * len(running.job.tokens):
            with frozen(engine):
                assert armed.wait(BUSY_S)
                struck.set()
                strike()

    def take_logits(ticket: str) -> None:
        if not (struck.is_set() and last):
            logits_ready(ticket)

    prefill.exported, prefill.logits_ready = export, take_logits  # type: ignore[method-assign]
    try:
        yield armed
        assert struck.is_set()
    finally:
        prefill.exported, prefill.logits_ready = exported, logits_ready  # type: ignore[method-assign]


def computed_tokens(home: VllmHome) -> int:
    """Of prompts, by vLLM's scheduler; those of peer checks left out."""
    prefill = prefill_of(home)
    assert until(lambda: not prefill.uncounted)
    return home.node.engine.counters.prompt_tokens - prefill.canary_tokens


def prefill_of(home: VllmHome) -> VllmPrefill:
    assert isinstance(home.node.chunked_prefill, VllmPrefill)
    return home.node.chunked_prefill


def test_vllm_is_killed_in_the_middle_and_the_decode_node_reads(home: VllmHome, decode: DecodeNode) -> None:
    """Through the orchestrator: right tokens, the warning in the record, and within the limits of the config."""
    prompt = prompt_of(LONG, seed=50)
    with cluster_over_http(home, decode) as config, DisaggregatedClient(config) as client:
        with striking(home, 0.5, home.server.kill, last=True) as armed:
            armed.set()
            tokens, metrics = answered(client, prompt, 4, model=home.model.name)
        assert metrics["total_time"] < Policies().prefill_timeout_s + Policies().decode_timeout_s
        [record] = client.history()
    assert tokens == expected(decode, prompt, 4)
    for told in (metrics, record):
        assert (told["method"], told["warning"]) == ("fallback", FALLBACK_WARNING)
        assert "vLLM" in told["warning_reason"]
    assert until(lambda: home.node.trouble() != "")


@pytest.mark.parametrize("part", [0.0, 0.99])
def test_vllm_is_killed(part: float, home: VllmHome, decode: DecodeNode) -> None:
    epoch = home.node.epoch
    with striking(home, part, home.server.kill, last=True) as armed:
        context, reading = home.node.submit(prompt_of(LONG, seed=int(100 * part)))
        answer = decode.generate_from_kv(context, GenerationParams(max_tokens=4))
        armed.set()
        with pytest.raises((EngineFailed, EngineUnavailable)):
            reading.result(BUSY_S)
        with pytest.raises(PeerFailed, match=r"vLLM|this node was restarted"):  # the second, if it came to ask later
            list(answer)
    assert until(lambda: home.node.trouble() != "")
    with pytest.raises(EngineUnavailable, match="not attached"):
        home.node.submit(prompt_of(10))
    assert until(lambda: home.node.epoch != epoch), "decode nodes must check the next vLLM again"


def test_the_receiver_is_gone(home: VllmHome) -> None:
    """No node fetches: vLLM finishes at its own speed and frees its blocks, the lease ends the rest. The lease's time
    stands still until the blocks are free."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(home.node.tickets, "clock", partial(float, time.monotonic()))
        context, reading = home.node.submit(prompt_of(LONG, seed=1))
        assert reading.result(BUSY_S).prompt_tokens == LONG
        assert until(lambda: home.server.metric("vllm:kv_cache_usage_perc") == 0), "vLLM holds blocks for a receiver"
        assert home.node.engine.kv_held_bytes > 0
    assert until(lambda: home.node.engine.kv_held_bytes == 0), "the lease of a cache that is not fetched does not end"
    assert not home.node.tickets.cancel(context.ticket)


def test_a_receiver_that_breaks_off(home: VllmHome, decode: DecodeNode) -> None:
    answers: list[Generation] = []
    with striking(home, 0.2, lambda: answers[0].cancel()) as armed:
        context, reading = home.node.submit(prompt_of(LONG, seed=2))
        answers.append(decode.generate_from_kv(context, GenerationParams(max_tokens=4)))
        armed.set()
        with pytest.raises(DisaggError):
            reading.result(BUSY_S)


@pytest.fixture
def one_connection(decode: DecodeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several connections, the one that breaks may have placed nothing yet: then none continues it."""
    monkeypatch.setattr(decode.kv_source, "streams", 1)


BREAKS_AT = 400_000  # bytes of about 1.2 million: after the peer check


@pytest.mark.usefixtures("one_connection")
@pytest.mark.parametrize("fault", ["cut", "flip"])
def test_a_broken_connection_is_resumed(fault: Fault, home: VllmHome, decode: DecodeNode) -> None:
    """From the last whole chunk, out of the node's memory: vLLM computes nothing again."""
    prompt = prompt_of(600, seed=len(fault))  # its prefix must not be cached: it comes in one chunk then
    with FaultyProxy(home.node.kv_addresses[0], fault, BREAKS_AT, heals=True) as proxy:
        context, _ = home.node.submit(prompt)
        detour = msgspec.structs.replace(context, addresses=(proxy.address,))
        answer = decode.generate_from_kv(detour, GenerationParams(max_tokens=4))
        assert list(answer) == expected(decode, prompt, 4)
        assert proxy.struck.is_set()
    assert answer.metrics.resumed
    assert answer.metrics.prompt_tokens_recomputed == 0


@pytest.mark.parametrize("asked", ["gateway", "node"])
def test_a_client_that_leaves_ends_its_prompt_in_vllm(asked: str, home: VllmHome, decode: DecodeNode) -> None:
    """It closes its connection to the gateway, or to the node, in the middle of the prefill."""
    prompt = prompt_of(LONG, seed=70 + len(asked))
    serving = gateway_over_http(home, decode) if asked == "gateway" else vllm_over_http(home)
    path, body = {
        "gateway": ("/v1/completions", {"model": home.model.name, "prompt": prompt, "max_tokens": 4, "stream": True}),
        "node": ("/prefill", {"tokens": prompt}),
    }[asked]
    with serving as url, closing(HTTPConnection(url.removeprefix("http://"), timeout=BUSY_S)) as client:
        before, gone = computed_tokens(home), threading.Event()

        def leave() -> None:
            aborted = home.server.aborted_requests()
            client.close()
            if until(lambda: not home.node.tickets) and until(lambda: home.server.aborted_requests() > aborted):
                gone.set()

        with striking(home, 0.0, leave, stop=True) as armed:
            client.request("POST", path, msgspec.json.encode(body), {"Content-Type": "application/json"})
            armed.set()
            assert gone.wait(3 * BUSY_S)
        assert 0 < computed_tokens(home) - before < LONG, "vLLM computed the whole prompt, for no request"


def test_a_request_that_is_aborted_in_vllm(home: VllmHome, decode: DecodeNode) -> None:
    """By vLLM's own API. The answer that vLLM then gives looks like any other, and its KV will never be complete."""
    with striking(home, 0.0, home.server.abort_requests, stop=True) as armed:
        context, reading = home.node.submit(prompt_of(LONG, seed=8))
        answer = decode.generate_from_kv(context, GenerationParams(max_tokens=4))
        armed.set()
        with pytest.raises(EngineFailed, match="vLLM aborted the request"):
            reading.result(BUSY_S)
        with pytest.raises(PeerFailed, match="vLLM aborted the request"):
            list(answer)


@pytest.mark.parametrize("min_part_bytes", [MIN_PART_BYTES, 1], ids=["whole slices", "slices in parts"])
def test_a_path_that_dies(
    min_part_bytes: int, home: VllmHome, decode: DecodeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its connections break and no new one comes about: they go on over the other path, with what is missing."""
    monkeypatch.setattr(home.node.kv_server, "min_part_bytes", min_part_bytes)
    before, direct = computed_tokens(home), home.node.kv_addresses[0]
    prompt = prompt_of(600, seed=90 + min_part_bytes % 2)
    with FaultyProxy(direct, "cut", BREAKS_AT) as proxy:
        context, _ = home.node.submit(prompt)
        both = msgspec.structs.replace(context, addresses=(proxy.address, direct))
        answer = decode.generate_from_kv(both, GenerationParams(max_tokens=4))
        assert list(answer) == expected(decode, prompt, 4)
        assert proxy.struck.is_set()
    assert answer.metrics.kv_paths == tuple(map(format_address, (proxy.address, direct)))
    assert answer.metrics.prompt_tokens_recomputed == 0
    assert computed_tokens(home) == before + len(prompt), "vLLM computed something again"


@pytest.mark.parametrize("part", [0.0, 0.4])
def test_a_cancelled_prompt_ends_in_vllm(part: float, home: VllmHome) -> None:
    contexts: list[PrefillContext] = []
    with striking(home, part, lambda: home.node.tickets.cancel(contexts[0].ticket)) as armed:
        context, reading = home.node.submit(prompt_of(LONG, seed=3))
        contexts.append(context)
        armed.set()
        with pytest.raises(DisaggError, match="cancelled"):
            reading.result(BUSY_S)
    assert until(lambda: home.server.metric("vllm:num_requests_running") == 0)


def test_out_of_blocks(home: VllmHome, decode: DecodeNode) -> None:
    """Four prompts, two at a time, and blocks for one and a half: vLLM preempts some and computes them again. They are
    there before it begins. Sliding and full layers take their blocks from one pool."""
    assert home.border.engine
    assert sorted(home.border.engine.scheduler.windows) == ([0] if home.model.name == "llama" else [0, 128])
    prefill, before = prefill_of(home), home.server.metric("vllm:num_preemptions_total")
    prompts = [prompt_of(2400, seed=20 + number) for number in range(4)]
    with frozen(home.server.engine()):
        answers = [hand_over(home, decode, prompt, 4) for prompt in prompts]
        assert until(lambda: len(prefill.uncounted) == 4)
    assert [list(answer) for answer in answers] == [expected(decode, prompt, 4) for prompt in prompts]
    assert home.server.metric("vllm:num_preemptions_total") > before, "the test shows nothing"


def test_a_prompt_that_vllm_refuses(home: VllmHome) -> None:
    """The node's own limit is vLLM's: beyond it the request never gets there."""
    with pytest.raises(DisaggError, match="3499"):
        home.node.submit(prompt_of(3500))
    assert home.node.engine.spec.context_window == 3499


def test_vllm_refuses_a_request(home: VllmHome, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = prefill_of(home)
    monkeypatch.setattr(prefill._completions, "model", lambda: "another model")
    _, reading = home.node.submit(prompt_of(10))
    with pytest.raises(ModelNotFound, match=r"vLLM does not serve this model: .*another model"):
        reading.result(BUSY_S)


@pytest.mark.parametrize(
    ("report", "missing"),
    [
        ("exported", "0 of 200 tokens arrived in every layer$"),
        ("logits_ready", "the logits are missing$"),
        ("started", "vLLM's scheduler did not report its start$"),
    ],
)
def test_what_the_connector_lost_is_an_error(
    report: str, missing: str, home: VllmHome, decode: DecodeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer, the logits or the start: the prompt must fail, not wait, and the decode node must not serve it."""
    prefill = prefill_of(home)
    reported, lost = getattr(prefill, report), threading.Event()

    def lose(*about: object) -> None:
        if report == "exported" and getattr(about[1], "layer", 2) != 2:
            reported(*about)
        else:
            lost.set()

    monkeypatch.setattr(prefill, report, lose)
    monkeypatch.setattr(prefill, "timeouts", VllmBorderTimeouts(export_s=0.5))
    context, reading = home.node.submit(prompt_of(200, seed=len(report)))
    answer = decode.generate_from_kv(context, GenerationParams(max_tokens=4))
    with pytest.raises(EngineFailed, match=f"^vLLM computed the prompt, but its KV is not complete: {missing}"):
        reading.result(BUSY_S)
    with pytest.raises(PeerFailed, match=missing.removesuffix("$")):
        list(answer)
    assert lost.is_set()


def test_a_vllm_that_hangs_is_seen(home: VllmHome) -> None:
    assert home.node.stalled_s == 0
    os.killpg(home.server.pid, signal.SIGSTOP)
    try:
        _, reading = home.node.submit(prompt_of(50, seed=6))
        assert until(lambda: home.node.stalled_s > 1)
        prefill_of(home).stepped()
        assert home.node.stalled_s < 1
    finally:
        os.killpg(home.server.pid, signal.SIGCONT)
    reading.result(BUSY_S)
    assert home.node.stalled_s == 0


def test_the_prompt_of_the_peer_check_is_kept(home: VllmHome) -> None:
    """Later there may be no memory for it."""
    assert home.node.kv_server.canary is not None


def test_a_stranger_on_the_socket(home: VllmHome) -> None:
    """It is refused, and vLLM stays attached."""
    for packet in (b"nonsense", b"\x81\xa4type\xa5Grant", b"x" * MAX_PACKET_BYTES):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(10)
            stranger.connect(str(home.border.path))
            stranger.sendall(packet)
            assert stranger.recv(100) == b""
    assert home.node.trouble() == ""


def test_a_lost_connection_to_the_connector(home: VllmHome) -> None:
    """vLLM lives, its connector dials again; prompts of the old connection fail."""
    epoch = home.node.epoch
    with striking(home, 0.1, lambda: home.border.refuse_all("the line is cut"), last=True) as armed:
        _, reading = home.node.submit(prompt_of(LONG, seed=5))
        armed.set()
        with pytest.raises(EngineFailed, match="is gone"):
            reading.result(BUSY_S)
    assert until(lambda: home.node.trouble() == "")
    assert home.node.epoch != epoch


def test_many_cancelled_at_once(home: VllmHome) -> None:
    def submit_and_cancel(number: int) -> None:
        context, _ = home.node.submit(prompt_of(500, seed=30 + number))
        time.sleep(0.02 * number)
        home.node.tickets.cancel(context.ticket)

    threads = [threading.Thread(target=submit_and_cancel, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
