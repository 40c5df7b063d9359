"""Nodes on one machine divide its cores: by locked files, which a dead process leaves unlocked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from disaggregated_inference.cores import CoreShare, available_cores, configured_threads, wait_without_spinning
from tests.support.waiting import until

_JOIN = "from pathlib import Path; from disaggregated_inference.cores import CoreShare; import sys, time;"
_JOIN += "CoreShare(0, Path(sys.argv[1])).join(); print(flush=True); time.sleep(600)"


def joined(folder: Path, fixed: int = 0, total: int = 8) -> CoreShare:
    share = CoreShare(fixed, folder / "nodes", total)
    share.join()
    return share


def test_one_node_has_all_cores(tmp_path: Path) -> None:
    assert joined(tmp_path).threads == 8


def test_nodes_divide_the_cores_and_get_them_back(tmp_path: Path) -> None:
    first, second = joined(tmp_path), joined(tmp_path)
    assert (first.threads, second.threads) == (4, 4)
    third = joined(tmp_path)
    assert (first.threads, second.threads, third.threads) == (2, 2, 2)
    second.leave()
    third.leave()
    assert first.threads == 8


def test_what_the_user_set_is_left_to_that_node(tmp_path: Path) -> None:
    shares = [joined(tmp_path, fixed=6), joined(tmp_path), joined(tmp_path)]
    assert [share.threads for share in shares] == [6, 1, 1]


def test_every_node_has_a_thread(tmp_path: Path) -> None:
    shares = [joined(tmp_path, total=2) for _ in range(5)] + [joined(tmp_path, fixed=64, total=2)]
    assert [share.threads for share in shares] == [1, 1, 1, 1, 1, 64]


def test_a_killed_node_does_not_count(tmp_path: Path) -> None:
    share = joined(tmp_path)
    command = [sys.executable, "-c", _JOIN, str(tmp_path / "nodes")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        assert share.threads == 4
        process.kill()
    assert share.threads == 8
    assert len(list((tmp_path / "nodes").iterdir())) == 1, "its file is gone"


def test_a_file_that_is_no_nodes_counts_as_dead_or_as_zero(tmp_path: Path) -> None:
    share = joined(tmp_path)
    (tmp_path / "nodes" / "123-left").write_text("nonsense")
    (tmp_path / "nodes" / "folder").mkdir()
    assert share.threads == 8


def test_a_folder_of_another_kind_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another user could have put a link there."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "nodes").symlink_to(tmp_path / "elsewhere")
    share = joined(tmp_path)
    assert "set --threads on each" in caplog.text
    assert share.threads == 8
    assert not list((tmp_path / "elsewhere").iterdir())


def test_the_cores_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "slice" / "service"
    group.mkdir(parents=True)
    (tmp_path / "own").write_text("0::/slice/service\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert available_cores(tmp_path, tmp_path / "own") == 16
    (group / "cpu.max").write_text("max 100000\n")
    (group.parent / "cpu.max").write_text("350000 100000\n")
    assert available_cores(tmp_path, tmp_path / "own") == 3, "the groups around it count too"
    (group / "cpu.max").write_text("50000 100000\n")
    assert available_cores(tmp_path, tmp_path / "own") == 1
    (group / "cpu.max").write_text("0 0 0")
    assert available_cores(tmp_path, tmp_path / "own") == 3


@pytest.mark.parametrize(("text", "threads"), [("3", 3), ("4,2", 4), ("", 0), ("many", 0), ("0", 0), ("99999", 1024)])
def test_the_users_threads(text: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert configured_threads() == threads


def test_the_users_way_to_wait_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.setenv("KMP_BLOCKTIME", "")
    monkeypatch.delenv("KMP_BLOCKTIME")
    wait_without_spinning()
    assert (os.environ["OMP_WAIT_POLICY"], os.environ["KMP_BLOCKTIME"]) == ("active", "0")


def test_several_nodes_start_at_once(tmp_path: Path) -> None:
    """None takes another's file for a dead one's."""
    share = joined(tmp_path, total=10)
    command = [sys.executable, "-c", _JOIN, str(tmp_path / "nodes")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
    try:
        assert until(lambda: share.threads == 2, 60)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
