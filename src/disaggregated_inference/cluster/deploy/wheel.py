"""The wheel that is deployed, and the versions of the packages that it needs.

The wheel is packed from the running package itself, with the metadata of its installation: no build tool and no network
are needed, and the same files always give the same bytes.
"""

import base64
import hashlib
import io
import re
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

import disaggregated_inference
from disaggregated_inference.errors import ConfigError

DISTRIBUTION = "disaggregated-inference"
_PACKAGES = ("disaggregated_inference", "grader")
_MODULES = ("disaggregated_client.py",)
_EPOCH = (2020, 1, 1, 0, 0, 0)
_LEFT_OUT = {"__pycache__", ".DS_Store"}


class Wheel(NamedTuple):
    name: str  # of the file
    content: bytes
    version: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


def read_wheel(path: str) -> Wheel:
    """A wheel that the user gives."""
    file = Path(path).expanduser()
    match = re.fullmatch(r"disaggregated_inference-([^-]+)-.*\.whl", file.name)
    if not match:
        raise ConfigError(f"--wheel: {file.name} is no wheel of {DISTRIBUTION}: give disaggregated_inference-*.whl")
    try:
        return Wheel(file.name, file.read_bytes(), match[1])
    except OSError as error:
        raise ConfigError(f"--wheel: {file} cannot be read: {error.strerror}") from None


def pack_wheel() -> Wheel:
    """Of the package that runs now."""
    about = _distribution()
    source = Path(disaggregated_inference.__file__).parents[1]
    info = f"disaggregated_inference-{about.version}.dist-info"
    files = dict(_package_files(source))
    files[f"{info}/METADATA"] = (about.read_text("METADATA") or "").encode()
    files[f"{info}/entry_points.txt"] = (about.read_text("entry_points.txt") or "").encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: disagg\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    return Wheel(f"disaggregated_inference-{about.version}-py3-none-any.whl", _zipped(files), about.version)


def _distribution() -> metadata.Distribution:
    try:
        return metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise ConfigError(f"{DISTRIBUTION} is not installed here: `pip install .`, or give --wheel FILE") from None


def _package_files(source: Path) -> Iterable[tuple[str, bytes]]:
    folders = [source / name for name in _PACKAGES if (source / name).is_dir()]
    found = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    found += [source / name for name in _MODULES if (source / name).is_file()]
    for path in sorted(found):
        relative = path.relative_to(source)
        if not _LEFT_OUT & set(relative.parts):
            yield relative.as_posix(), path.read_bytes()


def _record(files: dict[str, bytes], own_name: str) -> bytes:
    def digest(content: bytes) -> str:
        return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()

    lines = [f"{name},sha256={digest(content)},{len(content)}" for name, content in files.items()]
    return "\n".join([*lines, f"{own_name},,", ""]).encode()


def _zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return buffer.getvalue()


def pin_dependencies() -> str:
    """The versions here of all packages that ours needs on any machine, for `pip --constraint`. Engines are left out:
    their versions depend on the machine."""
    pinned: dict[str, str] = {}
    waiting = [DISTRIBUTION]
    while waiting:
        name = waiting.pop()
        for text in _requires(name):
            requirement = Requirement(text)
            key = requirement.name.lower().replace("_", "-")
            is_wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if key not in pinned and is_wanted and (version := _version(key)):
                pinned[key] = version
                waiting.append(key)
    return "".join(f"{name}=={version}\n" for name, version in sorted(pinned.items()))


def _requires(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def _version(name: str) -> str:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
    return "" if "+" in version else version  # a local build is on no index
