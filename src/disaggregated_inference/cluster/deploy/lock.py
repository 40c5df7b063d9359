"""One deploy at a time on a machine.

The lock is a symbolic link: made at once, with its text. The script that holds it ends with the ssh connection, so the
lock of a deploy that was killed goes by itself. One whose script is gone (the machine was switched off) is taken over.
"""

import getpass
import shlex
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from disaggregated_inference.cluster.shell import Shell
from disaggregated_inference.errors import DeployRefused

# Prints `held`, or `taken TEXT`. $$ is the shell that holds the lock. Of several that find an old lock, the one that
# makes the folder of its number takes it over, alone; the folder goes again at once.
_SCRIPT = """
lock={lock}; mkdir -p "$(dirname "$lock")" || exit 1; chmod 700 "$(dirname "$lock")"
take() {{ ln -s "$$ "{text} "$lock" 2>/dev/null; }}
refuse() {{ now=$(readlink "$lock"); echo "taken ${{now#* }}"; exit 0; }}
if ! take; then
  old=$(readlink "$lock"); pid=${{old%% *}}
  if [ -n "$pid" ] && kill -0 "$pid" 2>/dev/null; then refuse; fi
  mkdir "$lock.$pid" 2>/dev/null || refuse
  if [ "$(readlink "$lock")" = "$old" ]; then rm -f "$lock"; fi
  take; got=$?; rmdir "$lock.$pid"
  [ $got = 0 ] || refuse
fi
trap 'rm -f "$lock"' EXIT; trap 'exit 1' HUP INT TERM PIPE
echo held
cat >/dev/null
"""


def who_am_i() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"


@asynccontextmanager
async def machine_lock(shell: Shell, path: str, command: str) -> AsyncIterator[None]:
    text = f"{who_am_i()}, {command}, since {time.strftime('%Y-%m-%d %H:%M:%S %Z')}"
    async with shell.hold(_SCRIPT.format(lock=shlex.quote(path), text=shlex.quote(text))) as first:
        if first.startswith("taken"):
            holder = first.removeprefix("taken").strip()
            raise DeployRefused(
                shell.name,
                f"another command is at work there: {holder}; wait for the end, or remove {path} there if"
                " you know that it is over",
            )
        if first != "held":
            raise DeployRefused(shell.name, f"{path} cannot be written: check the disk and the rights of its folder")
        yield
