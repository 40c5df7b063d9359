"""Node processes that stand for machines of a cluster, and a client's view of them: orchestrated, or bare."""

import logging
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
import msgspec

from disaggregated_inference.cluster.local_nodes import LocalNode
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.orchestrator import DisaggregatedInference

_PLAIN: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
_JSON = {"Content-Type": "application/json"}


class Machine(NamedTuple):
    """One node of a cluster file; `model` is what requests call it there."""

    name: str
    model: str
    node: LocalNode

    @property
    def entry(self) -> dict[str, Any]:
        port = int(self.node.url.rpartition(":")[2])
        entry = {"host": "127.0.0.1", "port": port, "name": self.name, "model": self.model}
        return entry | ({"role": "both"} if self.node.role == "both" else {})


def simulated(name: str, role: str, shape: str, profile: str, *arguments: str) -> Machine:
    options = ("--model", f"simulated:{shape}", "--profile", profile, *arguments)
    return Machine(name, shape, LocalNode(role, "simulated", *options))


@contextmanager
def running(machines: Sequence[Machine]) -> Iterator[None]:
    try:
        for machine in machines:
            machine.node.ready()
        yield
    finally:
        for machine in machines:
            machine.node.stop()


def orchestrated(*machines: Machine, **policies: Any) -> DisaggregatedInference:
    """That a node was found is news to an operator, not in a benchmark."""
    logging.getLogger("disaggregated_inference.orchestrator.registry").setLevel(logging.ERROR)
    return DisaggregatedInference(
        {
            "prefill_servers": [machine.entry for machine in machines if machine.node.role == "prefill"],
            "decode_servers": [machine.entry for machine in machines if machine.node.role != "prefill"],
            "policies": {"queue": 4096} | policies,
        }
    )


def prompt_of(number: int, length: int) -> list[int]:
    """No two begin alike, so that no prefix is found again. Tokens that every model here has."""
    return random.Random(number).choices(range(300, 1000), k=length)


def plain(prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    """A request that is answered with so many tokens."""
    return {"tokens": prompt, "max_tokens": tokens} | _PLAIN | more


@dataclass(slots=True)
class ClientView:
    """One answer as its client sees it, while it comes."""

    started: float = field(default_factory=time.perf_counter)
    first_token_s: float = 0.0
    total_s: float = 0.0
    tokens: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)

    def took(self) -> None:
        self.first_token_s = self.first_token_s or time.perf_counter() - self.started
        self.tokens += 1

    def ended(self) -> None:
        self.total_s = time.perf_counter() - self.started


async def follow(core: DisaggregatedInference, seen: ClientView, asked: dict[str, Any]) -> None:
    """Through the orchestrator."""
    async for delta in core.stream(**asked):
        if delta.token is not None:
            seen.took()
        seen.metrics = delta.metrics or {}
    seen.ended()


class Bare:
    """The same two requests by aiohttp alone: no plan, no health, no queue, no deadline, no record."""

    def __init__(self, session: aiohttp.ClientSession, prefill: Machine, decode: Machine) -> None:
        self._session, self._prefill, self._decode = session, prefill.node.url, decode.node.url

    async def follow(self, seen: ClientView, asked: dict[str, Any]) -> None:
        reading = msgspec.json.encode({"tokens": asked["tokens"], "wait": False})
        async with self._session.post(self._prefill + "/prefill", data=reading, headers=_JSON) as response:
            context = msgspec.json.decode(await response.read())["context"]
        writing = msgspec.json.encode(asked | {"context": context, "stream": True})
        async with self._session.post(self._decode + "/decode", data=writing, headers=_JSON) as response:
            rest = b""
            while data := await response.content.readany():
                *lines, rest = (rest + data).split(b"\n\n")
                for line in lines:
                    if line.startswith(b"data: "):
                        _take(seen, msgspec.json.decode(line[6:]))
        seen.ended()


def _take(seen: ClientView, event: dict[str, Any]) -> None:
    if "error" in event:
        raise DisaggError(event["error"]["message"])
    if "token" in event:
        seen.took()
