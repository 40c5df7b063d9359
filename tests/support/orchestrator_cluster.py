"""Four node processes of one tiny model, and requests to them through a client."""

from typing import Any

from disaggregated_inference.client import DisaggregatedClient
from tests.support.cluster import Process

COMMON = ("--dtype", "float32", "--kv-memory", "256M", "--lease", "10")


class Four:
    """Two prefill nodes and two decode nodes of one model. `mended` restarts the nodes that a test killed."""

    def __init__(self, model: str) -> None:
        self.p1 = Process("p1", "prefill", "torch", model, *COMMON, "--chunk", "77")
        self.p2 = Process("p2", "prefill", "torch", model, *COMMON, "--chunk", "77")
        self.d1 = Process("d1", "decode", "mlx", model, *COMMON)
        self.d2 = Process("d2", "decode", "mlx", model, *COMMON)
        self.all = (self.p1, self.p2, self.d1, self.d2)
        for node in self.all:
            node.ready()

    def mended(self) -> "Four":
        dead = [node for node in self.all if not node.alive]
        for node in dead:
            node.start()
        for node in dead:
            node.ready()
        for node in self.all:
            node.kv_addresses = []
        return self

    def named(self, name: str) -> Process:
        return next(node for node in self.all if node.name == name)


def ask_of(prompt: list[int], count: int, **more: Any) -> dict[str, Any]:
    return {"model": "llama", "tokens": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True} | more


def answered(client: DisaggregatedClient, prompt: list[int], count: int, **more: Any) -> tuple[list[int], Any]:
    _, metrics = client.generate(**ask_of(prompt, count, **more))
    return metrics["tokens"], metrics
