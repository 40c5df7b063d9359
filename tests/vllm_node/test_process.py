"""The supervisor of the child: what a node that stops says of it. tests/vllm has the same with the real vLLM."""

import logging
import os
import sys
import threading
from pathlib import Path

import pytest

from disaggregated_inference.errors import DisaggError
from disaggregated_inference.timeouts import VllmTimeouts
from disaggregated_inference.vllm_node.process import VllmProcess
from disaggregated_inference.vllm_node.versions import VllmBuild
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="the guard looks into /proc")

# Loads for ever and does not end on SIGTERM, so that it has to be killed.
LOADING = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print("ERROR 11-19 06:00:00 [core.py:1] EngineCore died", flush=True))
print("INFO 11-19 06:00:00 [gpu.py:1] Starting to load model", flush=True)
while True:
    time.sleep(600)
"""


def test_a_node_that_stops_while_vllm_loads_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM is killed, as the system kills a process for its memory: the two must not be told as one."""
    caplog.set_level(logging.INFO)
    timeouts = VllmTimeouts(stop_s=1.0)
    launch = [sys.executable, "-c", LOADING], dict(os.environ)
    process = VllmProcess(lambda socket, key, folder: launch, VllmBuild(version="0.32.0"), timeouts=timeouts)
    errors: list[DisaggError] = []

    def start() -> None:
        try:
            process.start()
        except DisaggError as error:
            errors.append(error)

    starting = threading.Thread(target=start)
    starting.start()
    assert until(lambda: process.reason == "loading weights", 60)
    process.stop()
    starting.join(60)
    assert [str(error) for error in errors] == ["vLLM was ended: this node is stopping"]
    assert process.state == "stopped"
    assert "EngineCore died" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
