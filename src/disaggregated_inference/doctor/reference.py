"""docs/TROUBLESHOOTING.md, made of the catalogue."""

import textwrap
from importlib.resources import files

from disaggregated_inference.doctor.checks import CHECKS, CheckKind

_COLUMNS = 100


def reference() -> str:
    """The page: what is written by hand, then a section for each check."""
    text = (files(__package__) / "troubleshooting.md").read_text(encoding="utf-8")
    alone = [_section(name, kind) for name, kind in CHECKS.items() if not kind.between]
    between = [_section(name, kind) for name, kind in CHECKS.items() if kind.between]
    return text.replace("MACHINE_CHECKS", "\n\n".join(alone)).replace("CLUSTER_CHECKS", "\n\n".join(between))


def _section(name: str, kind: CheckKind) -> str:
    return f"### {name}\n\n**{kind.title}.**\n{_wrapped(kind.why)}\n\nMend: {_mend(kind.mend)}"


def _mend(text: str) -> str:
    """A command alone gets backticks; a sentence has its own."""
    is_command = "`" not in text and text.split()[0] in _PROGRAMS
    return _wrapped(f"`{text}`" if is_command else text, len("Mend: "))


_PROGRAMS = ("uv", "pip", "sudo", "disagg", "chmod", "ssh", "ip", "kill")


def _wrapped(text: str, indent: int = 0) -> str:
    lines = textwrap.wrap(" " * indent + text, _COLUMNS, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).lstrip()
