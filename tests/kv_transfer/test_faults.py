"""What can go wrong between two nodes. Each ends in a typed error or the right answer in time, leaks nothing, and the
next request succeeds; and each first shows that the fault happened."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest

from disaggregated_inference.api import GenerationParams
from disaggregated_inference.errors import (
    Cancelled,
    ContextTooLong,
    DeadlineExceeded,
    KVMemoryFull,
    PeerFailed,
    PeerGone,
    PeerRefused,
    RequestTooLarge,
)
from disaggregated_inference.kv import Fingerprint
from disaggregated_inference.kv_transfer import Connection, Hello
from disaggregated_inference.kv_transfer.frames import Kind
from disaggregated_inference.node.context import PrefillContext
from disaggregated_inference.node.decode import DecodeNode
from disaggregated_inference.node.generation import Generation
from disaggregated_inference.node.prefill import PrefillNode
from disaggregated_inference.timeouts import NodeTimeouts
from tests.support.engines import LoadTiny
from tests.support.handoff import alone, prompt_of
from tests.support.node_pair import ONE_PROCESS, PROVEN_ANYWHERE, Pair
from tests.support.tcp_proxy import FaultyProxy
from tests.support.waiting import until

pytestmark = pytest.mark.slow

PROMPT = prompt_of(300)
ANSWER = 16
KV_BYTES = 300 * 4 * 2 * 2 * 16 * 4  # tokens, layers, K and V, heads, dims, float32


@pytest.fixture
def right(tiny_engine: LoadTiny) -> list[int]:
    return alone(tiny_engine("mlx", "llama"), PROMPT, ANSWER)


QUIET = NodeTimeouts(transfer=msgspec.structs.replace(ONE_PROCESS.transfer, heartbeat_s=10.0))
SHORT_HELLO = NodeTimeouts(transfer=msgspec.structs.replace(ONE_PROCESS.transfer, hello_s=1.0))


@pytest.fixture
def pair(request: pytest.FixtureRequest, nodes: Callable[..., Pair], right: list[int]) -> Iterator[Pair]:
    """Checked by a canary prompt beforehand, so that faults strike the transfer; checked for leaks afterwards. The
    parameter, if any, is the nodes' timeouts."""
    prefill, decode = nodes(timeouts=getattr(request, "param", ONE_PROCESS), trusts=PROVEN_ANYWHERE)
    assert ask(prefill, decode) == right
    yield prefill, decode
    assert ask(prefill, decode) == right, "the next request"
    for ticket in list(prefill.jobs):
        prefill.tickets.cancel(ticket)
    assert until(lambda: nothing_held(prefill, decode)), "leaks"


def ask(prefill: PrefillNode, decode: DecodeNode, *addresses: tuple[str, int]) -> list[int]:
    return list(begin(prefill, decode, *addresses))


def begin(prefill: PrefillNode, decode: DecodeNode, *addresses: tuple[str, int]) -> Generation:
    context, _ = prefill.submit(PROMPT)
    return decode.generate_from_kv(by_way_of(context, *addresses), GenerationParams(max_tokens=ANSWER))


def by_way_of(context: PrefillContext, *addresses: tuple[str, int]) -> PrefillContext:
    return msgspec.structs.replace(context, addresses=addresses or context.addresses)


def nothing_held(prefill: PrefillNode, decode: DecodeNode) -> bool:
    threads = {thread.name for thread in threading.enumerate()}
    rows: int = prefill.engine.arena.used_rows  # type: ignore[attr-defined]
    return rows == 0 and not prefill.jobs and not {"decode", "kv-send", "kv-fetch-1", "kv-renew"} & threads


class Clock:
    """No more than two seconds, and what a busy machine takes."""

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, *_: object) -> None:
        assert time.monotonic() - self._started < 20  # not the request's own minute


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_the_sender_dies(share: float, pair: Pair) -> None:
    prefill, decode = pair
    with FaultyProxy(prefill.kv_addresses[0], "cut", int(KV_BYTES * share)) as proxy, Clock():
        with pytest.raises(PeerGone):
            ask(prefill, decode, proxy.address)
        assert proxy.struck.is_set()


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_cut_that_heals_is_resumed(share: float, pair: Pair, right: list[int]) -> None:
    prefill, decode = pair
    with FaultyProxy(prefill.kv_addresses[0], "cut", int(KV_BYTES * share), heals=True) as proxy, Clock():
        answer = begin(prefill, decode, proxy.address)
        assert list(answer) == right
        assert proxy.struck.is_set()
    assert answer.metrics.prompt_tokens_recomputed == 0
    if share == 0.5:
        assert KV_BYTES <= answer.metrics.kv_bytes < 1.5 * KV_BYTES, "only what was missing came again"


@pytest.mark.parametrize("fault", ["cut", "silent"])
def test_one_of_two_paths_dies(fault: str, pair: Pair, right: list[int]) -> None:
    """The first path is cut, or simply carries nothing any more: the second takes over where the chunks stand."""
    prefill, decode = pair
    direct = prefill.kv_addresses[0]
    with FaultyProxy(direct, fault, KV_BYTES // 2) as proxy, Clock():  # type: ignore[arg-type]
        answer = begin(prefill, decode, proxy.address, direct)
        assert list(answer) == right
        assert proxy.struck.is_set()
    assert answer.metrics.kv_paths == (f"127.0.0.1:{proxy.address[1]}", f"127.0.0.1:{direct[1]}")
    assert answer.metrics.kv_bytes < 1.5 * KV_BYTES
    seen = {path.port: path for path in decode.kv_source.paths.known()}
    assert seen[proxy.address[1]].failures > 0
    assert seen[direct[1]].failures == 0
    assert (seen[direct[1]].goodput_bytes_s or 0) > 0


@pytest.mark.parametrize("pair", [NodeTimeouts()], indirect=True, ids=["defaults"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_frozen_sender_is_known_in_a_second(share: float, pair: Pair, record_property: Any) -> None:
    """Its port is open, as a frozen process's is, and nothing answers there: also where a part had come already."""
    prefill, decode = pair
    with FaultyProxy(prefill.kv_addresses[0], "silent", int(KV_BYTES * share), heals=True) as proxy:
        answer = begin(prefill, decode, proxy.address)
        assert proxy.struck.wait(60)
        since = time.monotonic()
        with pytest.raises(PeerGone):
            list(answer)
        noticed_s = time.monotonic() - since
    record_property("report", f"a sender frozen at {share:.0%} was noticed after {noticed_s:.2f} s")
    assert noticed_s < 8, "0.9 s; longer where a busy machine took long to greet"


@pytest.mark.parametrize("pair", [QUIET], indirect=True, ids=["quiet"])
def test_a_quiet_sender_that_answers_is_waited_for(pair: Pair, right: list[int], monkeypatch: Any) -> None:
    """It says nothing for longer than it may, and is there when it is asked: nothing is sent twice."""
    prefill, decode = pair
    quick = prefill.engine.prefill

    def slow(*args: Any) -> Any:
        time.sleep(0.8)
        return quick(*args)

    monkeypatch.setattr(prefill.engine, "prefill", slow)
    before = decode.kv_source.paths.known()[0].connections
    answer = begin(prefill, decode)
    assert list(answer) == right
    monkeypatch.setattr(prefill.engine, "prefill", quick)
    asked = decode.kv_source.paths.known()[0].connections - before - 1
    assert asked > 0, "it was asked whether it is there"
    assert (answer.metrics.kv_bytes, decode.kv_source.paths.known()[0].failures) == (KV_BYTES, 0)


@pytest.mark.parametrize("pair", [QUIET], indirect=True, ids=["quiet"])
def test_a_sender_too_busy_to_answer_is_heard(pair: Pair, right: list[int], monkeypatch: Any) -> None:
    """The question whether it is there has no answer, and meanwhile the next slices come."""
    prefill, decode = pair
    quick, asked = prefill.engine.prefill, []

    def slow(*args: Any) -> Any:
        time.sleep(0.8)
        return quick(*args)

    def unanswered(connection: Connection, hello: Hello) -> float:
        connection.sock.close()
        asked.append(hello)
        time.sleep(2)
        raise PeerGone("nothing answers")

    monkeypatch.setattr(prefill.engine, "prefill", slow)
    monkeypatch.setattr("disaggregated_inference.kv_transfer.fetch.renew", unanswered)
    answer = begin(prefill, decode)
    assert list(answer) == right
    assert asked, "it was asked whether it is there"
    assert (answer.metrics.kv_bytes, answer.metrics.resumed, decode.kv_source.paths.known()[0].failures) == (
        KV_BYTES,
        0,
        0,
    )


def test_a_line_that_is_cut_before_its_first_chunk(pair: Pair, right: list[int], monkeypatch: Any) -> None:
    """It is dialled again, however long the fetch had waited for that chunk."""
    prefill, decode = pair
    assert ask(prefill, decode) == right, "they know each other"
    quick, go = prefill.engine.prefill, threading.Event()

    def slow(*args: Any) -> Any:
        go.wait(20)
        return quick(*args)

    monkeypatch.setattr(prefill.engine, "prefill", slow)
    with FaultyProxy(prefill.kv_addresses[0]) as proxy:
        answer = begin(prefill, decode, proxy.address)
        time.sleep(1)
        proxy.hang_up()
        go.set()
        assert list(answer) == right


def test_an_address_of_another_node_is_passed_over(pair: Pair, right: list[int], nodes: Callable[..., Pair]) -> None:
    """Someone mistyped: what listens there is a prefill node, and well."""
    prefill, decode = pair
    stranger, _ = nodes()
    assert ask(prefill, decode, stranger.kv_addresses[0], prefill.kv_addresses[0]) == right
    with pytest.raises(PeerFailed, match="from another node, or from before"):
        ask(prefill, decode, stranger.kv_addresses[0])


def test_an_unreachable_path_is_passed_over(pair: Pair, right: list[int]) -> None:
    prefill, decode = pair
    with socket.create_server(("127.0.0.1", 0)) as full:
        silent = full.getsockname()
    with Clock():
        assert ask(prefill, decode, silent, prefill.kv_addresses[0]) == right
        answer = begin(prefill, decode, silent, prefill.kv_addresses[0])
        assert list(answer) == right
    direct = prefill.kv_addresses[0]
    assert answer.metrics.kv_paths == (f"127.0.0.1:{direct[1]}",), "a path that has just failed is not tried first"


def test_one_flipped_bit(pair: Pair, right: list[int]) -> None:
    prefill, decode = pair
    with FaultyProxy(prefill.kv_addresses[0], "flip", KV_BYTES // 3) as proxy, Clock():
        answer = begin(prefill, decode, proxy.address)
        assert list(answer) == right
        assert proxy.struck.is_set()
    assert any("damaged" in (path.last_error or "") for path in decode.kv_source.paths.known())


def test_the_receiver_dies(nodes: Callable[..., Pair], right: list[int]) -> None:
    """A reset at half of it, as when a machine goes down: the cache is held for its lease, then given back."""
    prefill, decode = nodes(lease_s=4)
    context, reading = prefill.submit(PROMPT)
    reading.result(10)
    sock = socket.create_connection(prefill.kv_addresses[0])
    connection = Connection(sock)
    hello = Hello(ticket=context.ticket, secret=context.secret, fetch="f", fingerprint=decode.engine.fingerprint)
    connection.send_message(Kind.HELLO, msgspec.json.encode(hello))
    received = 0
    while received < KV_BYTES // 2:
        came = sock.recv(1 << 14)
        assert came
        received += len(came)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    assert prefill.engine.arena.used_rows == 300  # type: ignore[attr-defined]
    assert until(lambda: prefill.tickets.endings["expired"] == 1)
    assert until(lambda: nothing_held(prefill, decode))
    assert ask(prefill, decode) == right


def test_replayed_expired_and_guessed_tickets(nodes: Callable[..., Pair], right: list[int]) -> None:
    prefill, decode = nodes(lease_s=4)
    context, reading = prefill.submit(PROMPT)
    with pytest.raises(PeerFailed, match="no such ticket"):
        list(
            decode.generate_from_kv(
                msgspec.structs.replace(context, secret="guess"), GenerationParams(max_tokens=ANSWER)
            )
        )
    assert list(decode.generate_from_kv(context, GenerationParams(max_tokens=ANSWER))) == right
    with pytest.raises(PeerFailed, match="no such ticket"):
        list(decode.generate_from_kv(context, GenerationParams(max_tokens=ANSWER)))
    late, reading = prefill.submit(PROMPT)
    reading.result(10)
    assert until(lambda: prefill.tickets.endings["expired"] == 1)
    with pytest.raises(PeerFailed, match="no such ticket"):
        list(decode.generate_from_kv(late, GenerationParams(max_tokens=ANSWER)))
    assert ask(prefill, decode) == right
    assert until(lambda: nothing_held(prefill, decode))


def _other(fingerprint: Fingerprint, field: str) -> Any:
    value = getattr(fingerprint, field)
    if field == "layout":
        return msgspec.structs.replace(value, kv_heads=value.kv_heads + 1)
    if field == "weights":
        return msgspec.structs.replace(value, norms="others")
    if isinstance(value, tuple):
        return tuple(number * 1.01 for number in value)
    return f"{value}x" if isinstance(value, str) else value + 1


@pytest.mark.parametrize("field", Fingerprint.__struct_fields__)
def test_the_fingerprint_differs_in_one_field(field: str, pair: Pair) -> None:
    prefill, decode = pair
    own = decode.engine.fingerprint
    decode.engine.fingerprint = msgspec.structs.replace(own, **{field: _other(own, field)})
    assert decode.engine.fingerprint != own
    try:
        with pytest.raises(PeerFailed) as refusal, Clock():
            ask(prefill, decode)
        assert refusal.value.peer_code == "fingerprint_mismatch"
    finally:
        decode.engine.fingerprint = own


def test_the_client_leaves_between_prefill_and_decode(nodes: Callable[..., Pair], right: list[int]) -> None:
    prefill, decode = nodes(lease_s=1.0)
    _, reading = prefill.submit(PROMPT)
    reading.result(10)
    assert prefill.engine.arena.used_rows == 300  # type: ignore[attr-defined]
    assert until(lambda: nothing_held(prefill, decode))
    assert prefill.tickets.endings["expired"] == 1
    assert ask(prefill, decode) == right


def test_the_prefill_node_restarts_on_the_same_address(pair: Pair, right: list[int]) -> None:
    prefill, decode = pair
    context, reading = prefill.submit(PROMPT)
    reading.result(10)
    prefill.tickets.cancel(context.ticket)
    prefill.close()
    again = PrefillNode(prefill.kv_memory, prefill.kv_addresses, 77)
    try:
        assert again.kv_addresses == prefill.kv_addresses
        with Clock(), pytest.raises(PeerFailed, match="restarted"):
            list(decode.generate_from_kv(context, GenerationParams(max_tokens=ANSWER)))
        before = decode.kv_source.peer_checks.tokens_computed
        assert ask(again, decode) == right
        assert decode.kv_source.peer_checks.tokens_computed == before + 48, "a restarted node is proven again"
    finally:
        again.close()
        prefill.__init__(prefill.kv_memory, (("127.0.0.1", 0),), 77)  # type: ignore[misc]


@pytest.mark.parametrize("writer", ["torch", "mlx"])
def test_abort_half_way_then_the_same_memory(writer: str, nodes: Callable[..., Pair], tiny_engine: LoadTiny) -> None:
    """The first client leaves at half of the transfer, the next request takes the memory it had."""
    kv_memory = {"kv_bytes": 420 * 4 * 2 * 2 * 16 * 4} if writer == "torch" else {}
    prefill, decode = nodes("torch", writer, writer_options=kv_memory)
    right = alone(tiny_engine(writer, "llama"), PROMPT, ANSWER)
    assert ask(prefill, decode) == right
    other = prompt_of(290, seed=5)
    with FaultyProxy(prefill.kv_addresses[0], "silent", KV_BYTES // 2) as proxy:
        context, _ = prefill.submit(other)
        answer = decode.generate_from_kv(by_way_of(context, proxy.address), GenerationParams(max_tokens=ANSWER))
        assert proxy.struck.wait(60)
        answer.cancel()
        with Clock(), pytest.raises(Cancelled):
            list(answer)
        assert ask(prefill, decode) == right
    prefill.tickets.cancel(context.ticket)
    assert until(lambda: nothing_held(prefill, decode))


def test_requests_end_at_once_while_they_ask_for_their_prompt(pair: Pair) -> None:
    """A cancelled one and one whose time is up ask for their tokens on silent paths: each path would take seconds."""
    prefill, decode = pair
    ended: list[BaseException | None] = []
    decode.on_end = lambda answer, error: ended.append(error)
    silent = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    started = time.monotonic()
    answers = []
    for timeout_s in (60, 0.4):
        context, _ = prefill.submit(PROMPT)
        context = by_way_of(context, *(each.getsockname() for each in silent), *context.addresses)
        rules = GenerationParams(max_tokens=ANSWER, timeout_s=timeout_s)
        answers.append(decode.generate_from_kv(context, rules))
    time.sleep(0.4)
    answers[0].cancel()
    for answer, error in zip(answers, (Cancelled, DeadlineExceeded), strict=True):
        with pytest.raises(error):
            list(answer)
    assert decode.kv_memory.held_slots == decode.open_requests == 0
    assert time.monotonic() - started < 10  # three seconds each would be 12
    assert {type(each) for each in ended} == {Cancelled, DeadlineExceeded}
    assert until(lambda: prefill.tickets.endings["cancelled"] == 2, 60), "over a path on which a node answers"
    for each in silent:
        each.close()


def test_cancel_tells_the_sender(pair: Pair) -> None:
    """The ticket ends at once, not with its lease."""
    prefill, decode = pair
    with FaultyProxy(prefill.kv_addresses[0], "silent", KV_BYTES // 2) as proxy:
        answer = begin(prefill, decode, proxy.address)
        assert proxy.struck.wait(60)
        answer.cancel()
        with pytest.raises(Cancelled):
            list(answer)
        assert until(lambda: prefill.tickets.endings["cancelled"] == 1)


@pytest.mark.parametrize("length", [4095, 4096, 4097])
def test_prompts_around_the_window(length: int, nodes: Callable[..., Pair], tiny_engine: LoadTiny) -> None:
    prefill, decode = nodes("torch", "torch", chunk_tokens=1000)
    prompt = prompt_of(length)
    if length > 4096:
        with pytest.raises(ContextTooLong, match="4097 tokens do not fit the context window of 4096"):
            prefill.submit(prompt)
        return
    context, _ = prefill.submit(prompt)
    if length == 4096:
        with pytest.raises(ContextTooLong, match="4097"):
            decode.generate_from_kv(context, GenerationParams(max_tokens=1))
        prefill.tickets.cancel(context.ticket)
    else:
        assert list(decode.generate_from_kv(context, GenerationParams(max_tokens=1))) == alone(
            tiny_engine("torch", "llama"), prompt, 1
        )
    assert until(lambda: nothing_held(prefill, decode))


@pytest.mark.parametrize("smaller", ["prefill", "decode"])
def test_windows_and_memory_that_differ(
    smaller: str, nodes: Callable[..., Pair], right: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node with less refuses the whole prompt. None is cut, and what fits both is right."""
    prefill, decode = nodes(timeouts=ONE_PROCESS)
    kv_memory = (prefill if smaller == "prefill" else decode).kv_memory
    engine = kv_memory.engine

    def refused(error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            list(begin(prefill, decode))
        for ticket in list(prefill.jobs):
            prefill.tickets.cancel(ticket)
        assert until(lambda: nothing_held(prefill, decode))

    with monkeypatch.context() as less:
        less.setattr(engine, "spec", msgspec.structs.replace(engine.spec, context_window=299))
        refused(ContextTooLong, r"3\d\d tokens do not fit the context window of 299")
    with monkeypatch.context() as less:
        less.setattr(kv_memory.admission, "limit_bytes", engine.kv_cost(300) - 1)
        refused(RequestTooLarge, "can never fit")
    assert ask(prefill, decode) == right


def test_a_ticket_that_ends_stops_its_sender(pair: Pair) -> None:
    """Everything is computed and half of it sent when the ticket is cancelled: the rest must not follow, because its
    rows may belong to someone else by then."""
    prefill, decode = pair
    context, reading = prefill.submit(PROMPT)
    reading.result(10)
    with FaultyProxy(prefill.kv_addresses[0], "silent", KV_BYTES // 2, heals=True) as proxy:
        answer = decode.generate_from_kv(
            by_way_of(context, proxy.address, prefill.kv_addresses[0]), GenerationParams(max_tokens=ANSWER)
        )
        assert proxy.struck.wait(60)
        prefill.tickets.cancel(context.ticket)
        with pytest.raises(PeerFailed, match="no such ticket"):
            list(answer)


@pytest.mark.parametrize("pair", [SHORT_HELLO], indirect=True, ids=["short hello"])
def test_a_hello_that_arrives_byte_by_byte(pair: Pair) -> None:
    """It must not hold a connection: there is one deadline for all of HELLO."""
    prefill, _ = pair
    with socket.create_connection(prefill.kv_addresses[0]) as sock:
        sock.settimeout(20)
        started = time.monotonic()
        with suppress(OSError):
            for byte in b"DKVC" + bytes(28):
                sock.sendall(bytes([byte]))
                time.sleep(0.1)
        with suppress(OSError):
            assert b"peer_gone" in sock.recv(4096)
        assert time.monotonic() - started < 15
    assert until(lambda: "kv-send" not in {thread.name for thread in threading.enumerate()})


def room_for_one(open_: Any, capacity: int, reserved: bool = True) -> Any:
    if not reserved:
        raise KVMemoryFull("no room for a canary")
    return open_(capacity)


class TestCanary:
    def test_a_peer_that_computes_something_else_is_refused(self, nodes: Callable[..., Pair], right: list[int]) -> None:
        """Same files, same fingerprint, and two KV heads that changed places on their way out."""
        prefill, decode = nodes()
        honest = prefill.engine.run_prefill

        def swapped(sequence, tokens, emit, scoring):  # type: ignore[no-untyped-def]
            def twisted(piece):  # type: ignore[no-untyped-def]
                rows = piece.keys[:, ::-1].copy() if piece.layer == 2 else piece.keys
                emit(replace(piece, keys=rows))

            return honest(sequence, tokens, twisted, scoring)

        prefill.engine.run_prefill = swapped  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(PeerRefused, match="the keys of layer 2 differ by"):
                ask(prefill, decode)
        assert decode.kv_source.peer_checks.tokens_computed == 48, "the verdict is kept"
        assert decode.kv_source.peer_checks.stats()[0].refused
        prefill.engine.run_prefill = honest  # type: ignore[method-assign]
        with pytest.raises(PeerRefused):
            ask(prefill, decode)
        prefill.epoch = prefill.kv_server.epoch = "after a restart"
        prefill.kv_server.canary = None
        assert ask(prefill, decode) == right

    def test_once_for_many_at_the_same_time(self, nodes: Callable[..., Pair], right: list[int]) -> None:
        prefill, decode = nodes()
        answers = [begin(prefill, decode) for _ in range(6)]
        assert [list(answer) for answer in answers] == [right] * 6
        assert decode.kv_source.peer_checks.tokens_computed == 48
        assert sum(answer.metrics.canary_time > 0 for answer in answers) == 1

    def test_a_broken_connection_is_no_verdict(self, nodes: Callable[..., Pair], right: list[int]) -> None:
        prefill, decode = nodes()
        with FaultyProxy(prefill.kv_addresses[0], "cut", 5000) as proxy:
            with pytest.raises(PeerGone):
                ask(prefill, decode, proxy.address)
            assert proxy.struck.is_set()
        assert decode.kv_source.peer_checks.tokens_computed == 0
        assert ask(prefill, decode) == right

    def test_a_request_that_takes_all_memory(self, nodes: Callable[..., Pair], right: list[int]) -> None:
        """Neither node has room for a canary beside it: one reads it before, the other has read it at its start."""
        everything = KV_BYTES // 300 * (300 + ANSWER + 1)  # and a row of padding
        prefill, decode = nodes("torch", "torch", writer_options={"kv_bytes": everything})
        prefill.compute_canary()
        assert (prefill.chunked_prefill.canary_tokens, prefill.kv_memory.sequences, prefill.engine.kv_held_bytes) == (
            48,
            0,
            0,
        )
        assert decode.engine.kv_limit_bytes == KV_BYTES // 300 * (300 + ANSWER)
        prefill.kv_memory.open = partial(room_for_one, prefill.kv_memory.open)  # type: ignore[method-assign]
        assert ask(prefill, decode) == right
        assert prefill.chunked_prefill.canary_tokens == 48

    def test_a_canary_that_finds_no_room_waits(self, nodes: Callable[..., Pair]) -> None:
        """And takes none meanwhile: there is room for one of its two, and then for none."""
        prefill, decode = nodes("torch", "torch", writer_options={"kv_bytes": KV_BYTES})
        context, _ = prefill.submit(PROMPT[:20])
        free = decode.engine.arena.full_rows - 1  # type: ignore[attr-defined]
        taken = decode.scheduler.call(lambda: decode.kv_memory.open(free - 30, reserved=False))
        answer = decode.generate_from_kv(context, GenerationParams(max_tokens=4))
        time.sleep(0.3)
        assert len(decode.kv_memory.unreserved) == 1, "what the test took"
        decode.scheduler.call(lambda: decode.kv_memory.close(taken))
        assert len(list(answer)) == 4
        assert until(lambda: nothing_held(prefill, decode) and not decode.kv_memory.unreserved)

    def test_one_request_s_trouble_is_not_another_s(self, nodes: Callable[..., Pair], right: list[int]) -> None:
        """The first has an address where nothing answers; the second waits for its canary, then makes its own."""
        prefill, decode = nodes()
        with socket.create_server(("127.0.0.1", 0)) as silent:
            lost = begin(prefill, decode, silent.getsockname())
            time.sleep(0.2)
            assert ask(prefill, decode) == right
            with pytest.raises(PeerGone):
                list(lost)

    @pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "gpt_oss"])
    @pytest.mark.parametrize("engines", [("torch", "mlx"), ("mlx", "torch")])
    def test_honest_peers_are_close(
        self, engines: tuple[str, str], architecture: str, nodes: Callable[..., Pair]
    ) -> None:
        prefill, decode = nodes(*engines, architecture)
        context, _ = prefill.submit(PROMPT)
        list(decode.generate_from_kv(context, GenerationParams(max_tokens=2)))
        assert (decode.kv_source.peer_checks.stats()[0].distance or 1) < 0.001
