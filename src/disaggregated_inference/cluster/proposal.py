"""`disagg cluster init`: which machine does what, by what the machines have; and the cluster file that says so.

The NVIDIA machines prefill and the Macs decode. A model goes to the machines with the most memory left that hold its
weights and the KV cache of its context.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from disaggregated_inference.cluster.inventory import Inventory
from disaggregated_inference.cluster.ssh import LOCAL, SshTarget
from disaggregated_inference.defaults import PORTS
from disaggregated_inference.errors import ConfigError

_SHARE = 0.9  # of a machine's memory for models
_GB = 1e9
_VIRTUAL = ("docker", "br-", "veth", "virbr", "tailscale", "utun")  # links that carry no KV


class Checkpoint(NamedTuple):
    repository: str
    weights_gb: float
    engine: str


class KnownModel(NamedTuple):
    """Checkpoints by accelerator, the best first. Both ends of a pair must be able to share a cache."""

    name: str
    kv_token_bytes: int
    context_window: int
    checkpoints: Mapping[str, Sequence[Checkpoint]]


_QWEN = "Qwen3-Coder-30B-A3B-Instruct"
_GPT_OSS = Checkpoint("ggml-org/gpt-oss-120b-GGUF", 63, "llamacpp")  # torch expands it to 234 GB
_SMOLLM2 = Checkpoint("", 0.6, "torch")  # comes with the package
KNOWN_MODELS = {
    "qwen3-coder:30b": KnownModel(
        "qwen3-coder:30b",
        98_304,
        32_768,
        {
            "cuda": (Checkpoint(f"Qwen/{_QWEN}", 61, "torch"), Checkpoint(f"Qwen/{_QWEN}-FP8", 31, "torch")),
            "metal": (
                Checkpoint(f"mlx-community/{_QWEN}-8bit", 32, "mlx"),
                Checkpoint(f"mlx-community/{_QWEN}-4bit", 17, "mlx"),
            ),
        },
    ),
    "gpt-oss:120b": KnownModel("gpt-oss:120b", 36_864, 8_192, {"cuda": (_GPT_OSS,), "metal": (_GPT_OSS,)}),
    "smollm2:135m": KnownModel(
        "smollm2:135m",
        23_040,
        8_192,
        {
            "cuda": (_SMOLLM2,),
            "metal": (Checkpoint("", 0.6, "mlx"),),
            "cpu": (_SMOLLM2,),
        },
    ),
}


class ProposedNode(NamedTuple):
    machine: str
    role: str
    model: KnownModel
    checkpoint: Checkpoint
    port: int

    @property
    def needed_gb(self) -> float:
        return self.checkpoint.weights_gb + self.model.kv_token_bytes * self.model.context_window / _GB


def propose(machines: Mapping[str, Inventory], models: Sequence[str]) -> list[ProposedNode]:
    """A prefill and a decode node for each model; on a machine that is alone, one node for both."""
    require_known(models)
    wanted = [KNOWN_MODELS[name] for name in models]
    left_gb = {name: found.model_memory_bytes * _SHARE / _GB for name, found in machines.items()}
    chosen: list[ProposedNode] = []
    for model in sorted(wanted, key=_size, reverse=True):
        for role in _roles(machines):
            taken = {each.machine for each in chosen if each.model is model}
            found = _best(role, model, machines, left_gb, chosen, taken)
            chosen.append(found)
            left_gb[found.machine] -= found.needed_gb
    return chosen


def require_known(models: Sequence[str]) -> None:
    for name in models:
        if name not in KNOWN_MODELS:
            remedy = "write its servers into the file by hand, with a `source`"
            raise ConfigError(f"no sizes are known for {name}: choose of {', '.join(KNOWN_MODELS)}, or {remedy}")


def _size(model: KnownModel) -> float:
    return max(each.weights_gb for group in model.checkpoints.values() for each in group)


def _roles(machines: Mapping[str, Inventory]) -> tuple[str, ...]:
    return ("both",) if len(machines) == 1 else ("prefill", "decode")


def _best(
    role: str,
    model: KnownModel,
    machines: Mapping[str, Inventory],
    left_gb: Mapping[str, float],
    chosen: Sequence[ProposedNode],
    taken: set[str],
) -> ProposedNode:
    """The right kind of machine first, then one without a node, then the one with the most memory left."""
    right = {"prefill": "cuda", "decode": "metal"}.get(role, "")
    used = [each.machine for each in chosen]

    order = list(machines)

    def rank(name: str) -> tuple[bool, int, float, int]:
        """Of equal machines the last: large models choose first, and small ones are listed first by habit."""
        return machines[name].accelerator != right, used.count(name), -left_gb[name], -order.index(name)

    for name in sorted((each for each in machines if each not in taken), key=rank):
        port = PORTS[role] + 10 * used.count(name)
        for checkpoint in model.checkpoints.get(machines[name].accelerator, ()):
            found = ProposedNode(name, role, model, checkpoint, port)
            if found.needed_gb <= left_gb[name]:
                return found
    memories = ", ".join(f"{name}: {left_gb[name]:.0f} GB left" for name in machines)
    node = "one node for prefill and decode" if role == "both" else f"a {role} node"
    raise ConfigError(f"{model.name} fits no machine as {node} ({memories}): choose other models with --model")


def cluster_toml(
    machines: Mapping[str, Inventory],
    targets: Mapping[str, str],
    chosen: Sequence[ProposedNode],
    identity: str,
    trusted_link: str,
) -> str:
    """The file, with comments. `targets`: how ssh reaches each machine."""
    parts = [_head(identity, trusted_link)]
    parts += [_machine(name, found, targets[name]) for name, found in machines.items()]
    parts += [_server(each, machines[each.machine], targets[each.machine]) for each in chosen]
    for model in dict.fromkeys(each.model.name for each in chosen):
        window = KNOWN_MODELS[model].context_window
        parts.append(
            f"[models.{_quoted(model)}]\n"
            f"context_window = {window} # prompt and completion together; more needs more memory for the KV cache\n"
        )
    gateway = next(each.machine for each in chosen if each.role != "prefill")
    parts.append(
        '# The gateway: the APIs of OpenAI, Anthropic and Ollama. For users on other machines: host = "0.0.0.0", and\n'
        "# keys of `disagg gateway key NAME --file keys.json`.\n"
        f'[gateway]\nmachine = {_quoted(gateway)}\nhost = "127.0.0.1"\nport = 8080\n# keys = "keys.json"\n'
    )
    return "\n".join(parts)


def _head(identity: str, trusted_link: str) -> str:
    lines = [
        "# Made by `disagg cluster init`. Every field: `disagg config reference`. Next: `disagg cluster deploy`.\n"
    ]
    if identity:
        lines.append("# The certificate by which the nodes know this machine; everything between machines is TLS.")
        lines.append(f"identity = {_quoted(identity)}\n")
    if trusted_link:
        lines.append("# Nodes speak without TLS, because you say that nothing else is on the network between them:")
        lines.append(f"trusted_link = {_quoted(trusted_link)}")
        lines.append('token = "${DISAGG_TOKEN}" # export DISAGG_TOKEN=$(openssl rand -hex 32)\n')
    return "\n".join(lines)


def _machine(name: str, found: Inventory, target: str) -> str:
    gpus = ", ".join(dict.fromkeys(gpu.name for gpu in found.gpus))
    about = ", ".join(part for part in (found.chip, gpus, found.release) if part)
    sizes = f"{found.memory_bytes / _GB:.0f} GB memory, {found.free_disk_bytes / _GB:.0f} GB disk free"
    python = "" if found.python or found.uv else "\n# Python 3.11 or newer is missing: install it first."
    return f"# {about}: {sizes}{python}\n[machines.{_quoted(name)}]\nssh = {_quoted(target)}\n"


def _server(each: ProposedNode, found: Inventory, target: str) -> str:
    kind = "prefill" if each.role == "prefill" else "decode"
    host = _host(found, target)
    there = " (already there)" if each.checkpoint.repository in found.models else ""
    lines = [
        f"# {each.needed_gb:.0f} GB: {each.checkpoint.weights_gb:g} of weights{there}, the rest for the KV cache",
        f"[[{kind}_servers]]",
        f"name = {_quoted(f'{each.machine}-{short_name(each.model.name)}')}",
        f"machine = {_quoted(each.machine)}",
        f"host = {_quoted(host)}",
        f"port = {each.port}",
        f"model = {_quoted(each.model.name)}",
        f"engine = {_quoted(each.checkpoint.engine)}",
    ]
    lines += ['role = "both"'] if each.role == "both" else []
    lines += [f"source = {{ hf = {_quoted(each.checkpoint.repository)} }}"] if each.checkpoint.repository else []
    others = [link for link in _addresses(found) if link != host]
    if others and each.role == "prefill":
        text = ", ".join(_quoted(address) for address in (*others, host))
        when = "fastest first, if the decode machine reaches them"
        lines.append(f"# kv_addresses = [{text}] # other links for the KV cache, {when}")
    return "\n".join(lines) + "\n"


def _host(found: Inventory, target: str) -> str:
    """Where the other machines reach it."""
    if target == LOCAL:
        return next(iter(_addresses(found)), "127.0.0.1")
    return found.address or SshTarget.parse(target).host


def short_name(model: str) -> str:
    return re.split(r"[:\-]", model)[0] if not model.startswith("gpt-oss") else "gpt-oss"


def _addresses(found: Inventory) -> list[str]:
    """Of real links, the fastest first."""

    def speed(line: str) -> int:
        numbers = [int(number) for number in re.findall(r"(\d+) Mb/s", line)]
        return numbers[0] if numbers else 0

    real = [line for line in found.links if not line.startswith(_VIRTUAL)]
    return [line.split()[1] for line in sorted(real, key=speed, reverse=True)]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
