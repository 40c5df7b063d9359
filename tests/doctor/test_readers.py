"""Readers of what system programs print, with recorded output: parsers only, no machine of that kind is needed."""

from pathlib import Path

import pytest

from disaggregated_inference.doctor import mac, nvidia, ports, system
from disaggregated_inference.doctor.accelerator import judge_device, judge_matrix_units
from disaggregated_inference.doctor.findings import CannotRead, Finding
from disaggregated_inference.doctor.model_checks import metal_bytes
from disaggregated_inference.doctor.path_probe import linux_facts, mac_facts

RECORDED = Path(__file__).parent / "recorded"


def _read(name: str) -> str:
    return (RECORDED / name).read_text()


def _words(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.severity, finding.check) for finding in findings]


def test_an_h200_that_is_idle_and_well() -> None:
    (gpu,) = nvidia.parse_gpus(_read("nvidia-smi-h200.csv"))
    assert gpu == nvidia.NvidiaGpu("NVIDIA H200", 143771, 36, 700.0, 700.0, 1)
    assert _words(list(nvidia.judge_gpu(gpu))) == [("ok", "gpu-throttled")]


def test_a_locked_clock_shows_under_load_only() -> None:
    well = nvidia.parse_load(_read("nvidia-smi-h200-load.csv").strip())
    locked = nvidia.parse_load(_read("nvidia-smi-h200-locked.csv").strip())
    (finding,) = nvidia.judge_load(well)  # a full load reaches the usual power limit
    assert (finding.severity, finding.what) == ("ok", "the GPU computes at 1590 MHz of 1980, at its power limit")
    (finding,) = nvidia.judge_load(locked)
    assert _words([finding]) == [("warning", "gpu-clock")]
    assert "at 900 MHz of 1980, and names no reason: its clock is capped" in finding.what
    assert "nvidia-smi --reset-gpu-clocks" in finding.mend


def test_a_hot_gb10_without_memory_of_its_own() -> None:
    (gpu,) = nvidia.parse_gpus(_read("nvidia-smi-gb10-hot.csv"))
    assert gpu.memory_mib is None
    (finding,) = nvidia.judge_gpu(gpu)
    assert finding.what == "NVIDIA GB10 at 88 °C is held back by heat (software) and heat (hardware)"


def test_a_lowered_power_limit() -> None:
    gpu = nvidia.NvidiaGpu("NVIDIA H200", 143771, 36, 300.0, 700.0, 0)
    finding = list(nvidia.judge_gpu(gpu))[-1]
    assert (finding.severity, finding.what) == ("warning", "NVIDIA H200: it may use 300 W of its usual 700 W")
    assert finding.mend == "sudo nvidia-smi --power-limit=700"
    (finding,) = nvidia.judge_load(nvidia.parse_load(_read("nvidia-smi-h200-300w.csv").strip()))
    assert finding.what == "the GPU computes at 720 MHz of 1980: it may use 300 W of its usual 700 W"


def test_heat_under_load() -> None:
    (finding,) = nvidia.judge_load(nvidia.GpuLoad(1300, 1980, 0x44, 88, 700.0, 700.0))
    assert finding.what == "the GPU computes at 1300 MHz of 1980 at 88 °C, held back by heat (hardware)"


def test_a_strange_process_in_gpu_memory() -> None:
    (finding,) = nvidia.judge_processes(nvidia.parse_processes(_read("nvidia-smi-h200-apps.csv")))
    assert finding.what == "process 525 (python3) holds 4.6 GiB of GPU memory"


def test_nvidia_smi_of_another_format_is_said() -> None:
    with pytest.raises(CannotRead, match="2 fields instead of 6"):
        nvidia.parse_gpus("NVIDIA H200, 5\n")


def test_a_cpu_build_on_a_machine_with_a_gpu() -> None:
    (finding,) = judge_device("torch", {"device": "cpu", "build": "CPU only"}, "NVIDIA GB10")
    assert finding.severity == "error"
    assert finding.what == "torch computes on the CPU (CPU only); this machine has NVIDIA GB10"
    (finding,) = judge_device("torch", {"device": "cpu"}, "")
    assert (finding.severity, finding.mend) == ("note", "")


def test_the_measured_rate_and_clock_of_a_gpu() -> None:
    reading = {"device": "cuda", "name": "NVIDIA H200", "tflops": 673.7, "clocks": _read("nvidia-smi-h200-load.csv")}
    findings = list(judge_device("torch", reading, "NVIDIA H200"))
    assert _words(findings) == [("ok", "engine-device"), ("ok", "gpu-clock")]
    assert findings[0].what == "torch computes on NVIDIA H200, 674 TFLOP/s measured"


@pytest.mark.parametrize(
    ("name", "rate", "expected"),
    [
        ("Apple M5 Max", 61.0, [("ok", "matrix-units")]),
        ("Apple M5 Max", 17.0, [("warning", "matrix-units")]),
        ("Apple M3 Ultra", 17.0, []),
    ],
)
def test_matrix_units(name: str, rate: float, expected: list[tuple[str, str]]) -> None:
    findings = list(judge_matrix_units({"name": name, "tflops": rate, "tflops_float32": 15.5}))
    assert _words(findings) == expected


def test_interfaces_of_a_mac() -> None:
    texts = _read("ifconfig-mac.txt"), _read("networksetup-mac.txt")
    assert mac_facts("169.254.150.101", *texts) == {"name": "en0", "mtu": 9000, "speed_mbps": 10000, "wifi": False}
    assert mac_facts("192.168.1.23", *texts) == {"name": "en1", "mtu": 1500, "speed_mbps": None, "wifi": True}
    assert mac_facts("10.0.0.5", *texts) == {"name": "en5", "mtu": 1500, "speed_mbps": 1000, "wifi": False}
    assert mac_facts("169.254.3.7", *texts) == {"name": "bridge0", "mtu": 1500, "speed_mbps": None, "wifi": False}
    assert mac_facts("169.254.150.10", *texts) is None


def test_interfaces_of_linux(tmp_path: Path) -> None:
    for name, speed, folder in (("enp1s0f0np0", "200000", ""), ("wlP9s9", "-1", "phy80211")):
        (tmp_path / name / folder).mkdir(parents=True)
        (tmp_path / name / "mtu").write_text("9000\n")
        (tmp_path / name / "speed").write_text(f"{speed}\n")
    assert linux_facts("enp1s0f0np0", str(tmp_path))["speed_mbps"] == 200000
    assert linux_facts("wlP9s9", str(tmp_path)) == {"name": "wlP9s9", "mtu": 9000, "speed_mbps": None, "wifi": True}


def test_power_of_a_mac() -> None:
    well = list(mac.judge_power(_read("pmset.txt"), _read("pmset-therm.txt")))
    assert _words(well) == [("ok", "mac-power")]
    ill = list(mac.judge_power(_read("pmset-low-power.txt"), _read("pmset-therm-hot.txt")))
    assert [finding.what for finding in ill] == [
        "low power mode is on",
        "the Mac sleeps after 15 minutes",
        "heat limits the processor to 71 %",
    ]


def test_memory_that_metal_may_use() -> None:
    assert metal_bytes(512 * 2**30, "0\n") == 384 * 2**30
    assert metal_bytes(512 * 2**30, "458752\n") == 448 * 2**30


def test_the_process_that_has_a_port() -> None:
    assert ports.parse_ss(_read("ss-linux.txt")) == "process 4242 (python3)"
    assert ports.parse_lsof(_read("lsof-mac.txt")) == "process 612 (ControlCe)"
    assert ports.parse_ss("") == ports.parse_lsof("") == ""


def test_firewalls() -> None:
    assert ports.judge_nft(_read("nft-drop.txt")).severity == "note"
    assert ports.judge_nft("table inet filter {\n chain input { type filter hook input priority 0; policy accept; }\n}")
    assert ports.judge_iptables("-P INPUT DROP\n").severity == "note"
    assert ports.judge_iptables("-P INPUT ACCEPT\n").severity == "ok"
    assert "2 rules" in ports.judge_ufw(_read("ufw.txt")).what
    off = ports.judge_mac_firewall("Firewall is disabled. (State = 0)", "Block all DISABLED!")
    on = ports.judge_mac_firewall("Firewall is enabled. (State = 1)", "Firewall has block all state set to disabled.")
    closed = ports.judge_mac_firewall(
        "Firewall is enabled. (State = 2)", "Firewall has block all state set to enabled."
    )
    assert [each.severity for each in (off, on, closed)] == ["ok", "warning", "error"]


def test_the_clock_of_linux() -> None:
    assert system.judge_clock("Timezone=UTC\nNTP=yes\nNTPSynchronized=yes\n").severity == "ok"
    assert "NTP is off" in system.judge_clock("NTP=no\nNTPSynchronized=no\n").what
    assert "without an answer" in system.judge_clock("NTP=yes\nNTPSynchronized=no\n").what


def test_nodes_among_the_processes() -> None:
    nodes = system.running_nodes(_read("ps.txt"))
    assert [(node.pid, node.what, node.port) for node in nodes] == [
        (611, "a node", 8000),
        (733, "a node", 8009),
        (801, "a gateway", 8080),
    ]
    findings = list(system.judge_leftovers(nodes, {8000, 8080}))
    assert [finding.severity for finding in findings] == ["ok", "warning", "note"]  # our supervisor started the first
    assert findings[1].what == "process 733 is a node at port 8009; it is not in the cluster file"
    assert findings[1].mend == "kill 733"
    assert [finding.severity for finding in system.judge_leftovers(nodes, set())] == ["ok"] * 3
