"""`disagg-grade bench` on simulated machines."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# Machines that read alike: each prompt is read where the last one was, however busy this machine is.
_MACHINES = "custom:prefill=50000,decode=2000,custom:prefill=50000,decode=2000"


def test_bench_compares_both_ways() -> None:
    command = [sys.executable, "-m", "grader.cli", "bench", "--notebooks", "2", "--at-once", "1", "--json"]
    command += ["--answer-tokens", "16", "--simulated", _MACHINES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [row["name"] for row in told["rows"]] == ["one after the other", "both at once"]
    for row in told["rows"]:
        assert row["notebooks_per_minute"] > 0
        assert row["prompt_tokens"] > 0
        assert 0 < row["hit_rate"] < 1, "the second notebook's prompts begin as the first one's"
        assert row["kv_bytes_per_notebook"] is not None
