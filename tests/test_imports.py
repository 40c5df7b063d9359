"""What may import what, and that asking for help loads no engine."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "disaggregated_inference"

# Rooms, and the rooms each may import. Engine libraries only inside their engine's folder.
MAP = {
    "kv": {"errors"},
    "models": {"errors", "kv"},
    "kv_transfer": {"errors", "kv"},
    "http": {"errors"},
    "engines": {"errors", "kv", "models"},
    "node": {"errors", "logs", "kv", "models", "engines", "kv_transfer", "http", "ollama_node"},
    "ollama_node": {"errors", "logs", "kv", "models", "http", "node"},
    "cluster": {"errors"},
    "orchestrator": {"errors", "kv", "models", "cluster"},
    "gateway": {"__init__", "errors", "logs", "cluster", "models", "orchestrator", "http"},
}
LIBRARIES = {"torch": "torch", "transformers": "torch", "triton": "torch", "mlx": "mlx", "mlx_lm": "mlx"}
LIBRARIES |= {"xllamacpp": "llamacpp", "llama_cpp": "llamacpp"}


def _imports(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    parts = path.relative_to(PACKAGE).parts
    for name in _imports(path):
        top, *rest = name.split(".")
        if top in LIBRARIES:
            assert parts[:2] == ("engines", LIBRARIES[top]), f"{path} imports {name}"
        if top == "disaggregated_inference" and len(parts) > 1 and parts[0] in MAP:
            kv_memory = rest[0] if rest else "__init__"
            assert kv_memory == parts[0] or kv_memory in MAP[parts[0]], f"{path} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_fit_in_the_head(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


_QUIET = """
import sys
{what}
heavy = sorted({{'torch', 'transformers', 'mlx', 'mlx_lm', 'numpy'}} & set(sys.modules))
sys.exit(f"loaded {{heavy}}" if heavy else 0)
"""


@pytest.mark.parametrize(
    "what",
    [
        "import disaggregated_inference",
        "import disaggregated_inference.cli.main",
        "from typer.testing import CliRunner; from disaggregated_inference.cli.main import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0",
    ],
)
def test_help_loads_no_engine(what: str) -> None:
    subprocess.run([sys.executable, "-c", _QUIET.format(what=what)], check=True)


def test_tokenizing_loads_no_engine() -> None:
    what = (
        "from disaggregated_inference.models import ModelStore\nModelStore().resolve('smollm2').tokenizer.encode('x')"
    )
    subprocess.run([sys.executable, "-c", _QUIET.format(what=what).replace(", 'numpy'", "")], check=True)


def test_help_is_instant() -> None:
    """In time of the processor: a shared machine may be busy with other things."""
    before = os.times()
    subprocess.run([sys.executable, "-m", "disaggregated_inference", "--help"], check=True, capture_output=True)
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 0.3
