"""`disagg cluster remove`: everything that deploys put on a machine goes. Models stay, unless they are asked for."""

import json
import shlex
from collections.abc import Sequence

import msgspec

from disaggregated_inference.cluster.config import ClusterConfig, Server
from disaggregated_inference.cluster.deploy.lock import machine_lock
from disaggregated_inference.cluster.deploy.plan import MachinePlan, engine_of, expand, model_argument
from disaggregated_inference.cluster.deploy.release import Release
from disaggregated_inference.cluster.deploy.session import MachineOutcome, MachineSession, Tell, on_machines
from disaggregated_inference.cluster.services import MANAGERS, Place
from disaggregated_inference.cluster.shell import path_word
from disaggregated_inference.timeouts import DeployTimeouts

# Names in the folder of a machine that are ours. The folder itself goes only if nothing else is in it.
_OURS = ("current", "previous", "releases", "environments", "secrets", "logs", "run", "audit.jsonl")
_HUB = '"${HF_HUB_CACHE:-${HF_HOME:-$HOME/.cache/huggingface}/hub}"'


async def remove_machines(
    plans: Sequence[MachinePlan],
    config: ClusterConfig,
    tell: Tell,
    models: bool = False,
    timeouts: DeployTimeouts = DeployTimeouts(),
) -> list[MachineOutcome[str]]:
    async def work(session: MachineSession) -> str:
        async with machine_lock(session.shell, session.place.lock, "remove"):
            await _remove_services(session)
            scripts = removal_scripts(session.target.plan, config, session.place, models)
            for script in scripts:
                session.tell("removing its files" if script is scripts[-1] else script)
                await session.shell.check(script, timeout_s=timeouts.command_s, what="removing")
        await session.shell.run(f"rmdir {path_word(session.place.folder)} 2>/dev/null")
        session.tell("removed")
        return "removed"

    return await on_machines(plans, config, work, tell, timeouts)


async def _remove_services(session: MachineSession) -> None:
    """Of all releases that are there: one that broke off may have left a service, too."""
    found = await session.shell.run(f"cat {path_word(session.place.folder)}/releases/*/release.json")
    limit_s = session.shell.timeouts.stop_s + session.shell.timeouts.command_s
    scripts: dict[str, str] = {}
    for release in _releases(found.stdout):
        manager = session.manager(release)
        scripts |= {f"{release.kind} {each.name}": manager.remove(each) for each in release.services}
    for name, script in scripts.items():
        session.tell(f"removing the service {name.split()[1]}")
        await session.shell.check(script, b"", limit_s, f"removing {name}")


def _releases(text: str) -> list[Release]:
    """Documents of JSON, one after the other. What cannot be read is left out."""
    found, decoder = [], json.JSONDecoder()
    while text := text.strip():
        try:
            content, end = decoder.raw_decode(text)
            found.append(msgspec.convert(content, Release))
        except msgspec.ValidationError:
            pass
        except ValueError:
            break
        text = text[end:]
    return [release for release in found if release.kind in MANAGERS]


def removal_scripts(plan: MachinePlan, config: ClusterConfig, place: Place, models: bool) -> list[str]:
    """What a removal runs after the services are gone."""
    fetched = [script for server in plan.servers if (script := _model_script(server, config, place))] if models else []
    return [*fetched, shlex.join(["rm", "-rf", *(f"{place.folder}/{name}" for name in _OURS)])]


def _model_script(server: Server, config: ClusterConfig, place: Place) -> str:
    """Of models that a deploy fetched. One that was there already is the user's."""
    source = server.source
    if source.hf:
        return f"rm -rf {_HUB}/{shlex.quote('models--' + source.hf.replace('/', '--'))}"
    if source.rsync or source.command:
        return shlex.join(["rm", "-rf", expand(source.path, place)])
    if source.ollama or engine_of(server) == "ollama":
        return shlex.join(["ollama", "rm", model_argument(server, config, place)])
    return ""
