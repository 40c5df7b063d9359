"""Two simulated nodes, a folder with their cluster file, and terminals."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cli_processes import SLOW, Terminal, write_config
from tests.support.cluster import Process, config_of


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Process]]:
    model = "simulated:tiny"
    started = [Process(name, role, "simulated", model, *SLOW) for name, role in (("p1", "prefill"), ("d1", "decode"))]
    yield [node.ready() for node in started]
    for node in started:
        node.end()


@pytest.fixture
def folder(nodes: list[Process], tmp_path: Path) -> Path:
    """A folder with a cluster file at its default place."""
    write_config(tmp_path, config_of(*nodes))
    return tmp_path


@pytest.fixture
def terminal(folder: Path) -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def make(*arguments: str, columns: int = 80) -> Terminal:
        made.append(Terminal(folder, *arguments, columns=columns))
        return made[-1]

    yield make
    for found in made:
        if found.process.poll() is None:
            found.process.kill()
            found.end()
