"""`disagg history`: the last requests and their outcome."""

import json
import logging
import time
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from disaggregated_inference.cli.screen import speed, stdout_console
from disaggregated_inference.cluster import ClusterConfig, load_config
from disaggregated_inference.errors import ConfigError
from disaggregated_inference.orchestrator import History

_COLUMNS = ("#", "time", "model", "seconds", "ok", "prefill -> decode tok/s", "method")
_NUMBERS = ("#", "seconds")


def run(config: str | None, count: int, model: str | None, as_json: bool) -> None:
    cluster = load_config(config)
    limit = max(count, cluster.policies.history)
    records = _read(_file(cluster), limit, count, model and cluster.resolve_model(model))
    if as_json:
        print(json.dumps(records, indent=2))
    elif records:
        stdout_console().print(_table(records))
    else:
        print("no requests yet")


def _file(config: ClusterConfig) -> Path:
    policies = config.policies
    if not policies.history_file or not policies.history:
        example = '"policies": {"history_file": "~/disagg-history.sqlite"}'
        raise ConfigError(f"{config.source} has no policies.history_file; set it to keep a history: {example}")
    return Path(policies.history_file).expanduser()


def _read(path: Path, limit: int, count: int, model: str | None) -> list[dict[str, Any]]:
    if not path.exists():  # History would create it
        return []
    warnings = BufferingHandler(capacity=1000)  # History only logs that it cannot read its file: fail then
    warnings.setLevel(logging.WARNING)
    logger = logging.getLogger(History.__module__)
    logger.addHandler(warnings)
    try:
        history = History(limit, str(path))
        history.close()
    finally:
        logger.removeHandler(warnings)
    if warnings.buffer:
        raise ConfigError(warnings.buffer[0].getMessage())
    return history.recent(count, model)


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
    return _when(record["time"]), _model(record), seconds, _outcome(record), speeds, method


def _model(record: dict[str, Any]) -> str:
    """With the node's own name of it, if that is another."""
    model, own = record.get("model") or "-", record.get("node_model")
    return f"{model} ({own})" if own and own != model else model


def _when(at: float) -> str:
    """With the day, unless it is today."""
    then = time.localtime(at)
    return time.strftime("%H:%M:%S" if then[:3] == time.localtime()[:3] else "%b %d %H:%M", then)


def _outcome(record: dict[str, Any]) -> Text:
    if record.get("ok", True):
        return Text("yes", "green")
    return Text((record.get("error") or {}).get("code") or "no", "red")
