"""`disagg history` over long and hostile histories: exports one record after the other, and text that cannot draw."""

import csv
import io
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.table import Table
from rich.text import Text

from disaggregated_inference.api import RequestRecord
from disaggregated_inference.cli.history import CSV_FIELDS, HistoryOptions, run
from disaggregated_inference.cli.screen import stdout_console
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.orchestrator import History, HistoryFilter, HistoryReader
from tests.support.waiting import until

EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202egnp\nnext"
REQUESTS = 1203


def record_of(number: int) -> dict[str, Any]:
    usual = {"number": number, "request_id": f"r{number}", "time": time.time() - REQUESTS + number, "ok": True}
    usual |= {"model": "tiny", "node_model": f"tiny{EVIL}", "total_time": 1.5, "prefill_speed": 100.0}
    return usual | {"decode_speed": 10.0, "method": f"local{EVIL}", "plan": f"={EVIL}", "outcome": "ok"}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("history")
    history = History(REQUESTS, str(folder / "h.db"))
    for number in range(1, REQUESTS + 1):
        history.add(record_of(number), caller="ann")

    def complete() -> bool:
        with history.reader() as found:
            return bool(found.kept()["requests"] == REQUESTS)

    assert until(complete)
    history.close()
    servers = {"decode_servers": [{"host": "127.0.0.1", "port": 9, "model": "tiny", "name": "d1"}]}
    content = servers | {"prefill_servers": [], "policies": {"history_file": str(folder / "h.db")}}
    (folder / "cluster.json").write_text(json.dumps(content))
    return str(folder / "cluster.json")


def test_exports_hold_everything_in_order(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(HistoryOptions(config=config, as_csv=True))
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [int(row["number"]) for row in rows] == list(range(1, REQUESTS + 1)), "oldest first"
    run(HistoryOptions(config=config, as_json=True, since="1d"))
    found = json.loads(capsys.readouterr().out)
    assert [record["number"] for record in found] == list(range(REQUESTS, 0, -1)), "newest first"
    run(HistoryOptions(config=config, as_json=True, since="1d", until="12h"))
    assert json.loads(capsys.readouterr().out) == []
    run(HistoryOptions(config=config, as_csv=True, count=2))
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [int(row["number"]) for row in rows] == [REQUESTS - 1, REQUESTS], "the newest two"


def test_a_table_is_no_export(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(HistoryOptions(config=config, since="1d"))
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 1001
    assert shown.err == "the newest 1,000; --count shows more, --csv writes all\n"
    run(HistoryOptions(config=config, since="1d", count=1100))
    shown = capsys.readouterr()
    assert (len(shown.out.splitlines()), shown.err) == (1101, "")


@pytest.mark.parametrize("options", [{}, {"as_csv": True, "count": 3}, {"as_json": True, "count": 3}])
def test_no_text_of_a_record_draws(config: str, options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    run(HistoryOptions(config=config, **options))
    out = capsys.readouterr().out
    assert not [letter for letter in out if ord(letter) < 32 and letter not in "\r\n"]
    assert "\x9b" not in out
    assert "\u202e" not in out
    if options.get("as_csv"):
        assert "'=[2J" in out, "no formula either"


def test_a_table_shows_no_control_codes_of_its_cells(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("name")
    table.add_row(EVIL)
    table.add_row(Text(EVIL, "red"))
    stdout_console().print(table)
    assert not set(capsys.readouterr().out) & set("\x1b\x07\x9b\u202e")


def test_records_are_read_one_by_one(config: str) -> None:
    path = Path(config).with_name("h.db")
    with HistoryReader.of_file(path) as reader:
        records = reader.each_record(HistoryFilter(), 5)
        assert next(records)["number"] == REQUESTS
        assert [record["number"] for record in records] == [REQUESTS - place for place in range(1, 5)]
        oldest = reader.each_record(HistoryFilter(), 5, oldest_first=True)
        assert next(oldest)["number"] == REQUESTS - 4


@pytest.mark.parametrize(
    ("since", "until", "message"),
    [
        ("1h", "2h", "--until is not after --since: there is no time between them"),
        ("2026-11-17", "2026-11-17", "--until is not after --since"),
        ("2026-13-01", "", "--since: '2026-13-01' is no time"),
        ("", "yesterday", "--until: 'yesterday' is no time"),
        ("99999999999999d", "", "is no time"),
    ],
)
def test_wrong_times(config: str, since: str, until: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        run(HistoryOptions(config=config, since=since, until=until))


def test_the_columns_of_the_csv_are_fields_of_a_record() -> None:
    assert set(CSV_FIELDS) <= {field.name for field in msgspec.structs.fields(RequestRecord)}
