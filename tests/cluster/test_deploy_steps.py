"""Parts of a deploy on this machine: steps, locks, audits, logs, and every error that stops one."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from disaggregated_inference.api import PathStatus
from disaggregated_inference.cluster import load_config
from disaggregated_inference.cluster.deploy import (
    AuditEntry,
    MachineSession,
    ServiceChoice,
    merge_audits,
    on_machines,
    operate,
    path_in_use,
    plan_machines,
)
from disaggregated_inference.cluster.deploy.lock import machine_lock
from disaggregated_inference.cluster.deploy.log_lines import LogLine, parse_line
from disaggregated_inference.cluster.deploy.log_stream import in_order, merged
from disaggregated_inference.cluster.deploy.memory_fit import FitStep
from disaggregated_inference.cluster.deploy.steps import CommandStep, FilesStep, RemoteFile
from disaggregated_inference.cluster.inventory import Inventory
from disaggregated_inference.cluster.shell import LocalShell
from disaggregated_inference.errors import CommandFailed, DeployRefused
from tests.support.deploy_plans import PLACE, cluster, only_plan

Result = TypeVar("Result")


# Steps, locks, audits, logs


def local(work: Callable[[LocalShell], Awaitable[Result]]) -> Result:
    async def run() -> Result:
        return await work(LocalShell("spark"))

    return asyncio.run(run())


def test_files_are_written_once_and_corrected(tmp_path: Path) -> None:
    secret = RemoteFile(str(tmp_path / "a" / "token"), b"secret", is_secret=True)
    step = FilesStep("secrets", [secret, RemoteFile(str(tmp_path / "b"), b"", 0o644)])

    async def work(shell: LocalShell) -> None:
        assert not await step.is_done(shell)
        await step.do(shell)
        assert await step.is_done(shell)
        (tmp_path / "a" / "token").chmod(0o644)
        assert not await step.is_done(shell)
        await step.do(shell)
        assert (tmp_path / "a" / "token").stat().st_mode & 0o777 == 0o600

    local(work)
    assert "secret, not shown" in step.describe()[0]
    assert step.describe()[1].startswith(f"write {tmp_path}/b (0 bytes, mode 644, sha256")


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "small", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this container does not allow mounts")
    try:
        step = FilesStep("wheel", [RemoteFile(str(tmp_path / "wheel"), bytes(1 << 20))])
        with pytest.raises(CommandFailed, match="No space left on device; the disk is full: free some space there"):
            local(step.do)
        assert os.listdir(tmp_path) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize(
    ("stderr", "remedy"),
    [
        (
            "The virtual environment was not created because ensurepip is not available.",
            "install the package python3-v",
        ),
        ("ERROR: No matching distribution found for aiohttp", "the machine reaches no package index: give it one by"),
        ("OSError: [Errno 28] No space left on device", "the disk is full: free some space there"),
    ],
)
def test_installs_that_fail_say_what_to_do(stderr: str, remedy: str) -> None:
    from disaggregated_inference.cluster.deploy.install import install_remedy

    step = CommandStep("environment", f"echo {stderr!r} >&2; exit 1", "false", remedy=install_remedy)
    with pytest.raises(CommandFailed, match=rf"spark: environment failed \(exit code 1\): .*{re.escape(remedy)}"):
        local(step.do)


def test_a_model_that_does_not_fit() -> None:
    config = cluster({"model": "simulated:gpt-oss-120b", "engine": "llamacpp"})
    inventory = Inventory(os="Linux", memory_bytes=1 << 30)
    step = FitStep(only_plan(config), config, inventory, PLACE, sys.executable)
    with pytest.raises(
        DeployRefused, match=r"spark: weights and KV cache need [\d.]+ GB .*, and the machine has 1.1 GB"
    ):
        local(step.is_done)
    enough = FitStep(only_plan(config), config, Inventory(os="Linux", memory_bytes=1 << 40), PLACE, sys.executable)
    assert local(enough.is_done)


def test_one_deploy_at_a_time(tmp_path: Path) -> None:
    lock = tmp_path / "d" / "lock"

    async def work(shell: LocalShell) -> None:
        async with machine_lock(shell, str(lock), "deploy"):
            assert lock.is_symlink()
            with pytest.raises(DeployRefused, match=r"spark: another command is at work there: \S+@\S+, deploy, since"):
                async with machine_lock(LocalShell("spark"), str(lock), "down"):
                    pass
        assert not lock.is_symlink()
        lock.symlink_to("999999999 ada@desk, deploy, since yesterday")  # the machine was switched off meanwhile
        async with machine_lock(shell, str(lock), "deploy"):
            pass
        assert not lock.is_symlink()

    local(work)


def test_one_of_several_takes_an_old_lock(tmp_path: Path) -> None:
    """They all find it at the same time. None leaves before all have tried."""
    lock, tries = tmp_path / "lock", 6

    async def work() -> int:
        held, tried, all_tried = 0, 0, asyncio.Event()

        async def attempt() -> None:
            nonlocal held, tried
            try:
                async with machine_lock(LocalShell("spark"), str(lock), "deploy"):
                    held, tried = held + 1, tried + 1
                    if tried == tries:
                        all_tried.set()
                    await all_tried.wait()
            except DeployRefused:
                tried += 1
                if tried == tries:
                    all_tried.set()

        lock.symlink_to("999999999 ada@desk, deploy, since yesterday")
        await asyncio.gather(*(attempt() for _ in range(tries)))
        return held

    for _ in range(3):
        assert asyncio.run(work()) == 1
        assert list(tmp_path.iterdir()) == []


def test_a_lock_that_cannot_be_written() -> None:
    async def work(shell: LocalShell) -> None:
        async with machine_lock(shell, "/proc/none/lock", "deploy"):
            pass

    with pytest.raises(DeployRefused, match="spark: /proc/none/lock cannot be written"):
        local(work)


def test_audits_are_merged() -> None:
    def entry(id: str, time: float, release: str) -> AuditEntry:
        return AuditEntry(id=id, time=time, who="ada@desk", command="deploy", release=release)

    merged = merge_audits(
        {"a": [entry("2", 9, "1.0-ff-a2"), entry("1", 3, "1.0-ee-a1")], "b": [entry("2", 8, "1.0-ff-b")]}
    )
    assert [(each.id, each.time, each.release) for each in merged] == [("1", 3, "1.0-ee"), ("2", 8, "1.0-ff")]
    assert merged[1].releases == {"a": "1.0-ff-a2", "b": "1.0-ff-b"}


def test_lines_of_journals_and_of_our_own_logs() -> None:
    head = "2026-11-17T05:47:00.123456+0000 dgx1 python[812]: "
    plain = parse_line(head + "Traceback", "dgx1", "x", "")
    assert plain == LogLine("2026-11-17T05:47:00.123Z", "dgx1", "x", "Traceback")
    own = parse_line(head + '{"time": "2026-11-17T05:46:59.000Z", "request_id": "r1"}', "dgx1", "x", "")
    assert own
    assert own.time == "2026-11-17T05:46:59.000Z"
    assert own.concerns("r1")
    assert not own.concerns("r2")
    assert parse_line("-- No entries --", "dgx1", "x", "") is None
    assert [line.text for line in merged([plain, own])] == [own.text, "Traceback"]


def test_an_unforeseen_error_is_of_one_machine() -> None:
    config = load_config(
        {
            "decode_servers": [{"host": "10.0.0.1", "machine": "a", "model": "q"}],
            "prefill_servers": [{"host": "10.0.0.2", "machine": "b", "model": "q"}],
            "machines": {"a": {"ssh": "local"}, "b": {"ssh": "local"}},
        },
        {},
    )

    async def work(session: MachineSession) -> str:
        return {"b": "fine"}[session.name]

    outcomes = asyncio.run(on_machines(plan_machines(config), config, work, lambda machine, text: None))
    assert [(each.machine, each.result) for each in outcomes] == [("a", None), ("b", "fine")]
    reported = r"a: unexpected error, please report it: KeyError at test_deploy_steps.py:\d+: 'a'"
    assert re.fullmatch(reported, str(outcomes[0].error))


def test_a_rolling_command_stops_at_a_model_whose_first_machine_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = [{"host": f"10.0.0.{at}", "machine": name, "model": "q"} for at, name in enumerate("ab")]
    content = {"decode_servers": servers, "machines": {name: {"ssh": "local"} for name in "ab"}}
    config, asked = load_config(content, {}), []

    async def release(session: MachineSession, link: str = "current") -> None:
        asked.append(session.name)
        raise CommandFailed(session.name, "does not start")

    monkeypatch.setattr(MachineSession, "release", release)
    done = operate("restart", plan_machines(config), config, lambda machine, text: None, ServiceChoice())
    errors = [str(outcome.error) for outcome in asyncio.run(done)]
    assert errors == ["a: does not start", "b: left as it is, because a failed"]
    assert asked == ["a"]


def test_followed_lines_of_a_slower_machine_find_their_place() -> None:
    async def run() -> list[str]:
        queue: asyncio.Queue[LogLine] = asyncio.Queue()
        for time in ("3", "1", "2"):
            queue.put_nowait(LogLine(time, "m", "s", time))
        lines: AsyncIterator[LogLine] = in_order(queue)
        return [(await anext(lines)).text for _ in range(3)]

    assert asyncio.run(run()) == ["1", "2", "3"]


def test_the_kv_path_in_use_is_the_last_that_had_payload() -> None:
    paths = [PathStatus(host="10.0.0.1", port=1, idle_s=9.0), PathStatus(host="10.0.0.2", port=2, idle_s=0.5)]
    assert path_in_use([*paths, PathStatus(host="x", port=3)]) == "10.0.0.2:2"
    assert path_in_use([]) == ""
