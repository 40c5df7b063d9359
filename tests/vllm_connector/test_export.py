"""The connector's two halves and the node's border, over real sockets and real shared memory, with pages that are
filled as vLLM fills them: what arrives is what was computed, whatever the scheduler does."""

import random
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from disaggregated_inference.errors import EngineFailed, EngineUnavailable
from disaggregated_inference.kv import KVSlice
from disaggregated_inference.vllm_connector.messages import (
    MAX_PACKET_BYTES,
    Decoder,
    ExportedRows,
    Refuse,
    ToVllm,
    encode,
)
from disaggregated_inference.vllm_connector.region import RegionLayout
from disaggregated_inference.vllm_node.assembly import Assembly
from disaggregated_inference.vllm_node.connector_server import ConnectorServer
from disaggregated_inference.vllm_node.staging import Staging
from tests.support.paged_model import (
    DIM,
    HEADS,
    LAYERS,
    LAYOUTS,
    VOCABULARY,
    WINDOW,
    PagedModel,
    Request,
    Stage,
    spec,
)
from tests.support.waiting import until as until_soon

until = partial(until_soon, seconds=60)  # two cores may be busy with other tests
REGION = RegionLayout(LAYERS, HEADS, DIM, VOCABULARY, "float32")


class Receiver:
    """The node: copies every slice that is ready, and checks it against the truth."""

    def __init__(self, folder: Path) -> None:
        self.staging, self.spec = Staging(1 << 20), spec()
        self.border = ConnectorServer(folder / "border.sock", self.spec, self.staging)
        self.border.reports = self
        self.lock = threading.Lock()
        self.requests: dict[str, tuple[Request, int, Assembly]] = {}
        self.wrong: list[str] = []
        self.slices: dict[str, list[tuple[int, int, int]]] = {}
        self.logits: dict[str, np.ndarray] = {}
        self.cached: dict[str, int] = {}
        self.steps = 0
        self.computed: dict[str, int] = {}
        self.failures: dict[str, str] = {}
        self.lost_reasons: list[str] = []

    def grant(self, request: Request) -> None:
        offset = self.staging.take(REGION.ticket_bytes(request.tokens))
        engine = self.border.wait_attached(60)
        self.requests[request.ticket] = request, offset, Assembly(request.tokens, engine.senders)
        self.slices[request.ticket] = []
        self.border.grant(request.ticket, offset, request.tokens)

    def release(self, request: Request) -> threading.Event:
        done = threading.Event()
        self.border.release(request.ticket, done.set)
        return done

    def complete(self, request: Request) -> bool:
        return self.requests[request.ticket][2].complete and request.ticket in self.logits

    def started(self, ticket: str, cached_tokens: int) -> None:
        self.cached[ticket] = cached_tokens

    def stepped(self) -> None:
        self.steps += 1

    def exported(self, worker: int, rows: ExportedRows) -> None:
        with self.lock:
            request, offset, assembly = self.requests[rows.ticket]
            for layer, start, stop in assembly.add(worker, rows.layer, rows.start, rows.stop):
                first = self.spec.layout.layers[layer].first_row(start, stop)
                piece = self.staging.slice_at(REGION, "float32", offset, request.tokens, layer, first, stop)
                self._check(request, piece)
                self.slices[rows.ticket].append((layer, start, stop))

    def _check(self, request: Request, piece: KVSlice) -> None:
        piece.require_fits(self.spec.layout)
        truth = request.rows[piece.layer, :, piece.start : piece.stop].numpy()
        if not (np.array_equal(piece.keys, truth[0]) and np.array_equal(piece.values, truth[1])):
            self.wrong.append(f"{request.ticket}: layer {piece.layer}, {piece.start} to {piece.stop}")

    def logits_ready(self, ticket: str) -> None:
        request, offset, _ = self.requests[ticket]
        self.logits[ticket] = self.staging.logits_at(REGION, offset, request.tokens)

    def failed(self, ticket: str, reason: str) -> None:
        self.failures[ticket] = reason

    def ended(self, ticket: str, computed_tokens: int, status: str) -> None:
        self.computed[ticket] = computed_tokens

    def lost(self, reason: str) -> None:
        self.lost_reasons.append(reason)


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    made = Receiver(tmp_path)
    yield made
    made.border.close()
    made.staging.close()
    assert not made.wrong
    assert not made.failures


@pytest.fixture
def model(receiver: Receiver) -> Iterator[Callable[..., PagedModel]]:
    made: list[PagedModel] = []

    def make(*options: object, **more: object) -> PagedModel:
        made.append(PagedModel(receiver.border.path, *options, **more))  # type: ignore[arg-type]
        receiver.border.wait_attached(60)
        return made[-1]

    yield make
    for each in made:
        each.close()


Make = Callable[..., PagedModel]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunks_of_two_requests_in_one_step(layout: str, model: Make, receiver: Receiver) -> None:
    vllm = model(layout)
    one, two = vllm.request("one", 23), vllm.request("two", 9)
    for request in (one, two):
        receiver.grant(request)
    vllm.step((one, 7), (two, 9))
    vllm.step((one, 15))
    assert not receiver.complete(one)
    vllm.step((one, 1))
    assert until(lambda: receiver.complete(one) and receiver.complete(two))
    assert [stop for layer, _, stop in receiver.slices["one"] if layer == 1] == [7, 22, 23]
    assert np.array_equal(receiver.logits["one"], np.arange(VOCABULARY, dtype=np.float32))
    vllm.end(one)
    assert until(lambda: receiver.computed.get("one") == 23)


def test_a_step_that_calls_no_connector(model: Make, receiver: Receiver) -> None:
    """As a CUDA graph of the whole model: the end of the step sends what was not seen."""
    vllm = model()
    request = vllm.request("last", 12)
    receiver.grant(request)
    vllm.step((request, 11), sees=lambda layer: layer != 2)
    vllm.step((request, 1), sees=lambda layer: False)
    assert until(lambda: receiver.complete(request))


def test_a_cached_prefix_is_sent_from_the_pages(model: Make, receiver: Receiver) -> None:
    vllm = model()
    request = vllm.request("cached", 30)
    receiver.grant(request)
    vllm.hit(request, 21)
    vllm.step((request, 3))
    vllm.step((request, 6))
    assert until(lambda: receiver.complete(request))
    assert receiver.cached == {"cached": 21}
    assert receiver.slices["cached"][0][1:] == (0, 24)
    vllm.end(request)
    assert until(lambda: receiver.computed.get("cached") == 9)


def test_rows_of_a_preempted_request_are_sent_once(model: Make, receiver: Receiver) -> None:
    vllm = model()
    request = vllm.request("twice", 30)
    receiver.grant(request)
    vllm.step((request, 20))
    vllm.preempt(request)
    for count in (8, 8, 14):  # other chunks than before, in other blocks
        vllm.step((request, count))
    assert until(lambda: receiver.complete(request))
    assert [piece[1:] for piece in receiver.slices["twice"] if piece[0] == 1] == [(0, 20), (20, 30)]
    vllm.end(request)
    assert until(lambda: receiver.computed.get("twice") == 50)


def test_a_prompt_that_waits_hears_of_steps_for_others(model: Make, receiver: Receiver) -> None:
    """So that an engine at work is not taken for one that hangs. Once a second is enough."""
    vllm = model()
    waiting, other = vllm.request("waiting", 12), vllm.request("other", 12)
    receiver.border.wait_attached(60)
    vllm.step((other, 4))
    receiver.grant(waiting)
    assert until(lambda: bool(vllm.scheduler._link.grants))
    for _ in range(4):
        vllm.step((other, 2))
    assert until(lambda: receiver.steps > 0)
    vllm.step((waiting, 12))
    assert until(lambda: receiver.complete(waiting))
    assert receiver.steps == 1


def test_a_ticket_that_never_had_a_step_has_an_end_too(model: Make, receiver: Receiver) -> None:
    """A client left while its prompt waited in vLLM's queue."""
    vllm = model()
    request = vllm.request("waiting", 12)
    receiver.grant(request)
    vllm.end(request)
    assert until(lambda: receiver.computed == {"waiting": 0})


def test_a_vllm_that_comes_back_with_a_smaller_window_is_refused(model: Make, receiver: Receiver) -> None:
    """The node has told its router how long prompts may be."""
    first = model()
    receiver.border.wait_attached(60)
    first.close()
    assert until(lambda: receiver.border.trouble() != "")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as second:
        second.connect(str(receiver.border.path))
        second.sendall(encode(msgspec.structs.replace(first.attach, max_tokens=2048)))
        answer = Decoder(ToVllm).decode(second.recv(MAX_PACKET_BYTES))
    assert answer == Refuse(reason="its --max-model-len is 2048: start it with 4096, or restart this node")
    assert receiver.border.trouble() == answer.reason


@pytest.mark.parametrize("seed", range(12))
def test_any_schedule(seed: int, model: Make, receiver: Receiver) -> None:
    """Random chunks, batches, prefix hits and preemptions."""
    choose = random.Random(seed)
    vllm = model(choose.choice(list(LAYOUTS)), seed=seed)
    requests = [vllm.request(f"r{number}", choose.randrange(1, 40)) for number in range(6)]
    for request in requests:
        receiver.grant(request)
        if choose.random() < 0.3:
            vllm.hit(request, choose.randrange(request.tokens))
    for _ in range(400):
        if not (open_ones := [each for each in requests if each.computed < each.tokens]):
            break
        batch = choose.sample(open_ones, choose.randint(1, len(open_ones)))
        vllm.step(*((each, choose.randint(1, min(9, each.tokens - each.computed))) for each in batch))
        if choose.random() < 0.2:
            vllm.preempt(choose.choice(open_ones))
    assert until(lambda: all(map(receiver.complete, requests)))
    for request in requests:
        seen = sorted(receiver.slices[request.ticket])
        assert len(seen) == len(set(seen)), "rows were announced twice"


@pytest.mark.parametrize(
    "stages",
    [
        (Stage(heads=(0, 1)), Stage(heads=(1, 1))),
        (Stage(sends=False), Stage()),
        (Stage(layers=(0, 1)), Stage(layers=(2, 3))),
    ],
    ids=["each rank has a head", "replicated heads are sent once", "each stage has layers"],
)
def test_two_workers(stages: tuple[Stage, ...], model: Make, receiver: Receiver) -> None:
    vllm = model("heads first", stages)
    request = vllm.request("split", 17)
    receiver.grant(request)
    vllm.step((request, 10))
    vllm.step((request, 7))
    assert until(lambda: receiver.complete(request))
    assert len(receiver.slices["split"]) == 2 * LAYERS


def test_after_a_release_nothing_is_written(model: Make, receiver: Receiver) -> None:
    vllm = model()
    one, two = vllm.request("one", 20), vllm.request("two", 20)
    receiver.grant(one)
    vllm.step((one, 10))
    assert receiver.release(one).wait(60)
    receiver.staging.give_back(receiver.requests["one"][1])
    receiver.grant(two)  # in the same memory
    assert receiver.requests["two"][1] == receiver.requests["one"][1]
    vllm.step((one, 10), (two, 20))
    assert until(lambda: receiver.complete(two))
    assert not receiver.requests["one"][2].complete


def test_a_request_that_no_node_granted(model: Make, receiver: Receiver) -> None:
    vllm = model()
    stranger, known = vllm.request("stranger", 10), vllm.request("known", 10)
    receiver.grant(known)
    vllm.step((stranger, 10), (known, 10))
    assert until(lambda: receiver.complete(known))
    assert list(receiver.slices) == ["known"]


def test_missing_blocks_fail_the_request_by_name(
    model: Make, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = model()
    one, two = vllm.request("one", 20), vllm.request("two", 20)
    receiver.grant(one)
    monkeypatch.setattr(type(vllm.scheduler), "_blocks", staticmethod(lambda *_: (0,)))
    vllm.step((one, 20))
    assert until(lambda: "do not hold the rows" in receiver.failures.pop("one", ""))
    monkeypatch.undo()
    receiver.grant(two)
    vllm.step((two, 20))
    assert until(lambda: receiver.complete(two))


def test_the_connector_dials_again(model: Make, receiver: Receiver) -> None:
    vllm = model()
    one, two = vllm.request("one", 20), vllm.request("two", 20)
    receiver.grant(one)
    vllm.step((one, 10))
    for peer in receiver.border.peers():
        peer.hang_up()
    assert until(lambda: len(receiver.lost_reasons) == 1)
    with pytest.raises(EngineUnavailable):
        receiver.border.grant("late", 0, 10)
    vllm.step((one, 10))  # goes on without a node
    receiver.border.wait_attached(60)
    receiver.grant(two)
    vllm.step((two, 20))
    assert until(lambda: receiver.complete(two))


def test_a_version_that_was_never_run_is_logged(
    model: Make, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    """The vLLM of these tests says that it is of the version `test`."""
    model()
    assert receiver.border.engine
    assert receiver.border.engine.scheduler.windows == (WINDOW, 0)
    [told] = [each.getMessage() for each in caplog.records if "was not run" in each.getMessage()]
    assert told.startswith("this node was not run with vLLM test on a CPU, only with 0.25")


def test_workers_that_do_not_make_up_the_model(receiver: Receiver) -> None:
    vllm = PagedModel(receiver.border.path, "heads first", (Stage(heads=(0, 1)), Stage(heads=(0, 1))))
    assert until(lambda: "heads twice" in receiver.border.trouble())
    vllm.close()
    with pytest.raises(EngineUnavailable):
        receiver.border.wait_attached(0.1)


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([(0, 0, 0, 5), (0, 0, 6, 8)], "from token 6, after 5"),
        ([(0, 0, 0, 5), (0, 0, 0, 5)], "from token 0, after 5"),
        ([(0, 7, 0, 5)], "layer 7"),
        ([(0, 0, 0, 11)], "0 to 11"),
        ([(0, 0, 0, 5), (0, 1, 0, 4)], "different chunks"),
    ],
)
def test_assembly_refuses_what_does_not_fit(rows: list[tuple[int, int, int, int]], match: str) -> None:
    assembly = Assembly(10, [1, 1])
    for each in rows[:-1]:
        assembly.add(*each)
    with pytest.raises(EngineFailed, match=match):
        assembly.add(*rows[-1])


def test_assembly_keeps_chunks_in_order() -> None:
    """The first pipeline stage is a chunk ahead."""
    assembly = Assembly(8, [1, 1])
    assert assembly.add(0, 0, 0, 4) == [(0, 0, 4)]
    assert assembly.add(0, 0, 4, 8) == []
    assert assembly.add(1, 1, 0, 4) == [(1, 0, 4), (0, 4, 8)]
    assert "4 of 8" in assembly.missing()
    assert assembly.add(1, 1, 4, 8) == [(1, 4, 8)]
    assert assembly.complete


def test_pages_are_found_by_their_shape() -> None:
    from disaggregated_inference.vllm_connector.pages import PagesUnsupported, find_pages

    def pages(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    assert find_pages(pages(9, 2, 16, 4, 128), 4, 128, 16).name == LAYOUTS["rows"].name
    assert find_pages(pages(9, 2, 4, 16, 128).transpose(2, 3), 4, 128, 16).name == LAYOUTS["heads first"].name
    assert find_pages(pages(9, 4, 16, 256), 4, 128, 16).name == LAYOUTS["fused"].name
    for strange in (pages(2, 9, 16, 4, 128), pages(9, 16, 576), pages(9, 2, 16, 8, 128)):
        with pytest.raises(PagesUnsupported, match="not known"):
            find_pages(strange, 4, 128, 16)
    with pytest.raises(PagesUnsupported, match="kv-cache-dtype"):
        find_pages(pages(9, 2, 16, 4, 128, dtype=torch.float8_e4m3fn), 4, 128, 16)
