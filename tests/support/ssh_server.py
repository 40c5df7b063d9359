"""A real sshd on loopback, with keys of its own, and a home folder whose ssh config leads to it."""

import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
MISSING = "" if SSHD and shutil.which("ssh-keygen") else "openssh-server is not installed"

_CONFIG = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile {folder}/sshd.pid
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
MaxStartups 100
"""


class SshServer(NamedTuple):
    port: int
    home: Path  # of the client
    folder: Path  # of the server

    @property
    def known_hosts(self) -> Path:
        return self.home / ".ssh" / "known_hosts"

    def trust(self, key: Path) -> None:
        """Write the client's known_hosts: this public key is the server's."""
        kind, text, *_ = key.read_text().split()
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {kind} {text}\n")


def make_key(path: Path) -> Path:
    """Returns the public key's file."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path.with_name(path.name + ".pub")


@contextmanager
def ssh_server(folder: Path) -> Iterator[SshServer]:
    """The alias `box` of the client's ssh config is the server."""
    assert SSHD
    home = folder / "client"
    (home / ".ssh").mkdir(parents=True)
    port = _free_port()
    host_key, client_key = make_key(folder / "host_key"), make_key(home / ".ssh" / "id_ed25519")
    shutil.copy(client_key, folder / "authorized_keys")
    (folder / "sshd_config").write_text(_CONFIG.format(port=port, folder=folder))
    (home / ".ssh" / "config").write_text(
        f"Host box\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n"
        f"  IdentityFile {home}/.ssh/id_ed25519\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd's own folder, of its start script
    server = SshServer(port, home, folder)
    server.trust(host_key)
    process = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=subprocess.PIPE, text=True)
    assert process.stderr
    assert any("Server listening" in line for line in process.stderr)
    try:
        yield server
    finally:
        process.terminate()
        process.wait()
        process.stderr.close()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
