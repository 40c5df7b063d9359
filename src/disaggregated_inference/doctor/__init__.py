"""`disagg doctor`: what is wrong with this machine or this cluster, why it matters, and the command that mends it."""

from disaggregated_inference.doctor.checks import CHECKS
from disaggregated_inference.doctor.findings import DoctorReport, Finding
from disaggregated_inference.doctor.machine import examine_machine
from disaggregated_inference.doctor.plan import ExpectedMachine, plan_of_this_machine, read_plan
from disaggregated_inference.doctor.reference import reference

__all__ = [
    "CHECKS",
    "DoctorReport",
    "ExpectedMachine",
    "Finding",
    "examine_machine",
    "plan_of_this_machine",
    "read_plan",
    "reference",
]
