"""Times that decide when something gives up, or looks again, are in the structures of `timeouts.py`."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
TIME = re.compile(r"_?[A-Z][A-Z_]*_(S|MS|US|NS)")
# A file with constants in seconds, and what they are instead. Name and value of each are in the file.
EXCEPTIONS = {
    **dict.fromkeys(
        (
            "disaggregated_inference/cluster/services/supervise.py",
            "disaggregated_inference/doctor/path_probe.py",
            "disaggregated_inference/vllm_connector/connection.py",
            "disaggregated_inference/vllm_connector/parent_watch.py",
            "disaggregated_inference/vllm_connector/scheduler.py",
            "disaggregated_inference/vllm_node/guard.py",
            "grader/sandbox/driver.py",
        ),
        "runs without the package",
    ),
    **dict.fromkeys(
        (
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
            "disaggregated_inference/bench/security_overhead.py",
            "disaggregated_inference/bench/vllm_handoff.py",
            "disaggregated_inference/cli/serve.py",
            "disaggregated_inference/defaults.py",
            "disaggregated_inference/doctor/comparisons.py",
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
            "disaggregated_inference/chaos/line.py",
            "disaggregated_inference/gateway/budgets.py",
            "disaggregated_inference/gateway/metrics.py",
            "disaggregated_inference/http/body.py",
            "disaggregated_inference/orchestrator/history.py",
            "disaggregated_inference/orchestrator/history_series.py",
            "disaggregated_inference/orchestrator/router.py",
            "disaggregated_inference/orchestrator/single_machine.py",
            "disaggregated_inference/orchestrator/time_parsing.py",
        ),
        "a unit, a scale, a rate, an assumption or the size of a fault",
    ),
}


# Where a command begins, and takes the usual times.
ROOTS = ("disaggregated_inference/bench/", "disaggregated_inference/cli/")


def _constants(tree: ast.Module) -> Iterator[str]:
    """Names that a module sets, in tuples too."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [*targets, node.target] if isinstance(node, ast.AnnAssign) else targets
        yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))


def _made_in_a_body(tree: ast.Module) -> Iterator[str]:
    """Structures with the usual times. As the default of an argument they are right: a caller may give others."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for call in (each for function in functions for line in function.body for each in ast.walk(line)):
        if isinstance(call, ast.Call) and not call.keywords and ast.unparse(call.func).endswith("Timeouts"):
            yield ast.unparse(call)


def _trees() -> Iterator[tuple[str, ast.Module]]:
    for path in SOURCE.rglob("*.py"):
        yield str(path.relative_to(SOURCE)), ast.parse(path.read_text())


def test_times_are_in_the_structures() -> None:
    found = {file for file, tree in _trees() if any(map(TIME.fullmatch, _constants(tree)))}
    assert found == set(EXCEPTIONS), "move it into timeouts.py, or list the file with the reason; drop what is gone"


def test_the_structures_are_arguments() -> None:
    made = {file for file, tree in _trees() if not file.startswith(ROOTS) and list(_made_in_a_body(tree))}
    assert not made, "take it as an argument with this default"
