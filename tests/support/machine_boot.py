"""Boot one machine of `machines.py`: its root folder and the init process of its namespaces.

The machine sees this machine's programs and has its own /etc, /home, /opt, /root, /tmp, /usr and /var: overlays or
empty folders. Its init is a real systemd, so services, timers, linger, logs and restarts work as on a real machine.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

SYSTEMD = Path("/lib/systemd/systemd")
CGROUPS = [Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")]
SHARED = ("etc", "opt", "usr", "var")
OWN = ("home", "root", "run", "srv", "tmp", "mnt")
# Folders that the machine does not take over from this machine.
EMPTIED = ("etc/ssh", "etc/systemd/system", "etc/cron.d", "var/log", "var/tmp", "var/lib/systemd")

# The first process of the machine's namespaces: it builds the root folder, waits for the network and becomes systemd.
BOOT = r"""
set -e
base=$1; name=$2; shift 2
mount --make-rprivate /
mount -t tmpfs -o mode=755 root "$base/root"
cd "$base/root"
for d in etc opt usr var; do
    mkdir "$d"
    mount -t overlay overlay -o "lowerdir=/$d,upperdir=$base/upper/$d,workdir=$base/work/$d" "$d"
done
for d in home root run srv tmp mnt; do mkdir "$d"; mount --bind "$base/own/$d" "$d"; done
mount -t tmpfs -o mode=755 run run
for d in bin lib lib32 lib64 libx32 sbin; do [ -e "/$d" ] && ln -s "usr/$d" "$d"; done
for shared in "$@"; do
    mkdir -p ".$shared"; mount --rbind "$shared" ".$shared"; mount -o remount,bind,ro ".$shared"
done
mkdir proc sys dev old
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 dev dev
for d in null zero full random urandom tty; do touch "dev/$d"; mount --bind "/dev/$d" "dev/$d"; done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
mount -t tmpfs -o mode=1777 shm dev/shm
ln -s pts/ptmx dev/ptmx; ln -s /proc/self/fd dev/fd
hostname "$name"
pivot_root . old
umount -l old; rmdir old
echo booting
read -r _
exec env -i container=lab PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --log-target=null >/dev/null 2>&1
"""

SSHD_CONFIG = """\
HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM yes
AcceptEnv LANG LC_*
Subsystem sftp internal-sftp
MaxStartups 100
"""

SSHD_UNIT = """\
[Unit]
Description=ssh of this machine
StartLimitIntervalSec=0

[Service]
RuntimeDirectory=sshd
RuntimeDirectoryPreserve=yes
ExecStart=/usr/sbin/sshd -D -e
KillMode=process
Restart=always
RestartSec=200ms

[Install]
WantedBy=multi-user.target
"""


def cgroup_root() -> Path:
    """Where the cgroup2 hierarchy is mounted on this machine."""
    return next((path for path in CGROUPS if (path / "cgroup.procs").exists()), CGROUPS[-1])


def exposed_paths(*extra: Path) -> list[Path]:
    """Folders with the Python that runs the tests, its packages and the repository: the machines see them read-only."""
    repository = Path(__file__).resolve().parents[2]
    wanted = [Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parents[1], repository, *extra]
    return _outermost(path.resolve() for path in wanted if path.resolve().parts[1] not in SHARED)


def _outermost(paths: Iterable[Path]) -> list[Path]:
    found: list[Path] = []
    for path in sorted(set(paths)):
        if not any(path.is_relative_to(other) for other in found):
            found.append(path)
    return found


def prepare_root(base: Path, client_key: str) -> str:
    """Write the files in which a machine differs from this one; returns the public host key."""
    for folder in SHARED:
        (base / "upper" / folder).mkdir(parents=True)
        (base / "work" / folder).mkdir(parents=True)
    for folder in OWN:
        (base / "own" / folder).mkdir(parents=True, mode=0o1777 if folder == "tmp" else 0o755)
    (base / "own/tmp").chmod(0o1777)
    (base / "own/root").chmod(0o700)
    (base / "root").mkdir()
    upper = base / "upper"
    for folder in EMPTIED:
        (upper / folder).mkdir(parents=True)
        os.setxattr(upper / folder, "trusted.overlay.opaque", b"y")
    (upper / "var/tmp").chmod(0o1777)
    _write_services(upper / "etc/systemd/system")
    (upper / "etc/ssh/sshd_config").write_text(SSHD_CONFIG)
    (upper / "etc/machine-id").write_text("")
    (upper / "etc/hostname").write_text(base.name + "\n")
    _authorize(base / "own/root", client_key)
    return make_key(upper / "etc/ssh/ssh_host_ed25519_key")


def _write_services(units: Path) -> None:
    (units / "multi-user.target.wants").mkdir()
    (units / "sshd.service").write_text(SSHD_UNIT)
    (units / "multi-user.target.wants/sshd.service").symlink_to("/etc/systemd/system/sshd.service")
    (units / "default.target").symlink_to("/lib/systemd/system/multi-user.target")
    for masked in ("getty.target", "console-getty.service", "systemd-timesyncd.service", "ssh.service"):
        (units / masked).symlink_to("/dev/null")


def _authorize(home: Path, client_key: str) -> None:
    (home / ".ssh").mkdir(mode=0o700)
    (home / ".ssh/authorized_keys").write_text(client_key + "\n")


def make_key(path: Path) -> str:
    """Make an ed25519 key pair; returns the public key without its comment."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return " ".join(path.with_suffix(".pub").read_text().split()[:2])
