"""mypy fails when one side of a border (nodes, orchestrator, gateway, commands) changes a field, and the other not."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
API = Path("src/disaggregated_inference/api")
SIDES = ("node", "orchestrator")
TEXT_SIDES = ("node", "ollama_node", "orchestrator")
READERS = ("orchestrator", "gateway")
# Fields that one side sets and the other reads, in both directions, and the sides that name them by this struct.
FIELDS = [
    ("PrefillRequest", "ticket", SIDES),
    ("PrefillResponse", "context", SIDES),
    ("DecodeRequest", "context", SIDES),
    ("TextGenerateRequest", "template", ("orchestrator",)),
    ("OutputFormat", "schema", ("node", "ollama_node", "gateway")),
    ("ErrorDetail", "code", SIDES),
    ("NodeStatus", "waiting", (*TEXT_SIDES, "chaos")),
    ("PathStatus", "last_error_code", ("doctor",)),  # nodes set it from the attribute of the same name
    ("NodeHealth", "stalled_s", SIDES),
    ("PathStatus", "idle_s", ("cluster",)),
    ("PeerStatus", "refused", SIDES),
    ("Rates", "decode", TEXT_SIDES),
    ("Rate", "tokens_per_s", SIDES),
    ("StartLine", "kv_addresses", ("node", "cli")),
    ("StartLine", "ollama", ("ollama_node", "cli")),
    ("StartLine", "url", ("gateway", "cli")),
    ("TokenizerContent", "chat_template", SIDES),
    ("ModelInfo", "context_window", (*TEXT_SIDES, "gateway")),
    ("StoredModel", "quantization", ("ollama_node", "gateway")),
    ("PromptLogprobs", "tokens", (*SIDES, "gateway")),
    ("Progress", "total", READERS),
    ("DoneEvent", "node_metrics", ("node", "ollama_node")),
    ("StreamEvent", "node_metrics", ("orchestrator",)),  # the same field, as it is read
    ("Delta", "completion", READERS),
    ("RequestRecord", "prompt_tokens", READERS),
    ("RequestRecord", "total_time", (*READERS, "cli")),
    ("RequestRecord", "cost", READERS),
    ("RequestRecord", "kv_bytes", READERS),
    ("RequestRecord", "transfer_time", ("gateway",)),
    ("ClusterStatus", "models", (*READERS, "cli")),
    ("ClusterNode", "usable", (*READERS, "cli", "chaos")),
    ("ClusterLink", "payload_bytes", ("orchestrator", "cli")),
    ("KVRefusal", "why", ("orchestrator", "cli")),
    ("QueueStatus", "running", (*READERS, "chaos")),
    ("ModelSummary", "answered", ("orchestrator", "cli")),
    ("CombinedSummary", "busy_time", ("orchestrator", "cli")),
    ("Target", "goal", ("gateway", "cli")),
    ("Alarm", "limit", ("gateway", "cli")),
    ("ClusterPage", "summary", ("gateway", "cli")),
    ("TargetsPage", "targets", ("gateway", "cli")),
]


def _rename_in_definition(root: Path, struct: str, field: str) -> None:
    for path in (root / API).glob("*.py"):
        lines = path.read_text().splitlines(keepends=True)
        for node in ast.walk(ast.parse("".join(lines))):
            if isinstance(node, ast.ClassDef) and node.name == struct:
                [definition] = [line for line in node.body if _defines(line, field)]
                at = definition.lineno - 1
                lines[at] = lines[at].replace(field, f"renamed_{field}", 1)
                path.write_text("".join(lines))
                return
    raise AssertionError(f"no struct {struct} in {API}")


def _defines(line: ast.stmt, field: str) -> bool:
    return isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id == field


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What mypy says about a copy of the source in which the structs have other fields."""
    root = tmp_path_factory.mktemp("renamed")
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    for struct, field, _ in FIELDS:
        _rename_in_definition(root, struct, field)
    all_sides = sorted({side for *_, sides in FIELDS for side in sides})
    packages = [f"--package=disaggregated_inference.{side}" for side in all_sides]
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", str(root / "cache"), *packages]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=900)
    assert run.returncode == 1, run.stdout + run.stderr
    return run.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(("struct", "field", "side"), [(*names, side) for *names, sides in FIELDS for side in sides])
def test_a_renamed_field_is_an_error_on_both_sides(complaints: list[str], struct: str, field: str, side: str) -> None:
    of_side = [line for line in complaints if line.startswith(f"src/disaggregated_inference/{side}/")]
    assert [line for line in of_side if f'"{struct}"' in line and f'"{field}"' in line], "\n".join(complaints)
