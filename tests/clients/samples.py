"""The samples of docs/CLIENTS.md: the first code block under a client's heading is run as it stands there."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "CLIENTS.md"
_ADDRESS = "http://127.0.0.1:8080"
_SECTION = re.compile(r"^### ([^\n]+)\n(.*?)(?=^### |^## |\Z)", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^```(python|javascript|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def samples() -> dict[str, tuple[str, str]]:
    """Client to language and text."""
    found = {}
    for name, section in _SECTION.findall(PAGE.read_text()):
        if block := _BLOCK.search(section):
            found[name] = (block[1], block[2])
    return found


def sample_command(language: str, text: str, interpreter: Path, url: str) -> list[str]:
    """`interpreter` belongs to the client's environment."""
    text = text.replace(_ADDRESS, url)
    if language == "bash":
        return ["bash", "-euc", f'PATH="{interpreter.parent}:$PATH"\n{text}']
    return [str(interpreter), *(["-c"] if language == "python" else ["--input-type=module", "-e"]), text]
