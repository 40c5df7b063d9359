"""A prefill node and a decode node as processes of this machine: for the demo and for benchmarks."""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import IO, Any

from disaggregated_inference.errors import DisaggError


def shared_cores() -> dict[str, str]:
    """OpenMP threads of two processes that spin for each other make both sixty times slower: half of the cores each."""
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2))}


class LocalNode:
    """A node process; it answers once `ready` has returned."""

    def __init__(self, role: str, engine: str, *arguments: str) -> None:
        self.role, self.engine, self.url = role, engine, ""
        command = [sys.executable, "-m", "disaggregated_inference", "serve", "--role", role]
        command += ["--engine", engine, *arguments]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in stop; a pipe nobody reads would fill up
        self._process = subprocess.Popen(
            [*command, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=shared_cores() | os.environ,
        )

    def ready(self) -> int:
        """Wait for it; returns the port."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise DisaggError(f"the {self.role} node did not start:\n{self._log.read()[-2000:].strip()}")
        port: int = json.loads(line)["port"]
        self.url = f"http://127.0.0.1:{port}"
        return port

    def post(self, path: str, body: dict[str, Any]) -> IO[bytes]:
        try:
            response: IO[bytes] = urllib.request.urlopen(self.url + path, json.dumps(body).encode(), timeout=300)
        except urllib.error.HTTPError as error:
            with error:
                raise DisaggError(json.load(error)["error"]["message"]) from None
        return response

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        with self.post(path, body) as response:
            return json.load(response)

    def stop(self) -> None:
        self._process.terminate()
        self._process.communicate()
        self._log.close()


class StreamedAnswer:
    """An answer as it came: tokens, texts, when the first one was there, and the metrics of both legs."""

    def __init__(self, started: float) -> None:
        self.started = started
        self.tokens: list[int] = []
        self.first_token_s = self.total_s = 0.0
        self.metrics: dict[str, Any] = {}

    def read(self, response: IO[bytes]) -> Iterator[str]:
        """The texts, one by one."""
        for line in response:
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise DisaggError(event["error"]["message"])
            if "token" not in event:
                self.metrics = event["metrics"]
                break
            self.first_token_s = self.first_token_s or time.perf_counter() - self.started
            self.tokens.append(event["token"])
            yield event["text"]
        self.total_s = time.perf_counter() - self.started


def hand_over(
    reader: LocalNode, writer: LocalNode, tokens: list[int], max_tokens: int
) -> tuple[StreamedAnswer, Iterator[str]]:
    """Both legs at once: the fetch begins while the prompt is still being read."""
    written = StreamedAnswer(time.perf_counter())
    context = reader.ask("/prefill", {"tokens": tokens, "wait": False})["context"]
    asked = {"context": context, "max_new_tokens": max_tokens, "stream": True}
    return written, _texts(written, writer, "/decode", asked)


def write_alone(writer: LocalNode, tokens: list[int], max_tokens: int) -> tuple[StreamedAnswer, Iterator[str]]:
    written = StreamedAnswer(time.perf_counter())
    asked = {"tokens": tokens, "max_new_tokens": max_tokens, "stream": True}
    return written, _texts(written, writer, "/generate", asked)


def finished(answer: tuple[StreamedAnswer, Iterator[str]]) -> StreamedAnswer:
    """Read to its end, for those who want no text."""
    for _ in answer[1]:
        pass
    return answer[0]


def _texts(written: StreamedAnswer, node: LocalNode, path: str, asked: dict[str, Any]) -> Iterator[str]:
    with node.post(path, asked) as response:
        yield from written.read(response)
