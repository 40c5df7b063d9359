"""The machines of a cluster file: how `disagg cluster` reaches them, and what it installs there."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

ServiceKind = Literal["auto", "systemd", "systemd-user", "launchd", "launchd-user", "background"]

_KINDS = '"auto", "systemd", "systemd-user", "launchd", "launchd-user" or "background"'
_Service = Annotated[ServiceKind, Meta(description=_KINDS)]
_Words = Annotated[str, Meta(description="a string")]
_Switch = Annotated[bool, Meta(description="true or false")]
_Ssh = Annotated[str, Meta(description='HOST, USER@HOST, USER@HOST:PORT, a Host of ~/.ssh/config, or "local"')]
_Folder = Annotated[str, Meta(min_length=1, description='an absolute folder, or one that begins with "~/"')]
_Listen = Annotated[str, Meta(min_length=1, description="an address to listen on")]
_GatewayPort = Annotated[int, Meta(ge=1, le=65535, description="a port from 1 to 65535, such as 8080")]
_Arguments = Annotated[tuple[str, ...], Meta(description='a list such as ["--kv-memory", "8G"]')]
_Extras = Annotated[tuple[str, ...], Meta(description='a list such as ["torch"]')]
_Secrets = Annotated[dict[str, str], Meta(description='an object such as {"HF_TOKEN": "${HF_TOKEN}"}')]
_Variables = Annotated[dict[str, str], Meta(description='an object such as {"OMP_NUM_THREADS": "8"}')]


class ClusterMachine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that `disagg cluster` deploys to. The key is its name. A server whose host is not listed here is on a
    machine of its own, which is reached by ssh at that host."""

    ssh: _Ssh = ""  # how ssh reaches it; "local" is this machine itself, without ssh; default: the machine's name
    folder: _Folder = "~/.disagg"  # where releases, settings, secrets and logs are kept
    service: _Service = "auto"  # what starts the nodes and keeps them running; "auto" is the best that is there
    python: _Words = ""  # the Python to use; default: the newest of 3.11 or later that is found
    extras: _Extras | None = None  # extras of our package to install; default: those of the engines of its nodes
    pip_args: _Arguments = ()  # further options of pip, such as an index or a folder of wheels
    constraints: _Switch = True  # whether packages get the versions of this machine, from where it is deployed
    environment: _Variables = {}  # environment variables of its services; no secrets
    secrets: _Secrets = {}  # secret ones, also of commands that fetch models: "${NAME}" here, or a file here
    identity: _Words = ""  # folder here with its key and certificate; default: `keys issue` of the machine's name


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where a machine has a server's model from. Without any: it is there already, under the model's name."""

    path: _Words = ""  # folder or GGUF file on the machine; with `rsync` and `command`: where they put it
    hf: _Words = ""  # Hugging Face repository to download, such as Qwen/Qwen3-Coder-30B-A3B-Instruct
    ollama: _Words = ""  # model that `ollama pull` fetches, such as qwen3-coder:30b
    rsync: _Words = ""  # MACHINE:PATH to copy it from; the machine must reach that one by ssh
    command: _Words = ""  # shell command that fetches it; it runs only while `path` is missing

    @property
    def ways(self) -> tuple[str, ...]:
        return tuple(name for name in ("hf", "ollama", "rsync", "command") if getattr(self, name))


class GatewayService(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway that `disagg cluster` runs beside the nodes."""

    machine: _Words = ""  # the machine that it runs on; without one, none is deployed
    host: _Listen = "127.0.0.1"  # the address that it listens on
    port: _GatewayPort = 8080  # the port that it listens on
    keys: _Words = ""  # file here with API keys (`disagg gateway key`), which is copied to the machine
    arguments: _Arguments = ()  # further options of `disagg gateway`
