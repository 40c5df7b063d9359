"""`make clients`: real client packages against a real cluster on this machine, and one table.

python -m tests.clients [CLIENT ...] [--write] [--url URL --folder MODEL_FOLDER]
"""

import argparse
import datetime
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from tests.clients.cluster import gateway
from tests.clients.matrix import CLIENTS, ROOT, Row, expected_answer, run_client, served_requests, table
from tests.clients.samples import PAGE

BEGIN, END = "<!-- made by `make clients` -->\n", "<!-- end -->"


def main() -> int:
    arguments = _arguments()
    chosen = [client for client in CLIENTS if not arguments.clients or client.name in arguments.clients]
    started = time.monotonic()
    with _cluster(arguments) as (url, folder):
        print(f"torch reads, MLX writes; the gateway is {url}", flush=True)
        environ = {"GATEWAY_URL": url, "MODEL_FOLDER": str(folder), "EXPECTED": expected_answer(url)} | _QUIET
        rows = []
        for client in chosen:
            rows.append(run_client(client, environ))
            _print_progress(rows[-1], time.monotonic() - started)
        served = served_requests(url)
    text = f"{table(rows)}\n\n{_today()}, {sum(served.values())} requests: {_counts(served)}.\n"
    print("\n" + text)
    failed = any(row.errors for row in rows)
    if arguments.write and not failed and len(rows) == len(CLIENTS):
        _write(text)
    return int(failed)


# No client asks a hub, sends statistics, or writes outside its own folders.
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OMP_NUM_THREADS": "1",
    "NO_COLOR": "1",
    "PYTHONPATH": "",
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.clients")
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join(client.name for client in CLIENTS))
    parser.add_argument(
        "--write", action="store_true", help=f"if all pass, put the table into {PAGE.relative_to(ROOT)}"
    )
    parser.add_argument("--url", help="a gateway that runs already")
    parser.add_argument("--folder", type=Path, help="its model's folder, for the clients that need a tokenizer")
    return parser.parse_args()


def _cluster(arguments: argparse.Namespace) -> AbstractContextManager[tuple[str, Path]]:
    return nullcontext((arguments.url, arguments.folder)) if arguments.url else gateway()


def _print_progress(row: Row, seconds: float) -> None:
    print(f"{seconds:5.0f} s  {row.client.name} {row.version}: {'; '.join(row.errors) or 'passed'}", flush=True)
    if row.errors:
        print(row.log[-4000:], flush=True)


def _counts(served: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in served.items() if count)


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _write(text: str) -> None:
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2])


if __name__ == "__main__":
    sys.exit(main())
