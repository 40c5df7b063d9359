"""`disagg serve` as a child process on a free port."""

import json
import signal
import tempfile
import urllib.error
import urllib.request
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support.cluster import ready_line
from tests.support.command import read_output
from tests.support.forked import start_command, start_node


class Node:
    """A node process; `ready` is its first line. `forked=False` starts the command as a user does, which is slow."""

    def __init__(self, role: str, *arguments: str, forked: bool = True, **environment: str) -> None:
        start = start_node if forked else start_command
        command = ["serve", "--role", role, "--kv-port", "0", *arguments, "--port", "0"]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in stop
        self.process = start(*command, stderr=self.log, **environment)
        assert self.process.stdout
        self.ready = ready_line(self.process.stdout)
        assert self.ready, read_output(self.log)
        self.url = f"http://127.0.0.1:{self.ready['port']}"

    def ask(self, path: str, body: Any = None, method: str | None = None, token: str = "") -> tuple[int, Any]:
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=240) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def stream(self, path: str, body: Any) -> list[Any]:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=240) as response:
            return [json.loads(line[6:]) for line in response if line.startswith(b"data: ")]

    def logged(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in read_output(self.log).splitlines() if line.startswith("{")]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=30)
        finally:
            self.process.kill()
            self.log.close()
            if self.process.stdout:
                self.process.stdout.close()


def scraped(node: Node) -> dict[str, float]:
    with urllib.request.urlopen(node.url + "/metrics", timeout=30) as response:
        text = response.read().decode()
    return {
        sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
