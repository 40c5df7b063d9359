"""Shells over a real sshd, with the user's ssh settings; and every error of a connection."""

import asyncio
import os
import stat
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from disaggregated_inference.cluster.shell import MOST_BYTES, CommandOutput, Shell, printable
from disaggregated_inference.cluster.ssh import SshTarget, open_shell
from disaggregated_inference.errors import (
    CommandFailed,
    ConfigError,
    HostKeyChanged,
    HostKeyUnknown,
    LoginRefused,
    MachineError,
    MachineUnreachable,
)
from disaggregated_inference.timeouts import DeployTimeouts
from tests.support.ssh_server import MISSING, SshServer, make_key, ssh_server
from tests.support.waiting import until

needs_sshd = pytest.mark.skipif(bool(MISSING) or os.getuid() != 0, reason=MISSING or "sshd needs root here")
Result = TypeVar("Result")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    with ssh_server(tmp_path_factory.mktemp("ssh")) as server:
        yield server


@pytest.fixture
def home(server: SshServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HOME", str(server.home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    files = {path: path.read_bytes() for path in (server.known_hosts, server.home / ".ssh" / "config")}
    yield server.home
    for path, content in files.items():
        path.write_bytes(content)


def in_shell(work: Callable[[Shell], Awaitable[Result]], target: str = "box", most_bytes: int = MOST_BYTES) -> Result:
    async def run() -> Result:
        shell = await open_shell("spark-1", target, DeployTimeouts(connect_s=20), most_bytes)
        try:
            return await work(shell)
        finally:
            await shell.close()

    return asyncio.run(run())


@pytest.mark.parametrize("target", [pytest.param("box", marks=needs_sshd), "local"])
@pytest.mark.usefixtures("home")
def test_scripts_run_and_files_arrive(target: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / "secret 1"

    async def work(shell: Shell) -> None:
        done = await shell.run("echo out; echo err >&2; cat; exit 3", b"typed")
        assert (done.exit_code, done.stdout, done.stderr, done.ok) == (3, "out\ntyped", "err\n", False)
        with pytest.raises(CommandFailed, match=r"spark-1: writing x failed \(exit code 1\): no room"):
            await shell.check("echo no room >&2; exit 1", what="writing x")
        with pytest.raises(CommandFailed, match="no end after 0 s: sleep 60"):
            await shell.run("sleep 60", timeout_s=0.2)
        assert (await shell.run("cat; echo end")).stdout == "end\n"
        await shell.put(b"abc" * 100_000, str(path))
        assert [line async for line in shell.lines("printf 'a\\nb\\n'")] == ["a", "b"]

    in_shell(work, target)
    assert path.read_bytes() == b"abc" * 100_000
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["secret 1"]


@pytest.mark.parametrize("target", [pytest.param("box", marks=needs_sshd), "local"])
@pytest.mark.usefixtures("home")
def test_a_script_may_end_before_it_has_read_its_input(target: str) -> None:
    async def work(shell: Shell) -> set[int]:
        return {(await shell.run("exit 66", bytes(size))).exit_code for size in (1, 1 << 22) for _ in range(8)}

    assert in_shell(work, target) == {66}


@pytest.mark.parametrize("target", [pytest.param("box", marks=needs_sshd), "local"])
@pytest.mark.usefixtures("home")
def test_a_held_script_ends_with_its_block(target: str, tmp_path: Path) -> None:
    path = tmp_path / "held"

    async def work(shell: Shell) -> None:
        async with shell.hold(f"touch {path}; echo here; cat > /dev/null; rm {path}") as first:
            assert first == "here"
            assert path.exists()
        assert not path.exists()

    in_shell(work, target)


@pytest.mark.parametrize("target", [pytest.param("box", marks=needs_sshd), "local"])
@pytest.mark.usefixtures("home")
def test_output_without_an_end(target: str) -> None:
    async def work(shell: Shell) -> str:
        with pytest.raises(
            CommandFailed, match=r"^spark-1: it printed more than 1 MiB, check its login shell; .*: yes$"
        ):
            await shell.run("yes")
        return (await shell.run("head -c 1000000 /dev/zero | tr '\\0' x; echo end")).stdout

    assert in_shell(work, target, most_bytes=1 << 20).endswith("xend\n")


@pytest.mark.parametrize("target", [pytest.param("box", marks=needs_sshd), "local"])
@pytest.mark.usefixtures("home")
def test_long_lines_are_read(target: str) -> None:
    """Such as a log line with a long prompt."""

    async def work(shell: Shell) -> list[int]:
        script = "head -c 300000 /dev/zero | tr '\\0' x; echo; echo end"
        return [len(line) async for line in shell.lines(script)]

    assert in_shell(work, target) == [300_000, 3]


@pytest.mark.parametrize("target", [pytest.param("box", marks=needs_sshd), "local"])
@pytest.mark.usefixtures("home")
def test_a_held_script_that_says_nothing(target: str) -> None:
    async def run() -> None:
        shell = await open_shell("spark-1", target, DeployTimeouts(connect_s=60, command_s=1))
        try:
            with pytest.raises(CommandFailed, match=r"spark-1: no end after 1 s: exec sleep 600"):
                async with shell.hold("exec sleep 600"):
                    pass
        finally:
            await shell.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "text",
    ["\x1b[31;1mred\x1b[0m", "\x1b]0;title\x07red", "\x1b]0;title\x1b\\red", "r\x00e\x9bd\x7f"],
)
def test_words_of_a_machine_do_not_act_on_the_terminal(text: str) -> None:
    assert printable(text) == "red"
    assert CommandOutput(1, "", f"{text}\n").last_words == "red"


@needs_sshd
def test_a_login_shell_that_greets(home: Path, server: SshServer) -> None:
    """Such as `echo` in ~/.bashrc: scripts are read from where they begin."""
    forced = 'command="echo welcome; printf no-end-of-line; eval \\"$SSH_ORIGINAL_COMMAND\\"" '
    keys = server.folder / "authorized_keys"
    right = keys.read_text()
    keys.write_text(forced + right)

    async def work(shell: Shell) -> None:
        assert (await shell.run("echo one; cat", b"two")).stdout == "one\ntwo"
        assert [line async for line in shell.lines("echo a; echo b")] == ["a", "b"]
        async with shell.hold("echo held; cat >/dev/null") as first:
            assert first == "held"

    try:
        in_shell(work)
    finally:
        keys.write_text(right)


async def _nothing(shell: Shell) -> None:
    """Connecting is the test."""


@needs_sshd
def test_an_unknown_host_key(home: Path, server: SshServer) -> None:
    server.known_hosts.unlink()
    with pytest.raises(
        HostKeyUnknown, match=r"spark-1: the host key of \[127.0.0.1\]:\d+ is not in your known_hosts: co"
    ):
        in_shell(_nothing)


@needs_sshd
def test_a_changed_host_key(home: Path, server: SshServer, tmp_path: Path) -> None:
    server.trust(make_key(tmp_path / "another"))
    with pytest.raises(HostKeyChanged, match="another machine answers there, or it was installed again"):
        in_shell(_nothing)


@needs_sshd
def test_a_config_cannot_switch_the_check_off(home: Path, server: SshServer) -> None:
    config = home / ".ssh" / "config"
    config.write_text(config.read_text() + "  StrictHostKeyChecking no\n  UserKnownHostsFile none\n")
    with pytest.raises(MachineError, match="`UserKnownHostsFile none` for box"):
        in_shell(_nothing)
    config.write_text(config.read_text().replace("UserKnownHostsFile none", "UserKnownHostsFile /missing"))
    with pytest.raises(HostKeyUnknown):
        in_shell(_nothing)


@needs_sshd
def test_a_refused_login(home: Path, server: SshServer, tmp_path: Path) -> None:
    make_key(tmp_path / "stranger")
    config = home / ".ssh" / "config"
    config.write_text(config.read_text().replace(f"{home}/.ssh/id_ed25519", str(tmp_path / "stranger")))
    with pytest.raises(LoginRefused, match=r"box refuses the login .*`ssh-copy-id box`.*`ssh-add`"):
        in_shell(_nothing)


@needs_sshd
def test_a_jump_host_of_the_config_is_used(home: Path, server: SshServer) -> None:
    config = home / ".ssh" / "config"
    config.write_text(
        config.read_text() + f"Host inner\n  HostName 127.0.0.1\n  Port {server.port}\n  ProxyJump box\n"
        f"  IdentityFile {home}/.ssh/id_ed25519\n"
    )

    async def work(shell: Shell) -> str:
        return (await shell.run("echo $SSH_CONNECTION")).stdout

    assert in_shell(work, "inner").startswith("127.0.0.1")


@pytest.mark.usefixtures("home")
def test_no_machine_there() -> None:
    with pytest.raises(
        MachineUnreachable,
        match=r"root@127.0.0.1:1 cannot be reached by ssh: Connection refused; .*`ssh -p 1 root@127.0.0.1`",
    ):
        in_shell(_nothing, "root@127.0.0.1:1")


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("mac-1", ("mac-1", "", 0)),
        ("ada@10.0.0.1:2222", ("10.0.0.1", "ada", 2222)),
        ("[fe80::1]:22", ("fe80::1", "", 22)),
    ],
)
def test_addresses(text: str, target: tuple[str, str, int]) -> None:
    assert SshTarget.parse(text) == target


@pytest.mark.parametrize(
    "text", ["", "a b", "-oProxyCommand=x", "ada@-oProxyCommand=x", "-l@host", "a@b@c", "host:99x", "host:99999"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="is no ssh address"):
        SshTarget.parse(text)


@needs_sshd
def test_a_key_of_the_agent_opens_the_machine(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent alone has it: the files of the user's keys are away."""
    key, away, address = home / ".ssh" / "id_ed25519", tmp_path / "id_ed25519", tmp_path / "agent"
    config = home / ".ssh" / "config"
    config.write_text("".join(line for line in config.read_text().splitlines(True) if "IdentityFile" not in line))
    key.rename(away)
    with subprocess.Popen(["ssh-agent", "-D", "-a", str(address)], stdout=subprocess.DEVNULL) as agent:
        try:
            assert until(address.exists)
            with pytest.raises(LoginRefused):
                in_shell(lambda shell: shell.run("echo in"))
            monkeypatch.setenv("SSH_AUTH_SOCK", str(address))
            subprocess.run(["ssh-add", "-q", str(away)], check=True)
            assert in_shell(lambda shell: shell.run("echo in")).stdout == "in\n"
        finally:
            away.rename(key)
            agent.terminate()
