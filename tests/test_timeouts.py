"""Times that decide when something gives up, or looks again, are in the structures of `timeouts.py`."""

import re
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
TIME = re.compile(r"^_?[A-Z][A-Z_]*_S(?:: [^=]+)? = ", re.MULTILINE)
# A file with constants in seconds, and what they are instead. Name and value of each are in the file.
EXCEPTIONS = {
    **dict.fromkeys(
        (
            "disaggregated_inference/cluster/services/supervise.py",
            "disaggregated_inference/doctor/path_probe.py",
            "disaggregated_inference/vllm_connector/connection.py",
            "disaggregated_inference/vllm_connector/parent_watch.py",
            "disaggregated_inference/vllm_node/guard.py",
            "grader/sandbox/driver.py",
        ),
        "runs without the package",
    ),
    **dict.fromkeys(
        (
            "disaggregated_inference/bench/dashboards.py",
            "disaggregated_inference/bench/gateway.py",
            "disaggregated_inference/bench/orchestrator.py",
            "disaggregated_inference/cli/top_feed.py",
            "disaggregated_inference/gateway/slo.py",
            "disaggregated_inference/node/rate_measurement.py",
            "disaggregated_inference/node/rates.py",
            "disaggregated_inference/orchestrator/energy.py",
            "disaggregated_inference/orchestrator/links.py",
        ),
        "a window of a measurement",
    ),
    **dict.fromkeys(
        (
            "disaggregated_inference/cli/serve.py",
            "disaggregated_inference/defaults.py",
            "disaggregated_inference/doctor/paths.py",
            "disaggregated_inference/gateway/cluster/history_query.py",
            "disaggregated_inference/kv_transfer/stall_limit.py",
            "disaggregated_inference/ollama_node/client.py",
            "disaggregated_inference/orchestrator/recorder.py",
            "disaggregated_inference/orchestrator/waterfall.py",
            "disaggregated_inference/vllm_node/generation.py",
            "grader/sandbox/bubblewrap.py",
        ),
        "a threshold or a bound",
    ),
    **dict.fromkeys(
        (
            "disaggregated_inference/gateway/metrics.py",
            "disaggregated_inference/http/body.py",
            "disaggregated_inference/orchestrator/history.py",
            "disaggregated_inference/orchestrator/history_series.py",
            "disaggregated_inference/orchestrator/router.py",
            "disaggregated_inference/orchestrator/time_parsing.py",
        ),
        "a unit, a scale, a rate or an assumption",
    ),
}


def test_times_are_in_the_structures() -> None:
    found = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if TIME.search(path.read_text())}
    assert found == set(EXCEPTIONS), "move it into timeouts.py, or list the file with the reason; drop what is gone"
