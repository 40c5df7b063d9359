"""`disagg chaos`: what it prints, and its exit code."""

import json
import logging
import sys
from pathlib import Path

from rich.console import Console

from disaggregated_inference.chaos import ChaosReport, ChaosSettings, Show, run_chaos
from disaggregated_inference.engines import require_engine

_WIDTH = 110  # of the table in a file or pipe


def run(settings: ChaosSettings, as_json: bool) -> bool:
    """Whether the cluster passed."""
    for engine in () if settings.config else settings.engines:
        require_engine(engine)
    logging.getLogger("disaggregated_inference").setLevel(logging.CRITICAL)  # faults are expected here
    show, end = _progress_line()
    try:
        report = run_chaos(settings, show)
    finally:
        end("")
    if as_json:
        print(json.dumps(report.as_data(), indent=2))
    else:
        width = None if sys.stdout.isatty() else _WIDTH
        report.show(Console(highlight=False, markup=False, emoji=False, width=width))
    _save(report, settings, as_json)
    return report.passed


def _save(report: ChaosReport, settings: ChaosSettings, as_json: bool) -> None:
    if settings.log or not report.passed:
        path = settings.log or Path(f"chaos-{settings.seed}.json")
        report.save(path)
        print(f"saved {path}: seed, faults, failing requests, logs", file=sys.stderr if as_json else sys.stdout)


def _progress_line() -> tuple[Show, Show]:
    """Shows one line that changes, on a terminal only; and removes it."""
    if not sys.stderr.isatty():
        return lambda text: None, lambda text: None
    width = Console(stderr=True).width

    def show(text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text[: width - 1]}")
        sys.stderr.flush()

    return show, show
