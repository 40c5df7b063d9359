"""Programs that fetch models, replaced by ones that write down how they were called and make the model."""

import zipfile
from pathlib import Path

# Each writes its arguments and the token that it got, and makes the file that the real one would.
RECORDER = """#!/bin/sh
echo "{name} $* token=${{HF_TOKEN:-none}}" >> /root/calls
case "$*" in show*) test -e /root/pulled;; pull*) touch /root/pulled;; esac
"""


def put_ollama(home: Path) -> None:
    program = home / ".local/bin/ollama"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(RECORDER.format(name="ollama"))
    program.chmod(0o755)


def put_hub_wheel(folder: Path) -> None:
    """A package `huggingface_hub` whose `hf` is the recorder: the deploy installs it from this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    info, script = "huggingface_hub-9.9.dist-info", "huggingface_hub-9.9.data/scripts/hf"
    metadata = "Metadata-Version: 2.1\nName: huggingface_hub\nVersion: 9.9\n"
    wheel = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {script: RECORDER.format(name="hf"), f"{info}/METADATA": metadata, f"{info}/WHEEL": wheel}
    record = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / "huggingface_hub-9.9-py3-none-any.whl", "w") as archive:
        for name, text in (files | {f"{info}/RECORD": record}).items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (0o755 if name == script else 0o644) << 16
            archive.writestr(entry, text)
