"""What macOS says about power, heat and sleep."""

import platform
import re
from collections.abc import Iterator

from disaggregated_inference.doctor.commands import output_of
from disaggregated_inference.doctor.findings import Finding, found, ok
from disaggregated_inference.doctor.plan import ExpectedMachine


def check_mac_power(plan: ExpectedMachine) -> Iterator[Finding]:
    if platform.system() == "Darwin":
        yield from judge_power(output_of("pmset", "-g"), output_of("pmset", "-g", "therm"))


def judge_power(settings: str, heat: str) -> Iterator[Finding]:
    """From `pmset -g` and `pmset -g therm`."""
    faults = []
    if _setting(settings, "lowpowermode") == "1" or _setting(settings, "powermode") == "1":
        faults.append("low power mode is on")
    if _setting(settings, "sleep") not in (None, "0"):
        faults.append(f"the Mac sleeps after {_setting(settings, 'sleep')} minutes")
    limit = re.search(r"CPU_Speed_Limit\s*=\s*(\d+)", heat)
    if limit and int(limit[1]) < 100:
        faults.append(f"heat limits the processor to {limit[1]} %")
    for fault in faults:
        yield found("warning", "mac-power", fault)
    if not faults:
        yield ok("mac-power", "no low power mode, no sleep, no heat limit")


def _setting(text: str, name: str) -> str | None:
    match = re.search(rf"^\s*{name}\s+(\d+)", text, re.MULTILINE)
    return match[1] if match else None
