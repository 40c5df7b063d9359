"""Logs of services: the lines of one start, of one request, and the error among them."""

import subprocess
from pathlib import Path

import pytest

from disaggregated_inference.cluster.deploy.log_lines import find_error
from disaggregated_inference.cluster.services import Place, Service, ServiceManager, manager_of

SERVICE = Service(name="disagg-x", title="x", arguments=())
HEAD = "2026-11-17T05:47:00.123456+0000 dgx1 python[812]: "


@pytest.fixture
def manager(tmp_path: Path) -> ServiceManager:
    (tmp_path / "logs").mkdir()
    return manager_of("background", Place(str(tmp_path), str(tmp_path), "ada", 1000))


def output_of(script: str) -> str:
    return subprocess.run(["sh", "-c", script], check=True, capture_output=True, text=True).stdout


def test_the_error_of_a_service_is_found_in_any_log() -> None:
    """A start that is still on its way has its last line after the error of the start before."""
    lines = [f"{HEAD}error: 'x' is not a size", HEAD + '{"event": "start"}', HEAD + '{"event": "stopping"}']
    assert find_error("\n".join(lines)) == ("error: 'x' is not a size", '{"event": "stopping"}')
    own = '{"time": "t", "level": "info", "logger": "output", "message": "error: no such model"}'
    supervisor = '{"time": "t", "level": "warning", "logger": "supervise", "message": "ended with 1"}'
    assert find_error(f"{own}\n{supervisor}\n")[0] == "error: no such model"
    assert find_error("-- No entries --\n") == ("", "")


def test_lines_of_this_start_alone(manager: ServiceManager) -> None:
    log = Path(manager.place.log(SERVICE.name))
    nothing = output_of(manager.log_end(SERVICE)).strip()
    assert nothing == "0"
    log.write_text("error: old start\n")
    end = output_of(manager.log_end(SERVICE)).strip()
    assert output_of(manager.logs_after(SERVICE, end)) == ""
    log.write_text("error: old start\nnew start\n")
    assert output_of(manager.logs_after(SERVICE, end)) == "new start\n"
    log.write_text("new\n")  # rotated meanwhile
    assert output_of(manager.logs_after(SERVICE, end)) == "new\n"
    assert output_of(manager.logs_after(SERVICE, nothing)) == "new\n"


def test_a_request_is_found_in_rotated_logs(manager: ServiceManager) -> None:
    log = manager.place.log(SERVICE.name)
    for name, text in ((f"{log}.2", "a -x1 first\nb\n"), (f"{log}.1", "-x1 second\n"), (log, "c\n" * 500)):
        Path(name).write_text(text)
    assert output_of(manager.find_in_logs(SERVICE, "-x1")) == "a -x1 first\n-x1 second\n"
    assert output_of(manager.find_in_logs(SERVICE, "none")) == ""


def test_the_journal_is_read_from_a_cursor() -> None:
    systemd = manager_of("systemd", Place("/root", "/root/.disagg", "root", 0))
    assert systemd.logs_after(SERVICE, "s=1;i=2").endswith("'--after-cursor=s=1;i=2'")
    assert "--after-cursor" not in systemd.logs_after(SERVICE, "")
    assert systemd.find_in_logs(SERVICE, "id'1").endswith("grep -F -- 'id'\"'\"'1' || true")
