"""One machine of a command, looked at."""

from typing import NamedTuple

from disaggregated_inference.cluster.config import ClusterConfig
from disaggregated_inference.cluster.deploy.plan import MachinePlan
from disaggregated_inference.cluster.inventory import Inventory
from disaggregated_inference.cluster.services import Place, ServiceManager


class MachineTarget(NamedTuple):
    plan: MachinePlan
    config: ClusterConfig
    inventory: Inventory
    place: Place
    manager: ServiceManager
