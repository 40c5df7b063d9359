"""`make quick` leaves out what is marked slow, and still tests something of every package."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src"
PACKAGES = sorted(path.parent.name for path in (SOURCE / "disaggregated_inference").glob("*/__init__.py"))
PACKAGES += sorted(f"grader/{path.parent.name}" for path in (SOURCE / "grader").glob("*/__init__.py"))


def _is_slow(marks: list[ast.expr]) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "slow" for mark in marks for node in ast.walk(mark))


def _module_marks(tree: ast.Module) -> list[ast.expr]:
    assignments = [node for node in tree.body if isinstance(node, ast.Assign)]
    return [node.value for node in assignments if ast.unparse(node.targets[0]) == "pytestmark"]


def _quick_tests(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    if _is_slow(_module_marks(tree)):
        return []
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return [node.name for node in functions if not _is_slow(node.decorator_list)]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_quick_tests(package: str) -> None:
    assert sum(len(_quick_tests(path)) for path in (TESTS / package).glob("test_*.py")) > 0
