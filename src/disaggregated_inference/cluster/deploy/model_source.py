"""How a machine gets a model, in the way that `source` of its server names."""

import shlex
from functools import partial

from disaggregated_inference.cluster.config import Server
from disaggregated_inference.cluster.deploy.plan import engine_of, model_argument
from disaggregated_inference.cluster.deploy.steps import CommandStep, Step
from disaggregated_inference.cluster.deploy.target import MachineTarget
from disaggregated_inference.cluster.ssh import LOCAL, SshTarget
from disaggregated_inference.errors import MachineMisconfigured
from disaggregated_inference.timeouts import DeployTimeouts

_REFUSED = ("401", "403", "gated", "GatedRepo", "Unauthorized")


def model_step(server: Server, target: MachineTarget, bin: str, timeouts: DeployTimeouts) -> Step:
    """`bin`: the folder of programs of the environment."""
    source, model = server.source, model_argument(server, target.config, target.place)
    inspect = _with_environment(target, f"{bin}/python", "-m", "disaggregated_inference", "models", "inspect", model)
    script, check, remedy = f"{inspect} >/dev/null", f"{inspect} >/dev/null 2>&1", _missing_remedy
    if engine_of(server) == "ollama" or source.ollama:
        script, check = (
            shlex.join(["ollama", "pull", model]),
            f"{shlex.join(['ollama', 'show', model])} >/dev/null 2>&1",
        )
        remedy = partial(_fetch_remedy, target.plan.name, "ollama")
    elif source.hf:
        script = _with_environment(target, f"{bin}/hf", "download", source.hf)
        remedy = partial(_fetch_remedy, target.plan.name, "hf")
    elif source.command:
        script = _with_environment(target, "sh", "-c", source.command)
        check, remedy = f"test -e {shlex.quote(model)}", _no_remedy
    elif source.rsync:
        script, check = _rsync_scripts(source.rsync, model, target)
        remedy = partial(_fetch_remedy, target.plan.name, "rsync")
    return CommandStep(f"model {model}", script, check, timeouts.model_s, remedy)


def _with_environment(target: MachineTarget, *command: str) -> str:
    variables = [f"{name}={value}" for name, value in target.plan.machine.environment.items()]
    script = shlex.join(["env", *variables, *command])
    if not target.plan.machine.secrets:
        return script
    return f"set -a; . {shlex.quote(target.place.secret_environment)}; set +a; {script}"


def _rsync_scripts(source: str, goal: str, target: MachineTarget) -> tuple[str, str]:
    """To copy it, and to find that nothing is left to copy. A folder, or one GGUF file."""
    machine, _, path = source.partition(":")
    address = target.config.machines[machine].ssh or machine
    if address == LOCAL:
        raise MachineMisconfigured(
            target.plan.name, f"it cannot copy from {machine}, whose `ssh` is local: give an address"
        )
    at = SshTarget.parse(address)
    host, ssh = str(at._replace(port=0)), f"ssh -p {at.port}" if at.port else "ssh"
    is_file = goal.endswith(".gguf")
    ends = [f"{host}:{path}", goal] if is_file else [f"{host}:{path.rstrip('/')}/", f"{goal.rstrip('/')}/"]
    folder = goal.rpartition("/")[0] if is_file else goal
    copy = f"mkdir -p {shlex.quote(folder)} && {shlex.join(['rsync', '-a', '--partial', '-e', ssh, *ends])}"
    compare = shlex.join(["rsync", "-ani", "-e", ssh, *ends])
    return copy, f'test -e {shlex.quote(goal)} && left=$({compare}) && test -z "$left"'


def _missing_remedy(stderr: str) -> str:
    return "put the model there, or say in the server's `source` where it comes from"


def _no_remedy(stderr: str) -> str:
    return ""


def _fetch_remedy(machine: str, program: str, stderr: str) -> str:
    if "not found" in stderr and program != "hf":
        return f"install {program} there, or choose another `source`"
    if program == "hf" and any(word in stderr for word in _REFUSED):
        return f'give a token that may read it: secrets = {{ HF_TOKEN = "${{HF_TOKEN}}" }} of [machines.{machine}]'
    if program == "rsync" and ("Permission denied" in stderr or "Host key" in stderr):
        return f"{machine} itself must reach the other machine by ssh, without a password"
    return ""
