"""`disagg up`: a prefill node, a decode node and the gateway as processes of this machine, until Ctrl-C."""

import json
import re
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console

from disaggregated_inference.cli.local_cluster import LocalServer, cluster_file, short_name
from disaggregated_inference.cli.serve import spinner
from disaggregated_inference.cluster import without_token
from disaggregated_inference.defaults import DECODE_PORT, KV_PORT, PREFILL_PORT
from disaggregated_inference.engines import file_kind, require_engine
from disaggregated_inference.engines.simulated import Profile, line_gbps, parse_profile
from disaggregated_inference.errors import BadRequest, DisaggError, EngineUnavailable
from disaggregated_inference.http import is_free, require_free_port
from disaggregated_inference.local_nodes import (
    LocalNode,
    Process,
    as_ready,
    disagg,
    generate_disaggregated,
    stopping,
)
from disaggregated_inference.models import ModelFiles, ModelStore
from disaggregated_inference.progress import steps
from disaggregated_inference.timeouts import CommandTimeouts

_EMBEDDED, _SIMULATED = "smollm2", "simulated:qwen3-30b-a3b"
_ENGINES = {"prefill": ("torch", "mlx", "llamacpp", "vllm"), "decode": ("mlx", "torch", "llamacpp")}  # best first
_DRAIN = ("--drain", "2")  # seconds for running requests: a person waits
_PROFILE = re.compile(r"\s*custom:[^,]*,[^,]*|[^,]+")  # a custom one has a comma of its own
_PROMPT = "Why is the sky blue?"


class UpSettings(msgspec.Struct, frozen=True):
    """The options of `disagg up`. Empty: a default."""

    model: str = ""
    prefill_engine: str = ""
    decode_engine: str = ""
    simulated: str = ""
    port: int = 8080


def run(settings: UpSettings) -> None:
    """Until Ctrl-C, SIGTERM or the end of the terminal. Raises if one of the processes ends by itself."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    require_free_port("127.0.0.1", settings.port)
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    plan = _Plan.make(settings)
    console.print(plan.title)
    usual = settings.port > 0  # of two that start at once, each may see the other's ports free
    prefill, decode = plan.start("prefill", usual * PREFILL_PORT), plan.start("decode", usual * DECODE_PORT)
    with stopping([decode, prefill]):
        _show_start(console, [prefill, decode])
        _check_peer(console, plan.model, prefill, decode)
        with cluster_file(plan.server(prefill), plan.server(decode), plan.gbps) as path:
            _serve(console, plan, [prefill, decode], path, settings.port)
    console.print("stopped: the gateway, the decode node and the prefill node")


def _serve(console: Console, plan: "_Plan", nodes: list[LocalNode], path: Path, port: int) -> None:
    command = disagg("gateway", "--config", str(path), "--port", str(port), *_DRAIN)
    gateway = Process("the gateway", command, environ=without_token())
    with stopping([gateway]):
        _show_start(console, [gateway])
        console.print(_how_to(plan, gateway.url, path))
        try:
            _watch([*nodes, gateway])
        except KeyboardInterrupt:  # the usual end
            console.print("\nstopping")


class _Plan(msgspec.Struct, frozen=True):
    """What runs where."""

    model: ModelFiles
    engines: dict[str, str]  # by role
    profiles: dict[str, str]  # of simulated machines, by role

    @classmethod
    def make(cls, settings: UpSettings) -> "_Plan":
        engines = {"prefill": settings.prefill_engine, "decode": settings.decode_engine}
        if settings.simulated:
            return cls._simulated(settings)
        for role, name in engines.items():
            if name and name not in _ENGINES[role]:
                choices = ", ".join(_ENGINES[role])
                raise BadRequest(f"--{role}-engine {name}: choose {choices}; to compute nothing, --simulated")
        engines = {role: name or _installed(role) for role, name in engines.items()}
        with steps() as progress:  # both nodes then find the files
            for name in engines.values():
                _require(name)
                model = ModelStore().resolve(settings.model or _EMBEDDED, progress, file_kind(name))
        if model.simulated:
            raise BadRequest(f"{model.name} has no weights: add --simulated dgx-spark,m3-ultra")
        return cls(model, engines, {})

    @classmethod
    def _simulated(cls, settings: UpSettings) -> "_Plan":
        if settings.prefill_engine or settings.decode_engine:
            raise BadRequest("--simulated has an engine of its own: leave out --prefill-engine and --decode-engine")
        names = [name.strip() for name in _PROFILE.findall(settings.simulated)]
        if len(names) != 2:
            raise BadRequest(f"--simulated {settings.simulated}: give two machines, such as dgx-spark,m3-ultra")
        model = ModelStore().resolve(settings.model or _SIMULATED)
        if not model.simulated:
            raise BadRequest(f"--simulated computes nothing and cannot serve {model.name}: leave out --model")
        for name in names:
            parse_profile(name, model.name.partition(":")[2])
        return cls(model, dict.fromkeys(_ENGINES, "simulated"), dict(zip(_ENGINES, names, strict=True)))

    @property
    def title(self) -> str:
        if self.profiles:
            machines = f"{self.profiles['prefill']} prefills and {self.profiles['decode']} decodes {self.model.name}"
            made_up = any(name == "instant" or name.startswith("custom:") for name in self.profiles.values())
            return f"SIMULATED, no inference: {machines}{'' if made_up else ', at published speeds'}"
        return (
            f"{self.model.name} on this machine: {self.engines['prefill']} prefills, {self.engines['decode']} decodes"
        )

    def start(self, role: str, port: int) -> LocalNode:
        """On its usual ports, or where those are taken on free ones. Port 0: on free ones."""
        options = ["--model", self.model.name, "--port", str(port if port and is_free(port) else 0), *_DRAIN]
        options += ["--kv-port", str(KV_PORT)] if port and role == "prefill" and is_free(KV_PORT) else []
        options += ["--profile", self.profiles[role]] if self.profiles else []
        return LocalNode(role, self.engines[role], *options)

    def server(self, node: LocalNode) -> LocalServer:
        name = f"{node.role}-{self.profiles[node.role]}" if self.profiles else node.role
        entry = LocalServer(name, int(node.url.rpartition(":")[2]), self.model.name, node.engine)
        if not self.profiles:
            return entry
        machine = self._machine(node.role)
        return msgspec.structs.replace(entry, power_w=machine.power_w, idle_power_w=machine.idle_power_w)

    @property
    def gbps(self) -> float | None:
        """The line rate between the simulated machines. Their bytes really go through this machine's memory."""
        return line_gbps(self._machine("prefill"), self._machine("decode")) if self.profiles else None

    def _machine(self, role: str) -> Profile:
        return parse_profile(self.profiles[role], self.model.name.partition(":")[2])


def _require(engine: str) -> None:
    """vLLM has an environment of its own."""
    if engine != "vllm":
        return require_engine(engine)
    from disaggregated_inference.vllm_node import find_python, probe

    probe(find_python(""))


def _installed(role: str) -> str:
    for name in _ENGINES[role]:
        try:
            require_engine(name)
        except EngineUnavailable:
            continue
        return name
    raise EngineUnavailable(
        "no engine is installed: pip install 'disaggregated-inference[torch,mlx]', or look at the cluster without"
        " one: disagg up --simulated dgx-spark,m3-ultra"
    )


def _show_start(console: Console, processes: list[Process]) -> None:
    began_at, progress = time.monotonic(), spinner(console)
    progress.disable = not console.is_terminal
    tasks = {process: progress.add_task(_starting(process), total=None) for process in processes}
    with progress:
        for process in as_ready(processes):
            progress.remove_task(tasks[process])
            engine = f", {process.engine}" if isinstance(process, LocalNode) else ""
            console.print(f"{process.name}: {process.url}{engine}, ready after {time.monotonic() - began_at:.1f} s")


def _starting(process: Process) -> str:
    return f"{process.name}: {process.engine} loads the model" if isinstance(process, LocalNode) else process.name


def _check_peer(console: Console, model: ModelFiles, prefill: LocalNode, decode: LocalNode) -> None:
    """The first hand-off takes longer, since the decode node checks the prefill node: not while a user waits."""
    with _working(console, "the decode node checks the prefill node"):
        try:
            generate_disaggregated(prefill, decode, model.tokenizer.encode(_PROMPT)[:1], 1)
        except DisaggError as error:
            console.print(f"warning: the decode node will read all prompts itself: {error}")


@contextmanager
def _working(console: Console, text: str) -> Iterator[None]:
    progress = spinner(console)
    progress.disable = not console.is_terminal
    with progress:
        progress.add_task(text, total=None)
        yield


def _watch(processes: list[Process], timeouts: CommandTimeouts = CommandTimeouts()) -> None:
    while True:
        for process in processes:
            process.require_alive()
        time.sleep(timeouts.watch_s)


def _how_to(plan: _Plan, url: str, path: Path) -> str:
    body = {
        "model": short_name(plan.model.name),
        "max_tokens": 60,
        "messages": [{"role": "user", "content": _PROMPT}],
    }
    simulated = "\nSIMULATED: the answers are numbers in brackets\n" if plan.profiles else ""
    return f"""
ready: {url}/v1 (OpenAI), {url} (Anthropic, Ollama)
dashboard: {url}/dashboard
{simulated}
curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}

in another terminal:
  export DISAGG_CONFIG={shlex.quote(str(path))}
  disagg status
  disagg chat

Ctrl-C stops all"""
