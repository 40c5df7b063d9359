"""What may import what, one meaning for one name of a type, and that `--help` loads no engine."""

import ast
import os
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "src" / "disaggregated_inference"

# Rooms, and the rooms each may import. Engine libraries only inside their engine's folder.
SHARED = {"defaults", "errors", "timeouts", "private_files", "struct_types"}
MAP = {
    "kv": SHARED,
    "api": {"defaults", "errors", "kv"},
    "models": {*SHARED, "kv"},
    "kv_transfer": {*SHARED, "kv"},
    "identity": SHARED,
    "observe": {*SHARED, "api"},
    "http": {*SHARED, "api"},
    "engines": {*SHARED, "cores", "kv", "models"},
    "node": {
        *SHARED,
        "api",
        "cores",
        "logs",
        "kv",
        "models",
        "engines",
        "kv_transfer",
        "http",
        "identity",
        "observe",
    },
    "vllm_connector": set(),
    "vllm_node": {
        *SHARED,
        "__init__",
        "api",
        "kv",
        "models",
        "engines",
        "kv_transfer",
        "http",
        "node",
        "vllm_connector",
    },
    "ollama_node": {*SHARED, "api", "logs", "kv", "models", "http", "node", "observe"},
    "cluster": {*SHARED, "__init__", "api", "identity", "kv", "models"},
    "orchestrator": {*SHARED, "api", "kv", "models", "cluster", "identity"},
    "doctor": {*SHARED, "__init__", "api", "kv", "models", "engines", "cluster", "identity", "vllm_node"},
    "chaos": {"errors", "timeouts", "api", "cluster", "identity", "local_nodes", "observe", "orchestrator"},
    "gateway": {*SHARED, "__init__", "api", "logs", "cluster", "models", "observe", "orchestrator", "http"},
    "bench": {
        *SHARED,
        "__init__",
        "api",
        "progress",
        "local_nodes",
        "kv",
        "models",
        "engines",
        "kv_transfer",
        "identity",
        "node",
        "vllm_connector",
        "vllm_node",
        "orchestrator",
        "gateway",
    },
    "cli": {
        *SHARED,
        "__init__",
        "api",
        "client",
        "progress",
        "local_nodes",
        "node_process",
        "models",
        "engines",
        "http",
        "identity",
        "node",
        "vllm_node",
        "cluster",
        "orchestrator",
        "gateway",
        "doctor",
        "chaos",
        "bench",
    },
}
LIBRARIES = {"torch": "torch", "transformers": "torch", "triton": "torch", "mlx": "mlx", "mlx_lm": "mlx"}
LIBRARIES |= {"xllamacpp": "llamacpp", "llama_cpp": "llamacpp"}
# These run inside vLLM: its torch is there, and this project's is not.
INSIDE_VLLM = ("vllm_connector/", "bench/vllm_pages.py", "bench/vllm_weights.py")


@cache  # several tests look at every file
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
    return found


def _imported_names(path: Path) -> list[str]:
    """`from a import b` as `a.b`: b may be a module."""
    nodes = [node for node in ast.walk(_tree(path)) if isinstance(node, ast.ImportFrom)]
    return _imports(path) + [f"{node.module}.{alias.name}" for node in nodes for alias in node.names]


FILES = sorted(PACKAGE.rglob("*.py"))

# The grader is a program on top: of this package it knows the public client, the errors that the client raises, and
# what a process with threads has to do first.
GRADER = TESTS.parent / "src" / "grader"
GRADER_FILES = sorted(GRADER.rglob("*.py"))
PUBLIC = {
    "disaggregated_client",
    "disaggregated_inference",
    "disaggregated_inference.errors",
    "disaggregated_inference.struct_types",
}


def test_grader_uses_the_public_client_only() -> None:
    for path in GRADER_FILES:
        for name in _imports(path):
            if name.partition(".")[0] in {"disaggregated_client", "disaggregated_inference"}:
                assert name in PUBLIC, f"{path} imports {name}"


def test_nothing_imports_the_grader() -> None:
    for path in FILES:
        assert not [name for name in _imports(path) if name.partition(".")[0] == "grader"], path


def test_imports_point_one_way() -> None:
    for path in FILES:
        parts = path.relative_to(PACKAGE).parts
        for name in _imports(path):
            top, *rest = name.split(".")
            if top in LIBRARIES and not (top == "torch" and "/".join(parts).startswith(INSIDE_VLLM)):
                assert parts[:2] == ("engines", LIBRARIES[top]), f"{path} imports {name}"
            if top == "disaggregated_inference" and len(parts) > 1 and parts[0] in MAP:
                room = rest[0] if rest else "__init__"
                assert room == parts[0] or room in MAP[parts[0]], f"{path} imports {name}"


def test_no_rooms_import_each_other() -> None:
    """Nor in a longer circle, and nor do the modules beside the rooms."""
    rooms: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        names = {name.split(".")[1] for name in _imported_names(path) if name.startswith("disaggregated_inference.")}
        rooms[own] |= {name for name in names if _is_module(PACKAGE, name)} - {own}
    list(TopologicalSorter(rooms).static_order())  # raises CycleError, which names the circle


# Rooms that others import by their front door only, and the doors inside them.
INNER_DOORS = {"api.sampling", "kv.prefix_cache", "engines.simulated"}
# Each loads only what it needs: the cluster file is read by every command, ssh by few.
INNER_DOORS |= {"doctor.cluster", "cluster.deploy", "cluster.inventory", "cluster.machines", "cluster.proposal"}
INNER_DOORS |= {"vllm_connector.messages", "vllm_connector.region"}  # the part that needs neither torch nor vLLM
INNER_DOORS |= {"cluster.services", "cluster.shell", "cluster.ssh"}
# Each command loads its own benchmark; the package's other modules load the command, or a server script.
INNER_DOORS |= {f"bench.{name}" for name in ("cluster", "dashboards", "decode", "drift", "engines", "gateway")}
INNER_DOORS |= {f"bench.{name}" for name in ("handoff", "load", "orchestrator", "serve", "wire")}
INNER_DOORS |= {"cli.main", "cli.server_scripts"}
INNER_DOORS |= {"kv_transfer.codecs", "models.simulated"}  # used as `codecs.encode` and `simulated.SHAPES`


def _modules_inside_other_rooms(path: Path, root: Path) -> set[str]:
    """Modules, as `room.module`, that a file imports from other rooms; also as `from room import module`."""
    own, names = path.relative_to(root).parts[0], [name.removeprefix(f"{root.name}.") for name in _imports(path)]
    inside = {name for name in names if "." in name and _is_module(root, name)}
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{root.name}."):
            package = (node.module or "").removeprefix(f"{root.name}.")
            names = [alias.name for alias in node.names if alias.name not in _offered(root / package.replace(".", "/"))]
            inside |= {f"{package}.{name}" for name in names if _is_module(root, f"{package}.{name}")}
    return {name for name in inside if name.partition(".")[0] != own}


def _is_module(root: Path, name: str) -> bool:
    place = root / name.replace(".", "/")
    return place.with_suffix(".py").exists() or place.is_dir()


@cache
def _offered(package: Path) -> set[str]:
    """`__all__` of a package: some functions are named like their module."""
    door = package / "__init__.py"
    assignments = [node for node in _tree(door).body if isinstance(node, ast.Assign)] if door.exists() else []
    lists = [node.value for node in assignments if ast.unparse(node.targets[0]) == "__all__"]
    return set(ast.literal_eval(lists[0])) if lists else set()


def test_rooms_are_entered_by_the_front_door() -> None:
    for path in FILES:
        inside_vllm = str(path.relative_to(PACKAGE)).startswith(INSIDE_VLLM)
        for name in _modules_inside_other_rooms(path, PACKAGE):
            room = name.partition(".")[0]
            if room in MAP and not (inside_vllm and room == "vllm_connector"):
                assert name in INNER_DOORS, f"{path} imports {name}: import it from disaggregated_inference.{room}"


def test_grader_packages_are_entered_by_the_front_door() -> None:
    for path in GRADER_FILES:
        inside = _modules_inside_other_rooms(path, GRADER)
        assert not inside, f"{path} imports {inside}: import from their package"


@pytest.mark.parametrize("files", [FILES, GRADER_FILES], ids=["disaggregated_inference", "grader"])
def test_files_fit_in_the_head(files: list[Path]) -> None:
    lines = {path: len(path.read_text().splitlines()) for path in files}
    assert not {path: count for path, count in lines.items() if count > 400}


def test_classes_fit_in_the_head() -> None:
    for path in FILES + GRADER_FILES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ClassDef):
                methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
                assert len(methods) <= 30, f"{path}: {node.name} has {len(methods)} methods"


def test_no_test_imports_another_test() -> None:
    """What several tests need lives in tests/support/."""
    for path in (path for path in TESTS.rglob("*.py") if "node_modules" not in path.parts):
        for name in _imported_names(path):
            is_test = re.match(r"tests\.(\w+\.)*(test_\w+|conftest)\b", name)
            where = str(path.relative_to(TESTS))
            assert not is_test, f"{where} imports {name}"


def test_no_class_name_is_defined_twice() -> None:
    defined = defaultdict(list)
    for path in FILES + GRADER_FILES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ClassDef):
                defined[node.name].append(str(path))
    assert not {name: paths for name, paths in defined.items() if len(paths) > 1}


@pytest.mark.parametrize("files", [FILES, GRADER_FILES], ids=["disaggregated_inference", "grader"])
def test_no_type_name_has_two_meanings(files: list[Path]) -> None:
    """Nor do aliases such as `Address = tuple[str, int]`. Where a room must not import another, both may write the same
    alias down."""
    meanings = defaultdict(set)
    for path in files:
        for name, value in _type_aliases(path):
            meanings[name].add(value)
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ClassDef):
                meanings[node.name].add(f"the class of {path}")
    assert not {name: values for name, values in meanings.items() if len(values) > 1}


def _type_aliases(path: Path) -> list[tuple[str, str]]:
    """Public ones, with what they stand for. Type variables are of one file each."""
    found = []
    for node in _tree(path).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp):
            name = ast.unparse(node.targets[0])
            if re.fullmatch(r"[A-Z]\w*[a-z]\w*", name):
                found.append((name, ast.unparse(node.value)))
    return found


def _classes() -> dict[str, tuple[Path, ast.ClassDef]]:
    """By name, which only one class has."""
    return {
        node.name: (path, node)
        for path in FILES + GRADER_FILES
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ClassDef)
    }


def _private_methods(node: ast.ClassDef) -> set[str]:
    methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {name for name in methods if name.startswith("_") and not name.endswith("__")}


def _ancestors(node: ast.ClassDef, classes: dict[str, tuple[Path, ast.ClassDef]]) -> set[str]:
    bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases} & classes.keys()
    return bases.union(*(_ancestors(classes[base][1], classes) for base in bases))


def test_no_private_method_is_overridden_in_another_file() -> None:
    """What subclasses in other files replace is a hook of the base class, and has a public name."""
    classes, found = _classes(), []
    for name, (path, node) in classes.items():
        for base in sorted(_ancestors(node, classes)):
            where, ancestor = classes[base]
            both = _private_methods(node) & _private_methods(ancestor)
            found += [f"{path}: {name}.{method} of {base}" for method in sorted(both) if where != path]
    assert not found


def _private_names(node: ast.ClassDef) -> set[str]:
    """Methods, and what the class sets on itself."""
    stored = {each.attr for each in _own_attributes(node) if isinstance(each.ctx, ast.Store)}
    return _private_methods(node) | {name for name in stored if name.startswith("_")}


def _own_attributes(node: ast.ClassDef) -> list[ast.Attribute]:
    attributes = [each for each in ast.walk(node) if isinstance(each, ast.Attribute)]
    return [each for each in attributes if isinstance(each.value, ast.Name) and each.value.id == "self"]


def test_no_private_name_of_a_base_class_is_used_in_another_file() -> None:
    """What subclasses in other files need has a public name, too."""
    classes, found = _classes(), []
    for name, (path, node) in classes.items():
        used = {each.attr for each in _own_attributes(node)}
        for base in sorted(_ancestors(node, classes)):
            where, ancestor = classes[base]
            found += [
                f"{path}: {name} uses {each} of {base}" for each in used & _private_names(ancestor) if where != path
            ]
    assert not found


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
