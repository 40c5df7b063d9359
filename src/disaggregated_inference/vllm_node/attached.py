"""A vLLM that the user already runs, with this project's connector in its `--kv-transfer-config`."""

import asyncio
import logging
import os
import shlex
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import disaggregated_inference
from disaggregated_inference.errors import BadRequest, DisaggError, EngineUnavailable
from disaggregated_inference.timeouts import VllmTimeouts
from disaggregated_inference.vllm_node.client import UNIX, KeyRefused, NoVllm, ServedModel, VllmAddress, VllmClient
from disaggregated_inference.vllm_node.process import VllmState
from disaggregated_inference.vllm_node.versions import is_known, require_known

log = logging.getLogger(__name__)


class AttachedVllm:
    """The same interface as `VllmProcess`. Starting and restarting it is the user's own business."""

    def __init__(self, url: str, advice: str, timeouts: VllmTimeouts = VllmTimeouts()) -> None:
        """`advice`: what that vLLM must be started with."""
        self.url, self.key = base_url(url), os.environ.get("VLLM_API_KEY", "")
        self.advice, self._timeouts = advice, timeouts
        self.state: VllmState = "loading"
        self.reason = f"waiting for vLLM at {self.url}"
        self.model = ServedModel(id="")
        self._answered_at = time.monotonic()
        self._is_known = True  # its version, as far as it has answered
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="vllm", daemon=True)

    @property
    def stalled_s(self) -> float:
        silent = time.monotonic() - self._answered_at
        return silent if self.state == "ready" and silent > 2 * self._timeouts.health_s else 0.0

    def start(self, begin: Callable[[str], None] = lambda step: None) -> None:
        """Wait until it answers; one that loads is waited for. Raises if it is another version, or no vLLM, or wants
        another key."""
        begin(self.reason)
        deadline, told = time.monotonic() + self._timeouts.attach_s, ""
        while True:
            try:
                asyncio.run(self._look())
                break
            except DisaggError as error:
                if isinstance(error, KeyRefused):
                    raise
                if time.monotonic() > deadline or isinstance(error, NoVllm) or not self._is_known:
                    raise EngineUnavailable(f"{error}. Start it with: {self.advice}") from error
                if told != str(error):
                    begin(told := str(error))
                time.sleep(self._timeouts.poll_s)
        self.state, self.reason = "ready", ""
        self._thread.start()

    def why_stopped(self) -> str:
        """Never: the user may be restarting it, perhaps because this node said how."""
        return ""

    def stop(self) -> None:
        self._closing.set()
        self.state = "stopped"

    async def _look(self) -> None:
        client = VllmClient(lambda: VllmAddress(self.url, self.key), self._timeouts)
        version = await client.version()
        self._is_known = is_known(version)
        require_known(version)
        if not (models := await client.models()):
            raise EngineUnavailable(f"vLLM at {self.url} serves no model")
        self.model, self._answered_at = models[0], time.monotonic()

    def _watch(self) -> None:
        while not self._closing.wait(self._timeouts.health_s):
            try:
                asyncio.run(self._look())
                self.state, self.reason = "ready", ""
            except DisaggError as error:
                if self.state == "ready":
                    log.error("vLLM is away: %s", error)
                self.state, self.reason = "crashed", str(error)


def start_command(model: str, kv_transfer: str, logits_processor: str) -> str:
    """What to type for a vLLM that a node can attach to."""
    words = ["vllm", "serve", model, "--kv-transfer-config", kv_transfer, "--logits-processors", logits_processor]
    return f"pip install --no-deps {_package()} && {shlex.join(words)} --enable-prompt-tokens-details"


def _package() -> str:
    """For pip: the checkout that this runs from, or the package's name."""
    checkout = Path(disaggregated_inference.__file__).parents[2]
    return shlex.quote(str(checkout)) if (checkout / "pyproject.toml").is_file() else "disaggregated-inference"


def base_url(text: str) -> str:
    if text.startswith(UNIX):
        path = Path(text.removeprefix(UNIX).replace("///", "/", 1)).expanduser()
        if not path.is_absolute():
            raise BadRequest(f"--vllm-url: {text!r} is no path: give one such as unix:/run/vllm.sock")
        return UNIX + str(path)
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadRequest(
            f"--vllm-url: {text!r} is no address: give one such as http://127.0.0.1:8000 or unix:/run/vllm.sock"
        )
    return f"{parts.scheme}://{parts.netloc}"
