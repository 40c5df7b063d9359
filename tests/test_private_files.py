"""Prompts, completions and secrets are readable by their owner alone, also files of earlier versions."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from disaggregated_inference.cli.errors import message_of
from disaggregated_inference.cli.local_cluster import LocalServer, cluster_file
from disaggregated_inference.cli.transcript import Transcript, write
from disaggregated_inference.orchestrator.history import History
from disaggregated_inference.private_files import make_private, make_private_file, make_private_folder, warn_of_open
from tests.support.command import run_here

WRITABLE = "set DISAGG_HOME to a folder that you can write to"


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def open_to_all(path: Path, content: bytes = b"") -> Path:
    path.write_bytes(content)
    path.chmod(0o666)
    return path


def test_files_and_folders(tmp_path: Path) -> None:
    make_private_folder(tmp_path / "a" / "b")
    make_private_file(tmp_path / "a" / "b" / "new")
    old = open_to_all(tmp_path / "old")
    make_private_file(old)
    make_private(tmp_path / "missing")
    assert [mode(path) for path in (tmp_path / "a" / "b", tmp_path / "a" / "b" / "new", old)] == [0o700, 0o600, 0o600]
    assert mode(tmp_path / "a") == 0o700


def test_a_new_home(tmp_path: Path) -> None:
    """Whatever makes it first: a model here."""
    home = tmp_path / "new" / "home"
    command = [sys.executable, "-m", "disaggregated_inference", "models", "inspect", "simulated:tiny"]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"DISAGG_HOME": str(home)})
    folders = [home.parent, home, *(path for path in home.rglob("*") if path.is_dir())]
    assert len(folders) > 2
    assert {mode(path) for path in folders} == {0o700}


@pytest.mark.parametrize("earlier", [False, True])
def test_the_history(tmp_path: Path, earlier: bool) -> None:
    file = tmp_path / "folder" / "history.db"
    if earlier:
        history = History(10, str(file))
        history.add({"model": "m", "ok": True, "total_time": 1.0})
        history.close()
        for path in file.parent.iterdir():
            path.chmod(0o644)
    history = History(10, str(file))
    history.add({"model": "m", "ok": True, "total_time": 1.0})
    found = {path.name: mode(path) for path in file.parent.iterdir()}
    assert set(found.values()) == {0o600}, found
    assert len(found) > 1, "the files beside it too"
    assert mode(file.parent) == 0o700
    history.close()


def test_a_saved_chat(tmp_path: Path) -> None:
    for path in (tmp_path / "new.json", open_to_all(tmp_path / "old.json", b"{}")):
        write(path, Transcript(messages=()))
        assert mode(path) == 0o600


def test_the_cluster_file_of_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_HOME", str(tmp_path))
    server = LocalServer(name="n", port=1, model="m", engine="simulated")
    with cluster_file(server, server) as path:
        assert mode(path.parent) == 0o700
        assert {mode(each) for each in path.parent.iterdir()} == {0o600}


def test_a_folder_that_others_may_list_is_told_and_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o755)
    warn_of_open(tmp_path)
    assert f"run `chmod 700 {tmp_path}`, or set DISAGG_HOME" in caplog.text
    assert mode(tmp_path) == 0o755
    caplog.clear()
    tmp_path.chmod(0o700)
    warn_of_open(tmp_path)
    warn_of_open(tmp_path / "missing")
    assert not caplog.records


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (
            PermissionError(13, "Permission denied", "{home}/models"),
            WRITABLE,
        ),
        (PermissionError(13, "Permission denied", "{parent}"), WRITABLE),
        (OSError(30, "Read-only file system", "{home}"), WRITABLE),
        (OSError(28, "No space left on device"), "set DISAGG_HOME to a folder on another one"),
        (PermissionError(13, "Permission denied", "/elsewhere/file"), ""),
    ],
)
def test_what_to_do_about_a_home_that_cannot_be_written(
    error: OSError, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("DISAGG_HOME", str(home))
    if error.filename:
        error.filename = str(error.filename).format(home=home, parent=tmp_path)
    shown = message_of(error)
    assert shown.endswith(remedy)
    assert ("DISAGG_HOME" in shown) == bool(remedy)


@pytest.mark.parametrize(
    "command",
    [
        ("models", "list"),
        ("serve", "--engine", "simulated", "--model", "simulated:tiny", "--port", "0", "--kv-port", "0"),
        ("demo",),
        ("up", "--simulated", "instant,instant", "--port", "0"),
    ],
)
def test_no_command_ends_in_a_riddle(command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file stands where the home folder should be: also root cannot write there."""
    (tmp_path / "home").write_text("")
    monkeypatch.setenv("DISAGG_HOME", str(tmp_path / "home" / "inner"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run = run_here(*command)
    assert run.returncode == 0 or "DISAGG_HOME" in run.stderr, run.stderr
