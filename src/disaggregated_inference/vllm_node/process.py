"""A vLLM that this node starts: in an environment of its own, watched, restarted with back-off, never orphaned."""

import asyncio
import logging
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import disaggregated_inference
from disaggregated_inference.errors import BadRequest, DisaggError, EngineFailed, EngineUnavailable
from disaggregated_inference.timeouts import VllmTimeouts
from disaggregated_inference.vllm_node.client import UNIX, VllmAddress, VllmClient
from disaggregated_inference.vllm_node.guard import end_session
from disaggregated_inference.vllm_node.log_lines import VllmLog, failure
from disaggregated_inference.vllm_node.versions import VllmBuild

log = logging.getLogger(__name__)

VllmState = Literal["loading", "ready", "crashed", "stopped"]
Launch = Callable[[str, str, str], tuple[list[str], dict[str, str]]]  # socket, key, folder: command, environment
_MAX_SOCKET_BYTES = 107  # of a path, by the system
_SIGNALLED = 128  # the guard's exit code for a command that a signal ended, plus the signal


class VllmProcess:
    """`launch` makes the command and the environment of each run. The thread `vllm` owns the process and lives as long
    as this object; `on_change` is called on it when vLLM becomes ready or has died."""

    def __init__(
        self,
        launch: Launch,
        build: VllmBuild,
        on_change: Callable[[VllmState], None] = lambda state: None,
        timeouts: VllmTimeouts = VllmTimeouts(),
    ) -> None:
        self._launch, self._on_change, self._timeouts = launch, on_change, timeouts
        self.key = secrets.token_urlsafe(32)
        self.state: VllmState = "loading"
        self.reason = "starting"
        self.url, self.starts = "", 0
        self._build = build
        self._client = VllmClient(lambda: VllmAddress(self.url, self.key), timeouts)
        self._answered_at = time.monotonic()
        self._error: DisaggError | None = None
        self._first, self._closing = threading.Event(), threading.Event()
        self._guard: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._supervise, name="vllm", daemon=True)

    @property
    def stalled_s(self) -> float:
        """How long a ready vLLM has not answered its health check."""
        silent = time.monotonic() - self._answered_at
        return silent if self.state == "ready" and silent > 2 * self._timeouts.health_s else 0.0

    def start(self, begin: Callable[[str], None] = lambda step: None) -> None:
        """Wait until vLLM is ready. Raises why it is not: a first start that fails is not tried again."""
        self._thread.start()
        step = ""
        while not self._first.wait(self._timeouts.poll_s):
            if self.reason != step:
                step = self.reason
                begin(f"vLLM: {step}")
        if self._error:
            self.stop()
            raise self._error

    def why_stopped(self) -> str:
        """Of a start: it will not come back by itself."""
        return self.reason if self.state != "ready" else ""

    def stop(self) -> None:
        """End vLLM and all its processes. In-flight requests are lost: drain before."""
        self._closing.set()
        self._end_guard()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(self._timeouts.stop_s + self._timeouts.kill_s)
        self._tell("stopped", "the node is stopping")

    def _end_guard(self) -> None:
        """It sees the end of its standard input, and ends vLLM's whole session."""
        guard = self._guard
        if guard and guard.stdin and guard.poll() is None:
            guard.stdin.close()

    def _supervise(self) -> None:
        wait_s = self._timeouts.restart_s
        while not self._closing.is_set():
            ready_s = self._run()
            if self._closing.is_set() or not self._first.is_set():
                break
            wait_s = self._timeouts.restart_s if ready_s > self._timeouts.settled_s else wait_s
            self._tell("crashed", f"{self._error}; it starts again in {wait_s:g} s")
            log.error("vLLM died: %s", self.reason)
            self._closing.wait(wait_s)
            wait_s = min(2 * wait_s, self._timeouts.max_restart_s)
        self._first.set()

    def _run(self) -> float:
        """One run of vLLM, to its end; returns for how many seconds it was ready."""
        written, self.starts = VllmLog(self._closing.is_set), self.starts + 1
        self._tell("loading", written.step)
        try:
            with run_folder(self._build) as folder:
                command, environ = self._launch(_socket_in(folder), self.key, folder)
                self._guard = guard = spawn_guarded(command, environ, self._timeouts.stop_s)
                self.url = UNIX + _socket_in(folder)
                return self._run_to_its_end(guard, written)
        except Exception as error:
            self._end_guard()
            self._error = error if isinstance(error, DisaggError) else EngineFailed(f"vLLM does not start: {error!r}")
            return 0.0

    def _run_to_its_end(self, guard: "subprocess.Popen[str]", written: VllmLog) -> float:
        reader = threading.Thread(target=_read, args=(guard, written), name="vllm-log", daemon=True)
        reader.start()
        ready_at = self._watch(guard, written)
        code = guard.wait()
        end_session(guard.pid)  # a guard that was killed could not
        reader.join(self._timeouts.kill_s)
        stopping = EngineUnavailable("vLLM was ended: this node is stopping")
        failed = failure(written.lines, _SIGNALLED - code if code > _SIGNALLED else code)
        self._error = stopping if self._closing.is_set() else failed
        return time.monotonic() - ready_at if ready_at else 0.0

    def _watch(self, guard: "subprocess.Popen[str]", written: VllmLog) -> float:
        """Until the end of the process; returns when vLLM became ready, or 0."""
        ready_at, began_at = 0.0, time.monotonic()
        while guard.poll() is None:
            if self._closing.is_set():
                self._end_guard()
            elif asyncio.run(self._client.is_healthy()):
                self._answered_at = time.monotonic()
                if not ready_at:
                    ready_at = self._answered_at
                    self._tell("ready", "")
                    self._first.set()
            elif not ready_at:
                self._tell("loading", written.step)
                if time.monotonic() - began_at > self._timeouts.load_s:
                    written.add(f"ERROR TimeoutError: it was not ready within {self._timeouts.load_s:g} s")
                    self._end_guard()
            self._closing.wait(self._timeouts.poll_s if not ready_at else self._timeouts.health_s)
        return ready_at

    def _tell(self, state: VllmState, reason: str) -> None:
        changed, self.state, self.reason = state != self.state, state, reason
        if changed:
            self._on_change(state)


def _read(guard: "subprocess.Popen[str]", written: VllmLog) -> None:
    assert guard.stdout
    with guard.stdout:
        for line in guard.stdout:
            written.add(line)


def _socket_in(folder: str) -> str:
    """Where vLLM's HTTP API listens. No other user can reach it, not even the paths that need no key."""
    path = os.path.join(folder, "http.sock")
    if len(os.fsencode(path)) > _MAX_SOCKET_BYTES:
        raise BadRequest(f"the path of vLLM's HTTP socket is too long for the system: set TMPDIR to less than {folder}")
    return path


def spawn_guarded(
    command: Sequence[str], environ: dict[str, str], stop_s: float = VllmTimeouts().stop_s
) -> "subprocess.Popen[str]":
    """Its guard ends all of it when standard input is closed, also by the end of this process."""
    script = str(Path(__file__).with_name("guard.py"))
    return subprocess.Popen(
        [sys.executable, "-I", "-S", script, str(stop_s), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environ,
        start_new_session=True,  # Ctrl-C reaches this process alone
    )


def run_folder(build: VllmBuild) -> "tempfile.TemporaryDirectory[str]":
    """A folder of this user alone, for one run. For vLLM's `PYTHONPATH` it holds this package and nothing else: the
    folder that the package really lies in may hold another torch. A nameless vLLM finds its name there."""
    folder: tempfile.TemporaryDirectory[str] = tempfile.TemporaryDirectory(
        prefix="disagg-vllm-", ignore_cleanup_errors=True
    )
    package = Path(disaggregated_inference.__file__).parent
    (Path(folder.name) / package.name).symlink_to(package, target_is_directory=True)
    if build.nameless:
        about = Path(folder.name) / f"vllm-{build.version}+cpu.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {build.version}+cpu\n")
    return folder
