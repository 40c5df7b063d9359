"""Enemies on the line between two nodes, and liars among them. The first case of each shows what plain mode allows."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from disaggregated_inference.api import GenerationParams, KVSecurity
from disaggregated_inference.errors import DisaggError, PeerFailed, PeerGone, PeerRefused, TicketRefused
from disaggregated_inference.node.context import PrefillContext
from disaggregated_inference.node.decode import DecodeNode
from disaggregated_inference.node.prefill import PrefillNode
from disaggregated_inference.node.trust import Trust
from tests.support.engines import LoadTiny
from tests.support.forging_relay import ForgingRelay
from tests.support.handoff import alone, prompt_of
from tests.support.identities import Cluster
from tests.support.node_pair import Pair

pytestmark = pytest.mark.slow

PROMPT, ANSWER, PREFIX_BYTES = prompt_of(300), 16, 8 << 20


@pytest.fixture
def right(tiny_engine: LoadTiny) -> list[int]:
    return alone(tiny_engine("mlx", "llama"), PROMPT, ANSWER)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "keys")


def trusts_of(security: KVSecurity, cluster: Cluster) -> tuple[Trust, Trust]:
    if security == "plain":
        return Trust(), Trust()
    return Trust(cluster.identity("spark"), kv_security=security), Trust(cluster.identity("mac"))


def ask(prefill: PrefillNode, decode: DecodeNode, *addresses: tuple[str, int]) -> list[int]:
    """As the two requests of an orchestrator do; `addresses` are those of its cluster file."""
    context, _ = prefill.submit(PROMPT)
    context = msgspec.structs.replace(context, addresses=addresses or context.addresses)
    opened = decode.trust.open(prefill.trust.seal(context))
    return list(decode.generate_from_kv(opened, GenerationParams(max_tokens=ANSWER), tokens=PROMPT))


@pytest.mark.parametrize("security", ["plain", "authenticated", "tls"])
def test_a_relay_alters_slices_and_mends_checksums(
    security: KVSecurity, nodes: Callable[..., Pair], right: list[int], cluster: Cluster
) -> None:
    prefill, decode = nodes(prefix_bytes=PREFIX_BYTES, trusts=trusts_of(security, cluster))
    context, _ = prefill.submit(prompt_of(20))  # another prompt: the relay's victim is proven by now
    list(decode.generate_from_kv(context, GenerationParams(max_tokens=1)))
    with ForgingRelay(prefill.kv_addresses[0]) as relay:
        if security == "plain":
            assert ask(prefill, decode, relay.address) != right
            assert relay.secrets_seen, "the secret crosses in clear"
        else:
            with pytest.raises((PeerGone, DisaggError)):
                ask(prefill, decode, relay.address)
            assert not relay.secrets_seen
        assert relay.forged
    answer = ask(prefill, decode)
    assert (answer == right) == (security != "plain"), "in plain mode the forged rows stay in the prefix cache"


@pytest.mark.parametrize("security", ["authenticated", "tls"])
def test_nothing_is_lost_without_an_enemy(
    security: KVSecurity, nodes: Callable[..., Pair], right: list[int], cluster: Cluster
) -> None:
    prefill, decode = nodes(prefix_bytes=PREFIX_BYTES, trusts=trusts_of(security, cluster))
    assert [ask(prefill, decode) for _ in range(3)] == [right] * 3
    context, _ = prefill.submit(PROMPT)
    answer = decode.generate_from_kv(context, GenerationParams(max_tokens=ANSWER))  # the prompt comes over the wire
    assert list(answer) == right
    assert answer.metrics.cached_tokens > 0, "the KV of a proven identity is kept"
    assert decode.engine.counters.prompt_tokens == decode.kv_source.peer_checks.tokens_computed


@pytest.mark.parametrize("security", ["authenticated", "tls"])
def test_a_cancelled_request_frees_the_ticket(
    security: KVSecurity, nodes: Callable[..., Pair], cluster: Cluster
) -> None:
    prefill, decode = nodes(trusts=trusts_of(security, cluster))
    context, _ = prefill.submit(PROMPT)
    answer = decode.generate_from_kv(context, GenerationParams(max_tokens=ANSWER))
    answer.cancel()
    with suppress(DisaggError):
        list(answer)
    ended = threading.Event()
    for _ in range(100):
        if not len(prefill.tickets):
            return
        ended.wait(0.1)
    raise AssertionError("the ticket is still there")


def test_both_ends_must_agree_on_the_mode(nodes: Callable[..., Pair], cluster: Cluster) -> None:
    """The mode is in the signed context; who alters it is refused by the other end."""
    prefill, decode = nodes(trusts=trusts_of("authenticated", cluster))
    context, _ = prefill.submit(PROMPT)
    weaker = msgspec.structs.replace(context, security="plain")
    with pytest.raises(PeerFailed, match="--kv-security authenticated"):
        list(decode.generate_from_kv(weaker, GenerationParams(max_tokens=2)))
    stolen = msgspec.structs.replace(context, secret="guessed")
    with pytest.raises(PeerFailed, match="ticket_refused"):
        list(decode.generate_from_kv(stolen, GenerationParams(max_tokens=2)))


def test_a_ticket_holds_for_its_own_mode(nodes: Callable[..., Pair], cluster: Cluster) -> None:
    """The prefill node offers all modes: each ticket still has one, and who alters its context gets nothing."""
    modes: tuple[KVSecurity, ...] = ("tls", "authenticated", "plain")
    trusts = Trust(cluster.identity("spark"), kv_security="tls", kv_modes=modes), Trust(cluster.identity("mac"))
    prefill, decode = nodes(trusts=trusts, architecture="llama")
    for mode in modes:
        context, _ = prefill.submit(PROMPT, security=mode)
        for other in modes:
            if other != mode:
                altered = msgspec.structs.replace(context, security=other)
                with pytest.raises(PeerFailed, match=f"goes over {mode} connections, not {other}"):
                    list(decode.generate_from_kv(altered, GenerationParams(max_tokens=2)))
        opened = decode.trust.open(prefill.trust.seal(context))
        assert opened.security == mode
        assert list(decode.generate_from_kv(opened, GenerationParams(max_tokens=2), tokens=PROMPT))


class _Counting:
    """A listener that counts who dials it."""

    def __enter__(self) -> "_Counting":
        self._listener, self.dialled = socket.create_server(("127.0.0.1", 0)), 0
        self.address: tuple[str, int] = ("127.0.0.1", self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self.dialled += 1
                sock.close()

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def test_a_context_with_foreign_addresses_makes_a_node_dial_nothing(
    nodes: Callable[..., Pair], cluster: Cluster
) -> None:
    prefill, decode = nodes()
    with _Counting() as victim:
        context, _ = prefill.submit(PROMPT)
        forged = msgspec.structs.replace(context, addresses=(victim.address,) * 16)
        with pytest.raises(PeerGone):
            list(decode.generate_from_kv(decode.trust.open(forged.encode()), GenerationParams(max_tokens=2)))
        assert victim.dialled, "on loopback, without token and identity"
        dialled = victim.dialled
        member = cluster.identity("mac")
        for trust in (Trust(token="secret"), Trust(member)):
            with pytest.raises(TicketRefused):
                trust.open(forged.encode())
        elsewhere = Trust(cluster.identity("elsewhere", ("192.0.2.1",)), kv_security="tls")
        with pytest.raises(TicketRefused, match=r"127.0.0.1 is not an address of elsewhere"):
            Trust(member).open(elsewhere.seal(forged))
        assert victim.dialled == dialled


def test_errors_do_not_tell_open_from_closed_ports(nodes: Callable[..., Pair]) -> None:
    prefill, decode = nodes()
    closed = socket.create_server(("127.0.0.1", 0))
    address: tuple[str, int] = closed.getsockname()
    closed.close()
    said = []
    with _Counting() as open_port:
        for place in (address, open_port.address):
            with pytest.raises(DisaggError) as refused:
                ask(prefill, decode, place)
            said.append((type(refused.value), str(refused.value).replace(str(place[1]), "PORT")))
    assert said[0] == said[1]


def test_a_liar_about_its_epoch_harms_no_request(
    nodes: Callable[..., Pair], right: list[int], cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes other values and claims the epoch of an honest node: before, the honest node was locked out."""
    honest, decode = nodes(trusts=trusts_of("tls", cluster))
    liar, _ = nodes(trusts=(Trust(cluster.identity("liar"), kv_security="tls"), Trust()), architecture="llama")
    liar.epoch = liar.kv_server.epoch = honest.epoch
    original = liar.engine.run_prefill

    def lying(sequence, tokens, emit, scoring):  # type: ignore[no-untyped-def]
        return original(sequence, [1] * len(tokens), emit, scoring)

    monkeypatch.setattr(liar.engine, "run_prefill", lying)
    with pytest.raises(PeerRefused):
        ask(liar, decode)
    assert ask(honest, decode) == right, "the refusal is the liar's"
    with pytest.raises(PeerRefused):
        ask(liar, decode)
    stats = {peer.identity: peer for peer in decode.kv_source.peer_checks.stats()}
    assert stats["liar"].refused
    assert not stats["spark"].refused


def test_a_plain_liar_is_told_by_its_address(
    nodes: Callable[..., Pair], right: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, decode = nodes()
    liar, _ = nodes()
    liar.epoch = liar.kv_server.epoch = honest.epoch
    original = liar.engine.run_prefill
    monkeypatch.setattr(
        liar.engine, "run_prefill", lambda seq, tokens, emit, scoring: original(seq, [1] * len(tokens), emit, scoring)
    )
    for _ in range(2):
        with pytest.raises(PeerRefused):
            ask(liar, decode)
        assert ask(honest, decode) == right


def test_kv_from_beyond_loopback_is_not_kept_without_a_proof() -> None:
    context = PrefillContext(ticket="t", secret="s", epoch="e", tokens=3, prompt_hash="h", addresses=(("10.0.0.7", 9),))
    assert not Trust(token="t").may_keep(context)
    assert Trust(token="t", trusted_link="a cable").may_keep(context)
    signed = msgspec.structs.replace(context, signer="spark", security="authenticated")
    assert Trust().may_keep(signed)
    assert not Trust().may_keep(msgspec.structs.replace(signed, security="plain"))
