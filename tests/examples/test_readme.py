"""The README from top to bottom: every fenced command runs, in order, in a fresh folder, and prints what is promised.
The embedded model stands for large ones, loopback for the addresses; answers of 64 and 200 tokens have 16.

`make` uses the environment of the tests, and does not install it again. `make test` and `make quick` lint for real; one
file of tests stands for all, which this test is a part of, and mypy prints its version. The package is built and
installed by `pip install` into an environment of its own, and what follows uses that; its dependencies are those of the
tests. `make grade-demo` runs with three students and without its models, which judge for minutes."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from disaggregated_inference.models import ModelFiles
from tests.support.cluster import free_port
from tests.support.command import read_output
from tests.support.waiting import until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COMMANDS = ("make", "disagg", "pip", "export", "curl")
LONG_S = 240.0


def blocks() -> Iterator[tuple[str, list[str]]]:
    """Language and lines of each fenced block; comments behind commands left out."""
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S):
        yield language, re.sub(r"(max.tokens\W+)(64|200)\b", r"\g<1>16", text.rstrip()).splitlines()


def shape(line: str) -> str:
    """Without numbers and widths, which differ from run to run."""
    return " ".join(re.sub(r"\d[\d.,]*", "#", line).split())


class Walk:
    def __init__(self, folder: Path, embedded: ModelFiles) -> None:
        self.folder, self.embedded = folder, embedded
        self.port, self.ports = free_port(), {"prefill": free_port(), "decode": free_port()}
        self.env = os.environ | {"DISAGG_HOME": str(folder / "home"), "COLUMNS": "200"}
        self.env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        for name in ("CONFIG", "TOKEN", "TOKEN_FILE", "IDENTITY", "KEYS"):
            self.env.pop(f"DISAGG_{name}", None)
        self.env.pop("MAKEFLAGS", None)
        models = folder / "home" / "models"
        models.mkdir(parents=True)
        (models / embedded.path.name).symlink_to(embedded.path)
        self.python = sys.executable
        self.printed, self.running, self.ran = "", list[tuple[subprocess.Popen[str], IO[str]]](), list[str]()

    def block(self, language: str, lines: list[str]) -> None:
        if language == "python":
            self.call([self.python, "-W", "error::ResourceWarning", "-c", "\n".join(lines)])
            assert self.printed.startswith("disaggregated_mlx "), self.printed
            assert "Unclosed" not in self.printed
        elif lines[0].split()[0] in COMMANDS:
            for line in lines:
                self.command(re.sub(r"\s+#.*", "", line))
        else:
            real = {shape(line) for line in self.printed.splitlines()}
            promised = [shape(line) for line in lines if line and not line.endswith("...")]
            assert [line for line in promised if line not in real] == [], self.printed

    def command(self, line: str) -> None:
        self.ran.append(line)
        for pattern, run in _STEPS:
            if match := re.fullmatch(pattern, line):
                return run(self, match)
        raise AssertionError(f"the README has a command that this test does not know: {line}")

    def make(self, target: str, *options: str) -> None:
        made = ("--no-print-directory", f"--old-file={sys.prefix}/.ready", f"VENV={sys.prefix}")
        self.call(["make", *made, target, *options], folder=ROOT)

    def demo(self, _: "re.Match[str]") -> None:
        self.make("demo")

    def grade_demo(self, _: "re.Match[str]") -> None:
        """Without models, which judge for minutes."""
        self.end()  # what follows starts nodes of its own
        reports = self.folder / "grade-demo"
        self.make("grade-demo", f"ARGS={reports} --no-models --students 3")
        assert list(reports.rglob("*.html")), self.printed

    def lane(self, match: "re.Match[str]") -> None:
        self.make(match[1], "--dry-run")
        assert ('-m "not slow"' in self.printed) == (match[1] == "quick")
        python = f"{sys.prefix}/bin/python"
        assert re.search(rf"{re.escape(python)} -m pytest -n \d", self.printed), "all tests, by several processes"
        one = f"PYTEST={python} -m pytest -p no:cacheprovider --noconftest tests/test_lanes.py"
        self.make(match[1], one, "PARALLEL=", f"MYPY={sys.prefix}/bin/mypy --version")
        for said in ("All checks passed!", "files already formatted", "mypy ", " passed in "):
            assert said in self.printed, self.printed

    def install(self, match: "re.Match[str]") -> None:
        assert match[1] in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        if self.python == sys.executable:
            self.own_environment()
        pip = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check"]
        self.call([*pip, *shlex.split(match[0])[1:], "--no-deps", "--no-index", "--no-build-isolation"], folder=ROOT)
        self.call([self.python, "-c", "import disaggregated_inference; print(disaggregated_inference.__file__)"])
        assert self.printed.startswith(str(self.folder)), "what was installed is used"

    def own_environment(self) -> None:
        venv = self.folder / "venv"
        self.call([sys.executable, "-m", "venv", "--without-pip", str(venv)])
        (packages,) = venv.glob("lib/python*/site-packages")
        (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
        self.python, self.env["PATH"] = str(venv / "bin" / "python"), f"{venv / 'bin'}{os.pathsep}{self.env['PATH']}"
        self.env.pop("PYTHONPATH", None)

    def export(self, match: "re.Match[str]") -> None:
        """Both machines are this one: it is spark."""
        self.env[match[1]] = match[2].replace("~/identity", str(self.folder / "home" / "keys" / "spark"))

    def up(self, match: "re.Match[str]") -> None:
        output = self.start(f"{match[0]} --port {free_port()}", lambda text: "Ctrl-C stops all" in text)
        self.printed = output

    def serve(self, match: "re.Match[str]") -> None:
        role, addressed = match[1], re.sub(r"--host \S+", "--host 127.0.0.1", match[0])
        kv = f" --kv-port {free_port()}" if role == "prefill" else ""
        self.start(f"{addressed} --port {self.ports[role]}{kv}", lambda text: '"event": "ready"' in text)

    def gateway(self, match: "re.Match[str]") -> None:
        self.start(f"{match[0]} --port {self.port}", lambda text: '"event": "ready"' in text)

    def example(self, match: "re.Match[str]") -> None:
        """Edited, as the README says."""
        self.shell(match)
        example = json.loads((self.folder / "cluster.json").read_text())
        servers = {
            f"{role}_servers": [{"host": "127.0.0.1", "port": port, "model": "qwen3-coder:30b", "name": role}]
            for role, port in self.ports.items()
        }
        models = {"qwen3-coder:30b": {"aliases": ["qwen"], "defaults": {"max_tokens": 16}}}
        assert example.keys() >= servers.keys()
        config = servers | {"models": models, "policies": {"local": "never"}}
        (self.folder / "cluster.json").write_text(json.dumps(config))

    def shell(self, match: "re.Match[str]") -> None:
        line = match[0].replace("/path/to/Qwen3-Coder-30B-A3B-Instruct", str(self.embedded.path))
        line = line.replace("192.168.100.1:8000", f"127.0.0.1:{self.ports['prefill']}")
        line = re.sub(r"192\.168\.100\.\d", "127.0.0.1", line)
        self.call(["bash", "-c", line], typed="Hello.\n")

    def doctor(self, match: "re.Match[str]") -> None:
        """This machine may have no ssh server, and says so."""
        self.call(shlex.split(match[0]), codes=(0, 3, 4))
        assert "findings are ok" in self.printed

    def chat(self, match: "re.Match[str]") -> None:
        self.call([*shlex.split(match[0]), "--max-tokens", "8"], typed="Hello.\n")
        assert self.printed.strip()

    def curl(self, match: "re.Match[str]") -> None:
        line = match[0].replace("127.0.0.1:8080", f"127.0.0.1:{self.port}")
        self.call(["bash", "-c", line.replace("curl ", "curl --silent --show-error ", 1)])
        assert json.loads(self.printed.splitlines()[-1])["model"] == "qwen", self.printed

    def call(
        self, command: list[str], typed: str = "", folder: Path | None = None, codes: tuple[int, ...] = (0,)
    ) -> None:
        options = {"cwd": folder or self.folder, "env": self.env, "timeout": LONG_S, "input": typed}
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)  # type: ignore[call-overload]
        self.printed = done.stdout
        assert done.returncode in codes, (command, self.printed)

    def start(self, line: str, ready: Callable[[str], bool]) -> str:
        output = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in end
        process = subprocess.Popen(
            shlex.split(line), cwd=self.folder, env=self.env, stdout=output, stderr=output, text=True
        )
        self.running.append((process, output))
        assert until(lambda: ready(read_output(output)) or process.poll() is not None, LONG_S)
        assert process.poll() is None, read_output(output)
        return read_output(output)

    def end(self) -> None:
        for process, output in reversed(self.running):
            process.terminate()
            assert process.wait(LONG_S) in (0, 130), read_output(output)
            output.close()
        self.running.clear()


_STEPS: list[tuple[str, Callable[[Walk, "re.Match[str]"], None]]] = [
    (r"make demo", Walk.demo),
    (r"make grade-demo", Walk.grade_demo),
    (r"make (test|quick)", Walk.lane),
    (r"pip install '\.\[(\w+)\]'", Walk.install),
    (r"export (\w+)=(\S+)", Walk.export),
    (r"disagg up", Walk.up),
    (r"disagg serve --role (\w+) .*", Walk.serve),
    (r"disagg gateway .*", Walk.gateway),
    (r"disagg config example > cluster.json", Walk.example),
    (r"disagg doctor.*", Walk.doctor),
    (r"disagg chat.*", Walk.chat),
    (r"disagg .*", Walk.shell),
    (r"curl .*", Walk.curl),
]


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("make")), reason="the README calls make and curl")
def test_every_command_of_the_readme(tmp_path: Path, smollm2: ModelFiles) -> None:
    walk = Walk(tmp_path, smollm2)
    try:
        for language, lines in blocks():
            walk.block(language, lines)
        walk.end()
    finally:
        for process, output in walk.running:
            process.kill()
            process.wait()
            output.close()
    assert len(walk.ran) >= 20, walk.ran
