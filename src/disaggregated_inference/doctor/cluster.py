"""`disagg doctor --cluster`: every machine by ssh, then what concerns several machines."""

import asyncio
import shlex
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from disaggregated_inference import __version__
from disaggregated_inference.cluster import ClusterConfig, Server
from disaggregated_inference.cluster.deploy import (
    GatewayAnswer,
    MachinePlan,
    ask_gateway,
    figure_of,
    named,
    plan_machines,
)
from disaggregated_inference.cluster.shell import Shell, path_word
from disaggregated_inference.cluster.ssh import open_shell
from disaggregated_inference.doctor.comparisons import compare_pairs, judge_clock_skew
from disaggregated_inference.doctor.findings import DoctorReport, Finding, found, ok, sort_findings, unknown
from disaggregated_inference.doctor.node_status import judge_local_network, judge_node, read_status
from disaggregated_inference.doctor.paths import MeasuredPath, PathMachine, judge_pair, measure_path, not_measured
from disaggregated_inference.doctor.plan import ExpectedMachine, planned
from disaggregated_inference.errors import DisaggError, MachineError
from disaggregated_inference.struct_types import build_struct_types
from disaggregated_inference.timeouts import DoctorTimeouts

BETWEEN = "between machines"
_NOW = "python3 -c 'import time; print(time.time())' 2>/dev/null || date +%s"
_ABSENT = 66  # exit code of the script: nothing is deployed


def examine_cluster(config: ClusterConfig, only: Sequence[str] = (), seconds: float = 3.0) -> DoctorReport:
    return asyncio.run(_Examination(config, only, seconds).run())


class _Examination:
    def __init__(
        self, config: ClusterConfig, only: Sequence[str], seconds: float, timeouts: DoctorTimeouts = DoctorTimeouts()
    ) -> None:
        self._config, self._seconds, self._timeouts = config, seconds, timeouts
        self._plans = plan_machines(config, only)
        self._shells: dict[str, Shell] = {}
        self._models: dict[str, Any] = {}  # by server, as their machines describe them
        self._findings: list[Finding] = []

    async def run(self) -> DoctorReport:
        async with self._connected():
            await asyncio.gather(*(self._machine(plan) for plan in self._plans))
            await self._nodes()
            await self._gateway()
            self._say(BETWEEN, compare_pairs(self._pairs(), self._models))
            await self._paths()
        self._say("this machine", self._cluster_file())
        return DoctorReport(findings=sort_findings(self._findings, [plan.name for plan in self._plans]))

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[None]:
        try:
            await asyncio.gather(*(self._connect(plan) for plan in self._plans))
            yield
        finally:
            await asyncio.gather(*(shell.close() for shell in self._shells.values()), return_exceptions=True)

    async def _connect(self, plan: MachinePlan) -> None:
        try:
            self._shells[plan.name] = await open_shell(plan.name, plan.target)
        except Exception as error:
            what = named(error, plan.name).reason
            self._say(plan.name, [found("error", "ssh", what, f"ssh {plan.target}")])
        else:
            self._say(plan.name, [ok("ssh", f"{plan.target} is reached")])

    def _say(self, machine: str, findings: Iterable[Finding]) -> None:
        self._findings += [msgspec.structs.replace(finding, machine=machine) for finding in findings]

    async def _machine(self, plan: MachinePlan) -> None:
        """The clock, and the machine's own doctor. One machine that fails does not stop the others."""
        if not (shell := self._shells.get(plan.name)):
            return
        try:
            self._say(plan.name, [await _clock(shell)])
            self._say(plan.name, await self._own_doctor(plan, shell))
        except Exception as error:
            self._say(plan.name, [unknown("ssh", str(named(error, plan.name)))])

    async def _own_doctor(self, plan: MachinePlan, shell: Shell) -> Iterable[Finding]:
        python = path_word(f"{plan.machine.folder}/current/venv/bin/python")
        variables = "".join(f"{name}={shlex.quote(value)} " for name, value in plan.machine.environment.items())
        command = f"{python} -m disaggregated_inference doctor --json --expected"
        script = f"[ -x {python} ] || exit {_ABSENT}; exec env {variables}{command}"  # as its services run
        done = await shell.run(script, self._expected(plan).encoded(), self._timeouts.machine_s)
        if done.exit_code == _ABSENT:
            return [found("warning", "deployed", f"nothing is deployed in {plan.machine.folder}")]
        try:
            report = msgspec.json.decode(done.stdout, type=DoctorReport)
        except msgspec.DecodeError:
            return [unknown("deployed", f"its doctor failed: {done.last_words}")]
        self._models |= report.facts.get("models", {})
        return [_judge_version(str(report.facts.get("version", ""))), *report.findings]

    def _expected(self, plan: MachinePlan) -> ExpectedMachine:
        secrets = f"{plan.machine.folder}/secrets"
        has_identity = any(server.tls for server in plan.servers)
        return ExpectedMachine(
            machine=plan.name,
            servers=tuple(planned(self._config, server) for server in plan.servers),
            gateway_port=self._config.gateway.port if plan.has_gateway else 0,
            identity=f"{secrets}/identity" if has_identity else "",
            secrets=secrets,
        )

    async def _nodes(self) -> None:
        build_struct_types()
        statuses = await asyncio.gather(
            *(asyncio.to_thread(read_status, self._config, server) for server in self._servers())
        )
        for server, status in zip(self._servers(), statuses, strict=True):
            machine = self._machine_of(server)
            self._say(machine, [judge_node(server, status), *judge_local_network(server, status)])

    async def _gateway(self) -> None:
        """A prompt for each model through it."""
        machine = self._config.gateway.machine
        if machine not in self._shells:
            return
        try:
            answers = await ask_gateway(self._config, self._config.names)
        except DisaggError as error:
            self._say(machine, [unknown("gateway", error.reason if isinstance(error, MachineError) else str(error))])
            return
        self._say(machine, [_judge_answer(answer) for answer in answers])

    def _servers(self) -> list[Server]:
        return [server for plan in self._plans for server in plan.servers]

    def _machine_of(self, server: Server) -> str:
        return next(plan.name for plan in self._plans if server in plan.servers)

    async def _paths(self) -> None:
        """One after the other: two measurements at once would share a link."""
        for prefill, decode in self._pairs():
            if self._machine_of(prefill) == self._machine_of(decode):
                continue
            places = planned(self._config, prefill).kv_hosts
            paths = [await self._measure(prefill, decode, host, port) for host, port in places]
            self._say(BETWEEN, [path for path in paths if isinstance(path, Finding)])
            measured = [path for path in paths if isinstance(path, MeasuredPath)]
            self._say(BETWEEN, judge_pair(measured, self._link_gbps(prefill, decode)))

    def _link_gbps(self, prefill: Server, decode: Server) -> float | None:
        ends = (prefill.name, decode.name)
        return next((link.gbps for link in self._config.links if (link.prefill, link.decode) == ends), None)

    def _pairs(self) -> Iterator[tuple[Server, Server]]:
        """Prefill and decode nodes of one model."""
        resolve = self._config.resolve_model
        for prefill in self._servers():
            for decode in self._servers():
                roles = "prefill" in prefill.roles and "decode" in decode.roles and prefill is not decode
                if roles and resolve(prefill.model) == resolve(decode.model):
                    yield prefill, decode

    async def _measure(self, prefill: Server, decode: Server, host: str, port: int) -> MeasuredPath | Finding:
        path = MeasuredPath(prefill=prefill.name, decode=decode.name, address=host)
        ends = [self._path_machine(self._machine_of(server)) for server in (prefill, decode)]
        if not ends[0] or not ends[1]:
            return not_measured(path, "one of the machines cannot be reached by ssh")
        try:
            return await measure_path(ends[0], ends[1], path, port, self._seconds)
        except Exception as error:
            return not_measured(path, str(named(error, prefill.name)))

    def _path_machine(self, name: str) -> PathMachine | None:
        plan = next(plan for plan in self._plans if plan.name == name)
        shell = self._shells.get(name)
        return PathMachine(shell, plan.machine.folder) if shell else None

    def _cluster_file(self) -> Iterator[Finding]:
        for warning in self._config.warnings:
            yield found("warning", "cluster-file", warning)
        if not self._config.warnings:
            yield ok("cluster-file", f"{self._config.source or 'the configuration'} has no faults")


def _judge_answer(answer: GatewayAnswer) -> Finding:
    try:
        figure = figure_of(answer)
    except DisaggError as error:
        return found("error", "gateway", f"{answer.model}: {error}")
    return unknown("gateway", figure) if answer.needs_key else ok("gateway", f"{answer.model}: {figure}")


async def _clock(shell: Shell) -> Finding:
    """Half of the time that the answer took is the uncertainty."""
    before = time.time()
    told = float((await shell.check(_NOW, what="reading the clock")).strip())
    after = time.time()
    return judge_clock_skew(told - (before + after) / 2, (after - before) / 2)


def _judge_version(version: str) -> Finding:
    if version == __version__:
        return ok("deployed", f"version {version}, as here")
    return found("warning", "deployed", f"version {version} is deployed; here is {__version__}")
