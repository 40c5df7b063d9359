"""`disagg top`: its picture at every size, and in a real terminal."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from rich.console import Console

from disaggregated_inference.cli.top_feed import TopState
from disaggregated_inference.cli.top_screen import render
from disaggregated_inference.gateway.key_file import new_key
from disaggregated_inference.orchestrator import summary
from tests.support.cluster import Process, free_port
from tests.support.command import disagg
from tests.support.gateway import GatewayProcess, gateway_process, simulated_config, simulated_pair
from tests.support.waiting import until


def node_of(name: str, **more: Any) -> dict[str, Any]:
    usual = {"name": name, "role": "decode", "state": "healthy", "usable": True, "why": "", "waiting": 1, "running": 1}
    usual |= {"slots": {"used": 1, "most": 8}, "url": "http://169.254.150.103:8001", "readings": None}
    return usual | more


SPARK: dict[str, Any] = {
    "cpu_share": 0.07,
    "memory_used_bytes": 80 << 30,
    "memory_total_bytes": 119 << 30,
    "memory_shared": True,
}
SPARK |= {"power_w": 61.4, "gpus": [{"name": "NVIDIA GB10", "utilisation": 0.95, "temperature_c": 64}]}


def request_of(number: int, **more: Any) -> dict[str, Any]:
    usual = {"time": 1000.0 + number, "model": "qwen3-coder:30b", "ok": True, "total_time": 9.3, "prefill_time": 0.8}
    usual |= {"prefill_speed": 1500.0, "decode_time": 8.5, "decode_speed": 60.0, "completion_tokens": 500}
    return usual | {"method": "disaggregated_mlx", "energy_j": 812.0, "energy_source": "measured"} | more


def state_of(
    nodes: int = 4, requests: int = 20, models: tuple[str, ...] = ("qwen3-coder:30b", "gpt-oss:120b")
) -> TopState:
    state = TopState("http://127.0.0.1:8080")
    found = [node_of(f"mac-studio-{n}", readings=SPARK if n == 0 else None) for n in range(nodes)]
    cluster = {"verdict": "all up", "nodes": found, "models": dict.fromkeys(models, "all up")}
    history = [request_of(n) for n in range(requests)][::-1]
    state.began(cluster | {"history": history, "summary": msgspec.to_builtins(summary(history, models))}, {})
    return state


def picture(state: TopState, width: int = 80, height: int = 24) -> list[str]:
    with open(os.devnull, "w") as nowhere:
        console = Console(width=width, height=height, file=nowhere, record=True, highlight=False, markup=False)
        console.print(render(state, width, height, now=0.0))
        return console.export_text().splitlines()


def test_the_screen_as_the_user_drew_it() -> None:
    state = state_of()
    state.requests.appendleft(request_of(99, ok=False, error={"code": "no_decode_node"}, energy_j=None))
    lines = picture(state)
    text = "\n".join(lines)
    assert "all up  http://127.0.0.1:8080" in lines[0]
    assert "qwen3-coder:30b" in lines[1]
    assert "All requests" in lines[1]
    assert "Prefill  0.80s 1,500 t/s" in text
    assert "Total    9.30s med of 20" in text
    assert "Decode   8.50s  60.0 t/s" in text
    assert "no answer yet" in text, "the other model"
    assert "Speedup" in text
    first = next(line for line in lines if line.startswith("mac-studio-0"))
    assert first.split()[-5:] == ["7%", "80/119G", "95%", "61W", "64°C"]
    assert first.split()[-6] == "0/1/8", "a request in a slot does not wait"
    other = next(line for line in lines if line.startswith("mac-studio-1"))
    assert other.split()[-5:] == ["-"] * 5, "what a machine does not tell is not invented"
    assert "no_decode_node" in text
    assert "812J meas" in text


def test_a_cached_prompt_has_no_speed() -> None:
    state = state_of(requests=0)
    request = request_of(1, prompt_tokens=800, cached_tokens=799, prefill_speed=0.4)
    state.requests.appendleft(request)
    state.happened("summary", msgspec.to_builtins(summary([request], ["qwen3-coder:30b"])))
    text = "\n".join(picture(state))
    assert "cached -> 60.0" in text
    assert "Prefill  0.80s    cached" in text


@pytest.mark.parametrize("nodes", [0, 1, 4, 16])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 20), (40, 10), (200, 60), (20, 5), (10, 4)])
@pytest.mark.parametrize("models", [(), ("m",), ("a very long name of a model/" * 3, "b", "c", "d", "e")])
def test_it_fits_every_screen(nodes: int, width: int, height: int, models: tuple[str, ...]) -> None:
    for requests in (0, 1, 50):
        lines = picture(state_of(nodes, requests, models), width, height)
        assert len(lines) <= height
        assert all(len(line.rstrip()) <= width for line in lines)


def test_alarms_and_troubles_come_first() -> None:
    state = state_of()
    assert state.status
    state.status["nodes"][0] |= {"why": "it does not answer", "state": "unreachable", "usable": False}
    alarm = {"name": "fallback_share", "state": "alarm", "measured": 12.5, "limit": 5, "unit": "%"}
    state.judged({"alarms": [alarm | {"what": "answers by fallback", "why": "look there"}]})
    lines = picture(state, 100)
    assert lines[1].startswith("ALARM answers by fallback: 12.5 %, limit 5; look there")
    assert lines[2].startswith("mac-studio-0: it does not answer")
    state.trouble = "Connection refused"
    assert "reconnecting: Connection refused" in picture(state, 70)[0]
    assert "connecting" in picture(TopState("http://x"))[0]


def test_text_of_nodes_and_clients_cannot_draw() -> None:
    state = state_of(nodes=1, requests=0)
    assert state.status
    state.status["nodes"][0] |= {"name": "a\x1b[31mb\nc", "why": "x\x1b]0;title\x07y\r\n"}
    state.requests.appendleft(request_of(1, model="\x1b[2J[red]m"))
    text = "\n".join(picture(state))
    assert not any(bad in text for bad in ("\x1b", "\x07", "\r"))
    assert "[red]m" in text


# In a terminal, with a real gateway.


class Terminal:
    """A child process on a pty of its own."""

    def __init__(self, *arguments: str, columns: int = 80, lines: int = 24) -> None:
        self._ours, theirs = pty.openpty()
        self.resize(columns, lines, None)
        command = [sys.executable, "-m", "disaggregated_inference", *arguments]
        environment = os.environ | {"TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        self.settings = termios.tcgetattr(theirs)
        self._theirs, self.shown, self._done = theirs, b"", threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while not self._done.is_set():
            if select.select([self._ours], [], [], 0.05)[0]:
                self.shown += os.read(self._ours, 65536)

    def resize(self, columns: int, lines: int, pid: int | None) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        if pid:
            os.kill(pid, signal.SIGWINCH)

    def type(self, text: bytes) -> None:
        os.write(self._ours, text)

    def sees(self, text: str, since: int = 0) -> bool:
        """After the first `since` bytes of what it showed."""
        return until(lambda: text.encode() in self.shown[since:], 60)

    def ended(self) -> int:
        return self.process.wait(60)

    def is_as_before(self) -> bool:
        return bool(termios.tcgetattr(self._theirs) == self.settings)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._done.set()
        self._reader.join()
        os.close(self._ours)
        os.close(self._theirs)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Process, Process]]:
    with simulated_pair() as pair:
        yield pair


@pytest.mark.slow
def test_in_a_terminal(pair: tuple[Process, Process], tmp_path: Path) -> None:
    """Shows requests as they end, follows the window, waits for a gateway that restarts, and quits cleanly."""
    port = str(free_port())
    gateway = GatewayProcess(tmp_path, simulated_config(*pair), "--port", port).ready()
    terminal = Terminal("top", "--url", gateway.url)
    try:
        assert terminal.sees("all up"), terminal.shown
        before = len(terminal.shown)
        answer = httpx.post(f"{gateway.url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=60)
        assert answer.status_code == 200
        assert terminal.sees("med of 1", before)
        assert until(lambda: b"\x1b[?1049h" in terminal.shown), "a screen of its own"
        before = len(terminal.shown)
        terminal.resize(60, 20, terminal.process.pid)
        assert terminal.sees("╮", before), "it draws again"
        gateway.end()
        assert terminal.sees("reconnecting")
        before = len(terminal.shown)
        gateway = GatewayProcess(tmp_path, simulated_config(*pair), "--port", port).ready()
        assert terminal.sees("all up", before)
        terminal.type(b"x")
        time.sleep(0.1)
        assert terminal.process.poll() is None, "only q quits"
        terminal.type(b"q")
        assert terminal.ended() == 0
        assert until(lambda: b"\x1b[?1049l" in terminal.shown), "the old screen is back"
        assert terminal.is_as_before()
    finally:
        terminal.close()
        gateway.end()


@pytest.mark.slow
def test_ctrl_c_and_refusals(pair: tuple[Process, Process], tmp_path: Path) -> None:
    key = new_key("root", tmp_path / "keys.json", operator=True)
    limited = new_key("some", tmp_path / "keys.json", models=["other"])
    with gateway_process(tmp_path, simulated_config(*pair), "--keys", str(tmp_path / "keys.json")) as gateway:
        (tmp_path / "key").write_text(key)
        terminal = Terminal("top", "--url", gateway.url, "--token-file", str(tmp_path / "key"))
        try:
            assert terminal.sees("all up")
            terminal.process.send_signal(signal.SIGINT)
            assert terminal.ended() == 0
            assert terminal.is_as_before()
        finally:
            terminal.close()
        asked = ("--url", gateway.url, "--token-file", str(tmp_path / "key"))
        once = disagg("top", "--once", *asked)
        assert once.returncode == 0
        assert "simulated:tiny" in once.stdout
        assert '"verdict": "all up' in disagg("top", "--json", *asked).stdout
        terminal = Terminal("top", "--url", gateway.url)
        try:
            assert terminal.sees("needs an API key: set DISAGG_TOKEN, or give --token-file FILE")
            assert terminal.ended() == 1
        finally:
            terminal.close()
        wrong = disagg("top", "--once", "--url", f"http://127.0.0.1:{pair[1].port}")
        assert "is no gateway of this version: it has no /cluster" in wrong.stderr
        (tmp_path / "key").write_text(limited)
        refused = disagg("top", "--once", *asked)
        assert "limited to some models" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("localhost:8080", "error: --url: 'localhost:8080' is no address of a gateway; give one such as http://"),
        ("http://127.0.0.1:1", "error: http://127.0.0.1:1: no gateway answers there: Connection refused"),
    ],
)
def test_mistakes(url: str, message: str) -> None:
    run = disagg("top", "--once", "--url", url)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith(message)
