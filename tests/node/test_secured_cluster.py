"""Real processes over mutual TLS: the tokens are those of the plain cluster, and strangers are refused."""

import io
import shutil
import socket
import ssl
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from disaggregated_inference.api import split_context
from disaggregated_inference.chaos.tcp_proxy import TcpProxy
from disaggregated_inference.cli.status import render
from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.identity import Identity
from disaggregated_inference.kv import Fingerprint
from disaggregated_inference.kv_transfer import Hello
from disaggregated_inference.kv_transfer.frames import Frame, Kind, encode_header
from disaggregated_inference.node.context import PrefillContext
from tests.support.cluster import Process, config_of
from tests.support.identities import Cluster, ask
from tests.support.rotation import AskingClients, old_serials, rotate_all
from tests.support.waiting import until

pytestmark = pytest.mark.slow

MODEL, PROMPT = "simulated:tiny", [(7 * at) % 900 + 5 for at in range(300)]
FAST, SLOW = "custom:prefill=20000,decode=2000", "custom:prefill=20000,decode=80"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("secured") / "keys")


def nodes_of(
    *options: str, spark: Path | None = None, mac: Path | None = None, profile: str = FAST
) -> tuple[Process, Process]:
    with_spark, with_mac = (("--identity", str(folder)) if folder else () for folder in (spark, mac))
    pair = (
        Process("spark", "prefill", "simulated", MODEL, "--profile", profile, *options, *with_spark),
        Process("mac", "decode", "simulated", MODEL, "--profile", profile, *with_mac),
    )
    return pair[0].ready(), pair[1].ready()


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[tuple[Process, Process]]:
    pair = nodes_of(spark=cluster.folder_of("spark"), mac=cluster.folder_of("mac"))
    yield pair
    for node in pair:
        node.end()


@pytest.fixture(scope="module")
def expected() -> Iterator[list[int]]:
    """Of a cluster without an identity."""
    pair = nodes_of()
    yield tokens_of(config_of(*pair))
    for node in pair:
        node.end()


def tokens_of(config: dict[str, Any], count: int = 24) -> list[int]:
    with DisaggregatedClient(config) as client:
        _, metrics = client.generate(tokens=PROMPT, max_tokens=count, temperature=0, ignore_eos=True)
    assert metrics["method"] == "disaggregated_simulated", metrics
    assert metrics["prompt_tokens_recomputed"] == 0
    tokens: list[int] = metrics["tokens"]
    return tokens


def url_of(node: Process, path: str) -> str:
    return f"https://127.0.0.1:{node.port}{path}"


def test_the_tokens_are_those_of_a_plain_cluster(
    nodes: tuple[Process, Process], cluster: Cluster, expected: list[int]
) -> None:
    config = config_of(*nodes) | {"identity": str(cluster.client)}
    assert tokens_of(config) == expected
    client = Identity(cluster.client)
    status, said = ask(url_of(nodes[0], "/status"), client)
    assert (status, said["identity"], said["kv_security"], said["trusted_link"]) == (200, "spark", "tls", "")
    [peer] = ask(url_of(nodes[1], "/status"), client)[1]["peers"]
    assert (peer["identity"], peer.get("refused")) == ("spark", None)
    assert ask(url_of(nodes[1], "/status"), client)[1]["prefixes"]["blocks"] > 0, "the KV is proven: it is kept"


def test_the_authenticated_mode(cluster: Cluster, expected: list[int]) -> None:
    spark, mac = nodes_of(
        "--kv-security", "authenticated", spark=cluster.folder_of("spark"), mac=cluster.folder_of("mac")
    )
    try:
        assert tokens_of(config_of(spark, mac) | {"identity": str(cluster.client)}) == expected
        said = ask(url_of(mac, "/status"), Identity(cluster.client))[1]
        assert said["prefixes"]["blocks"] > 0
        assert said["peers"][0]["identity"] == "spark"
    finally:
        spark.end()
        mac.end()


class FirstBytes(TcpProxy):
    """Remembers what each connection begins with."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.begun: list[bytes] = []
        super().__init__(target)

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        self.begun.append(near.recv(4, socket.MSG_PEEK))
        super()._forward(near, far)


SPOKEN = {"tls": b"\x16\x03", "authenticated": b"DKVA", "plain": b"DKVC"}


def test_each_link_has_a_mode_of_its_own(cluster: Cluster, expected: list[int]) -> None:
    """The cluster file chooses among what the prefill node offers; a decode node that takes TLS alone stays with it."""
    spark, mac = nodes_of(
        "--kv-security", ",".join(SPOKEN), spark=cluster.folder_of("spark"), mac=cluster.folder_of("mac")
    )
    strict = Process(
        *("strict", "decode", "simulated", MODEL, "--profile", FAST, "--kv-security", "tls"),
        *("--identity", str(cluster.folder_of("strict"))),
    ).ready()
    line = FirstBytes(("127.0.0.1", spark.kv_port))
    try:
        for decode, mode in ((mac, "tls"), (mac, "authenticated"), (mac, "plain"), (strict, "tls"), (strict, "")):
            config = config_of(spark, decode) | {"identity": str(cluster.client)}
            config["prefill_servers"][0]["kv_addresses"] = [f"127.0.0.1:{line.address[1]}"]
            link = {"prefill": spark.name, "decode": decode.name}
            config["links"] = [link | {"security": mode}] if mode else [link]
            line.begun.clear()
            assert tokens_of(config) == expected
            assert line.begun
            assert all(begin.startswith(SPOKEN[mode or "tls"]) for begin in line.begun)
        line.begun.clear()
        config["links"][0]["security"] = "authenticated"
        with DisaggregatedClient(config) as client:
            _, metrics = client.generate(tokens=PROMPT, max_tokens=24, temperature=0, ignore_eos=True)
        assert (metrics["tokens"], metrics["method"] == "disaggregated_simulated") == (expected, False)
        assert "would come with authenticated, and --kv-security here is tls" in str(metrics["failovers"])
        assert not line.begun, "the decode node dialled nothing"
    finally:
        line.close()
        for node in (spark, mac, strict):
            node.end()


def test_no_weaker_mode_can_be_asked_for(nodes: tuple[Process, Process], cluster: Cluster) -> None:
    for mode in ("authenticated", "plain"):
        body = {"tokens": PROMPT, "kv_security": mode}
        status, said = ask(url_of(nodes[0], "/prefill"), Identity(cluster.client), body)
        assert (status, said["error"]["code"]) == (403, "ticket_refused")
        assert f"a link with {mode}, and --kv-security here is tls" in said["error"]["message"]
    assert ask(url_of(nodes[0], "/prefill"), Identity(cluster.client), {"tokens": PROMPT, "kv_security": "x"})[0] == 400


def test_clients_that_are_not_members(nodes: tuple[Process, Process], cluster: Cluster, tmp_path: Path) -> None:
    stranger = Cluster(tmp_path / "other").identity("client")
    stranger.client_context.now.check_hostname = False
    stranger.client_context.now.verify_mode = ssl.CERT_NONE
    for identity in (None, stranger):  # no certificate, and one of another cluster
        with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
            ask(url_of(nodes[1], "/health"), identity)
    with pytest.raises((urllib.error.URLError, OSError)):
        ask(url_of(nodes[1], "/health").replace("https", "http"), None)
    assert ask(url_of(nodes[1], "/health"), Identity(cluster.client))[0] == 200


def test_nothing_older_than_tls_1_3(nodes: tuple[Process, Process], cluster: Cluster) -> None:
    """Not even from a member."""
    member = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    member.load_verify_locations(cluster.client / "ca.pem")
    member.load_cert_chain(cluster.folder_of("mac") / "node.pem", cluster.folder_of("mac") / "node.key")
    for port in (nodes[0].port, nodes[1].port, nodes[0].kv_port):
        assert spoken_version(port, member) == "TLSv1.3"
    member.maximum_version = ssl.TLSVersion.TLSv1_2
    for port in (nodes[0].port, nodes[1].port, nodes[0].kv_port):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            spoken_version(port, member)


def spoken_version(port: int, context: ssl.SSLContext) -> str | None:
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as sock,
        context.wrap_socket(sock, server_hostname="127.0.0.1") as tls,
    ):
        return tls.version()


def why_unreachable(config: dict[str, Any]) -> str:
    with DisaggregatedClient(config) as client:
        client.health()
        return str(client.status()["nodes"][0]["why"])


def test_an_orchestrator_says_what_is_wrong(nodes: tuple[Process, Process], cluster: Cluster, tmp_path: Path) -> None:
    config = config_of(*nodes)
    assert "if it has an identity, name ours" in why_unreachable(config)
    other = Cluster(tmp_path / "other").client
    assert "its certificate is not valid here" in why_unreachable(config | {"identity": str(other)})
    plain = Process("plain", "decode", "simulated", MODEL).ready()
    try:
        said = why_unreachable(config_of(plain) | {"identity": str(cluster.client)})
        assert "it speaks plain HTTP; if this cluster has an identity, start it with --identity" in said
    finally:
        plain.end()
    wrong_host = cluster.folder_of("elsewhere", ("192.0.2.1",))
    node = Process("elsewhere", "decode", "simulated", MODEL, "--identity", str(wrong_host)).ready()
    try:
        assert "IP address mismatch" in why_unreachable(config_of(node) | {"identity": str(cluster.client)})
    finally:
        node.end()


def test_a_stolen_context_needs_a_certificate(nodes: tuple[Process, Process], cluster: Cluster, tmp_path: Path) -> None:
    """Of a node of the cluster: a client's is not enough."""
    spark, mac = nodes
    client = Identity(cluster.client)
    context = ask(url_of(spark, "/prefill"), client, {"tokens": PROMPT})[1]["context"]
    for thief in (None, Cluster(tmp_path / "other").folder_of("mac")):
        node = Process("thief", "decode", "simulated", MODEL, *(("--identity", str(thief)) if thief else ())).ready()
        try:
            url, identity = (
                (url_of(node, "/decode"), Identity(thief)) if thief else (f"http://127.0.0.1:{node.port}/decode", None)
            )
            status, said = ask(url, identity, {"context": context, "max_new_tokens": 2})
            assert (status, said["error"]["code"]) == (403, "ticket_refused")
        finally:
            node.end()
    hello = renewal(context, ask(url_of(spark, "/model"), client)[1]["fingerprint"])
    assert answer_on_kv_port(spark.kv_port, cluster.identity("mac"), hello) == Kind.WELCOME
    for folder in (cluster.client, Cluster(tmp_path / "third").folder_of("mac")):
        assert answer_on_kv_port(spark.kv_port, Identity(folder), hello) in (None, Kind.ERROR)
    status, said = ask(url_of(mac, "/decode"), client, {"context": context, "max_new_tokens": 2})
    assert (status, len(said["tokens"])) == (200, 2), "the ticket was not spent"


def renewal(context: str, fingerprint: Any) -> bytes:
    """A HELLO with a context's ticket and secret, which leaves the ticket unspent."""
    found = PrefillContext.read(split_context(context)[0])
    shape = msgspec.convert(fingerprint, Fingerprint)
    hello = Hello(ticket=found.ticket, secret=found.secret, fetch="f", fingerprint=shape, renew_only=True)
    body = msgspec.json.encode(hello)
    return encode_header(Frame(Kind.HELLO, len(body))) + body + bytes(8)  # inside TLS the checksum is 0


def answer_on_kv_port(port: int, identity: Identity, hello: bytes) -> int | None:
    """The kind of the node's first frame; None if it ends the connection. The thief does not care who answers."""
    context = identity.kv_client_context.now
    context.verify_mode = ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        try:
            with context.wrap_socket(sock) as tls:
                tls.sendall(hello)
                answer = tls.recv(100)
        except OSError:
            return None
    return answer[5] if len(answer) > 5 else None


def test_a_handshake_that_stalls_holds_only_itself(nodes: tuple[Process, Process], cluster: Cluster) -> None:
    stalled = [socket.create_connection(("127.0.0.1", nodes[0].kv_port)) for _ in range(20)]
    try:
        config = config_of(*nodes) | {"identity": str(cluster.client)}
        assert len(tokens_of(config, 4)) == 4
        for sock in stalled:  # the node closes them at its deadline
            sock.settimeout(30)
            assert sock.recv(1) == b""
    finally:
        for sock in stalled:
            sock.close()


def test_rotation_disturbs_no_request_and_revocation_ends_access(
    tmp_path: Path, nodes: tuple[Process, Process], cluster: Cluster
) -> None:
    """The certificates of all names are rotated three times, and the old ones revoked, while five clients ask."""
    expected = tokens_of(config_of(*nodes) | {"identity": str(cluster.client)}, 60)
    keys = Cluster(tmp_path / "keys")
    spark, mac = nodes_of(spark=keys.folder_of("spark"), mac=keys.folder_of("mac"), profile=SLOW)
    config = config_of(spark, mac) | {"identity": str(keys.client)}
    asking = AskingClients(config, PROMPT, 5)
    try:
        old = Identity(Path(shutil.copytree(keys.client, tmp_path / "old-client")))
        for _ in range(3):
            assert asking.each_asks_again()
            rotate_all(keys, mac.port, spark.port, spark.kv_port)
        assert ask(url_of(mac, "/health"), old)[0] == 200, "the old certificate is still valid"
        for serial in old_serials(keys):
            keys.authority.revoke(serial)
        for node in (spark, mac):
            assert until(lambda node=node: ask(url_of(node, "/health"), old)[0] == 403, 30)  # type: ignore[misc]
        assert asking.each_asks_again(), "all ends use new certificates: the old ones are revoked"
        asking.end()
        asking.require(expected)
        require_revocation(keys, spark, mac)
    finally:
        asking.end()
        spark.end()
        mac.end()


def require_revocation(keys: Cluster, spark: Process, mac: Process) -> None:
    client = Identity(keys.client)
    assert ask(url_of(mac, "/health"), client)[0] == 200
    keys.authority.revoke("client")
    assert until(lambda: ask(url_of(mac, "/health"), client)[0] == 403, 30)
    assert "revoked" in ask(url_of(mac, "/health"), client)[1]["error"]["message"]
    watcher = keys.folder_of("watcher", ())
    keys.authority.revoke("spark")
    said = why_unreachable(config_of(spark, mac) | {"identity": str(watcher)})
    assert "the certificate of spark was revoked" in said


def test_a_client_that_never_ends_its_handshake_is_closed(nodes: tuple[Process, Process], cluster: Cluster) -> None:
    with socket.create_connection(("127.0.0.1", nodes[1].port), timeout=30) as stalled:
        assert ask(url_of(nodes[1], "/health"), Identity(cluster.client))[0] == 200
        assert stalled.recv(1) == b""


def test_beyond_loopback_an_identity_needs_no_token(cluster: Cluster) -> None:
    """Mutual TLS knows every client. The node refused to start without a token or --insecure."""
    node = Process(
        "d", "decode", "simulated", MODEL, "--host", "0.0.0.0", "--identity", str(cluster.folder_of("open"))
    ).ready()
    try:
        assert ask(url_of(node, "/status"), Identity(cluster.client))[1]["identity"] == "open"
        with pytest.raises(OSError):  # noqa: PT011  as the connection breaks
            ask(url_of(node, "/status"), None)
    finally:
        node.end()


def test_a_trusted_link_is_declared_in_words_and_shown() -> None:
    words = "the cable between two desks"
    node = Process(
        "d", "decode", "simulated", MODEL, "--host", "0.0.0.0", "--insecure", "--trusted-link", words
    ).ready()
    try:
        assert node.status()["trusted_link"] == words
        assert f"the link is declared trusted: {words}" in node.said()
        with DisaggregatedClient(config_of(node)) as client:
            client.health()
            console = Console(width=200, record=True, file=io.StringIO())
            console.print(render(client.cluster_status()))
        assert f"d: plain, on a link declared trusted: {words}" in console.export_text()
    finally:
        node.end()
