"""`disagg doctor`: findings as text, the worst of each machine first, or as JSON."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.text import Text

from disaggregated_inference.cli.screen import one_line, stdout_console
from disaggregated_inference.cli.serve import spinner
from disaggregated_inference.cluster import ClusterConfig, find_config, load_config
from disaggregated_inference.doctor import (
    DoctorReport,
    ExpectedMachine,
    Finding,
    examine_machine,
    plan_of_this_machine,
    read_plan,
)
from disaggregated_inference.errors import ConfigError

_COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red", "unknown": "magenta"}
_WORDS = {"unknown": "not checked"}
_WIDTH = max(len(_WORDS.get(severity, severity)) for severity in _COLOURS)


class DoctorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `disagg doctor`."""

    cluster: bool = False
    config: str | None = None
    token_file: str = ""
    machines: tuple[str, ...] = ()
    seconds: float = 3.0
    expected: bool = False  # standard input has what should run here


def run(settings: DoctorSettings, as_json: bool) -> int:
    """The exit code."""
    with _waiting("examining the machines, then the paths between them" if settings.cluster else "examining"):
        report = _examine(settings)
    if as_json:
        print(json.dumps(_as_data(report), indent=None if settings.expected else 2))
    else:
        _show(report)
    return report.exit_code


@contextmanager
def _waiting(words: str) -> Iterator[None]:
    """Engines and transfers take seconds. On a terminal, a line says so meanwhile."""
    console = Console(stderr=True)
    progress = spinner(console)
    progress.disable = not console.is_terminal
    with progress:
        progress.add_task(words, total=None)
        yield


def _examine(settings: DoctorSettings) -> DoctorReport:
    if settings.cluster:
        from disaggregated_inference.doctor.cluster import examine_cluster

        config = load_config(settings.config, token_file=settings.token_file)
        return examine_cluster(config, settings.machines, settings.seconds)
    if settings.machines:
        raise ConfigError("--machine names machines of a cluster: add --cluster")
    return examine_machine(read_plan(sys.stdin.read()) if settings.expected else _expected_here(settings))


def _expected_here(settings: DoctorSettings) -> ExpectedMachine:
    """Without a cluster file there is nothing to compare with. A file that was asked for must be readable."""
    config = _find_config(settings)
    return plan_of_this_machine(config) if config else ExpectedMachine()


def _find_config(settings: DoctorSettings) -> ClusterConfig | None:
    if settings.config is None and find_config() is None:
        return None
    return load_config(settings.config, token_file=settings.token_file)


def _as_data(report: DoctorReport) -> dict[str, object]:
    counts = {severity: report.count(severity) for severity in _COLOURS}  # type: ignore[arg-type]
    findings = [msgspec.to_builtins(finding) for finding in report.findings]
    return {"exit_code": report.exit_code, "counts": counts, "findings": findings, "facts": report.facts}


def _show(report: DoctorReport) -> None:
    console, machine = stdout_console(), None
    said: set[str] = set()
    for finding in report.findings:
        if finding.machine != machine:
            machine = finding.machine
            console.print(Text(machine or "this machine", "bold"))
        for line in _lines(finding, said):
            console.print(line, soft_wrap=True)
    console.print(_summary(report), soft_wrap=True)


def _lines(finding: Finding, said: set[str]) -> Iterator[Text]:
    """`said`: reasons and remedies above; each is printed once."""
    severity = _WORDS.get(finding.severity, finding.severity)
    line = Text("  ") + Text(severity.ljust(_WIDTH), _COLOURS[finding.severity])
    yield line + Text(f"  {finding.check}: ", "dim") + Text(one_line(finding.what))
    indent = " " * (_WIDTH + 4)
    for name, words, style in (("why: ", finding.why, "dim"), ("mend:", finding.mend, "")):
        if words and words not in said:
            said.add(words)
            yield Text(f"{indent}{name} {one_line(words)}", style)


def _summary(report: DoctorReport) -> Text:
    words = [
        f"{count} {_plural(name, count)}"
        for severity, name in (("error", "error"), ("warning", "warning"), ("note", "note"))
        if (count := report.count(severity))  # type: ignore[arg-type]
    ]
    left = report.count("unknown")
    words += [f"{left} could not be checked"] if left else []
    fine = f"{report.count('ok')} of {len(report.findings)} findings are ok"
    colour = "red" if report.count("error") else "yellow" if report.count("warning") else "green"
    return Text("; ".join([fine, *words]), f"bold {colour}")


def _plural(name: str, count: int) -> str:
    return name if count == 1 else f"{name}s"
