"""Large slices travel in parts, one on each connection: all rows arrive once, in order, whichever connection is slow,
breaks or lies. Here every slice is a large one."""

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from disaggregated_inference.api import GenerationParams
from disaggregated_inference.errors import Cancelled, DisaggError, ProtocolError
from disaggregated_inference.kv import KVLayout, KVSlice, LayerPlan
from disaggregated_inference.kv_transfer import Hello, Sink
from disaggregated_inference.kv_transfer.placement import Placement
from disaggregated_inference.kv_transfer.receiver import ConnectionFetch
from tests.support.engines import LoadTiny
from tests.support.handoff import alone, prompt_of
from tests.support.node_pair import PROVEN_ANYWHERE, Pair
from tests.support.tcp_proxy import FaultyProxy

PROMPT = prompt_of(300)
ANSWER = 16
STREAMS = 3


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, KVSlice]]:
    """Every piece that arrives, with its stream."""
    seen: list[tuple[int, KVSlice]] = []
    receive = ConnectionFetch._slice

    def remember(self: ConnectionFetch, frame: Any) -> KVSlice:
        piece = receive(self, frame)
        seen.append((self.hello.stream, piece.copy()))
        return piece

    monkeypatch.setattr(ConnectionFetch, "_slice", remember)
    return seen


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("writer", ["torch", "mlx"])
def test_an_answer_from_parts(
    writer: str, codec: str, nodes: Callable[..., Pair], tiny_engine: LoadTiny, parts: list[tuple[int, KVSlice]]
) -> None:
    prefill, decode = nodes("torch", writer, streams=STREAMS, codecs=(codec,), min_part_bytes=1)
    context, _ = prefill.submit(PROMPT)
    answer = list(decode.generate_from_kv(context, GenerationParams(max_tokens=ANSWER)))
    assert {stream for stream, _ in parts} == set(range(STREAMS))
    assert any(piece.rest for _, piece in parts)
    if codec == "raw":
        assert answer == alone(tiny_engine(writer, "llama"), PROMPT, ANSWER)


def test_a_sliding_layer_travels_whole(
    nodes: Callable[..., Pair], tiny_engine: LoadTiny, parts: list[tuple[int, KVSlice]]
) -> None:
    prefill, decode = nodes("torch", "mlx", architecture="gpt_oss", streams=STREAMS, min_part_bytes=1)
    context, _ = prefill.submit(PROMPT)
    answer = list(decode.generate_from_kv(context, GenerationParams(max_tokens=ANSWER)))
    assert answer == alone(tiny_engine("mlx", "gpt_oss"), PROMPT, ANSWER)
    layers = prefill.engine.spec.layout.layers
    assert {bool(layers[piece.layer].window) for _, piece in parts if piece.rest} == {False}


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_cut_in_the_middle_is_resumed(
    share: float, nodes: Callable[..., Pair], tiny_engine: LoadTiny, parts: list[tuple[int, KVSlice]]
) -> None:
    """Rows that came before the cut are not placed twice: the engine would refuse them."""
    prefill, decode = nodes("torch", "mlx", streams=STREAMS, trusts=PROVEN_ANYWHERE, min_part_bytes=1)
    context, _ = prefill.submit(PROMPT)
    right = list(decode.generate_from_kv(context, GenerationParams(max_tokens=ANSWER)))
    assert right == alone(tiny_engine("mlx", "llama"), PROMPT, ANSWER)
    cut_at = int(prefill.engine.spec.kv_bytes(len(PROMPT), "float32") * share / STREAMS)
    with FaultyProxy(prefill.kv_addresses[0], "cut", cut_at, heals=True) as proxy:
        context, _ = prefill.submit(PROMPT)
        context = msgspec.structs.replace(context, addresses=(proxy.address,))
        answer = decode.generate_from_kv(context, GenerationParams(max_tokens=ANSWER))
        assert list(answer) == right
        assert proxy.struck.is_set()
    assert answer.metrics.prompt_tokens_recomputed == 0


LAYOUT = KVLayout((LayerPlan(), LayerPlan()), 1, 4)


def piece(layer: int, start: int, stop: int, rest: int = 0) -> KVSlice:
    rows = np.zeros((stop - start, 1, 4), np.float32)
    return KVSlice(layer, start, "float32", rows, rows, rest=rest)


class Placed:
    """A placement without connections: threads bring it the rows of their streams."""

    def __init__(self, streams: int, tokens: int, slow: threading.Event | None = None) -> None:
        self.rows: list[tuple[int, int, int]] = []
        self.commits: list[int] = []
        self._slow = slow
        hello = Hello(ticket="t", secret="s", fetch="f", fingerprint=None)  # type: ignore[arg-type]
        sink = Sink(self._place, self.commits.append, lambda logits: None)
        self.placement = Placement(hello, LAYOUT, tokens, streams, sink)
        self.errors: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def _place(self, piece: KVSlice) -> None:
        if self._slow:
            self._slow.wait(20)
        self.rows.append((piece.layer, piece.start, piece.stop))

    def bring(self, stream: int, *pieces: KVSlice) -> None:
        def run() -> None:
            try:
                for each in pieces:
                    self.placement.take_slice(stream, each)
            except DisaggError as error:
                self.errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        self._threads.append(thread)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in self._threads)


def test_rows_are_placed_in_order_and_chunks_too() -> None:
    """The second stream is far ahead of the first."""
    placed = Placed(2, 8)
    placed.bring(1, piece(0, 2, 4), piece(1, 0, 2, rest=2), piece(0, 6, 8), piece(1, 4, 6, rest=2))
    time.sleep(0.1)
    assert placed.rows == []
    placed.bring(0, piece(0, 0, 2, rest=2), piece(1, 2, 4), piece(0, 4, 6, rest=2), piece(1, 6, 8))
    placed.join()
    assert not placed.errors
    assert placed.commits == [4, 8]
    for layer in (0, 1):
        assert [row[1:] for row in placed.rows if row[0] == layer] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert {row[2] for row in placed.rows[:4]} == {2, 4}


def test_rows_that_come_again_are_dropped() -> None:
    placed = Placed(1, 4)
    placed.bring(0, piece(0, 0, 2, rest=2), piece(0, 0, 2, rest=2), piece(0, 2, 4), piece(0, 2, 4), piece(1, 0, 4))
    placed.join()
    assert placed.rows == [(0, 0, 2), (0, 2, 4), (1, 0, 4)]
    assert placed.commits == [4]


def test_rows_that_two_streams_bring_at_once_are_placed_once() -> None:
    slow = threading.Event()
    placed = Placed(2, 4, slow)
    placed.bring(0, piece(0, 0, 4))
    placed.bring(1, piece(0, 0, 4), piece(1, 0, 4))
    time.sleep(0.1)
    slow.set()
    placed.join()
    assert sorted(placed.rows) == [(0, 0, 4), (1, 0, 4)]
    assert placed.commits == [4]
    assert not placed.errors


def test_a_stop_ends_the_wait() -> None:
    placed = Placed(2, 4)
    placed.bring(0, piece(0, 2, 4))
    time.sleep(0.1)
    placed.placement.stop(Cancelled("the client left"))
    placed.join()
    assert [type(error) for error in placed.errors] == [Cancelled]


def test_rows_that_never_come_are_a_protocol_error() -> None:
    """A stream waits for the first rows, and the other stream has ended without them."""
    placed = Placed(2, 4)
    placed.bring(0, piece(0, 2, 4))
    time.sleep(0.1)
    assert not placed.errors
    placed.placement.stream_ended()
    placed.join()
    assert [type(error) for error in placed.errors] == [ProtocolError]
    assert placed.rows == []
