"""Plans of a deploy to one machine."""

from typing import Any

from disaggregated_inference.cluster import load_config
from disaggregated_inference.cluster.deploy import MachinePlan, plan_machines
from disaggregated_inference.cluster.services import Place

PLACE = Place("/home/ada", "/home/ada/.disagg", "ada", 1000)
SPARK = {"host": "192.168.100.1", "model": "qwen3-coder:30b", "name": "Spark 1", "machine": "spark"}


def cluster(server: dict[str, Any] | None = None, machine: dict[str, Any] | None = None, **more: Any) -> Any:
    content = {"decode_servers": [SPARK | (server or {})], "machines": {"spark": machine or {}}}
    return load_config(content | more, environ={})


def only_plan(config: Any) -> MachinePlan:
    (plan,) = plan_machines(config)
    return plan
