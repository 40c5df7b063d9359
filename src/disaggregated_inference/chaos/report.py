"""The result of a chaos run: one table for people, the same as data for programs."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from disaggregated_inference.chaos.faults import ChaosFault
from disaggregated_inference.chaos.footprint import Footprint
from disaggregated_inference.chaos.outcomes import FailingCase, RequestOutcomes
from disaggregated_inference.chaos.settings import ChaosSettings

Show = Callable[[str], None]  # one line of progress

_WARM, _FULL = 0.2, 5000  # of the requests, and at least so many: caches fill; what grows later is a leak
_LAST = 3  # samples
_MOST_GROWTH = {  # more than this is one
    "resident_bytes": 12 << 20,
    "python_blocks": 30_000,
    "malloc_bytes": 4 << 20,
    "threads": 6,
    "descriptors": 12,
}


class GrowthSample(msgspec.Struct, frozen=True, kw_only=True):
    requests: int
    processes: dict[str, Footprint]


class ChaosReport(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    seconds: float
    at_once: int
    requests: int
    right: int
    over_failure: int
    cancelled: int
    failed: int
    wrong: int
    codes: dict[str, int]  # of failed requests
    failovers: dict[str, int]  # by node and code
    slowest_s: float
    slowest: str
    faults: list[ChaosFault]
    left: list[str]  # memory, tickets or requests that did not end; nodes that did not come back
    begin: dict[str, Footprint]
    end: dict[str, Footprint]
    starts: dict[str, int]
    samples: list[GrowthSample]
    outages_allowed: bool
    cases: list[FailingCase]
    logs: dict[str, str]

    @classmethod
    def make(cls, settings: ChaosSettings, outcomes: RequestOutcomes, **found: Any) -> "ChaosReport":
        names = ("right", "over_failure", "cancelled", "failed", "wrong", "slowest", "cases")
        return cls(
            seed=settings.seed,
            at_once=settings.at_once,
            outages_allowed=settings.everything,
            requests=outcomes.total,
            codes=dict(outcomes.codes),
            failovers=dict(outcomes.failovers.most_common()),
            slowest_s=round(outcomes.slowest_s, 2),
            **{name: getattr(outcomes, name) for name in names},
            **found,
        )

    @property
    def passed(self) -> bool:
        failed = self.failed and not self.outages_allowed
        return not (self.wrong or failed or self.left or self.grown) and self.right > 0

    @property
    def grown(self) -> list[str]:
        """What a process holds more of at the end than after the warm-up; unknown for a run that is too short."""
        begin = max(_WARM * self.requests, _FULL)
        warm = [sample.processes for sample in self.samples if sample.requests >= begin]
        return [f"{name}: {text}" for name in (warm[0] if warm else ()) for text in _growth([at[name] for at in warm])]

    def as_data(self) -> dict[str, Any]:
        hidden = ("logs",)
        data = {name: value for name, value in msgspec.to_builtins(self).items() if name not in hidden}
        return data | {"passed": self.passed, "grown": self.grown}

    def save(self, path: Path) -> None:
        content = self.as_data() | {"logs": self.logs, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        path.write_text(json.dumps(content, indent=2) + "\n")

    def show(self, console: Console) -> None:
        title = f"{self.requests:,} requests in {self.seconds:.0f} s, {self.at_once} at once, seed {self.seed}"
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column()
        for section in (self._requests(), self._faults(), self._processes()):
            for row in section:
                table.add_row(*row)
            table.add_section()
        console.print(table)
        if self.samples:
            console.print(_growth_table(self.samples))
            console.print(_in_use_table(self.samples))
        for line in self._verdict():
            console.print(line)

    def _requests(self) -> Iterator[tuple[str, str, str]]:
        yield "right", f"{self.right:,}", f"{self.over_failure:,} of them over a failure"
        yield "cancelled by the client", f"{self.cancelled:,}", "what had come was right"
        yield "failed", f"{self.failed:,}", _counted(self.codes)
        yield "WRONG", f"{self.wrong:,}", ""
        yield "slowest", f"{self.slowest_s:.1f} s", self.slowest
        yield "failovers", f"{sum(self.failovers.values()):,}", _counted(self.failovers)

    def _faults(self) -> Iterator[tuple[str, str, str]]:
        kinds: dict[str, Counter[str]] = {}
        for fault in self.faults:
            if fault.struck:
                kinds.setdefault(fault.kind, Counter())[fault.where] += 1
        for kind, places in sorted(kinds.items()):
            yield kind, f"{sum(places.values()):,}", _counted(places)
        if missed := sum(not fault.struck for fault in self.faults):
            yield "faults that hit nothing", f"{missed:,}", ""

    def _processes(self) -> Iterator[tuple[str, str, str]]:
        for name, last in self.end.items():
            again = f", started {count} times" if (count := self.starts.get(name, 1)) > 1 else ""
            yield (
                name,
                _megabytes(last),
                f"{_described(self.begin.get(name))} at the begin, {_described(last)} now{again}",
            )
        yield "left behind", f"{len(self.left):,}", "; ".join(self.left) or "no request, ticket or reserved memory"

    def _verdict(self) -> Iterator[str]:
        yield from (f"grown: {text}" for text in self.grown)
        for case in self.cases[:5]:
            yield f"{case.request_id} ({case.request}) at {case.at_s} s: {case.what[:300]}"
        if self.failed and self.outages_allowed:
            yield "failed requests are allowed with --everything"
        yield "passed" if self.passed else "FAILED"


def _growth(found: list[Footprint]) -> Iterator[str]:
    """From the first sample in which a node has served at all. The least of the last samples counts: what is grown
    stays, and garbage waits up to a minute to be collected."""
    first, *later = [each for each in found if each.requests != 0] or [Footprint()]
    for name, limit in _MOST_GROWTH.items():
        before, last = getattr(first, name), [getattr(each, name) for each in later[-_LAST:]]
        if before is not None and last and None not in last and (after := min(last)) > before + limit:
            yield f"{name} from {before:,} to {after:,}"


def _growth_table(samples: list[GrowthSample]) -> Table:
    table = Table(title="MB, threads, descriptors", title_justify="left")
    table.add_column("requests", justify="right")
    for name in samples[0].processes:
        table.add_column(name, justify="right")
    for sample in samples:
        table.add_row(f"{sample.requests:,}", *(_figures(each) for each in sample.processes.values()))
    return table


def _in_use_table(samples: list[GrowthSample]) -> Table:
    table = Table(title="In use: Python's blocks, MB by malloc", title_justify="left")
    table.add_column("requests", justify="right")
    names = [name for name, found in samples[0].processes.items() if found.python_blocks]
    for name in names:
        table.add_column(name, justify="right")
    for sample in samples:
        table.add_row(f"{sample.requests:,}", *(_in_use(sample.processes[name]) for name in names))
    return table


def _in_use(found: Footprint) -> str:
    return f"{found.python_blocks or 0:,}, {(found.malloc_bytes or 0) / 1e6:.1f}"


def _figures(found: Footprint) -> str:
    return f"{(found.resident_bytes or 0) / 1e6:.0f}, {found.threads or 0}, {found.descriptors or 0}"


def _megabytes(found: Footprint) -> str:
    return "-" if found.resident_bytes is None else f"{found.resident_bytes / 1e6:.0f} MB"


def _described(found: Footprint | None) -> str:
    if found is None or found.resident_bytes is None:
        return "unknown"
    return f"{_megabytes(found)}, {found.threads} threads, {found.descriptors} descriptors"


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
