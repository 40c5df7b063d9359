"""Text files that people hand in: rubrics, rosters, tables of learning platforms."""

from pathlib import Path

from grader.errors import GraderError


def decoded(content: bytes, name: str) -> str:
    """With or without the mark that Excel writes at the start."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise GraderError(f"{name} is no text in UTF-8: save it again as UTF-8 (Excel: CSV UTF-8)") from None


def read_text(path: Path) -> str:
    return decoded(path.read_bytes(), str(path))
