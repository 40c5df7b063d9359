"""The lane of `make clients` is whole: every package has a check, a sample and a row in docs/CLIENTS.md."""

import json
import re
from pathlib import Path

import pytest

from tests.clients.__main__ import BEGIN, END
from tests.clients.matrix import CHECKS, CLIENTS, Client, Row, run_client, table
from tests.clients.samples import PAGE, sample_command, samples

FOLDER = CHECKS.parent
HELPERS = {"@ai-sdk/", "node", "zod"}  # beside the clients in package.json


def _table() -> list[str]:
    return PAGE.read_text().split(BEGIN)[1].split(END)[0].splitlines()


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_every_client_has_a_check_a_sample_and_a_row(client: Client) -> None:
    assert (CHECKS / client.script).is_file()
    assert client.name in samples()
    rows = [line for line in _table() if line.startswith(f"| {client.name} |")]
    assert len(rows) == 1
    assert "FAILED" not in rows[0]


def test_every_package_is_checked() -> None:
    packages = json.loads((FOLDER / "package.json").read_text())["dependencies"]
    lines = "".join(path.read_text() for path in FOLDER.glob("requirements*.txt")).splitlines()
    names = {name for name in packages if not name.startswith(tuple(HELPERS))}
    names |= {re.split(r"[\[>]", line)[0] for line in lines if line and not line.startswith("#")} - {"transformers"}
    text = "".join((CHECKS / client.script).read_text() for client in CLIENTS)
    reported = set(re.findall(r"""report(?:_model)?\(\s*['"]([^'"]+)""", text))
    assert {name.replace("-", "_") for name in names} <= {name.replace("-", "_") for name in reported}


def test_a_row_has_what_the_checks_report() -> None:
    row = Row(client=CLIENTS[0])
    for line in ({"version": "1.2"}, {"check": "chat", "note": "a|b"}, {"check": "tools", "error": "TypeError: no"}):
        row.add(line)
    assert table([row]).splitlines()[-1] == "| openai | 1.2 | yes |  |  | FAILED | a/b; tools: TypeError: no |"


def test_a_client_that_crashes_or_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    interpreter = tmp_path / "interpreter"
    monkeypatch.setattr("tests.clients.matrix._interpreter", lambda client: interpreter)
    interpreter.write_text("#!/bin/sh\nexit 7\n")
    interpreter.chmod(0o755)
    row = run_client(CLIENTS[0], {"GATEWAY_URL": ""})
    assert row.errors == ["exit code 7", "its sample: exit code 7"]
    interpreter.write_text("#!/bin/sh\nexec sleep 60\n")
    row = run_client(CLIENTS[0]._replace(limit_s=1), {"GATEWAY_URL": ""})
    assert row.errors == ["not done after 1 s", "its sample: not done after 1 s"]


def test_a_sample_is_run_at_the_gateway() -> None:
    command = sample_command("python", 'print("http://127.0.0.1:8080/v1")', CHECKS, "http://127.0.0.1:1")
    assert command[1:] == ["-c", 'print("http://127.0.0.1:1/v1")']
