"""What became of requests, kept whatever happens to the file."""

import json
import logging
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disaggregated_inference.orchestrator.history import History
from disaggregated_inference.timeouts import HistoryTimeouts
from tests.support.waiting import until


@contextmanager
def opened(
    most: int, file: Path | str = "", max_pending: int = 4096, max_unwritten: int = 1000, **timeouts: float
) -> Iterator[History]:
    limits = {"max_pending": max_pending, "max_unwritten": max_unwritten}
    history = History(most, str(file), HistoryTimeouts(**timeouts), **limits)
    try:
        yield history
    finally:
        history.close()


def rows(file: Path, what: str = "json") -> list[Any]:
    with closing(sqlite3.connect(file)) as database:
        return [row[0] if "," not in what else row for row in database.execute(f"SELECT {what} FROM requests")]


def written_numbers(file: Path) -> list[int]:
    return [json.loads(row)["n"] for row in rows(file)]


def numbers(records: list[dict[str, Any]]) -> list[int]:
    return [record["n"] for record in records]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_newest_first_up_to_the_limit() -> None:
    with opened(3) as history:
        assert (history.recent(5), history.total_time_percentiles()) == ([], {})
        for n in range(5):
            history.add({"n": n, "model": "odd" if n % 2 else "even"})
        assert numbers(history.recent(10)) == [4, 3, 2]
        assert numbers(history.recent(1)) == [4]
        assert numbers(history.recent(10, "even")) == [4, 2]
        assert history.recent(0) == history.recent(-1) == history.recent(5, "none") == []


def test_records_of_another_history_are_taken_over_once(tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    with opened(9, file) as old:
        for n in range(3):
            old.add({"n": n, "request_id": str(n)})
        assert until(lambda: len(rows(file)) == 3)
        with opened(3, file) as history:
            old.add({"n": 3, "request_id": "3"})
            history.adopt(old)
            history.add({"n": 4, "request_id": "4"})
            assert numbers(history.recent(9)) == [4, 3, 2]
    assert sorted(json.loads(row)["n"] for row in rows(file)) == [0, 1, 2, 3, 4]


def test_a_history_of_size_zero_keeps_nothing(tmp_path: Path) -> None:
    with opened(0, tmp_path / "h.sqlite") as history:
        history.add({"n": 1})
        assert history.recent(5) == []
    assert not (tmp_path / "h.sqlite").exists()


def test_records_are_copies() -> None:
    record = {"n": 1}
    with opened(3) as history:
        history.add(record)
        record["n"] = 2
        history.recent(1)[0]["n"] = 3
        assert numbers(history.recent(1)) == [1]
        assert abs(history.recent(1)[0]["time"] - time.time()) < 60


def test_percentiles() -> None:
    with opened(1000) as history:
        for n in range(1, 102):
            history.add({"total_time": float(n), "model": "a"})
        history.add({"total_time": 1000, "model": "b"})
        for odd in (None, "5", True, float("nan"), float("inf"), 10**400, [1]):
            history.add({"total_time": odd, "model": "a"})
        history.add({})
        assert history.total_time_percentiles("a") == {"p50": 51, "p95": 96, "p99": 100}
        assert history.total_time_percentiles("b") == {"p50": 1000, "p95": 1000, "p99": 1000}
        assert history.total_time_percentiles()["p50"] == 51.5
        assert history.total_time_percentiles("none") == {}


@given(st.lists(st.floats(0.001, 1e9), min_size=1, max_size=40))
def test_percentiles_as_numpy_has_them(values: list[float]) -> None:
    history = History(100)
    for value in values:
        history.add({"total_time": value})
    assert list(history.total_time_percentiles().values()) == pytest.approx(
        np.percentile(values, (50, 95, 99)), abs=1e-6
    )


def test_the_file(tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "h.sqlite"
    with opened(10, file) as history:
        history.add({"time": 5.0, "model": "qwen", "ok": False, "total_time": 1.5, "error": "no"})
        history.add({"time": 6, "total_time": "?"})
    assert rows(file, "id, time, model, ok, total_time") == [(1, 5.0, "qwen", 0, 1.5), (2, 6.0, "", 1, None)]
    assert json.loads(rows(file)[0])["error"] == "no"


def test_it_survives_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    for start in (0, 6):
        with opened(4, file) as history:
            assert numbers(history.recent(9)) == [5, 4, 3, 2][: start * 4]
            for n in range(start, start + 6):
                history.add({"n": n, "total_time": float(n)})
    with opened(4, file) as history:
        assert numbers(history.recent(9)) == [11, 10, 9, 8]
        assert history.total_time_percentiles()["p50"] == 9.5
    with opened(100, file) as history:
        assert numbers(history.recent(100)) == list(range(11, -1, -1)), "the file has more than memory had"


def test_the_file_is_bounded_and_drops_the_oldest(tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    with opened(2, file) as history:
        for n in range(530):
            history.add({"n": n})
            if n % 100 == 0:
                assert until(lambda: written_numbers(file)[-1:] == [n])  # noqa: B023
    assert written_numbers(file) == list(range(330, 530))


def test_close_twice_and_add_after(tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    history = History(5, str(file))
    history.add({"n": 1})
    history.close()
    history.close()
    history.add({"n": 2})
    assert numbers(history.recent(5)) == [2, 1]
    assert len(rows(file)) == 1
    assert not any(thread.name == "history" for thread in threading.enumerate())


def _damaged(file: Path) -> None:
    with opened(1000, file) as history:
        for n in range(1000):
            history.add({"n": n, "text": "x" * 200})
    data = bytearray(file.read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    file.write_bytes(data)


def _of_another_program(file: Path) -> None:
    with closing(sqlite3.connect(file)) as database:
        database.execute("CREATE TABLE requests (other TEXT)")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_bytes(b"this is no database" * 1000),
        lambda file: file.mkdir(),
        _damaged,
        _of_another_program,
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Any) -> None:
    file = tmp_path / "h.sqlite"
    spoil(file)
    with opened(5, file) as history:
        history.add({"n": 1})
        assert numbers(history.recent(5)) == [1]
    assert len(warnings(caplog)) == 1
    assert "h.sqlite cannot be used, memory only: " in warnings(caplog)[0]


def test_a_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with opened(5, tmp_path / "file" / "h.sqlite") as history:
        history.add({"n": 1})
        assert numbers(history.recent(5)) == [1]
    assert "memory only" in caplog.text


def test_broken_rows_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    with opened(9, file) as history:
        for n in range(3):
            history.add({"n": n})
    with closing(sqlite3.connect(file)) as database, database:
        for bad in ("{", "[1]", None, b"\xff", "[" * 100_000):
            database.execute("INSERT INTO requests (json) VALUES (?)", (bad,))
    with opened(9, file) as history:
        assert numbers(history.recent(9)) == [2, 1, 0]


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_records_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "h.sqlite"
    circle: dict[str, Any] = {}
    circle["self"] = circle
    odd: list[dict[Any, Any]] = [
        circle,
        {"x": Unprintable()},
        {"model": Unprintable()},
        {("key",): 1},
        {"time": "yesterday"},
        {"time": None},
    ]
    fine: list[dict[str, Any]] = [
        {"model": "\ud800", "ok": "yes", "total_time": 10**400},
        {"model": ["list"], "x": {1, 2}, "path": tmp_path},
        {"total_time": float("nan"), "ok": None, "zero": "\0"},
    ]
    with opened(99, file) as history:
        for record in [*odd, *fine]:
            history.add(record)
        assert len(history.recent(99)) == 9
    assert len(rows(file)) == 3
    assert len([text for text in warnings(caplog) if "a record cannot be written" in text]) == len(odd)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.execute("ROLLBACK")


def test_a_locked_file_blocks_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "h.sqlite"
    with opened(500, file, max_pending=10, max_unwritten=0, lock_s=0.05) as history:
        with locked(file):
            for n in range(200):
                history.add({"n": n})
            assert numbers(history.recent(1)) == [199]
            assert until(lambda: "database is locked" in caplog.text)
            history.add({"n": 200})
            assert until(lambda: history.lost == 201), "all, whether they were tried or never had room"
        assert len(warnings(caplog)) == 1, "one trouble, one warning"
        history.add({"n": 201})
        assert until(lambda: len(rows(file)) == 1), "the trouble passed"
        assert history.lost == 201


def test_records_are_written_when_the_lock_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "h.sqlite"
    with opened(500, file, max_unwritten=3, lock_s=0.05) as history:
        with locked(file):
            history.add({"n": 0})
            assert until(lambda: "database is locked" in caplog.text)
            for n in range(1, 5):
                history.add({"n": n})
            assert until(lambda: history.lost == 2), "of five the last three are kept"
        history.add({"n": 5})
        assert until(lambda: written_numbers(file) == [2, 3, 4, 5]), "with the next, in their order, each once"
        assert len(warnings(caplog)) == 1
    assert (written_numbers(file), history.lost) == ([2, 3, 4, 5], 2)


def test_close_tries_once_more_to_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "h.sqlite"
    with opened(5, file, lock_s=0.05) as history, locked(file):
        history.add({"n": 1})
        assert until(lambda: "database is locked" in caplog.text)
    assert (written_numbers(file), history.lost) == ([1], 0)
    with opened(5, file, lock_s=0.05, close_s=60) as history, locked(file):
        history.add({"n": 2})
        history.close()
        assert history.lost == 1
    assert written_numbers(file) == [1]


def test_records_that_cannot_be_written_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    with opened(5, file) as history:
        with closing(sqlite3.connect(file)) as database, database:
            database.execute("CREATE UNIQUE INDEX once ON requests (model)")
        history.add({"n": 1, "model": "a"})
        assert until(lambda: written_numbers(file) == [1])
        history.add({"n": 2, "model": "a"})
        assert until(lambda: history.lost == 1)
        history.add({"n": 3, "model": "b"})
    assert written_numbers(file) == [1, 3]


def test_closing_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "h.sqlite"
    history = History(5, str(file), HistoryTimeouts(lock_s=3.0, close_s=0.05))
    with locked(file):
        history.add({"n": 1})
        history.close()
        assert "not written within 0.05 s" in caplog.text
    history.close()
    assert len(rows(file)) == 1


def test_two_processes_may_share_a_file(tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    with opened(500, file) as one, opened(500, file) as other:
        for n in range(100):
            one.add({"n": n})
            other.add({"n": n})
    assert len(rows(file)) == 200


def test_many_threads(tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    with opened(50, file) as history:

        def work(name: str) -> None:
            for n in range(200):
                history.add({"n": n, "model": name, "total_time": 1 + n})
                assert len(history.recent(10)) <= 10
                assert history.total_time_percentiles().keys() == {"p50", "p95", "p99"}

        threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(history.recent(1000)) == 50
    assert history.lost == 0
    models = rows(file, "model")
    assert {name: models.count(name) for name in "abcd"} == dict.fromkeys("abcd", 200)


def test_numbers_go_on_after_a_restart(tmp_path: Path) -> None:
    file = str(tmp_path / "history.db")
    history = History(5, file)
    for _ in range(7):
        history.add({"number": history.next_number()})
    history.close()
    again = History(5, file)
    assert again.next_number() == 8
    again.close()
    assert History(5).next_number() == 1


def test_numbers_of_a_file_without_them_begin_after_its_rows(tmp_path: Path) -> None:
    file = str(tmp_path / "history.db")
    history = History(2, file)
    for _ in range(4):
        history.add({"model": "m"})
    history.close()
    again = History(2, file)
    assert again.next_number() == 5
    newer = History(3)
    newer.adopt(again)
    assert newer.next_number() == 6, "a new config goes on, too"
    again.close()
