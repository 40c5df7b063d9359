"""A prefill node and a decode node, each with its engine on its own thread, over real sockets."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from disaggregated_inference.errors import (
    BadRequest,
    ContextTooLong,
    KVMemoryFull,
    NodeBusy,
    PeerFailed,
    PeerGone,
    TicketRefused,
    TokensRefused,
)
from disaggregated_inference.kv_transfer.frames import HEADER, Kind, decode_header
from disaggregated_inference.node.context import PrefillContext
from disaggregated_inference.node.kv_listener import KVListener
from disaggregated_inference.node.scheduler import Scheduler, Work
from tests.conftest import LoadTiny, Pair, until
from tests.kv_transfer.test_fuzz import split_frames
from tests.support.handoff import alone, prompt_of

Folder = Callable[[str], Path]


def expected(tiny_engine: LoadTiny, writer: str, architecture: str, prompt: list[int], count: int = 16) -> list[int]:
    return alone(tiny_engine(writer, architecture), prompt, count)


@pytest.mark.parametrize("pair", [("torch", "mlx"), ("mlx", "torch"), ("torch", "torch"), ("mlx", "mlx")])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gpt_oss"])
def test_token_exact_between_nodes(
    architecture: str, pair: tuple[str, str], nodes: Callable[..., Pair], tiny_engine: LoadTiny
) -> None:
    prefill, decode = nodes(*pair, architecture)
    prompt = prompt_of(300)
    context, reading = prefill.begin(prompt)
    answer = decode.fetch_and_write(PrefillContext.decode(context.encode()), 16)
    assert list(answer) == expected(tiny_engine, pair[1], architecture, prompt)
    assert reading.result(5).prompt_tokens == 300
    assert decode.engine.counters.prompt_tokens == decode.proofs.tokens_computed == 48  # the canary's
    assert answer.metrics.prompt_tokens_recomputed == 0
    assert answer.metrics.completion_tokens == 16
    assert until(lambda: prefill.book.endings.fetched == 1)


@pytest.mark.parametrize("when", ["before the prefill ends", "after"])
def test_a_held_context_is_fetched_once(when: str, nodes: Callable[..., Pair], tiny_engine: LoadTiny) -> None:
    prefill, decode = nodes()
    context, reading = prefill.begin(prompt_of(300))
    if when == "after":
        reading.result(10)
    assert list(decode.fetch_and_write(context, 16)) == expected(tiny_engine, "mlx", "llama", prompt_of(300))
    assert until(lambda: len(prefill.book) == 0)
    with pytest.raises(PeerFailed, match="no such ticket"):
        list(decode.fetch_and_write(context, 16))
    assert until(lambda: prefill.engine.arena.used_rows == 0)  # type: ignore[attr-defined]


def test_a_lease_ends(nodes: Callable[..., Pair]) -> None:
    prefill, decode = nodes(lease_s=1.0)
    context, reading = prefill.begin(prompt_of(100))
    reading.result(10)
    assert prefill.engine.arena.used_rows == 100  # type: ignore[attr-defined]
    assert until(lambda: prefill.book.endings.expired == 1)
    assert until(lambda: prefill.engine.arena.used_rows == 0)  # type: ignore[attr-defined]
    with pytest.raises(PeerFailed, match="no such ticket"):
        list(decode.fetch_and_write(context, 4))


def test_cancel_in_the_middle_of_a_prefill(nodes: Callable[..., Pair]) -> None:
    prefill, decode = nodes()
    context, reading = prefill.begin(prompt_of(4000))
    assert prefill.book.cancel(context.ticket)
    with pytest.raises(Exception, match="cancelled"):
        reading.result(10)
    assert until(lambda: prefill.engine.arena.used_rows == 0)  # type: ignore[attr-defined]
    with pytest.raises(PeerFailed):
        list(decode.fetch_and_write(context, 4))


def test_the_decode_node_reads_by_itself(nodes: Callable[..., Pair], tiny_engine: LoadTiny) -> None:
    _, decode = nodes()
    answer = decode.read_and_write(prompt_of(300), 16)
    assert list(answer) == expected(tiny_engine, "mlx", "llama", prompt_of(300))
    assert answer.metrics.prompt_tokens_recomputed == 300


def test_the_prefill_node_is_gone(nodes: Callable[..., Pair]) -> None:
    prefill, decode = nodes()
    context, _ = prefill.begin(prompt_of(100))
    prefill.close()
    with pytest.raises(PeerGone, match="does not answer"):
        list(decode.fetch_and_write(context, 4))


def test_no_room_is_said_before_anything_moves(nodes: Callable[..., Pair]) -> None:
    prefill, decode = nodes()
    context, _ = prefill.begin(prompt_of(4000))
    with pytest.raises(ContextTooLong):
        decode.fetch_and_write(context, 1000)
    with pytest.raises(ContextTooLong):
        prefill.begin(prompt_of(4097))
    with pytest.raises(BadRequest, match="empty"):
        prefill.begin([])
    with pytest.raises(TokensRefused):
        prefill.begin([512])
    assert len(prefill.book) == 1, "nothing is kept of what was refused"
    with pytest.raises(TicketRefused, match="not one that a prefill node gave out"):
        PrefillContext.decode("nonsense")


def test_long_prompts_do_not_starve_short_ones(nodes: Callable[..., Pair]) -> None:
    prefill, _ = nodes()
    order: list[str] = []
    for name, length in (("long", 4000), ("short", 50)):
        _, reading = prefill.begin(prompt_of(length))
        reading.add_done_callback(lambda _, name=name: order.append(name))  # type: ignore[misc]
    assert until(lambda: len(order) == 2, 30)
    assert order == ["short", "long"]


def test_a_full_queue_says_so(tiny_engine: LoadTiny) -> None:
    scheduler = Scheduler(lambda: tiny_engine("torch", "llama"), most_works=1)
    going = [True]

    def work() -> Work[None]:
        while going[0]:
            yield

    first = scheduler.start(work())

    def fill() -> None:
        for _ in range(1000):
            scheduler.start(work())

    with pytest.raises(NodeBusy):
        fill()
    assert scheduler.call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        scheduler.call(lambda: 1 // 0)
    assert scheduler.alive
    going[0] = False
    first.result(5)
    scheduler.stop()


def test_the_process_ends_in_peace(tiny_folder: Folder) -> None:
    """MLX aborts a process in which a thread ended with its streams. Five times over: it did so one time in five."""
    code = (
        "import sys; from pathlib import Path; from functools import partial\n"
        "from disaggregated_inference.engines import load_engine\n"
        "from disaggregated_inference.models import ModelFiles\n"
        "from disaggregated_inference.node.scheduler import EngineThread\n"
        "from disaggregated_inference.node.decode import DecodeNode\n"
        "from disaggregated_inference.node.kv_memory import Room\n"
        "model = ModelFiles('x', Path(sys.argv[1]))\n"
        "worker = EngineThread(partial(load_engine, 'mlx', model))\n"
        "list(DecodeNode(Room(worker), model.tokenizer).read_and_write([5, 6], 4)); worker.stop()"
    )
    for _ in range(5):
        subprocess.run([sys.executable, "-c", code, str(tiny_folder("llama"))], check=True)


def test_a_model_that_does_not_load() -> None:
    def load() -> None:
        raise KVMemoryFull("no room at all")

    with pytest.raises(KVMemoryFull):
        Scheduler(load)  # type: ignore[arg-type]


def test_a_lease_does_not_run_while_the_prompt_is_read(nodes: Callable[..., Pair]) -> None:
    """More prompts at once than can be read within a lease: all are read, and each is held from its own end on."""
    prefill, _ = nodes(lease_s=0.3, chunk_tokens=20)
    started = time.monotonic()
    readings = [prefill.begin(prompt_of(400))[1] for _ in range(20)]
    assert [reading.result(30).prompt_tokens for reading in readings] == [400] * 20
    assert time.monotonic() - started > 0.3, "the test is too fast to show anything"
    assert until(lambda: prefill.book.endings.expired == 20)
    assert until(lambda: prefill.engine.arena.used_rows == 0)  # type: ignore[attr-defined]


def test_a_listener_survives_running_out_of_descriptors() -> None:
    taken: list[socket.socket] = []
    listener = KVListener([("127.0.0.1", 0)], lambda sock: taken.append(sock), 8)
    refusals = [OSError(24, "Too many open files"), OSError(24, "Too many open files")]
    near, far = socket.socketpair()

    class Exhausted:
        def accept(self) -> tuple[socket.socket, None]:
            if refusals:
                raise refusals.pop()
            listener._closing.set()
            return far, None

    listener._accept(Exhausted())  # type: ignore[arg-type]
    assert until(lambda: taken == [far])
    listener.close()
    near.close()
    far.close()


def test_few_works_take_turns(tiny_engine: LoadTiny) -> None:
    scheduler = Scheduler(lambda: tiny_engine("torch", "llama"), in_turn=2)
    begun: list[int] = []

    def work(number: int) -> Work[int]:
        begun.append(number)
        for _ in range(3):
            yield
        return len(begun)

    futures = [scheduler.start(work(number)) for number in range(6)]
    assert scheduler.waiting > 0
    results = [future.result(5) for future in futures]
    assert results[0] == 2, "the first was done when only two had begun"
    assert scheduler.waiting == 0
    scheduler.stop()
    with pytest.raises(NodeBusy, match="stopped"):
        scheduler.call(lambda: 1)


def test_a_call_that_nobody_waits_for_any_more(tiny_engine: LoadTiny) -> None:
    """It is left out, and the thread goes on."""
    scheduler, go, called = Scheduler(lambda: tiny_engine("torch", "llama")), threading.Event(), list[int]()
    busy = scheduler.post(lambda: go.wait(10))
    left = scheduler.post(lambda: called.append(1))
    assert left.cancel()
    go.set()
    assert busy.result(5)
    assert scheduler.call(lambda: 5) == 5
    assert not called
    scheduler.stop()


def test_slices_out_of_order_are_refused(nodes: Callable[..., Pair], tiny_engine: LoadTiny) -> None:
    """The second chunk's slice of a layer before the first's, every frame whole by itself."""
    prefill, decode = nodes()
    context, reading = prefill.begin(prompt_of(300))
    reading.result(10)
    frames = split_frames(prefill.inline(context.ticket, 1 << 24))
    slices = [at for at, frame in enumerate(frames) if decode_header(frame[: HEADER.size]).kind is Kind.SLICE]
    first, second = slices[0], slices[4]  # four layers: the same one, a chunk later
    right = expected(tiny_engine, "mlx", "llama", prompt_of(300))
    assert list(decode.play_and_write(b"".join(frames), 16)) == right
    frames[first], frames[second] = frames[second], frames[first]
    with pytest.raises(BadRequest, match="a slice that does not belong here"):
        list(decode.play_and_write(b"".join(frames), 16))
    assert list(decode.fetch_and_write(context, 16)) == right
