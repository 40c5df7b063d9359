"""All checks of one machine, in their order."""

from collections.abc import Callable, Iterator

from disaggregated_inference import __version__
from disaggregated_inference.doctor import accelerator, credentials, mac, model_checks, nvidia, ports, software, system
from disaggregated_inference.doctor.findings import CannotRead, DoctorReport, Finding, sort_findings, unknown
from disaggregated_inference.doctor.plan import ExpectedMachine

MachineCheck = Callable[[ExpectedMachine], Iterator[Finding]]

# What the doctor could not check has the name beside the check.
MACHINE_CHECKS: tuple[tuple[str, MachineCheck], ...] = (
    ("python-version", software.check_python),
    ("engine-version", software.check_engines),
    ("engine-device", accelerator.check_devices),
    ("gpu-throttled", nvidia.check_gpus),
    ("mac-power", mac.check_mac_power),
    ("model-files", model_checks.check_models),
    ("port", ports.check_ports),
    ("firewall", ports.check_firewall),
    ("clock-synchronized", system.check_clock),
    ("disk", system.check_disk),
    ("leftovers", system.check_leftovers),
    ("secrets", credentials.check_secrets),
    ("certificate", credentials.check_certificate),
    ("cluster-file", credentials.check_cluster_file),
)


def examine_machine(plan: ExpectedMachine) -> DoctorReport:
    findings = [finding for name, check in MACHINE_CHECKS for finding in _attempt(name, check, plan)]
    facts = {"version": __version__, "models": model_checks.describe_planned(plan)}
    return DoctorReport(findings=sort_findings(findings), facts=facts)


def _attempt(name: str, check: MachineCheck, plan: ExpectedMachine) -> Iterator[Finding]:
    """A check that fails is a finding itself: the others go on."""
    try:
        yield from check(plan)
    except CannotRead as error:
        yield unknown(name, str(error))
    except Exception as error:  # systems answer in ways that no check expects
        yield unknown(name, f"{type(error).__name__}: {error}")
