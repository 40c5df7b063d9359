"""`disagg cluster`: deploy to machines by ssh, start and stop services there, look at them."""

from disaggregated_inference.cluster.deploy.audit import AuditEntry, merge_audits, read_audit
from disaggregated_inference.cluster.deploy.deployment import Deployed, Deployment, describe_deploy
from disaggregated_inference.cluster.deploy.gateway import ask_gateway, figure_of
from disaggregated_inference.cluster.deploy.install import Package
from disaggregated_inference.cluster.deploy.log_lines import LogLine
from disaggregated_inference.cluster.deploy.log_stream import follow_logs, in_order, merged, read_logs
from disaggregated_inference.cluster.deploy.operations import ServiceChoice, operate
from disaggregated_inference.cluster.deploy.overview import (
    MachineOverview,
    ServiceOverview,
    look_at,
    path_in_use,
)
from disaggregated_inference.cluster.deploy.plan import MachinePlan, kv_port_of, plan_machines
from disaggregated_inference.cluster.deploy.removal import removal_scripts, remove_machines
from disaggregated_inference.cluster.deploy.session import MachineOutcome, MachineSession, Tell, named, on_machines
from disaggregated_inference.cluster.deploy.wheel import Wheel, pack_wheel, pin_dependencies, read_wheel
from disaggregated_inference.cluster.services.gateway_probe import GatewayAnswer

__all__ = [
    "AuditEntry",
    "Deployed",
    "Deployment",
    "GatewayAnswer",
    "LogLine",
    "MachineOutcome",
    "MachineOverview",
    "MachinePlan",
    "MachineSession",
    "Package",
    "ServiceChoice",
    "ServiceOverview",
    "Tell",
    "Wheel",
    "ask_gateway",
    "describe_deploy",
    "figure_of",
    "follow_logs",
    "in_order",
    "kv_port_of",
    "look_at",
    "merge_audits",
    "merged",
    "named",
    "on_machines",
    "operate",
    "pack_wheel",
    "path_in_use",
    "pin_dependencies",
    "plan_machines",
    "read_audit",
    "read_logs",
    "read_wheel",
    "removal_scripts",
    "remove_machines",
]
