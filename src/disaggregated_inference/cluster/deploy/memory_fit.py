"""Whether the models of a machine fit its memory: weights, and the KV cache of one full context."""

import shlex
from typing import Any

import msgspec

from disaggregated_inference.cluster.config import ClusterConfig, Server
from disaggregated_inference.cluster.deploy.plan import MachinePlan, engine_of, model_argument
from disaggregated_inference.cluster.deploy.steps import Step
from disaggregated_inference.cluster.inventory import Inventory
from disaggregated_inference.cluster.services import Place
from disaggregated_inference.cluster.shell import Shell
from disaggregated_inference.errors import DeployRefused

_SHARE = 0.95  # of the memory: the system and the engine's own buffers need some
_NOT_MEASURED = ("simulated", "ollama", "vllm")


class FitStep(Step):
    """Changes nothing: it only refuses what cannot work."""

    def __init__(
        self, plan: MachinePlan, config: ClusterConfig, inventory: Inventory, place: Place, python: str
    ) -> None:
        super().__init__("memory")
        self._plan, self._config, self._inventory, self._place, self._python = plan, config, inventory, place, python
        self._servers = [server for server in plan.servers if engine_of(server) not in _NOT_MEASURED]

    def describe(self) -> list[str]:
        return [f"{self._script(server)}   # fits the memory?" for server in self._servers]

    def _script(self, server: Server) -> str:
        variables = [f"{name}={value}" for name, value in self._plan.machine.environment.items()]
        model = model_argument(server, self._config, self._place)
        context = self._config.options_of(server.model).context_window
        options = ["--json", *(["--context", str(context)] if context else [])]
        module = [self._python, "-m", "disaggregated_inference", "models", "inspect"]
        return shlex.join(["env", *variables, *module, model, *options])

    async def is_done(self, shell: Shell) -> bool:
        needed: dict[str, int] = {}
        for server in self._servers:
            done = await shell.run(self._script(server))
            facts = _decoded(done.stdout) if done.ok else {}
            needed[f"{server.model} ({server.role})"] = int(facts.get("memory_bytes", 0))
        self._require(needed)
        return True

    def _require(self, needed: dict[str, int]) -> None:
        total, has = sum(needed.values()), self._inventory.model_memory_bytes
        if has and total > has * _SHARE:
            models = " and ".join(f"{name} {size / 1e9:.1f} GB" for name, size in needed.items())
            raise DeployRefused(
                self._plan.name,
                f"weights and KV cache need {total / 1e9:.1f} GB ({models}), and the machine has"
                f" {has / 1e9:.1f} GB: take a smaller quantization, lower `context_window`, or move a server",
            )

    async def do(self, shell: Shell) -> None:
        """Nothing to do."""


def _decoded(text: str) -> dict[str, Any]:
    try:
        return dict(msgspec.json.decode(text))
    except (msgspec.DecodeError, TypeError):
        return {}
