"""Units and plists as golden files, checked by the systems' own readers where they are; scripts of all managers; the
states that they print."""

import os
import plistlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from disaggregated_inference.cluster.services import MANAGERS, Place, Service, ServiceState, manager_of
from disaggregated_inference.errors import ConfigError

GOLDEN = Path(__file__).parent / "golden"
PLACES = {
    "systemd": Place("/home/ada", "/home/ada/.disagg", "ada", 1000),
    "systemd-user": Place("/home/ada", "/home/ada/.disagg", "ada", 1000),
    "launchd": Place("/Users/ada", "/Users/ada/.disagg", "ada", 501),
    "launchd-user": Place("/Users/ada", "/Users/ada/.disagg", "ada", 501),
    "background": Place("/home/ada", "/home/ada/.disagg", "ada", 1000),
}
NODE = Service(
    name="disagg-mac-studio-2",
    title="Mac Studio 2 (decode, qwen)",
    arguments=(
        *("serve", "--role", "decode", "--model", "qwen3-coder:30b", "--host", "169.254.150.102", "--port", "8001"),
        *("--trusted-link", 'the 100% "cable" for $5'),
    ),
    environment={"DISAGG_TOKEN_FILE": "secrets/disagg-mac-studio-2.token"},
    url="http://169.254.150.102:8001",
    node="Mac Studio 2",
    role="decode",
    model="qwen",
)


def at(place: Place) -> Service:
    """The node with absolute paths of this machine, as a plan makes it."""
    files = {name: f"{place.folder}/{value}" for name, value in NODE.environment.items()}
    return Service(**{name: getattr(NODE, name) for name in NODE.__struct_fields__} | {"environment": files})


@pytest.mark.parametrize("kind", MANAGERS)
def test_files_are_the_golden_ones(kind: str) -> None:
    """After a wanted change: write the new content over the old file, and read the difference."""
    place = PLACES[kind]
    file = manager_of(kind, place).file(at(place))
    assert file.content == (GOLDEN / kind / file.name).read_text()


def test_an_unknown_kind() -> None:
    with pytest.raises(ConfigError, match="unknown service kind 'cron': use one of systemd, "):
        manager_of("cron", PLACES["systemd"])


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
@pytest.mark.parametrize("kind", ["systemd", "systemd-user"])
def test_units_pass_systemd_analyze(kind: str, tmp_path: Path) -> None:
    """With a program that is there: the command checks that, too."""
    place = Place(str(tmp_path), str(tmp_path), "root", 0)
    program = Path(place.python)
    program.parent.mkdir(parents=True)
    shutil.copy("/bin/sh", program)
    file = manager_of(kind, place).file(NODE)
    unit = tmp_path / file.name
    unit.write_text(file.content)
    assert _verified(unit, kind) == ""
    unit.write_text(file.content.replace("ExecStart=", "ExecStar="))  # the check finds faults
    assert "Unknown key 'ExecStar'" in _verified(unit, kind) or "Unknown key name 'ExecStar'" in _verified(unit, kind)


def _verified(unit: Path, kind: str) -> str:
    mode = ["--user"] if kind == "systemd-user" else []
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(unit.parent)}
    command = ["systemd-analyze", *mode, "verify", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return "\n".join(line for line in done.stderr.splitlines() if unit.name in line or done.returncode)


@pytest.mark.parametrize("kind", ["launchd", "launchd-user"])
def test_plists_parse_and_have_absolute_paths(kind: str) -> None:
    place = PLACES[kind]
    file = manager_of(kind, place).file(at(place))
    found: dict[str, Any] = plistlib.loads(file.content.encode())
    assert found["Label"] == file.name.removesuffix(".plist") == NODE.name
    assert found["RunAtLoad"] is found["KeepAlive"] is True
    assert found["ProgramArguments"][-len(NODE.arguments) :] == list(NODE.arguments)
    values = [found["WorkingDirectory"], found["StandardOutPath"], found["StandardErrorPath"]]
    values += [*found["EnvironmentVariables"].values(), found["ProgramArguments"][0], file.installed]
    options = found["ProgramArguments"]
    values += [options[options.index(name) + 1] for name in ("-I", "--log", "--state", "--")]
    assert all(Path(value).is_absolute() for value in values), values
    assert ("UserName" in found) == (kind == "launchd")


# Keys of launchd.plist(5) that our files may have, with the types that it documents.
DOCUMENTED: dict[str, type | tuple[type, ...]] = {
    "Label": str,
    "UserName": str,
    "ProgramArguments": list,
    "EnvironmentVariables": dict,
    "WorkingDirectory": str,
    "RunAtLoad": bool,
    "KeepAlive": (bool, dict),
    "ThrottleInterval": int,
    "ExitTimeOut": int,
    "ProcessType": str,
    "Umask": (int, str),
    "SoftResourceLimits": dict,
    "HardResourceLimits": dict,
    "StandardOutPath": str,
    "StandardErrorPath": str,
}


@pytest.mark.parametrize("kind", ["launchd", "launchd-user"])
def test_plists_have_documented_keys_and_types(kind: str) -> None:
    (golden,) = (GOLDEN / kind).iterdir()
    found = plistlib.loads(golden.read_bytes())
    assert all(isinstance(value, DOCUMENTED[key]) for key, value in found.items())
    assert all(isinstance(word, str) for word in found["ProgramArguments"])
    assert all(isinstance(value, str) for value in found["EnvironmentVariables"].values())
    assert found["ProcessType"] in ("Background", "Standard", "Adaptive", "Interactive")
    assert golden.name == f"{found['Label']}.plist"  # launchctl(1) finds services by their label
    for limits in (found["SoftResourceLimits"], found["HardResourceLimits"]):
        assert set(limits) == {"NumberOfFiles"}
    assert isinstance(found["Umask"], int)  # a decimal number: property lists have no octal ones
    assert found["Umask"] == 0o077
    assert found["ExitTimeOut"] > 60  # the drain of a node


@pytest.mark.parametrize("kind", ["launchd", "launchd-user"])
def test_launchd_finds_the_folder_of_its_logs(kind: str, tmp_path: Path) -> None:
    """launchd makes no folders, and does not start a job whose log it cannot open."""
    place = Place(str(tmp_path), f"{tmp_path}/my disagg", "ada", 0)
    manager = manager_of(kind, place)
    script = manager.install(NODE, "/missing").split(" && ")
    assert "install -m 644" in script[-1]
    subprocess.run(["sh", "-c", " && ".join(script[:-1])], check=True)
    log = Path(plistlib.loads(manager.file(NODE).content.encode())["StandardOutPath"])
    assert log.parent.is_dir()
    assert log.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", MANAGERS)
def test_scripts_are_posix_shell(kind: str) -> None:
    manager = manager_of(kind, PLACES[kind])
    scripts = [manager.start(NODE), manager.stop(NODE), manager.remove(NODE), manager.state(NODE)]
    scripts += [manager.install(NODE, "/r"), manager.logs(NODE, 10, follow=True), manager.logs(NODE, 1, follow=False)]
    for script in scripts:
        assert subprocess.run(["sh", "-n", "-c", script], capture_output=True).returncode == 0, script


def test_root_needs_no_sudo_and_others_never_type_a_password() -> None:
    for kind in ("systemd", "launchd"):
        place = PLACES[kind]
        assert "sudo -n " in manager_of(kind, place).start(NODE)
        assert "sudo" not in manager_of(kind, place._replace(uid=0)).start(NODE)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("running 812 3", ServiceState(True, 812, 3)),
        ("running", ServiceState(True, 0, 0)),
        ("stopped 0 4", ServiceState(False, 0, 4)),
        ("stopped", ServiceState(False)),
        ("", ServiceState(False)),
        ("running [not 1", ServiceState(True, 0, 1)),
    ],
)
def test_states(text: str, state: ServiceState) -> None:
    assert ServiceState.parse(text) == state


LAUNCHCTL_PRINT = """system/disagg-mac-studio-2 = {
\tactive count = 1
\tstate = running
\tprogram = /Users/ada/.disagg/current/venv/bin/python
\truns = 3
\tpid = 4711
\tspawn type = interactive (4)
\tjetsam coalition = {
\t\tstate = active
\t}
}
"""


def test_the_state_of_launchd_is_read(tmp_path: Path) -> None:
    """With a launchctl that prints what macOS 15 prints."""
    fake = tmp_path / "launchctl"
    fake.write_text(f"#!/bin/sh\ncat <<'END'\n{LAUNCHCTL_PRINT}END\n")
    fake.chmod(0o755)
    script = manager_of("launchd", PLACES["launchd"]._replace(uid=0)).state(NODE)
    done = subprocess.run(["sh", "-c", f"PATH={tmp_path}:$PATH; {script}"], capture_output=True, text=True)
    assert ServiceState.parse(done.stdout) == ServiceState(True, 4711, 2)
