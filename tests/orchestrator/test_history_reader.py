"""The history is read by time, model, node and caller, and SQLite aggregates it as Python would."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disaggregated_inference.orchestrator import (
    History,
    HistoryFilter,
    HistoryReader,
    energy_sums,
    series,
)
from disaggregated_inference.orchestrator.history_record import HistoryRecord
from disaggregated_inference.orchestrator.history_series import MAX_POINTS, step_of
from disaggregated_inference.timeouts import HistoryTimeouts
from tests.support.waiting import until


def record(time: float, **more: Any) -> dict[str, Any]:
    usual = {"model": "qwen", "ok": True, "outcome": "ok", "total_time": 2.0, "first_token_time": 0.5, "n": 1}
    usual |= {"decode_speed": 20.0, "prompt_tokens": 100, "completion_tokens": 10, "cached_tokens": 25}
    usual |= {"prefill_node": "p1", "decode_node": "d1", "kind": "disaggregated", "request_id": f"r{time:g}"}
    return usual | {"time": time} | more


RECORDS = [
    record(100.0, caller="alice"),
    record(130.0, first_token_time=1.5, caller="bob", prompt_tokens_recomputed=10, kv_bytes=1000),
    record(170.0, kind="local", prefill_node="d1", model="gpt"),
    record(171.0, kind="fallback", total_time=9.0),
    record(172.0, ok=False, outcome="failed", error={"code": "no_decode_node"}, kind=None, first_token_time=0.0),
]


@pytest.fixture(params=["file", "memory"])
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HistoryReader]:
    history = History(50, str(tmp_path / "h.sqlite") if request.param == "file" else "")
    for each in RECORDS:
        history.add(each, each.get("caller", ""))

    def complete() -> bool:
        with history.reader() as found:
            return bool(found.kept()["requests"] == len(RECORDS))

    assert until(complete)
    with history.reader() as found:
        yield found
    history.close()


def test_requests_by_time_model_node_caller_and_outcome(reader: HistoryReader) -> None:
    def times(limit: int = 10, **wanted: Any) -> list[float]:
        return [each["time"] for each in reader.records(HistoryFilter(**wanted), limit)]

    assert times() == [172, 171, 170, 130, 100]
    assert times(2) == [172, 171]
    assert times(since=130, until=171) == [170, 130]
    assert times(model="gpt") == [170]
    assert times(node="p1") == [172, 171, 130, 100]
    assert times(caller="alice") == [100]
    assert times(outcome="failed") == [172]
    assert times(model="'; DROP TABLE requests; --") == []
    assert {"requests": 5, "oldest": 100}.items() <= reader.kept().items()


def test_one_request(reader: HistoryReader) -> None:
    found = reader.record("r130")
    assert found
    assert found["first_token_time"] == 1.5
    assert reader.record("r130", "bob") == found
    assert reader.record("r130", "alice") is None
    assert reader.record("nothing") is None


def test_figures_over_time(reader: HistoryReader) -> None:
    found = series(reader, HistoryFilter(since=95, until=185), 60)
    assert (found.step_s, found.times) == (60, [60, 120, 180])
    got = found.series
    assert got["requests"] == [1, 4, 0]
    assert got["failed"] == [0, 1, 0]
    assert got["ttft_p50"] == [0.5, 0.5, None], "a request without a token has no time to its first"
    assert got["ttft_p99"][1] == pytest.approx(np.percentile([1.5, 0.5, 0.5], 99))
    assert got["e2e_p95"][1] == pytest.approx(np.percentile([2, 2, 9], 95)), "of answered requests"
    assert got["tpot_p50"] == [0.05, 0.05, None]
    assert got["disaggregated"] == [1, pytest.approx(1 / 3), None]
    assert got["local"] == got["fallback"] == [0, pytest.approx(1 / 3), None]
    assert got["errors"] == [0, 0.25, None]
    assert got["prefix_hit_rate"] == [0.25, 0.25, None]
    assert got["completion_tokens_per_s"] == [10 / 60, 40 / 60, None], "5 of 60 s make no rate"
    assert got["recomputed_tokens"] == [0, 10, 0]
    assert got["energy_j"] == [None, None, None], "no meter, no watts: nothing is invented"
    one = series(reader, HistoryFilter(since=95, until=185, model="gpt"), 60)
    assert one.series["requests"] == [0, 1, 0]


def test_a_rate_of_the_last_interval_is_that_of_its_part(reader: HistoryReader) -> None:
    """Otherwise every chart would end with a drop."""
    found = series(reader, HistoryFilter(since=95, until=150), 60)
    assert found.times == [60, 120]
    assert found.series["requests_per_s"] == [1 / 60, 1 / 30], "one request in the 30 s of it"
    assert found.series["completion_tokens_per_s"] == [10 / 60, 10 / 30]
    assert found.series["requests"] == [1, 1], "a count"


def test_before_the_oldest_request_nothing_is_known(reader: HistoryReader) -> None:
    """A history keeps so many requests: no line of zeros for those that it has forgotten."""
    oldest = reader.kept()["oldest"]
    found = series(reader, HistoryFilter(since=0, until=185), 10)
    for name in ("requests", "requests_per_s", "recomputed_tokens"):
        known = [value is not None for value in found.series[name]]
        assert known == [start + 10 > oldest for start in found.times]


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=40))
def test_percentiles_as_numpy_has_them(values: list[float]) -> None:
    with HistoryReader.of_records(
        [HistoryRecord({"time": 1.0, "first_token_time": value}) for value in values]
    ) as reader:
        found = reader.percentiles(HistoryFilter(), "first_token_time", (0.5, 0.95, 0.99))
    assert found[0] == pytest.approx(np.percentile(values, (50, 95, 99)), rel=1e-9)


@given(st.floats(1, 400 * 86400), st.none() | st.floats(0.1, 1e6))
def test_intervals_are_bounded(range_s: float, wish_s: float | None) -> None:
    step_s = step_of(range_s, wish_s)
    assert range_s / step_s <= MAX_POINTS
    assert wish_s is None or step_s >= min(wish_s, 86400)


def test_energy_by_model_caller_and_day() -> None:
    def used(time: float, joules: float | None, measured: float = 0.0, **more: Any) -> dict[str, Any]:
        shares = [{"node": "d1", "phase": "decode", "joules": measured, "source": "measured"}]
        return record(time, energy_j=joules, energy=shares, cost=joules and joules / 1e6, **more)

    day = 86400.0
    records = [
        used(1.0, 3600.0, 600.0, caller="alice"),
        used(2.0, 3600.0, model="gpt"),
        used(day + 1, None),
        used(day + 2, 1800.0, 1800.0, ok=False, outcome="failed"),
    ]
    with HistoryReader.of_records(map(HistoryRecord, records)) as reader:
        sums = energy_sums(reader, HistoryFilter())
        total = sums.total
        assert (total.requests, total.answered, total.with_energy) == (4, 3, 3)
        assert (total.energy_j, total.measured_j, total.configured_j) == (9000, 2400, 6600)
        assert total.requests_per_kwh == pytest.approx(2 * 3.6e6 / 9000), "a failed request costs, and is no answer"
        assert total.joules_per_token == 300
        assert total.cost == pytest.approx(0.009)
        assert {name: each.energy_j for name, each in sums.models.items()} == {"gpt": 3600, "qwen": 5400}
        assert sums.callers["alice"].energy_j == 3600
        assert [*sums.days] == ["1970-01-01", "1970-01-02"]
        none = energy_sums(reader, HistoryFilter(since=1e9)).total
        assert (none.requests, none.energy_j, none.requests_per_kwh) == (0, None, None)


def test_retention_by_rows_and_days(tmp_path: Path) -> None:
    file, now = tmp_path / "h.sqlite", 2e9  # beyond today: `days` counts back from the clock
    history = History(10, str(file), rows=5)
    for n in range(20):
        history.add(record(now + n))
    history.close()
    with HistoryReader.of_file(file) as reader:
        assert [each["time"] - now for each in reader.records(HistoryFilter(), 99)] == [19, 18, 17, 16, 15]
    history = History(10, str(file), rows=5, days=7)
    history.add(record(1000.0))
    history.add(record(now))
    history.close()
    with HistoryReader.of_file(file) as reader:
        assert 1000.0 not in [each["time"] for each in reader.records(HistoryFilter(), 99)]


def test_a_file_of_an_earlier_version_gets_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    with closing(sqlite3.connect(file)) as database, database:
        columns = "id INTEGER PRIMARY KEY, time REAL, model TEXT, ok INTEGER, total_time REAL, json TEXT"
        database.execute(f"CREATE TABLE requests ({columns})")
        rows = [(each["time"], each["model"], each["ok"], each["total_time"], json.dumps(each)) for each in RECORDS]
        rows.append((1.0, "broken", 1, 1.0, "{"))
        database.executemany("INSERT INTO requests (time, model, ok, total_time, json) VALUES (?, ?, ?, ?, ?)", rows)
    history = History(50, str(file))

    def answered() -> Any:
        with history.reader() as reader:
            return series(reader, HistoryFilter(since=95, until=185), 60).series["ttft_p50"]

    assert until(lambda: answered() == [0.5, 0.5, None])
    history.close()


def test_a_missing_file_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(sqlite3.OperationalError):
        HistoryReader.of_file(tmp_path / "none.sqlite")
    assert not (tmp_path / "none.sqlite").exists()


def test_reading_is_bounded_in_time(tmp_path: Path) -> None:
    history = History(3000, str(tmp_path / "h.sqlite"))
    for n in range(3000):
        history.add(record(float(n)))
    history.close()
    with (
        HistoryReader.of_file(tmp_path / "h.sqlite", HistoryTimeouts(read_s=0.0)) as reader,
        pytest.raises(sqlite3.OperationalError, match="interrupted"),
    ):
        series(reader, HistoryFilter(since=0, until=3000), 1)
