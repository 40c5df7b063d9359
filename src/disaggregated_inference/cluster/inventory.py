"""What a machine has: system, chip, GPU, memory, links, Python, disk, models. One small script asks all of it.

The script is POSIX sh: nothing of ours is on the machine yet. Each line of its output is `key<TAB>value`.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from disaggregated_inference.cluster.shell import Shell, path_word, printable
from disaggregated_inference.errors import CommandFailed

OLDEST_PYTHON = (3, 11)
_LONGEST = 1000  # characters of a fact
_PYTHON = re.compile(r"\d+\.\d+\.\d+ \S.*", re.ASCII)
_PYTHONS = ("python3.14", "python3.13", "python3.12", "python3.11", "python3", "python")

INVENTORY_SCRIPT = r"""
say() { printf '%s\t%s\n' "$1" "$2"; }
say os "$(uname -s)"; say arch "$(uname -m)"; say host "$(uname -n)"
set -- $SSH_CONNECTION; say address "$3"
say home "$HOME"; say user "$(id -un)"; say uid "$(id -u)"
if [ "$(uname -s)" = Darwin ]; then
  say release "macOS $(sw_vers -productVersion 2>/dev/null)"
  say chip "$(sysctl -n machdep.cpu.brand_string 2>/dev/null)"
  say memory_bytes "$(sysctl -n hw.memsize 2>/dev/null)"
  for i in $(ifconfig -l 2>/dev/null); do
    a=$(ipconfig getifaddr "$i" 2>/dev/null) || continue
    say link "$i $a $(ifconfig "$i" | sed -n 's/.*media: *//p' | tr -d '\n')"
  done
else
  say release "$(. /etc/os-release 2>/dev/null; echo "$PRETTY_NAME")"
  say chip "$(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo 2>/dev/null | head -1)"
  say memory_kib "$(sed -n 's/^MemTotal: *\([0-9]*\).*/\1/p' /proc/meminfo 2>/dev/null)"
  if command -v ip >/dev/null; then
    ip -o -4 addr show 2>/dev/null | while read -r _ i _ a _; do
      [ "$i" = lo ] || say link "$i ${a%%/*} $(cat /sys/class/net/"$i"/speed 2>/dev/null) Mb/s"
    done
  fi
fi
if command -v nvidia-smi >/dev/null; then
  nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits 2>/dev/null |
    while IFS= read -r line; do say gpu "$line"; done
fi
[ -d /run/systemd/system ] && say systemd yes
systemctl --user show-environment >/dev/null 2>&1 && say systemd_user yes
[ "$(id -u)" = 0 ] && say root yes
command -v sudo >/dev/null && sudo -n true 2>/dev/null && say root yes
command -v uv >/dev/null && say uv "$(command -v uv)"
command -v rsync >/dev/null && say rsync yes
command -v ollama >/dev/null && say ollama yes
for p in @PYTHONS@; do
  command -v "$p" >/dev/null 2>&1 || continue
  v=$("$p" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) && say python "$v $(command -v "$p")"
done
f=@FOLDER@; while [ ! -d "$f" ] && [ "$f" != / ]; do f=$(dirname "$f"); done
say disk_kib "$(df -Pk "$f" 2>/dev/null | awk 'NR==2 {print $4}')"
for m in "${HF_HOME:-$HOME/.cache/huggingface}"/hub/models--*; do
  [ -d "$m" ] && say model "$(basename "$m" | sed 's/^models--//; s/--/\//g')"
done
[ -e @FOLDER@/current ] && say installed "$(basename "$(readlink @FOLDER@/current)")"
true
"""


class Gpu(NamedTuple):
    name: str
    memory_bytes: int


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    os: str  # Linux or Darwin
    arch: str = ""
    release: str = ""
    host: str = ""
    chip: str = ""
    address: str = ""  # where ssh reached it
    home: str = ""
    user: str = ""
    uid: int = -1
    memory_bytes: int = 0
    free_disk_bytes: int = 0
    gpus: tuple[Gpu, ...] = ()
    links: tuple[str, ...] = ()
    pythons: tuple[str, ...] = ()  # "3.12.3 /usr/bin/python3", newest first
    uv: str = ""
    models: tuple[str, ...] = ()  # Hugging Face repositories
    tools: frozenset[str] = frozenset()  # systemd, systemd_user, root, rsync, ollama
    installed: str = ""  # the current release

    @property
    def is_mac(self) -> bool:
        return self.os == "Darwin"

    @property
    def accelerator(self) -> str:
        """cuda, metal or cpu"""
        return "cuda" if self.gpus else "metal" if self.is_mac and self.arch == "arm64" else "cpu"

    @property
    def model_memory_bytes(self) -> int:
        """What a model may use: the GPU's own memory, or the machine's, where they share it."""
        own = sum(gpu.memory_bytes for gpu in self.gpus)
        return own or self.memory_bytes

    @property
    def python(self) -> str:
        """The path of the newest that is new enough; empty: none."""
        for line in self.pythons:
            version, _, path = line.partition(" ")
            if tuple(int(part) for part in version.split(".")[:2]) >= OLDEST_PYTHON:
                return path
        return ""

    @property
    def service_kind(self) -> str:
        """The best that is there: what starts at boot comes first."""
        if self.is_mac:
            return "launchd" if "root" in self.tools else "launchd-user"
        if "systemd" in self.tools and "root" in self.tools:
            return "systemd"
        return "systemd-user" if "systemd_user" in self.tools else "background"


async def take_inventory(shell: Shell, folder: str = "~/.disagg", python: str = "") -> Inventory:
    """`python`: one that the user wants asked, too."""
    pythons = " ".join(path_word(name) for name in ((python,) if python else _PYTHONS))
    script = INVENTORY_SCRIPT.replace("@FOLDER@", path_word(folder)).replace("@PYTHONS@", pythons)
    output = await shell.check(script, what="looking at the machine")
    return parse_inventory(output, shell.name)


def parse_inventory(output: str, name: str = "") -> Inventory:
    """Lines that are not ours, such as a greeting of the login shell, are left out. What is printed and written into
    files has no control characters, and an end."""
    facts: dict[str, list[str]] = {}
    for line in output.splitlines():
        key, tab, value = line.partition("\t")
        if tab and (value := printable(value).strip()[:_LONGEST]):
            facts.setdefault(key, []).append(value)

    def one(key: str) -> str:
        return facts.get(key, [""])[0]

    if not one("os") or not one("home"):
        said = printable(output).strip()[:200]
        raise CommandFailed(name, f"the machine did not say what it is: {said!r}; check its login shell")
    return Inventory(
        os=one("os"),
        arch=one("arch"),
        release=one("release"),
        host=one("host"),
        chip=one("chip"),
        address=one("address"),
        home=one("home"),
        user=one("user"),
        uid=_number(one("uid")),
        memory_bytes=_number(one("memory_bytes")) or _number(one("memory_kib")) * 1024,
        free_disk_bytes=_number(one("disk_kib")) * 1024,
        gpus=tuple(gpu for line in facts.get("gpu", ()) if (gpu := _gpu(line))),
        links=tuple(facts.get("link", ())),
        pythons=_newest_first([line for line in facts.get("python", ()) if _PYTHON.fullmatch(line)]),
        uv=one("uv"),
        models=tuple(facts.get("model", ())),
        tools=frozenset(key for key in ("systemd", "systemd_user", "root", "rsync", "ollama") if key in facts),
        installed=one("installed"),
    )


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0


def _gpu(line: str) -> Gpu | None:
    """A Spark, which shares its memory with the CPU, says `[N/A]` for the memory."""
    name, _, mebibytes = line.rpartition(",")
    return Gpu(name.strip(), _number(mebibytes.strip()) << 20) if name else None


def _newest_first(found: Sequence[str]) -> tuple[str, ...]:
    def version(line: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", line.split()[0])]

    return tuple(sorted(dict.fromkeys(found), key=version, reverse=True))
