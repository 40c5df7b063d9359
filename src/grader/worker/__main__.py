"""`python -m grader.worker FOLDER OPTIONS`: the worker process.

SIGTERM ends it within seconds; unfinished jobs wait again.
"""

import logging
import signal
import sys
from pathlib import Path

import msgspec

from grader.worker.worker import Worker, WorkerOptions


def main() -> None:
    folder, options = sys.argv[1:]
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    worker = Worker(Path(folder), msgspec.json.decode(options, type=WorkerOptions))
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    raise SystemExit(worker.run())


if __name__ == "__main__":
    main()
