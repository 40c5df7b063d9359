"""A node in front of an Ollama that was recorded, and one whose Ollama is down."""

from collections.abc import Iterator

import pytest

from tests.support.recorded_ollama import LONG_S, Front, RecordedOllama
from tests.support.waiting import until


@pytest.fixture
def ollama() -> Iterator[RecordedOllama]:
    server = RecordedOllama()
    yield server
    server.end()


@pytest.fixture
def front(ollama: RecordedOllama) -> Iterator[Front]:
    node = Front(ollama.url)
    assert until(lambda: node.node.running is not None or node.ask("/health")[1]["loaded"], LONG_S)
    yield node
    node.end()


@pytest.fixture(scope="module")
def down() -> Iterator[Front]:
    """In front of nothing: what is refused at the border needs nothing behind it."""
    node = Front("http://127.0.0.1:9")
    yield node
    node.end()
