"""Review source files in parallel; findings come as JSON that a schema enforces.

    python examples/review_code.py --config cluster.json --model qwen3-coder:30b src/*.py

Long files are what splitting is for: the prefill machine reads the next file while the decode machine writes about the
last one. The instructions come first in every prompt, so that all files share their prefix in the prefix cache.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from disaggregated_client import DisaggregatedClient

INSTRUCTIONS = (
    "You review source code. List real defects only: wrong results, crashes, leaks, security holes. "
    "Name the line of each and say in one sentence how to fix it. An empty list is a good answer."
)
FINDING = {
    "type": "object",
    "properties": {
        "line": {"type": "integer", "minimum": 1, "maximum": 99999},
        "severity": {"enum": ["high", "medium", "low"]},
        "advice": {"type": "string", "maxLength": 200},
    },
    "required": ["line", "severity", "advice"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {"findings": {"type": "array", "items": FINDING, "maxItems": 5}},
    "required": ["findings"],
    "additionalProperties": False,
}


def numbered(source: str) -> str:
    return "\n".join(f"{number:5} {line}" for number, line in enumerate(source.splitlines(), 1))


def review(client: DisaggregatedClient, model: str | None, max_tokens: int, path: Path) -> list[dict[str, Any]]:
    response, metrics = client.generate(
        messages=[
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": f"{path.name}\n\n{numbered(path.read_text())}"},
        ],
        model=model,
        max_tokens=max_tokens,
        temperature=0.0,
        format={"type": "json_schema", "schema": SCHEMA},
    )
    if metrics["finish_reason"] == "length":
        raise SystemExit(f"{path}: the review is longer than {max_tokens} tokens; raise --max-tokens")
    findings: list[dict[str, Any]] = json.loads(response)["findings"]
    return findings


def report(path: Path, findings: list[dict[str, Any]]) -> Iterator[str]:
    for finding in sorted(findings, key=lambda finding: int(finding["line"])):
        yield f"{path}:{finding['line']}: {finding['severity']}: {finding['advice']}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Review source files with a cluster.")
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--config", help="the cluster file")
    parser.add_argument("--model", help="a model of the cluster; needed if there are several")
    parser.add_argument("--parallel", type=int, default=4, help="files at once")
    parser.add_argument("--max-tokens", type=int, default=2000)
    options = parser.parse_args()

    with DisaggregatedClient(options.config) as client, ThreadPoolExecutor(options.parallel) as pool:
        reviews = pool.map(lambda path: review(client, options.model, options.max_tokens, path), options.files)
        for path, findings in zip(options.files, reviews, strict=True):
            print(*report(path, findings), sep="\n", end="\n" if findings else "")
            print(f"{path}: {len(findings)} findings", file=sys.stderr)


if __name__ == "__main__":
    main()
