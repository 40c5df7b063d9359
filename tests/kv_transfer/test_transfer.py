"""The wire over real sockets: golden bytes, token-exact hand-offs, and every way a connection can go wrong."""

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disaggregated_inference.engines import Engine, Sequence, chunks
from disaggregated_inference.errors import (
    Cancelled,
    ChecksumMismatch,
    DisaggError,
    FingerprintMismatch,
    PeerFailed,
    PeerGone,
    ProtocolError,
    TicketRefused,
    VersionUnsupported,
    WireError,
)
from disaggregated_inference.kv import Array, Fingerprint, KVLayout, KVSlice, LayerPlan, Weights, require_same_model
from disaggregated_inference.kv_transfer import (
    Connection,
    End,
    Hello,
    Outbox,
    Welcome,
    bytes_of,
    codecs,
    fetch_stream,
    serve,
)
from disaggregated_inference.kv_transfer.codecs import dequantize, quantize
from disaggregated_inference.kv_transfer.frames import HEADER, Frame, Kind, decode_header, encode_header
from disaggregated_inference.kv_transfer.messages import ErrorMessage
from disaggregated_inference.kv_transfer.receiver import ConnectionResult
from disaggregated_inference.timeouts import TransferTimeouts
from tests.support.engines import LoadTiny
from tests.support.handoff import HostLogits, alone, prompt_of, write_answer
from tests.support.kv_frames import encode, message, tcp_pair

ANSWER = 16


class Transfer:
    """A prefill on one engine, offered under a ticket; what it takes to fetch it into another."""

    def __init__(self, reader: Engine, writer: Engine, prompt: list[int], chunk: int) -> None:
        self.reader, self.writer, self.prompt, self.chunk = reader, writer, prompt, chunk
        self.outbox = Outbox()
        self.source = reader.open(len(prompt))
        self.target: Sequence = writer.open(len(prompt) + ANSWER)
        self.logits: Array | None = None
        self.lock = threading.Lock()

    def read(self) -> None:
        for part in chunks(self.prompt, self.chunk):
            logits = self.reader.prefill(self.source, part, self.outbox.put)
        self.outbox.put_logits(np.ascontiguousarray(logits.numpy()[0]))
        self.outbox.finish(End(prompt_tokens=len(self.prompt)))

    def admit(self, hello: Hello, codec: str = "raw") -> tuple[Welcome, Outbox]:
        if (hello.ticket, hello.secret) != ("ticket", "secret"):
            raise TicketRefused("no such ticket")
        require_same_model(self.reader.fingerprint, hello.fingerprint)
        welcome = Welcome(
            epoch="1",
            prompt_tokens=len(self.prompt),
            dtype=self.reader.dtype,
            codec=codec,
            chunk_tokens=min(self.chunk, len(self.prompt)),
        )
        return welcome, self.outbox

    def hello(self, **changes: object) -> Hello:
        plain = Hello(ticket="ticket", secret="secret", fetch="f", fingerprint=self.writer.fingerprint)
        return msgspec.structs.replace(plain, **changes)

    def take(self, piece: KVSlice) -> None:
        with self.lock:
            self.writer.place(self.target, piece)

    def fetch(
        self, sock: socket.socket, on_slice: Callable[[KVSlice], None] | None = None, **changes: object
    ) -> ConnectionResult:
        layout, vocabulary = self.writer.spec.layout, self.writer.spec.vocabulary
        keep = lambda logits: setattr(self, "logits", logits)  # noqa: E731
        return fetch_stream(
            Connection(sock), self.hello(**changes), layout, vocabulary, 4096, on_slice or self.take, keep
        )

    def answer(self) -> list[int]:
        assert self.logits is not None
        self.writer.commit(self.target, len(self.prompt))
        return write_answer(self.writer, self.target, HostLogits(self.logits), ANSWER)

    def close(self) -> None:
        self.reader.close(self.source)
        self.writer.close(self.target)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def transfer(tiny_engine: LoadTiny) -> Iterator[Callable[..., Transfer]]:
    made: list[Transfer] = []

    def make(
        length: int = 300, chunk: int = 77, architecture: str = "llama", pair: tuple[str, str] = ("torch", "mlx")
    ) -> Transfer:
        made.append(
            Transfer(tiny_engine(pair[0], architecture), tiny_engine(pair[1], architecture), prompt_of(length), chunk)
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


TINY = KVSlice(3, 300, "float32", *np.arange(4, dtype=np.float32).reshape(2, 1, 1, 2))
MODEL = Fingerprint(
    architecture="llama",
    layout=KVLayout(layers=(LayerPlan(), LayerPlan("sliding", 8)), kv_heads=1, head_dim=2),
    rope_frequencies=(1.0,),
    rope_scale=1.0,
    vocabulary=5,
    tokenizer="t",
    chat_template="c",
    weights=Weights(norms="n", format="f", sample="s"),
)


def golden_frames() -> dict[str, bytes]:
    """A frame of every kind, as our own code writes it."""
    raw, packed = (b"".join(map(bytes, map(bytes_of, codecs.encode(name, TINY)))) for name in ("raw", "int8"))
    logits = np.array([0.5, -1.0], np.float32).tobytes()
    return {
        "hello": message(Kind.HELLO, Hello(ticket="t", secret="s", fetch="f", fingerprint=MODEL, epoch="e")),
        "welcome": message(
            Kind.WELCOME, Welcome(epoch="e", prompt_tokens=9, dtype="bfloat16", codec="raw", chunk_tokens=4)
        ),
        "slice raw": encode(Frame(Kind.SLICE, len(raw), 0, 3, 1, 300), raw),
        "slice int8": encode(Frame(Kind.SLICE, len(packed), 1, 3, 1, 300), packed),
        "logits": encode(Frame(Kind.LOGITS, len(logits)), logits),
        "end": message(Kind.END, End(prompt_tokens=9, queue_s=0.25, prefill_s=0.5, computed_s=-0.125)),
        "error": message(Kind.ERROR, ErrorMessage(code="ticket_refused", message="no")),
        "cancel": message(Kind.CANCEL),
        "renew": message(Kind.RENEW),
        "done": message(Kind.DONE),
        "alive": message(Kind.ALIVE),
        "tokens": encode(Frame(Kind.TOKENS, 8), np.array([3, 4], "<u4").tobytes()),
        "logprobs": encode(
            Frame(Kind.LOGPROBS, 24, tokens=2, start=5), struct.pack("<ffIIff", -0.5, -2.0, 3, 4, -0.5, -0.25)
        ),
    }


def test_golden_bytes() -> None:
    """Byte for byte: the protocol is what is on the wire, not what the code says today."""
    golden = json.loads((Path(__file__).parent / "golden_frames.json").read_text())
    frames = golden_frames()
    assert {name: frame.hex() for name, frame in frames.items()} == golden
    assert {decode_header(frame[: HEADER.size]).kind for frame in frames.values()} == set(Kind)


@pytest.mark.parametrize("pair", [("torch", "mlx"), ("mlx", "torch"), ("torch", "torch"), ("mlx", "mlx")])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gpt_oss"])
def test_token_exact_over_tcp(
    architecture: str, pair: tuple[str, str], transfer: Callable[..., Transfer], threads: ThreadPoolExecutor
) -> None:
    """The fetch begins before the prefill; every slice crosses a socket; chunks do not divide the prompt."""
    one = transfer(architecture=architecture, pair=pair)
    before = one.writer.counters.prompt_tokens if pair[0] != pair[1] else None
    slices: list[KVSlice] = []
    with tcp_pair() as (near, far):
        sending = threads.submit(serve, Connection(far), one.admit)
        fetching = threads.submit(one.fetch, near, lambda piece: slices.append(piece.copy()))
        one.read()  # engines belong to this thread; the wire does not care which thread that is
        receipt = fetching.result(10)
        end = sending.result(10)
        assert end
        assert end.prompt_tokens == 300
    for piece in slices:
        one.take(piece)
    assert receipt.payload_bytes == sum(piece.size_bytes for piece in slices)
    if before is not None:
        assert one.writer.counters.prompt_tokens == before
    assert one.answer() == alone(one.writer, one.prompt, ANSWER)


def start(one: Transfer, threads: ThreadPoolExecutor, far: socket.socket, **options: str) -> "Future[End | None]":
    return threads.submit(serve, Connection(far), lambda hello: one.admit(hello, **options))


def test_several_connections_share_the_layers(transfer: Callable[..., Transfer], threads: ThreadPoolExecutor) -> None:
    one = transfer()
    one.read()
    with tcp_pair() as (near1, far1), tcp_pair() as (near2, far2), tcp_pair() as (near3, far3):
        ends = [start(one, threads, far) for far in (far1, far2, far3)]
        fetches = [threads.submit(one.fetch, near, stream=i, streams=3) for i, near in enumerate((near1, near2, near3))]
        receipts = [future.result(10) for future in fetches]
        assert [msgspec.to_builtins(end.result(10))["prompt_tokens"] for end in ends] == [300] * 3
    assert sum(r.payload_bytes for r in receipts) == one.writer.spec.kv_bytes(300, "float32")
    assert one.answer() == alone(one.writer, one.prompt, ANSWER)


def test_only_what_is_not_held_is_sent(transfer: Callable[..., Transfer], threads: ThreadPoolExecutor) -> None:
    one = transfer(length=308, chunk=77)
    one.writer.prefill(one.target, one.prompt[:231])
    one.read()
    with tcp_pair() as (near, far):
        start(one, threads, far)
        receipt = one.fetch(near, held_tokens=231)
    assert receipt.payload_bytes == one.writer.spec.kv_bytes(77, "float32")
    assert one.answer() == alone(one.writer, one.prompt, ANSWER)


@pytest.mark.slow
@pytest.mark.parametrize("unwanted", [{"held_tokens": 231}, {"stream": 40, "streams": 64}])
def test_slices_that_are_not_wanted_are_no_silence(
    unwanted: dict[str, int],
    transfer: Callable[..., Transfer],
    threads: ThreadPoolExecutor,
) -> None:
    """The prefill node computes what the receiver holds, or layers of other streams, and sends nothing."""
    one = transfer(length=308, chunk=77)
    one.writer.prefill(one.target, one.prompt[:231])
    outbox, one.outbox = one.outbox, Outbox()
    one.read()
    computed, one.outbox = one.outbox, outbox

    def put_slowly() -> None:
        for piece in computed.slices():
            time.sleep(0.2)  # more often than the pulse
            outbox.put(piece)
        outbox.finish(End(prompt_tokens=308))

    with tcp_pair() as (near, far):
        near.settimeout(2.0)
        threads.submit(serve, Connection(far, TransferTimeouts(heartbeat_s=0.4)), one.admit)
        putting = threads.submit(put_slowly)
        receipt = one.fetch(near, lambda piece: None, **unwanted)
        putting.result(10)
    assert receipt.end.prompt_tokens == 308, "it was not given up"


@pytest.mark.slow
def test_a_device_that_is_behind_is_no_silence(transfer: Callable[..., Transfer], threads: ThreadPoolExecutor) -> None:
    """A GPU's slices are handed out before they are computed; with other prompts before them that takes a while."""
    one = transfer()
    outbox, one.outbox = one.outbox, Outbox()
    one.read()
    computed, one.outbox = one.outbox, outbox
    there_at = time.monotonic() + 4
    for piece in computed.slices():
        late = replace(piece, ready=lambda: time.monotonic() > there_at)
        one.outbox.put(late)
    one.outbox.put_logits(np.zeros(512, np.float32))
    one.outbox.finish(End(prompt_tokens=300))
    with tcp_pair() as (near, far):
        near.settimeout(2.0)
        start(one, threads, far)
        receipt = one.fetch(near)
    assert time.monotonic() > there_at
    assert receipt.payload_bytes == one.writer.spec.kv_bytes(300, "float32")


def test_logits_overtake_waiting_slices(transfer: Callable[..., Transfer], threads: ThreadPoolExecutor) -> None:
    one = transfer()
    one.read()
    order: list[str] = []
    with tcp_pair() as (near, far):
        start(one, threads, far)
        fetch_stream(
            Connection(near),
            one.hello(),
            one.writer.spec.layout,
            512,
            300,
            lambda _: order.append("slice"),
            lambda _: order.append("logits"),
        )
    assert order[0] == "logits"
    assert order.count("slice") == 4 * 4


def test_int8_drift_is_bounded_and_measured(
    transfer: Callable[..., Transfer], threads: ThreadPoolExecutor, record_property: Callable[[str, object], None]
) -> None:
    one = transfer(pair=("torch", "torch"))
    one.read()
    with tcp_pair() as (near, far):
        start(one, threads, far, codec="int8")
        receipt = one.fetch(near, codecs=("int8", "raw"))
    assert receipt.payload_bytes < 0.35 * one.writer.spec.kv_bytes(300, "float32")
    one.writer.commit(one.target, 300)
    exact = one.writer.open(320)
    one.writer.prefill(exact, one.prompt)
    a, b = (one.writer.step([s], [7]).numpy()[0] for s in (one.target, exact))
    drift = float(np.abs(a - b).max() / np.abs(b).max())
    one.writer.close(exact)
    record_property("report", f"int8 on the wire, tiny llama: worst logit error {drift:.4f} of the largest logit")
    assert 0 < drift < 0.1


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=8, max_size=64))
def test_int8_error_is_half_a_step(values: list[float]) -> None:
    rows = np.array(values[: len(values) // 8 * 8], np.float32).reshape(-1, 2, 4)
    scales, steps = quantize(rows)
    assert np.all(np.abs(dequantize(scales, steps) - rows) <= scales[..., None] * 0.5001 + 1e-30)


class TestFaults:
    """Each ends in a typed error on both sides within two seconds, and the next fetch of the same ticket succeeds."""

    @pytest.fixture(autouse=True)
    def quick(self) -> Iterator[None]:
        started = time.monotonic()
        yield
        assert time.monotonic() - started < 15

    def recovered(self, one: Transfer, threads: ThreadPoolExecutor) -> bool:
        one.writer.close(one.target)
        one.target = one.writer.open(len(one.prompt) + ANSWER)
        with tcp_pair() as (near, far):
            start(one, threads, far)
            one.fetch(near)
        return one.answer() == alone(one.writer, one.prompt, ANSWER)

    @pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
    def test_the_sender_dies(
        self, share: float, transfer: Callable[..., Transfer], threads: ThreadPoolExecutor
    ) -> None:
        one = transfer()
        one.read()
        with tcp_pair() as (near, far), tcp_pair() as (relay_in, relay_out):
            sending = start(one, threads, far)
            total = one.writer.spec.kv_bytes(300, "float32")
            threads.submit(relay, near, relay_out, int(total * share), None)
            with pytest.raises(WireError):
                one.fetch(relay_in)
            with pytest.raises(WireError):
                sending.result(60)
        assert self.recovered(one, threads)

    def test_the_receiver_dies(self, transfer: Callable[..., Transfer], threads: ThreadPoolExecutor) -> None:
        one = transfer()
        one.read()
        with tcp_pair() as (near, far):
            sending = start(one, threads, far)
            near.sendall(message(Kind.HELLO, one.hello()))
            assert near.recv(3000)
            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            near.close()  # a reset, as when a machine goes down
            with pytest.raises(PeerGone):
                sending.result(60)
        assert self.recovered(one, threads)

    def test_the_receiver_fails_and_says_so(
        self, transfer: Callable[..., Transfer], threads: ThreadPoolExecutor
    ) -> None:
        one = transfer()
        one.read()
        seen: list[int] = []

        def fail(piece: KVSlice) -> None:
            seen.append(piece.layer)
            if len(seen) == 5:
                raise MemoryError("no room")

        with tcp_pair() as (near, far):
            sending = start(one, threads, far)
            with pytest.raises(MemoryError):
                one.fetch(near, fail)
            with pytest.raises(Cancelled):
                sending.result(60)
        assert len(seen) == 5
        assert self.recovered(one, threads)

    def test_cancel_while_the_prefill_is_still_computing(
        self, transfer: Callable[..., Transfer], threads: ThreadPoolExecutor
    ) -> None:
        one = transfer()
        with tcp_pair() as (near, far):
            sending = start(one, threads, far)
            near.sendall(message(Kind.HELLO, one.hello()) + message(Kind.CANCEL))
            started = time.monotonic()
            with pytest.raises(Cancelled):
                sending.result(20)
            assert time.monotonic() - started < 10

    def test_one_flipped_bit(self, transfer: Callable[..., Transfer], threads: ThreadPoolExecutor) -> None:
        one = transfer()
        one.read()
        with tcp_pair() as (near, far), tcp_pair() as (relay_in, relay_out):
            sending = start(one, threads, far)
            threads.submit(relay, near, relay_out, None, 20_000)
            with pytest.raises(ChecksumMismatch):
                one.fetch(relay_in)
            with pytest.raises(WireError):
                sending.result(60)
        assert self.recovered(one, threads)

    def test_the_prefill_fails(self, transfer: Callable[..., Transfer], threads: ThreadPoolExecutor) -> None:
        one = transfer()
        one.outbox.fail(DisaggError("out of memory"))
        with tcp_pair() as (near, far):
            sending = start(one, threads, far)
            with pytest.raises(PeerFailed, match="out of memory"):
                one.fetch(near)
            with pytest.raises(DisaggError, match="out of memory"):
                sending.result(60)

    def test_a_wrong_secret(self, transfer: Callable[..., Transfer], threads: ThreadPoolExecutor) -> None:
        one = transfer()
        one.read()
        with tcp_pair() as (near, far):
            sending = start(one, threads, far)
            with pytest.raises(PeerFailed) as caught:
                one.fetch(near, secret="guess")
            assert caught.value.peer_code == "ticket_refused"
            with pytest.raises(TicketRefused):
                sending.result(60)
        assert self.recovered(one, threads)

    def test_another_model(self, transfer: Callable[..., Transfer], threads: ThreadPoolExecutor) -> None:
        one = transfer()
        other = msgspec.structs.replace(one.writer.fingerprint, tokenizer="another")
        with tcp_pair() as (near, far):
            sending = start(one, threads, far)
            with pytest.raises(PeerFailed, match="tokenizer"):
                one.fetch(near, fingerprint=other)
            with pytest.raises(FingerprintMismatch):
                sending.result(60)

    def test_a_newer_version(self) -> None:
        raw = bytearray(encode_header(Frame(Kind.HELLO, 0)))
        raw[4] = 2
        with tcp_pair() as (near, far):
            near.sendall(raw)
            with pytest.raises(VersionUnsupported, match="version 2, this node 1"):
                serve(Connection(far), lambda hello: (_ for _ in ()).throw(AssertionError))
            assert b"version_unsupported" in near.recv(4096)

    @pytest.mark.parametrize(
        "frame",
        [
            Frame(Kind.SLICE, 10, layer=99, tokens=1),
            Frame(Kind.SLICE, 10, layer=0, tokens=10_000),
            Frame(Kind.SLICE, 1 << 60, layer=0, tokens=10),
            Frame(Kind.SLICE, 10, layer=0, tokens=0),
            Frame(Kind.SLICE, 10, layer=0, tokens=77, start=290),
            Frame(Kind.SLICE, 10, layer=0, tokens=1, rest=10),
            Frame(Kind.SLICE, 10, layer=0, tokens=10, rest=(1 << 32) - 1),
            Frame(Kind.SLICE, 10, layer=0, tokens=10, codec=7),
            Frame(Kind.SLICE, 10, layer=0, tokens=10, codec=1),
            Frame(Kind.LOGITS, 1 << 40),
            Frame(Kind.END, 1 << 40),
            Frame(Kind.HELLO, 2),
            Frame(Kind.WELCOME, 2),
            Frame(Kind.DONE, 0),
        ],
        ids=str,
    )
    def test_a_sender_that_lies(
        self, frame: Frame, transfer: Callable[..., Transfer], threads: ThreadPoolExecutor
    ) -> None:
        """Sizes are refused from the header alone: nothing is allocated, nothing more is read."""
        one = transfer()
        welcome, _ = one.admit(one.hello())
        with tcp_pair() as (near, far):
            fetching = threads.submit(one.fetch, near)
            assert far.recv(65536)
            far.sendall(message(Kind.WELCOME, welcome) + encode_header(frame))
            with pytest.raises(ProtocolError):
                fetching.result(60)

    def test_truncated_frames(self, transfer: Callable[..., Transfer], threads: ThreadPoolExecutor) -> None:
        one = transfer()
        whole = message(Kind.WELCOME, one.admit(one.hello())[0])
        for cut in (0, 1, 39, 40, 60, len(whole) - 1):
            with tcp_pair() as (near, far):
                fetching = threads.submit(one.fetch, near)
                assert far.recv(65536)
                far.sendall(whole[:cut])
                far.close()
                with pytest.raises(PeerGone):
                    fetching.result(60)


def relay(source: socket.socket, target: socket.socket, stop_after: int | None, flip_at: int | None) -> None:
    """Between sender and receiver: cuts the line after so many bytes, or flips one bit on the way."""
    threading.Thread(target=_pump_back, args=(target, source), daemon=True).start()
    passed = 0
    with suppress(OSError):
        while data := source.recv(4096):
            if flip_at is not None and passed <= flip_at < passed + len(data):
                index = flip_at - passed
                data = data[:index] + bytes([data[index] ^ 0x10]) + data[index + 1 :]
            if stop_after is not None and passed + len(data) > stop_after:
                target.sendall(data[: stop_after - passed])
                break
            target.sendall(data)
            passed += len(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _pump_back(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(4096):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
