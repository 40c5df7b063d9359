"""Node processes that act as the machines of a cluster, and clients: the orchestrator, or bare HTTP."""

import logging
import random
from typing import Any

import aiohttp
import msgspec

from disaggregated_inference.bench.relay import event_lines
from disaggregated_inference.engines.simulated import MACHINES
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.local_nodes import ClientView, LocalNode
from disaggregated_inference.orchestrator import DisaggregatedInference

_JSON = {"Content-Type": "application/json"}


class Machine(LocalNode):
    """One node of a cluster file; `model` is its name in requests, `power_w` what its machine draws, where known."""

    def __init__(
        self, name: str, model: str, role: str, engine: str, *arguments: str, power_w: float | None = None
    ) -> None:
        self.model, self.power_w = model, power_w
        super().__init__(role, engine, *arguments, name=name)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def entry(self) -> dict[str, Any]:
        entry = {"host": "127.0.0.1", "port": self.port, "name": self.name, "model": self.model, "tls": False}
        entry |= {"role": "both"} if self.role == "both" else {}
        return entry if self.power_w is None else entry | {"power_w": self.power_w}


def simulated(name: str, role: str, shape: str, profile: str, *arguments: str) -> Machine:
    options = ("--model", f"simulated:{shape}", "--profile", profile, *arguments)
    known = MACHINES.get(profile, {}).get(shape)
    return Machine(name, shape, role, "simulated", *options, power_w=known.power_w if known else None)


def orchestrated(*machines: Machine, **policies: Any) -> DisaggregatedInference:
    """Without the log line for every node that is found."""
    logging.getLogger("disaggregated_inference.orchestrator.registry").setLevel(logging.ERROR)
    return DisaggregatedInference(
        {
            "prefill_servers": [machine.entry for machine in machines if machine.role == "prefill"],
            "decode_servers": [machine.entry for machine in machines if machine.role != "prefill"],
            "policies": {"queue": 4096} | policies,
        }
    )


def random_prompt(number: int, length: int) -> list[int]:
    """Different from the first token on, so that no prefix cache helps. All models here have these tokens."""
    return random.Random(number).choices(range(300, 1000), k=length)


def greedy(prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    """A request for exactly `tokens` tokens."""
    return {"tokens": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True} | more


async def follow(core: DisaggregatedInference, view: ClientView, request: dict[str, Any]) -> None:
    """Stream through the orchestrator."""
    async for delta in core.stream(**request):
        if delta.token is not None:
            view.add_token()
        view.completion = delta.completion
    view.end()


class Bare:
    """The same two requests with aiohttp alone: no plan, health checks, queue, deadline or record."""

    def __init__(self, session: aiohttp.ClientSession, prefill: Machine, decode: Machine) -> None:
        self._session, self._prefill, self._decode = session, prefill.url, decode.url

    async def follow(self, view: ClientView, request: dict[str, Any]) -> None:
        prefill = msgspec.json.encode({"tokens": request["tokens"], "wait": False})
        async with self._session.post(self._prefill + "/prefill", data=prefill, headers=_JSON) as response:
            context = msgspec.json.decode(await response.read())["context"]
        decode = msgspec.json.encode(request | {"context": context, "stream": True})
        async with self._session.post(self._decode + "/decode", data=decode, headers=_JSON) as response:
            async for lines in event_lines(response):
                for event in (msgspec.json.decode(line[6:]) for line in lines):
                    if "error" in event:
                        raise DisaggError(event["error"]["message"])
                    if "token" in event:
                        view.add_token()
        view.end()
