"""docs/GRADING.md: its rubric is valid, its commands exist, and its first screen is for instructors."""

import re
import shlex
from pathlib import Path

import typer

from grader.cli.main import app
from grader.rubric import load_rubric

_PAGE = Path(__file__).parents[3] / "docs" / "GRADING.md"
_FIRST_SCREEN = 45  # lines


def test_the_rubric_is_valid() -> None:
    rubric = load_rubric(_PAGE.read_text().partition("```yaml\n")[2].partition("```")[0])
    assert rubric.maximum == 10


def test_every_command_and_option_exists() -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    lines = [line for line in _PAGE.read_text().splitlines() if line.startswith("disagg-grade ")]
    assert len(lines) > 8
    for line in lines:
        words = shlex.split(line, comments=True)
        options = {name for parameter in known[words[1]].params for name in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, line


def test_the_first_screen_is_for_instructors() -> None:
    screen = "\n".join(_PAGE.read_text().splitlines()[:_FIRST_SCREEN])
    assert not re.search(r"\b(?:KV|cache|prefill|decode|token|GPU)s?\b", screen, re.IGNORECASE)
