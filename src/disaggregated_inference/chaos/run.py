"""A chaos run: clients ask, faults happen, every answer is compared; then everything must be free again."""

import asyncio
import gc
import math
import random
import secrets
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from disaggregated_inference.api import QueueStatus
from disaggregated_inference.chaos.answers import ChaosAnswer, difference, partial_difference
from disaggregated_inference.chaos.clients import ChaosClients, Leaves, wait_for
from disaggregated_inference.chaos.cluster import ChaosCluster, chaos_cluster
from disaggregated_inference.chaos.faults import FaultMaker
from disaggregated_inference.chaos.footprint import Footprint, footprint_of
from disaggregated_inference.chaos.gate import Gate
from disaggregated_inference.chaos.outcomes import FailingCase, RequestOutcomes
from disaggregated_inference.chaos.report import ChaosReport, GrowthSample, Show
from disaggregated_inference.chaos.settings import ChaosSettings
from disaggregated_inference.chaos.workload import ChaosRequest, catalogue
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.orchestrator import DisaggregatedInference

_LEAVING = 0.12  # of the clients go in the middle of an answer
_SAMPLES = 10
_LOG_BYTES = 8000  # an error of eight requests at once, with its trace


def run_chaos(settings: ChaosSettings, show: Show) -> ChaosReport:
    with chaos_cluster(settings) as cluster:
        return asyncio.run(ChaosRun(settings, cluster, show).run())


class ChaosRun:
    def __init__(self, settings: ChaosSettings, cluster: ChaosCluster, show: Show) -> None:
        self._settings, self._cluster, self._show = settings, cluster, show
        self._timeouts = settings.timeouts
        self._outcomes, self._gate, self._over = RequestOutcomes(), Gate(settings.timeouts.idle_s), asyncio.Event()
        self._requests = catalogue(settings.seed, cluster.model, short=not settings.faults)
        self._expected: list[ChaosAnswer] = []
        self._begun = 0
        self._name = f"chaos-{settings.seed}-{secrets.token_hex(3)}"
        self._samples: list[GrowthSample] = []
        self._began_at = time.monotonic()

    async def run(self) -> ChaosReport:
        core = DisaggregatedInference(self._without_history())
        self._clients = ChaosClients(core, self._cluster.gateway.url, self._timeouts.request_s)
        with suppress(NotImplementedError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupt)
        try:
            async with core:
                return await self._run()
        finally:
            await self._clients.close()

    def _without_history(self) -> dict[str, Any]:
        """The gateway writes it: two writers would only wait for each other."""
        policies = {name: value for name, value in self._cluster.config["policies"].items() if name != "history_file"}
        return self._cluster.config | {"policies": policies}

    def _interrupt(self) -> None:
        """The first Ctrl-C ends the run early, the second one at once."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        self._over.set()

    async def _run(self) -> ChaosReport:
        self._faults = FaultMaker(self._cluster.nodes, self._cluster.gateway, self._clients, self._gate, self._settings)
        await self._wait_for_nodes()
        await self._ask_undisturbed()
        begin, self._began_at = await self._footprints(), time.monotonic()
        await self._disturb()
        left = await self._wait_until_free()
        return self._report(begin, await self._footprints(), left)

    async def _wait_for_nodes(self) -> None:
        async def all_are_used() -> bool:
            return len(await self._faults.usable()) == len(self._cluster.nodes)

        if not await wait_for(all_are_used, self._timeouts.ready_s):
            raise DisaggError("not all nodes are usable: see `disagg status`")

    async def _ask_undisturbed(self) -> None:
        """One at a time. An error here is one of the request or the cluster, and ends the run."""
        for number, request in enumerate(self._requests):
            self._show(f"undisturbed answers: {number} of {len(self._requests)}")
            answer = ChaosAnswer()
            await self._clients.ask(request, f"{self._name}-undisturbed-{number}", answer, lambda _: False)
            self._expected.append(answer)

    async def _disturb(self) -> None:
        tasks = [asyncio.create_task(self._client(number)) for number in range(self._settings.at_once)]
        watching = [asyncio.create_task(work) for work in (self._watch_clock(), self._watch_growth())]
        try:
            if self._settings.faults:
                await self._faults.run(self._over)
            await asyncio.gather(*tasks)
            if not self._over.is_set():
                await watching[1]  # the last sample
        finally:
            self._over.set()
            for task in (*tasks, *watching):
                task.cancel()
            await asyncio.gather(*tasks, *watching, return_exceptions=True)

    async def _watch_clock(self) -> None:
        while not self._over.is_set():
            await asyncio.sleep(self._timeouts.show_s)
            self._show(self._progress())
            if not self._settings.requests and self._passed_s() > self._settings.minutes * 60:
                self._over.set()
        while True:
            await asyncio.sleep(self._timeouts.show_s)
            self._show(f"{self._progress()}; ending")

    def _progress(self) -> str:
        seen = self._outcomes
        counts = f"{seen.right} right ({seen.over_failure} over a failure), {seen.cancelled} cancelled"
        faults = f"; now: {', '.join(self._faults.running)}" if self._faults.running else ""
        return f"{self._passed_s():.0f} s: {counts}, {seen.failed} failed, {seen.wrong} WRONG{faults}"

    def _passed_s(self) -> float:
        return time.monotonic() - self._began_at

    async def _client(self, number: int) -> None:
        draw = random.Random(self._settings.seed * 1000 + number)
        while not self._is_enough():
            async with self._gate.passed():
                self._begun += 1
                await self._one(f"{self._name}-{self._begun}", draw)

    def _is_enough(self) -> bool:
        return self._over.is_set() or (0 < self._settings.requests <= self._begun)

    async def _one(self, request_id: str, draw: random.Random) -> None:
        which, leaving = draw.randrange(len(self._requests)), draw.random() < _LEAVING
        request, expected, answer = self._requests[which], self._expected[which], ChaosAnswer()
        started, failure = time.monotonic(), ""
        leaves = _leaves_at(draw.random() * sum(len(choice.text) for choice in expected.choices) if leaving else None)
        asked = self._clients.ask(request, request_id, answer, leaves)
        try:
            await asyncio.wait_for(
                asked, draw.random() * self._timeouts.leave_s if leaving and not request.stream else None
            )
        except TimeoutError:
            pass
        except Exception as error:  # whatever a client gets is an outcome
            failure = error.code if isinstance(error, DisaggError) else type(error).__name__
            self._outcomes.has_failed(failure, self._case(request, request_id, started, f"{failure}: {error}", answer))
        self._outcomes.took(time.monotonic() - started, request_id)
        if not failure:
            self._compare(request, request_id, started, expected, answer, leaving)

    def _compare(
        self,
        request: ChaosRequest,
        request_id: str,
        started: float,
        expected: ChaosAnswer,
        answer: ChaosAnswer,
        leaving: bool,
    ) -> None:
        wrong = partial_difference(expected, answer) if leaving else difference(expected, answer)
        if wrong:
            self._outcomes.was_wrong(self._case(request, request_id, started, wrong, answer))
        elif leaving:
            self._outcomes.cancelled += 1
        else:
            self._outcomes.was_right(answer.failovers)

    def _case(
        self, request: ChaosRequest, request_id: str, started: float, what: str, answer: ChaosAnswer
    ) -> FailingCase:
        return FailingCase(
            request_id=request_id,
            request=request.name,
            at_s=round(started - self._began_at, 2),
            seconds=round(time.monotonic() - started, 2),
            what=what,
            failovers=answer.failovers,
            gateway_log=self._cluster.gateway.last_words(_LOG_BYTES),
        )

    async def _watch_growth(self) -> None:
        """Ten times in a run with a number of requests, while none runs: open requests are no growth."""
        every = self._settings.requests // _SAMPLES
        while every and len(self._samples) < _SAMPLES:
            due = every * (len(self._samples) + 1)
            await wait_for(partial(self._has_ended, due), math.inf, self._timeouts.poll_s)
            async with self._gate.closed():
                await asyncio.sleep(self._timeouts.poll_s)
                processes = await self._footprints()
                self._samples.append(GrowthSample(requests=self._outcomes.total, processes=processes))

    async def _has_ended(self, requests: int) -> bool:
        return self._outcomes.total >= requests

    async def _footprints(self) -> dict[str, Footprint]:
        metrics = {node.name: await asyncio.to_thread(node.metrics) for node in self._cluster.nodes if node.process}
        metrics["gateway"] = await self._clients.gateway_metrics()
        gc.collect()  # of the library, as the gateway does once a minute
        processes = self._cluster.processes()
        return {name: footprint_of(pid, metrics.get(name, "")) for name, pid in processes.items()}

    async def _wait_until_free(self) -> list[str]:
        """What is left on a node: requests, tickets, reserved KV memory."""
        left: list[str] = []

        async def is_free() -> bool:
            self._show(f"waiting until all memory is free: {', '.join(left) or 'looking'}")
            left[:] = [text for node in self._cluster.nodes for text in await asyncio.to_thread(node.left)]
            left.extend(_queued((await self._clients.core.cluster_status()).queue))
            return not left

        await wait_for(is_free, self._timeouts.free_s)
        return left

    def _report(self, begin: dict[str, Footprint], end: dict[str, Footprint], left: list[str]) -> ChaosReport:
        return ChaosReport.make(
            settings=self._settings,
            seconds=round(self._passed_s(), 1),
            outcomes=self._outcomes,
            faults=self._faults.faults,
            left=[*left, *self._faults.problems],
            begin=begin,
            end=end,
            starts={node.name: node.starts for node in self._cluster.nodes},
            samples=self._samples,
            logs=self._cluster.last_words(),
        )


def _leaves_at(characters: float | None) -> Leaves:
    if characters is None:
        return lambda answer: False
    return lambda answer: sum(len(choice.text) for choice in answer.choices) >= characters


def _queued(queues: Mapping[str, QueueStatus]) -> list[str]:
    return [f"{model}: requests in the queue" for model, queue in queues.items() if queue.waiting or queue.running]
