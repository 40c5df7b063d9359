"""The authority: what it makes, what it refuses, and that its files belong to their owner alone."""

import datetime
import json
import os
import ssl
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from disaggregated_inference.cli.main import app
from disaggregated_inference.cluster import Server
from disaggregated_inference.errors import ConfigError, IdentityRefused
from disaggregated_inference.identity import Authority, Identity
from disaggregated_inference.orchestrator.connection_errors import why_unreachable
from tests.support.identities import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "keys")


def run(*arguments: Any) -> str:
    result = CliRunner().invoke(app, ["cluster", "keys", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_the_commands_lead_from_nothing_to_an_identity(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    assert "disagg cluster keys issue NAME --host ADDRESS" in run("init", "--keys", keys)
    said = run("issue", "spark-1", "--host", "192.168.100.1", "--host", "spark.local", "--keys", keys)
    assert f"scp -pr {keys / 'spark-1'} MACHINE:identity" in said
    assert "--identity ~/identity" in said
    assert "DISAGG_IDENTITY" in run("issue", "gateway", "--keys", keys)
    spark = Identity(keys / "spark-1")
    assert (spark.name, set(spark.me.hosts)) == ("spark-1", {"192.168.100.1", "spark.local"})
    assert not Identity(keys / "gateway").me.is_node
    assert "spark-1" in run("rotate", "--all", "--keys", keys)
    assert "revoked gateway" in run("revoke", "gateway", "--keys", keys)
    listed = run("list", "--keys", keys)
    assert [line.split()[0] for line in listed.splitlines()] == ["name", "spark-1", "gateway", "spark-1", "gateway"]
    assert listed.count("valid") == 2
    assert len(json.loads(run("list", "--json", "--keys", keys))) == 4


def test_files_are_their_owners_alone(cluster: Cluster) -> None:
    folder = cluster.folder_of("spark")
    cluster.authority.revoke("spark")
    for path in [cluster.authority.folder, *cluster.authority.folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert {path.name for path in folder.iterdir()} == {"ca.pem", "node.pem", "node.key", "revoked.pem"}


def test_plain_errors(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no authority in .*nowhere: make the cluster's authority with `disagg"):
        Authority(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="has an authority already"):
        Authority.create(cluster.authority.folder)
    cluster.folder_of("spark")
    for name, hosts, says in [
        ("spark", ("a",), "has a certificate already: renew it with `disagg cluster keys rotate spark`"),
        ("Spark 1", ("a",), "is not a name"),
        ("../up", ("a",), "is not a name"),
        ("mac", ("10.0.0.1:8000",), "is not a host"),
        ("mac", ("256.1.1.1",), "is not a host"),
    ]:
        with pytest.raises(ConfigError, match=says):
            cluster.authority.issue(name, hosts)
    for refused in (cluster.authority.rotate, cluster.authority.revoke):
        with pytest.raises(ConfigError, match="no certificate has the name 'mac'; there are: spark"):
            refused("mac")
    with pytest.raises(ConfigError, match=r"no identity in .*: copy the folder"):
        Identity(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("node.key", None, "node.key is missing"),
        ("node.key", b"nonsense", "is not a private key"),
        ("node.pem", b"nonsense", "is not a certificate"),
        ("ca.pem", b"nonsense", "is not a certificate"),
        ("revoked.pem", b"nonsense", "is not a list of revoked certificates"),
    ],
)
def test_damaged_folders(file: str, content: bytes | None, says: str, cluster: Cluster) -> None:
    path = cluster.folder_of("spark") / file
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        Identity(path.parent)


def test_parts_of_two_clusters_do_not_mix(cluster: Cluster, tmp_path: Path) -> None:
    other = Cluster(tmp_path / "other")
    for file, says in [
        ("ca.pem", "not of this cluster's authority"),
        ("node.key", "is not the key of node.pem"),
        ("revoked.pem", "is not of this cluster's authority"),
    ]:
        folder = cluster.folder_of(f"spark-{file[:2]}")
        (folder / file).write_bytes((other.folder_of("mac") / file).read_bytes())
        with pytest.raises(ConfigError, match=says):
            Identity(folder)


def test_a_key_that_others_can_read_is_told(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    folder = cluster.folder_of("spark")
    os.chmod(folder / "node.key", 0o644)
    Identity(folder)
    assert "run `chmod 600" in caplog.text


def test_who_is_a_member(cluster: Cluster, tmp_path: Path) -> None:
    spark, mac, stranger = cluster.identity("spark"), cluster.identity("mac"), Cluster(tmp_path / "o").identity("mac")
    assert spark.require(mac.certificate).name == "mac"
    signature = mac.sign(b"content")
    assert spark.require_signature(mac.certificate, signature, b"content").name == "mac"
    for certificate, signed, content, says in [
        (mac.certificate, signature, b"other content", "the signature is not that of mac"),
        (spark.certificate, signature, b"content", "the signature is not that of spark"),
        (stranger.certificate, stranger.sign(b"content"), b"content", "not of this cluster"),
        (b"", signature, b"content", "there is no certificate"),
        (b"nonsense", signature, b"content", "there is no certificate"),
    ]:
        with pytest.raises(IdentityRefused, match=says):
            spark.require_signature(certificate, signed, content)


def test_an_expired_certificate_is_refused(tmp_path: Path) -> None:
    two_days_ago = datetime.datetime.now(datetime.UTC).replace(microsecond=0) - datetime.timedelta(days=2)
    old = Authority.create(tmp_path / "keys", clock=lambda: two_days_ago)
    old.issue("old", ("127.0.0.1",), days=1)
    member = Identity(Authority(tmp_path / "keys").issue("new", ("127.0.0.1",)))
    pem = (tmp_path / "keys" / "old" / "node.pem").read_text()
    with pytest.raises(IdentityRefused, match="the certificate of old has expired"):
        member.require(ssl.PEM_cert_to_DER_cert(pem))
    with pytest.raises(ConfigError, match=r"node.pem: the certificate of old has expired: run .*rotate"):
        Identity(tmp_path / "keys" / "old")


def test_a_certificate_that_is_not_valid_yet_names_the_clock(tmp_path: Path) -> None:
    """It was reported as expired: rotating it would not have helped."""
    ahead = datetime.datetime.now(datetime.UTC).replace(microsecond=0) + datetime.timedelta(days=2)
    folder = Authority.create(tmp_path / "keys", clock=lambda: ahead).issue("early", ("127.0.0.1",))
    member = Identity(Authority(tmp_path / "keys").issue("new", ("127.0.0.1",)))
    pem = (folder / "node.pem").read_text()
    says = r"the certificate of early is not valid before .* UTC, and this machine's clock says .* UTC: set the clock"
    with pytest.raises(IdentityRefused, match=says):
        member.require(ssl.PEM_cert_to_DER_cert(pem))
    with pytest.raises(ConfigError, match=says):
        Identity(folder)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "node.pem", folder / "node.key")
    node = Server(host="127.0.0.1", port=1, model="m", name="early", role="decode", tls=True)
    words = why_unreachable(_handshake(server, member), node)
    assert words.startswith("TLS failed: its certificate is not valid yet by this machine's clock")


def _handshake(server: ssl.SSLContext, member: Identity) -> Exception:
    """What the client gets."""
    forth, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = member.client_context.wrap_bio(back, forth, server_hostname="127.0.0.1")
    far = server.wrap_bio(forth, back, server_side=True)
    for side in (near, far):
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    with pytest.raises(ssl.SSLCertVerificationError) as failed:
        near.do_handshake()
    return failed.value


def test_commands_at_the_same_time_lose_no_certificate(cluster: Cluster) -> None:
    """Each read the list before the others changed it: the last one to write it won."""
    folder, names = cluster.authority.folder, [f"r{number}" for number in range(6)]
    cluster.folder_of("old")
    started = {name: Authority(folder) for name in names}
    renewing, revoking = Authority(folder), Authority(folder)
    with ThreadPoolExecutor(8) as threads:
        issued = [threads.submit(authority.issue, name, ()) for name, authority in started.items()]
        renewed, revoked = threads.submit(renewing.rotate, "old"), threads.submit(revoking.revoke, "old")
        assert [each.result().name for each in (*issued, renewed)] == [*names, "old"]
        assert {each.name for each in revoked.result()} == {"old"}
    found = Authority(folder)
    assert sorted(each.name for each in found.issued) == ["old", "old", *names]
    assert any(each.revoked_at for each in found.issued if each.name == "old")
    for name in names:
        assert len(found.revoke(name)) == 1
    assert len({(path / "revoked.pem").read_bytes() for path in folder.iterdir() if path.is_dir()}) == 1


def test_two_authorities_at_once_are_one(tmp_path: Path) -> None:
    def create(_: int) -> bool:
        try:
            Authority.create(tmp_path / "keys").issue("spark", ())
        except ConfigError:
            return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(create, range(4))) == 1
    Identity(tmp_path / "keys" / "spark")


def test_a_home_that_cannot_be_made_names_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_HOME", "/dev/null/home")
    monkeypatch.delenv("DISAGG_KEYS", raising=False)
    with pytest.raises(ConfigError, match=r"cannot make the folder /dev/null/home/keys.*--keys.*DISAGG_HOME"):
        run("init")


def test_revoked_by_name_and_by_serial(cluster: Cluster) -> None:
    spark, mac = cluster.identity("spark"), cluster.identity("mac")
    old = mac.certificate
    cluster.authority.rotate("mac")
    assert mac.refresh()
    assert not mac.refresh()
    assert mac.certificate != old
    assert spark.require(old) != spark.require(mac.certificate)  # both are valid
    cluster.authority.revoke(f"{spark.require(old).serial:x}")
    assert spark.refresh()
    with pytest.raises(IdentityRefused, match="the certificate of mac was revoked"):
        spark.require(old)
    assert spark.require(mac.certificate).name == "mac"
    cluster.authority.revoke("mac")
    assert spark.refresh()
    with pytest.raises(IdentityRefused, match="revoked"):
        spark.require(mac.certificate)


def test_half_copied_files_change_nothing(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    spark = cluster.identity("spark")
    before, key = spark.certificate, (spark.folder / "node.key").read_bytes()
    cluster.authority.rotate("spark")
    new_key = (spark.folder / "node.key").read_bytes()
    (spark.folder / "node.key").write_bytes(key)  # the new certificate came first
    assert not spark.refresh()
    assert spark.certificate == before
    assert "the changed identity is not used" in caplog.text
    (spark.folder / "node.key").write_bytes(new_key)
    assert spark.refresh()
    assert spark.certificate != before
