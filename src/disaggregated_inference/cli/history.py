"""`disagg history`: what became of the last requests."""

import json
import logging
import time
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from disaggregated_inference.cli.screen import speed, stdout_console
from disaggregated_inference.cluster.config import ClusterConfig, load_config
from disaggregated_inference.errors import ConfigError
from disaggregated_inference.orchestrator.history import History

_COLUMNS = ("#", "time", "model", "seconds", "ok", "prefill -> decode tok/s", "method")
_NUMBERS = ("#", "seconds")


def run(config: str | None, count: int, model: str | None, as_json: bool) -> None:
    found = load_config(config)
    records = _read(_file(found), max(count, found.policies.history), count, model and found.resolve_model(model))
    if as_json:
        print(json.dumps(records, indent=2))
    elif records:
        stdout_console().print(_table(records))
    else:
        print("no requests yet")


def _file(config: ClusterConfig) -> Path:
    """That is there: opening one that is not would make it."""
    policies = config.policies
    if not policies.history_file or not policies.history:
        how = 'set it, such as "policies": {"history_file": "~/disagg-history.sqlite"}, for requests to be kept'
        raise ConfigError(f"{config.source} has no policies.history_file; {how}")
    return Path(policies.history_file).expanduser()


def _read(path: Path, most: int, count: int, model: str | None) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    complaints = _Complaints()
    logger = logging.getLogger(History.__module__)
    logger.addHandler(complaints)
    try:
        history = History(most, str(path))
        history.close()
    finally:
        logger.removeHandler(complaints)
    if complaints.said:
        raise ConfigError(complaints.said[0])
    return history.recent(count, model)


class _Complaints(logging.Handler):
    """A history that cannot read its file says so in the log and goes on; here the file is all that is wanted."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def _table(records: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in _COLUMNS:
        table.add_column(name, overflow="fold", justify="right" if name in _NUMBERS else "left")
    for number, record in enumerate(records, 1):
        table.add_row(str(number), *_cells(record))
    return table


def _cells(record: dict[str, Any]) -> tuple[Text | str, ...]:
    seconds = f"{record.get('total_time') or 0.0:.2f}"
    speeds = f"{speed(record.get('prefill_speed') or 0.0)} -> {speed(record.get('decode_speed') or 0.0)}"
    method = record.get("method") or "-"
    return _when(record["time"]), record.get("model") or "-", seconds, _outcome(record), speeds, method


def _when(at: float) -> str:
    """The day only where it is another one than today."""
    then = time.localtime(at)
    return time.strftime("%H:%M:%S" if then[:3] == time.localtime()[:3] else "%b %d %H:%M", then)


def _outcome(record: dict[str, Any]) -> Text:
    if record.get("ok", True):
        return Text("yes", "green")
    return Text((record.get("error") or {}).get("code") or "no", "red")
