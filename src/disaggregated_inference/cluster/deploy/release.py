"""Releases on a machine: `FOLDER/releases/ID`, the links `current` and `previous`, and what a release consists of.

A release has the environment (code and packages, in `FOLDER/environments`), the files of its services and, for the
gateway, the cluster file. So a rollback returns to the settings, too. Secrets are no part of it: an earlier token, or
an earlier list of revoked certificates, must not come back.
"""

import hashlib
import shlex

import msgspec

from disaggregated_inference.cluster.services import Place, Service
from disaggregated_inference.cluster.shell import Shell, path_word

_REPLACE_LINK = (
    "import os, sys; goal, link = sys.argv[1:]; new = link + '.new'; os.path.lexists(new) and os.unlink(new);"
    " os.symlink(goal, new); os.replace(new, link)"
)
KEPT = ("current", "previous")


class Release(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    environment: str  # id
    kind: str  # of the service manager
    services: tuple[Service, ...]
    settings: str = ""  # digest of the gateway's cluster file
    id: str = ""

    def named(self) -> "Release":
        content = msgspec.json.encode(msgspec.structs.replace(self, id=""))
        return msgspec.structs.replace(self, id=f"{self.version}-{hashlib.sha256(content).hexdigest()[:6]}")

    def folder(self, place: Place) -> str:
        return f"{place.folder}/releases/{self.id}"


async def read_release(shell: Shell, place: Place, link: str = "current") -> Release | None:
    """The release that a link names; None: there is none, or it cannot be read."""
    done = await shell.run(f"cat {path_word(f'{place.folder}/{link}/release.json')}")
    try:
        return msgspec.json.decode(done.stdout, type=Release) if done.ok else None
    except msgspec.DecodeError:
        return None


def link_script(place: Place, current: Release, previous: Release | None) -> str:
    """`current` changes at once: there is no moment without it."""
    lines = [_link(place, "current", current)]
    if previous and previous.id != current.id:
        lines.append(_link(place, "previous", previous))
    return " && ".join(lines)


def _link(place: Place, name: str, release: Release) -> str:
    python = f"{release.folder(place)}/venv/bin/python"
    return shlex.join([python, "-c", _REPLACE_LINK, f"releases/{release.id}", f"{place.folder}/{name}"])


def unlink_script(place: Place) -> str:
    return f"rm -f {path_word(place.current)}"


def prune_script(place: Place) -> str:
    """Remove releases and environments that neither `current` nor `previous` uses."""
    folder = path_word(place.folder)
    return f"""cd {folder} || exit 1
keep=" "; used=" "
for link in {" ".join(KEPT)}; do
  [ -e "$link" ] || continue
  keep="$keep$(basename "$(readlink "$link")") "
  used="$used$(basename "$(dirname "$(readlink "$link/venv")")") "
done
for each in releases/*; do case "$keep" in *" $(basename "$each") "*) ;; *) rm -rf "$each";; esac; done
for each in environments/*; do case "$used" in *" $(basename "$each") "*) ;; *) rm -rf "$each";; esac; done"""
