"""Which contexts a node accepts. Nothing is dialled here: a context is refused before that."""

import base64
from pathlib import Path

import msgspec
import pytest

from disaggregated_inference.api import KVSecurity, seal_for
from disaggregated_inference.errors import BadRequest, TicketRefused
from disaggregated_inference.node.context import PrefillContext
from disaggregated_inference.node.trust import Trust, choose_security, default_security, require_trusted_link
from tests.support.identities import Cluster

HERE = PrefillContext(
    ticket="t", secret="s", epoch="e", tokens=3, prompt_hash="h", addresses=(("127.0.0.1", 9), ("::1", 9))
)
THERE = msgspec.structs.replace(HERE, addresses=(("127.0.0.1", 9), ("10.0.0.7", 22)))


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "keys")


def altered(text: str, context: PrefillContext) -> str:
    """The same seal on another body."""
    _, *seal = text.split(".")
    return ".".join([base64.urlsafe_b64encode(msgspec.json.encode(context)).decode(), *seal])


def test_loopback_alone_without_token_and_identity() -> None:
    here = Trust().seal(HERE)
    assert Trust().open(here) == HERE
    assert here == HERE.encode(), "the form of earlier versions"
    with pytest.raises(TicketRefused, match="leads beyond this machine"):
        Trust().open(THERE.encode())
    declared = Trust(trusted_link="a cable")
    assert declared.open(THERE.encode()) == THERE
    assert declared.may_keep(THERE)
    assert Trust().may_keep(HERE)
    assert not Trust(token="t").may_keep(THERE)


def test_a_token_seals_contexts() -> None:
    node, other = Trust(token="secret"), Trust(token="other")
    sealed = node.seal(THERE)
    assert node.open(sealed) == THERE
    for text in (THERE.encode(), altered(sealed, HERE), other.seal(THERE), sealed + ".AAAA"):
        with pytest.raises(TicketRefused):
            node.open(text)
    with pytest.raises(TicketRefused, match="give both nodes the same token, or an identity"):
        node.open(other.seal(THERE))
    assert node.open(seal_for(other.seal(THERE), "secret")) == THERE, "an orchestrator has the tokens of both"
    assert seal_for("nonsense!", "secret")


def test_an_identity_signs_contexts(cluster: Cluster, tmp_path: Path) -> None:
    spark = Trust(cluster.identity("spark", ("127.0.0.1", "::1", "10.0.0.7")), kv_security="tls")
    mac = Trust(cluster.identity("mac"))
    opened = mac.open(spark.seal(msgspec.structs.replace(THERE, security="tls")))
    assert (opened.signer, opened.security, opened.addresses) == ("spark", "tls", THERE.addresses)
    assert mac.may_keep(opened)
    stranger = Trust(Cluster(tmp_path / "other").identity("spark"), kv_security="tls")
    client = Trust(cluster.identity("client", ()), kv_security="tls")
    for text, says in [
        (HERE.encode(), "not signed by a node of this cluster"),
        (Trust(token="t").seal(HERE), "not signed by a node of this cluster"),
        (stranger.seal(HERE), "not of this cluster's authority"),
        (altered(spark.seal(THERE), HERE), "the signature is not that of spark"),
        (client.seal(HERE), "not signed by a node"),
        (mac.seal(THERE), "is not an address of mac"),
        ("nonsense", "not signed"),
        ("no.base64.!", "this is not a context"),
    ]:
        with pytest.raises(TicketRefused, match=says):
            mac.open(text)
    for plain in (Trust(), Trust(token="t"), Trust(trusted_link="x")):
        with pytest.raises(TicketRefused, match="start this node with its --identity too"):
            plain.open(spark.seal(HERE))


def test_a_signer_is_who_signed(cluster: Cluster) -> None:
    """A member of the cluster cannot speak for another one."""
    spark, mac = cluster.identity("spark"), cluster.identity("mac")
    body = msgspec.json.encode(msgspec.structs.replace(HERE, signer="spark", security="tls"))
    parts = (base64.urlsafe_b64encode(part).decode() for part in (body, mac.certificate, mac.sign(body)))
    with pytest.raises(TicketRefused, match="not signed"):
        Trust(spark).open(".".join(parts))


def test_revoked_signers(cluster: Cluster) -> None:
    spark, mac = Trust(cluster.identity("spark"), kv_security="tls"), Trust(cluster.identity("mac"))
    sealed = spark.seal(HERE)
    mac.open(sealed)
    cluster.authority.revoke("spark")
    assert mac.identity
    assert mac.identity.refresh()
    with pytest.raises(TicketRefused, match="revoked"):
        mac.open(sealed)


def test_results_of_peer_checks_belong_to_one_node() -> None:
    """A lie about an epoch changes the other part of the key."""
    signed = msgspec.structs.replace(HERE, signer="spark", security="tls")
    liar = msgspec.structs.replace(signed, signer="mac")
    trust = Trust()
    assert trust.peer_key(signed) != trust.peer_key(liar)
    assert trust.peer_key(HERE) != trust.peer_key(THERE)
    assert trust.peer_key(signed) == trust.peer_key(msgspec.structs.replace(signed, addresses=THERE.addresses))
    unproven = msgspec.structs.replace(signed, security="plain")
    assert trust.peer_key(unproven) == trust.peer_key(msgspec.structs.replace(unproven, signer="")), "by address"


def test_beyond_loopback_a_node_needs_an_identity_or_words(cluster: Cluster) -> None:
    require_trusted_link(["127.0.0.1", "::1"], ["127.0.0.1"], Trust())
    with pytest.raises(BadRequest, match=r"refusing to listen on 10.0.0.7 without an identity: .*--trusted-link"):
        require_trusted_link(["10.0.0.7"], ["10.0.0.7"], Trust(token="t"))
    require_trusted_link(["10.0.0.7"], ["10.0.0.7"], Trust(trusted_link="a cable"))
    identity = cluster.identity("spark")
    require_trusted_link(["10.0.0.7"], ["10.0.0.7"], Trust(identity, kv_security="tls"))
    with pytest.raises(BadRequest, match="--kv-security plain beyond loopback needs the words"):
        require_trusted_link(["10.0.0.7"], ["10.0.0.7"], Trust(identity, kv_security="plain"))


def test_the_default_security(cluster: Cluster) -> None:
    identity = cluster.identity("spark")
    assert (choose_security("", None), choose_security("", identity)) == ((), ())
    assert [default_security((), None), default_security((), identity)] == ["plain", "tls"]
    for name in ("plain", "authenticated", "tls"):
        assert choose_security(name, identity) == (name,)
    modes = choose_security("authenticated, tls,tls", identity)
    assert (modes, default_security(modes, identity)) == (("authenticated", "tls"), "authenticated")
    wrong = (
        ("tls", None, "needs an identity"),
        ("ssl", identity, "unknown --kv-security"),
        ("tls,", identity, "unknown"),
    )
    for given, who, says in wrong:
        with pytest.raises(BadRequest, match=says):
            choose_security(given, who)


def test_no_link_is_weaker_than_its_ends_allow(cluster: Cluster) -> None:
    """What a prefill node does not offer cannot be asked of it; what a decode node does not take is not dialled."""
    spark, mac = cluster.identity("spark", ("127.0.0.1", "::1", "10.0.0.7")), cluster.identity("mac")
    offering = Trust(spark, kv_security="tls", kv_modes=("tls", "authenticated"))
    assert [offering.mode_of(wanted) for wanted in (msgspec.UNSET, "tls", "authenticated")] == [
        *("tls", "tls", "authenticated"),
    ]
    refused: list[tuple[Trust, KVSecurity]] = [
        (offering, "plain"),
        (Trust(spark, kv_security="tls"), "authenticated"),
    ]
    for trust, wanted in refused:
        with pytest.raises(TicketRefused, match=f"a link with {wanted}, and --kv-security here is tls"):
            trust.mode_of(wanted)

    def sealed(security: str) -> str:
        return offering.seal(msgspec.structs.replace(THERE, security=security))

    cases: list[tuple[tuple[KVSecurity, ...], str, tuple[KVSecurity, ...]]] = [
        ((), "", ("tls", "authenticated")),
        ((), "a cable", ("tls", "authenticated", "plain")),
        (("tls",), "a cable", ("tls",)),
        (("authenticated",), "", ("tls", "authenticated")),
        (("plain", "tls"), "", ("tls", "authenticated", "plain")),
    ]
    for modes, trusted_link, taken in cases:
        trust = Trust(mac, trusted_link=trusted_link, kv_modes=modes)
        for security in ("tls", "authenticated", "plain"):
            if security in taken:
                assert trust.open(sealed(security)).security == security
            else:
                with pytest.raises(TicketRefused, match=f"the KV would come (with|in) {security}"):
                    trust.open(sealed(security))
