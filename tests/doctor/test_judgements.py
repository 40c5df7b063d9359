"""What the doctor concludes from readings: paths, clocks, memory, nodes, secrets."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from disaggregated_inference.api import NodeStatus, PathStatus
from disaggregated_inference.cluster import load_config
from disaggregated_inference.doctor import ExpectedMachine, credentials, system
from disaggregated_inference.doctor.comparisons import compare_pairs, judge_clock_skew
from disaggregated_inference.doctor.findings import DoctorReport, Finding, found, ok, sort_findings, unknown
from disaggregated_inference.doctor.model_checks import FoundModel, check_models, judge_memory
from disaggregated_inference.doctor.node_status import NodeAnswer, judge_local_network, judge_node
from disaggregated_inference.doctor.paths import MeasuredPath, PathEnd, judge_pair
from disaggregated_inference.doctor.plan import ExpectedServer, planned
from disaggregated_inference.identity import Authority
from disaggregated_inference.kv_transfer.frames import no_answer
from disaggregated_inference.kv_transfer.paths import NetworkPath
from disaggregated_inference.models import ModelFiles, describe_model

CABLE = PathEnd(name="enp1s0", mtu=9000, speed_mbps=10_000)
PATH = MeasuredPath(
    prefill="DGX Spark 1",
    decode="Mac Studio 2",
    address="169.254.150.103",
    bytes=1_000_000_000,
    seconds=0.85,
    round_trip_s=0.0001,
    packet_bytes=8948,
    sender=CABLE,
    receiver=CABLE,
)
CLUSTER = {
    "prefill_servers": [{"name": "p", "host": "127.0.0.1", "model": "m", "kv_addresses": ["10.0.0.1:9000", "fe80::1"]}],
    "decode_servers": [{"name": "d", "host": "127.0.0.2", "model": "m"}],
}


def _path(**changes: object) -> MeasuredPath:
    return msgspec.structs.replace(PATH, **changes)


def _kinds(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.severity, finding.check) for finding in findings]


def test_a_good_path() -> None:
    (finding,) = judge_pair([PATH])
    assert finding.what == "DGX Spark 1 -> Mac Studio 2 by 169.254.150.103: 9.41 Gb/s, 0.10 ms; the link has 10 Gb/s"
    assert finding.severity == "ok"


def test_a_link_at_a_tenth_of_its_rate_is_named() -> None:
    (finding,) = judge_pair([_path(seconds=9.5)])
    assert _kinds([finding]) == [("warning", "path-bandwidth")]
    assert "0.842 Gb/s, 0.10 ms; the link has 10 Gb/s: less than a tenth arrives" in finding.what
    assert _kinds(list(judge_pair([_path(seconds=2.0)]))) == [("note", "path-bandwidth")]


def test_the_cluster_file_knows_the_link_better() -> None:
    assert _kinds(list(judge_pair([PATH], link_gbps=200))) == [("warning", "path-bandwidth")]
    unknown_rate = _path(sender=PathEnd(name="bridge0"))
    (finding,) = judge_pair([unknown_rate])
    assert finding.what.endswith("the system does not tell the rate of the link")


def test_a_route_by_wifi_is_named() -> None:
    wifi = PathEnd(name="en1", mtu=1500, wifi=True)
    findings = list(judge_pair([_path(seconds=20.0, round_trip_s=0.012, receiver=wifi, sender=PathEnd(mtu=1500))]))
    assert _kinds(findings)[1:] == [("warning", "path-latency"), ("warning", "path-wifi")]
    assert findings[2].what.endswith("Mac Studio 2 uses Wi-Fi (en1) for it")


def test_packets() -> None:
    fast = PathEnd(name="enp1s0", mtu=1500, speed_mbps=200_000)
    findings = list(judge_pair([_path(seconds=0.05, packet_bytes=1448, sender=fast, receiver=fast)]))
    assert _kinds(findings) == [("ok", "path-bandwidth"), ("note", "path-mtu")]
    assert findings[1].what.endswith("packets of 1500 bytes")
    unequal = list(judge_pair([_path(receiver=PathEnd(name="en0", mtu=1500, speed_mbps=10_000))]))
    assert "the MTU is 9000 on one side and 1500 on the other" in unequal[1].what


def test_a_closed_path_matters_less_if_another_is_open() -> None:
    closed = _path(error="timed out")
    (alone,) = judge_pair([closed])
    assert alone.severity == "error"
    assert alone.what.endswith(": timed out; no path works between them")
    assert _kinds(list(judge_pair([closed, PATH]))) == [("warning", "path"), ("ok", "path-bandwidth")]


def test_a_firewall_that_closes_the_port_of_the_node_alone() -> None:
    findings = list(judge_pair([_path(closed_port="port 8100: timed out")]))
    assert _kinds(findings) == [("ok", "path-bandwidth"), ("error", "path")]
    assert findings[1].what.endswith("another port is open, and not the node's: port 8100: timed out")


def test_a_faster_path_should_be_the_first() -> None:
    findings = list(judge_pair([_path(seconds=1.6), _path(address="10.0.0.1")]))
    assert findings[-1].check == "path-order"
    assert "by 10.0.0.1 has 9.41 Gb/s, 169.254.150.103 before it 5" in findings[-1].what


def test_clock_skew() -> None:
    assert judge_clock_skew(0.3, 0.1).severity == "ok"
    assert judge_clock_skew(-1.5, 0.7).severity == "ok"  # the answer took that long
    behind = judge_clock_skew(-4.2, 0.1)
    assert (behind.severity, behind.what[:40]) == ("warning", "the clock is 4.2 s behind this machine's")
    assert judge_clock_skew(3600, 0.1).severity == "error"


def test_exit_codes_and_order() -> None:
    error, warning = found("error", "disk", "full"), found("warning", "disk", "almost")
    assert [DoctorReport(findings=f).exit_code for f in ((), (ok("disk", "fine"),), (warning,), (warning, error))] == [
        0,
        0,
        3,
        4,
    ]
    assert DoctorReport(findings=(unknown("disk", "no df"),)).exit_code == 0
    listed = [msgspec.structs.replace(each, machine=name) for name in ("b", "a") for each in (warning, error)]
    assert [(each.machine, each.severity) for each in sort_findings(listed)] == [
        ("b", "error"), ("b", "warning"), ("a", "error"), ("a", "warning"),
    ]  # fmt: skip


def test_every_finding_says_why_and_what_mends_it() -> None:
    finding = found("error", "port", "port 8000 is used by process 3 (nc)")
    assert finding.why.startswith("The node cannot start")
    assert finding.mend.startswith("End that process")


def test_paths_of_the_cluster_file() -> None:
    config = load_config(CLUSTER)
    server = planned(config, config.prefill_servers[0])
    assert server.kv_hosts == [("10.0.0.1", 9000), ("fe80::1", 8100)]
    assert server.ports == [8000, 9000, 8100]
    assert planned(config, config.decode_servers[0]).kv_hosts == []
    assert server.engine == "torch"


def _expected(model: str, **more: object) -> ExpectedServer:
    fields = {"name": "node", "role": "prefill", "engine": "torch", "host": "127.0.0.1", "port": 8000}
    return msgspec.convert(fields | {"model": model} | more, ExpectedServer)


def test_memory_against_weights_and_cache(smollm2: ModelFiles) -> None:
    each = FoundModel(_expected("smollm2", context_window=8192))
    assert each.needed_bytes == smollm2.size_bytes + smollm2.spec.kv_bytes(8192, "bfloat16")
    severities = [next(judge_memory([each], share * each.needed_bytes // 100)).severity for share in (90, 110, 200)]
    assert severities == ["error", "warning", "ok"]
    assert "at 8,192 tokens" in next(judge_memory([each], 10**12)).what


@pytest.mark.slow
def test_missing_and_damaged_models(tmp_path: Path, tiny_folder: Callable[[str], Path]) -> None:
    def check(path: Path) -> Finding:
        return next(iter(check_models(ExpectedMachine(servers=(_expected(str(path)),)))))

    assert (check(tmp_path / "gone").severity, check(tmp_path / "gone").check) == ("error", "model-files")
    broken = tmp_path / "broken"
    shutil.copytree(whole := tiny_folder("llama"), broken)
    for file in broken.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    damaged = check(broken)
    assert (damaged.severity, damaged.check) == ("error", "model-files")
    assert str(broken) in damaged.what
    assert check(whole).what == f"node: {whole} is whole ({ModelFiles('tiny', whole).size_bytes / 1e6:.0f} MB)"


def test_models_that_differ_between_two_machines(smollm2: ModelFiles) -> None:
    config = load_config(CLUSTER)
    pair = (config.prefill_servers[0], config.decode_servers[0])
    described = msgspec.json.decode(msgspec.json.encode(describe_model(smollm2)))
    other = msgspec.json.decode(msgspec.json.encode(described))
    other["fingerprint"]["tokenizer"] = "0" * 16
    (same,) = compare_pairs([pair], {"p": described, "d": described})
    (different,) = compare_pairs([pair], {"p": described, "d": other})
    assert (same.severity, different.severity) == ("ok", "error")
    assert "tokenizer" in different.what
    assert list(compare_pairs([pair], {"p": described})) == []


def test_what_nodes_say() -> None:
    server = load_config(CLUSTER).decode_servers[0]
    assert (
        judge_node(server, NodeAnswer(error="it refuses the token")).what == "d at 127.0.0.2:8001: it refuses the token"
    )
    assert judge_node(server, NodeAnswer(status=NodeStatus(status="healthy", backend="mlx"))).severity == "ok"
    loading = judge_node(server, NodeAnswer(status=NodeStatus(status="unhealthy", reason="the engine stopped")))
    assert (loading.severity, loading.what) == ("warning", "d at 127.0.0.2:8001 is unhealthy: the engine stopped")


def test_a_node_without_a_route_may_be_a_mac_that_is_forbidden_to_dial() -> None:
    """With a path that failed as a real dial does: its error says only that the address does not answer."""
    server = load_config(CLUSTER).decode_servers[0]

    def findings(number: int) -> list[str]:
        path = NetworkPath(("10.0.0.1", 9100))
        failed = no_answer("10.0.0.1:9100")
        failed.__cause__ = OSError(number, os.strerror(number))
        path.record_failure(failed)
        paths = (msgspec.convert(path, PathStatus, from_attributes=True),)
        return [each.check for each in judge_local_network(server, NodeAnswer(status=NodeStatus(paths=paths)))]

    assert findings(errno.EHOSTUNREACH) == ["local-network"]
    assert findings(errno.ECONNREFUSED) == []
    assert list(judge_local_network(server, NodeAnswer(error="it is away"))) == []


def test_secrets_that_others_can_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_HOME", str(tmp_path))
    token, file = tmp_path / "token", tmp_path / "cluster.json"
    token.write_text("abc")
    token.chmod(0o644)
    file.write_text('{"token": "abcdefghijklmnopq", "decode_servers": [{"host": "a", "model": "m"}]}')
    file.chmod(0o644)
    monkeypatch.setenv("DISAGG_TOKEN_FILE", str(token))
    findings = list(credentials.check_secrets(ExpectedMachine(source=str(file))))
    assert [finding.mend for finding in findings] == [f"chmod go= {token}", f"chmod go= {file}"]
    os.system(f"{findings[0].mend} && {findings[1].mend}")  # the remedies work
    assert [finding.severity for finding in credentials.check_secrets(ExpectedMachine(source=str(file)))] == ["ok"]
    monkeypatch.setenv("DISAGG_TOKEN", "letmein")
    assert "only 7 characters" in next(iter(credentials.check_secrets(ExpectedMachine()))).what


def test_a_variable_in_the_cluster_file_is_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('token = "${DISAGG_TOKEN}"\n')
    assert not credentials.has_token(file)
    file.write_text('[[decode_servers]]\nhost = "a"\nmodel = "m"\ntoken = "secret"\n')
    assert credentials.has_token(file)


def test_certificates_expire(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "keys")
    folder = authority.issue("spark-1", ["127.0.0.1"], 365)
    (fresh,) = credentials.check_certificate(ExpectedMachine(identity=str(folder)))
    assert fresh.severity == "ok"
    folder = authority.issue("spark-2", ["127.0.0.1"], 10)
    (soon,) = credentials.check_certificate(ExpectedMachine(identity=str(folder)))
    assert soon.severity == "warning"
    assert "spark-2" in soon.mend
    (missing,) = credentials.check_certificate(ExpectedMachine(identity=str(tmp_path / "none")))
    assert (missing.severity, missing.check) == ("error", "certificate")


def test_disks(tmp_path: Path) -> None:
    severities = [system.judge_disk(tmp_path, size).severity for size in (10**9, 10**10, 10**11)]
    assert severities == ["error", "warning", "ok"]
