"""`disagg generate` and `history` as processes over simulated nodes; and the manual of all commands."""

import csv
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from disaggregated_inference.api import FALLBACK_WARNING
from disaggregated_inference.cli.errors import as_data
from disaggregated_inference.cli.main import app
from disaggregated_inference.cli.screen import summary
from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.orchestrator.history import History
from tests.support.cli_processes import COMMAND, LONG, SLOW, TIMEOUT_S, disagg, json_lines, start, write_config
from tests.support.cluster import Process, config_of, free_port
from tests.support.waiting import until

pytestmark = pytest.mark.slow
MANUAL = Path(__file__).parents[2] / "docs" / "CLIENT.md"
REFUSED = "g: it refused the token (401): `token` in the cluster file, else DISAGG_TOKEN, is not the node's"


# generate


def test_an_answer_goes_to_standard_output_and_nothing_else_does(folder: Path) -> None:
    plain = disagg(folder, "generate", "Why?", "--max-tokens", "8", "--temperature", "0")
    assert (plain.returncode, plain.stderr) == (0, "")
    assert re.fullmatch(r"(\[\d{4}\]){8}\n", plain.stdout)
    at_once = disagg(folder, "generate", "Why?", "--max-tokens", "8", "--temperature", "0", "--no-stream")
    assert at_once.stdout == plain.stdout


def test_metrics_go_to_standard_error(folder: Path) -> None:
    run = disagg(folder, "generate", "Why?", "--max-tokens", "8", "--metrics")
    reading, writing = run.stderr.splitlines()
    assert re.fullmatch(
        r"prefill on p1: (\d+ of )?\d+ tokens, [\d.]+ s, [\d.,]+ tok/s; transfer: [\d.]+ ms exposed", reading
    )
    assert re.match(r"decode on d1: 8 tokens, cut at max tokens, [\d.]+ tok/s; disaggregated_simulated, ", writing)


def test_json_has_the_answer_and_the_metrics(folder: Path) -> None:
    run = disagg(folder, "generate", "-", "--max-tokens", "8", "--json", typed="Why?\n")
    (answer,) = json_lines(run)
    assert answer.keys() == {"response", "metrics"}
    assert answer["response"].count("[") == answer["metrics"]["completion_tokens"] == 8
    assert answer["metrics"]["prefill_node"] == "p1"


def test_a_prompt_is_a_message_unless_it_is_raw(folder: Path) -> None:
    def prompt_tokens(*arguments: str, typed: str | None = None) -> int:
        run = disagg(folder, "generate", *arguments, "--max-tokens", "1", "--json", typed=typed)
        tokens: int = json_lines(run)[0]["metrics"]["prompt_tokens"]
        return tokens

    assert prompt_tokens("--raw", "Why?") == len("Why?")  # of this model, a letter is a token
    assert prompt_tokens("--raw", typed="Why?\n") == len("Why?\n")
    alone = prompt_tokens("Why?")
    assert alone == prompt_tokens(typed="Why?\n") > len("Why?")
    assert prompt_tokens("Why?", "--system", "Be brief.") > alone + len("Be brief.")


def test_the_same_seed_gives_the_same_answer(folder: Path) -> None:
    rules = ("--temperature", "2", "--max-tokens", "12", "--seed")
    first, again, other = (disagg(folder, "generate", "Why?", *rules, seed).stdout for seed in ("7", "7", "8"))
    assert first == again != other


def test_an_answer_ends_before_a_stop(folder: Path) -> None:
    whole = disagg(folder, "generate", "Why?", "--max-tokens", "8", "--temperature", "0").stdout.strip()
    cut = disagg(folder, "generate", "Why?", "--max-tokens", "8", "--temperature", "0", "--stop", whole[12:18])
    assert cut.stdout.strip() == whole[:12]


def test_an_answer_follows_a_schema(folder: Path) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    (folder / "schema.json").write_text(json.dumps(schema | {"additionalProperties": False}))
    run = disagg(folder, "generate", "Is it?", "--json-schema", "schema.json", "--max-tokens", "60")
    assert json.loads(run.stdout)["ok"] in (True, False)


def test_ctrl_c_ends_an_answer_on_both_nodes(folder: Path, nodes: list[Process]) -> None:
    with start(folder, "generate", "Why?", "--max-tokens", LONG) as process:
        assert process.stdout
        first_text = process.stdout.read(12)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, err) == (130, "")
    assert (first_text + rest).endswith("]\n")
    assert until(lambda: all(node.nothing_left() for node in nodes))


def test_a_closed_pipe_ends_the_request(folder: Path, nodes: list[Process]) -> None:
    with start(folder, "generate", "Why?", "--max-tokens", LONG) as process:
        assert process.stdout
        process.stdout.read(6)
        process.stdout.close()
        assert process.wait(TIMEOUT_S) == 1
        assert process.stderr
        assert process.stderr.read() == ""
    assert until(lambda: all(node.nothing_left() for node in nodes))


def test_a_fallback_is_always_reported(nodes: list[Process], tmp_path: Path) -> None:
    config = config_of(*nodes, local="auto")
    config["prefill_servers"][0]["port"] = free_port()
    write_config(tmp_path, config)
    run = disagg(tmp_path, "generate", "Why?", "--max-tokens", "2")
    assert run.returncode == 0
    assert run.stderr == f"warning: {FALLBACK_WARNING}: p1: it cannot be reached: connection refused\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate",), "the prompt is empty"),
        (("generate", " "), "the prompt is empty"),
        (("generate", "\udcff"), "the prompt is not valid UTF-8 text"),
        (("generate", "x", "--model", "nope"), 'no model "nope"; the cluster has simulated:tiny'),
        (("generate", "x", "--raw", "--system", "y"), "--system needs a chat template, which --raw does not use"),
        (("generate", "x", "--json-schema", "nowhere"), "--json-schema: cannot read nowhere: No such file"),
        (("generate", "x", "--json-schema", "nowhere"), "; name a file that contains a JSON schema"),
        (("generate", "x", "--json-schema", "notes"), "--json-schema: notes is not JSON"),
        (("generate", "x", "--config", "nowhere"), "nowhere: cannot be read"),
        (("generate", "x", "--timeout", "0.2", "--max-tokens", "99"), "not done within 0.2 s"),
        (("generate", "x", "--max-tokens", "10000000"), "do not fit the context window"),
        (("chat", "--model", "nope"), 'no model "nope"'),
        (("status", "--config", "nowhere"), "nowhere: cannot be read"),
        (("history",), "has no policies.history_file; set it"),
        (("config", "check", "nowhere"), "nowhere: cannot be read"),
    ],
)
def test_mistakes_get_one_clear_line(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    (folder / "notes").write_text("no JSON")
    run = disagg(folder, *arguments)
    assert run.returncode == 1
    assert run.stderr.startswith("error: ")
    assert message in run.stderr
    assert len(run.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("generate", "x", "--model", "nope"), "model_not_found"),
        (("generate", "x", "--json-schema", "nowhere"), "bad_request"),
        (("models", "verify", "smollm2", "nowhere"), "model_not_found"),
        (("generate", "x", "--config", "away.json"), "no_decode_node"),
        (("status", "--config", "nowhere"), "config_error"),
        (("chat", "--config", "nowhere"), "config_error"),
        (("history",), "config_error"),
        (("config", "check", "nowhere"), "config_error"),
        (("models", "inspect", "nowhere"), "model_not_found"),
    ],
)
def test_mistakes_are_json_where_answers_are(folder: Path, arguments: tuple[str, ...], code: str) -> None:
    away = {"decode_servers": [{"host": "127.0.0.1", "port": free_port(), "model": "m"}]}
    (folder / "away.json").write_text(json.dumps(away))
    run = disagg(folder, *arguments, "--json")
    assert run.returncode == 1
    error = json.loads(run.stdout)["error"]
    assert (error.keys(), error["code"]) == ({"code", "message"}, code)


def test_system_errors_have_a_code() -> None:
    assert as_data(OSError("no space left")) == {"code": "os_error", "message": "no space left"}


def test_a_refusal_of_a_node_is_a_bad_request(folder: Path) -> None:
    """So is a refusal by the client itself."""
    with DisaggregatedClient(str(folder / "cluster.json")) as client:
        stops = [str(at) for at in range(17)]
        refused: list[dict[str, Any]] = [{"tokens": []}, {"prompt": ""}, {"prompt": "x", "stop": stops}]
        for options in refused:
            with pytest.raises(BadRequest):
                client.generate(**options)


def test_a_token_is_ruled_out_by_the_cluster_file(folder: Path) -> None:
    config = json.loads((folder / "cluster.json").read_text())
    request: dict[str, Any] = {"prompt": "Why?", "temperature": 0, "max_tokens": 1}
    with DisaggregatedClient(config) as client:
        (token,) = client.generate(**request)[1]["tokens"]
    models = {"simulated:tiny": {"defaults": {"logit_bias": {str(token): -100}}}}
    write_config(folder, config | {"models": config.get("models", {}) | models})
    assert disagg(folder, "config", "check").returncode == 0
    with DisaggregatedClient(str(folder / "cluster.json")) as client:
        assert client.generate(**request)[1]["tokens"] != [token]


def test_arguments_after_two_dashes_are_no_options(folder: Path) -> None:
    run = disagg(folder, "generate", "--model", "nope", "--", "--json")
    assert (run.returncode, run.stdout) == (1, "")


def test_commands_read_the_token(nodes: list[Process], tmp_path: Path) -> None:
    """From the variable or a file; a wrong one is named where it hurts, and never shown."""
    (tmp_path / "right").write_text("SECRET\n")
    secret = ("--token-file", str(tmp_path / "right"))
    guarded = Process("g", "decode", "simulated", "simulated:tiny", *SLOW, *secret).ready()
    (tmp_path / "wrong").write_text("HIDDEN\n")
    ask, place = ("generate", "Why?", "--max-tokens", "2"), f"127.0.0.1:{guarded.port}"
    try:
        write_config(tmp_path, config_of(nodes[0], guarded))
        right = disagg(tmp_path, *ask, "--token-file", "right")
        assert (right.returncode, right.stderr) == (0, "")
        [chat] = json_lines(
            disagg(tmp_path, "chat", "--json", "--max-tokens", "2", typed="Hi\n", DISAGG_TOKEN="SECRET")
        )
        assert chat["error"] is None
        wrong = disagg(tmp_path, *ask, "--token-file", "wrong")
        cause = REFUSED
        assert wrong.stderr == f"error: Decode server unavailable - request failed: {cause}\n"
        status = disagg(tmp_path, "status", DISAGG_TOKEN_FILE="wrong")
        assert re.search(r"^g +decode +- +wrong token ", status.stdout, re.MULTILINE)
        verify = disagg(tmp_path, "models", "verify", place, place, DISAGG_TOKEN="HIDDEN")
        said = f"http://{place} answers with HTTP 401: it refuses the token; compare DISAGG_TOKEN with the node's\n"
        assert verify.stderr.endswith(said)
    finally:
        guarded.end()
    assert [run.returncode for run in (wrong, status, verify)] == [1, 1, 1]
    assert not any("HIDDEN" in run.stdout + run.stderr for run in (wrong, status, verify))


def test_no_command_takes_a_token_on_the_command_line() -> None:
    for command in (["serve"], ["models", "verify", "http://127.0.0.1:1", "http://127.0.0.1:2"]):
        assert "--token " not in CliRunner().invoke(app, [command[0], "--help"]).stdout
        refused = CliRunner().invoke(app, [*command, "--token", "SECRET"]).exception
        assert "everyone on this machine can read it in the process list" in str(refused)
    for name in ("serve", "generate", "chat", "status", "gateway"):
        assert "--token-file FILE" in CliRunner().invoke(app, [name, "--help"]).stdout


# history


def test_history_is_what_the_file_has(nodes: list[Process], tmp_path: Path) -> None:
    write_config(tmp_path, config_of(*nodes, history_file=str(tmp_path / "history.sqlite")))
    assert disagg(tmp_path, "history").stdout == "no requests yet\n"
    assert not (tmp_path / "history.sqlite").exists()
    disagg(tmp_path, "generate", "Why?", "--max-tokens", "8")
    disagg(tmp_path, "generate", "Why?", "--max-tokens", "99", "--timeout", "0.3")
    header, failed, served = disagg(tmp_path, "history").stdout.splitlines()
    assert header.split()[:5] == ["#", "time", "model", "seconds", "ok"]
    assert re.match(r"2  [\d:]{8}  simulated:tiny +\d\.\d\d  deadline_exceeded  ", failed)
    assert re.match(
        r"1  [\d:]{8}  simulated:tiny +\d\.\d\d  yes +[\d.,]+ -> [\d.,]+ +disaggregated_simulated *$", served
    )
    (newest,) = json.loads(disagg(tmp_path, "history", "--count", "1", "--json").stdout)
    assert newest["error"]["code"] == "deadline_exceeded"
    assert len(disagg(tmp_path, "history", "--model", "tiny").stdout.splitlines()) == 3


def test_history_that_cannot_be_read(folder: Path, nodes: list[Process]) -> None:
    write_config(folder, config_of(*nodes, history_file=str(folder / "damaged")))
    (folder / "damaged").write_text("this is no database, and long enough to be seen as none at once")
    run = disagg(folder, "history")
    assert run.returncode == 1
    assert "error: the history file" in run.stderr


def test_history_is_longer_than_memory(folder: Path, nodes: list[Process]) -> None:
    file = folder / "history.sqlite"
    write_config(folder, config_of(*nodes, history=2, history_file=str(file)))
    history = History(100, str(file))
    for number in range(8):
        history.add({"model": "m", "time": float(number), "ok": True})
    history.close()
    lines = disagg(folder, "history", "-n", "5").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["#", "1", "2", "3", "4", "5"]


def test_history_as_csv_and_by_time(folder: Path, nodes: list[Process]) -> None:
    file = folder / "history.sqlite"
    write_config(folder, config_of(*nodes, history_file=str(file)))
    history, now = History(100, str(file)), time.time()
    for hours in range(3):
        plan = {"plan": "=1+1", "request_id": f"r{hours}", "decode_node": nodes[1].name if hours else "other"}
        history.add({"model": "simulated:tiny", "time": now - hours * 3600, "ok": False, "error": {"code": "x"}} | plan)
    history.close()
    rows = list(csv.DictReader(disagg(folder, "history", "--csv").stdout.splitlines()))
    assert [(row["request_id"], row["error"], row["plan"]) for row in rows] == [
        (f"r{hours}", "x", "'=1+1") for hours in (2, 1, 0)
    ]
    assert rows[0]["time"] == time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now - 7200))
    recent = json.loads(disagg(folder, "history", "--json", "--since", "90m").stdout)
    assert [row["request_id"] for row in recent] == ["r0", "r1"]
    assert len(disagg(folder, "history", "--since", "90m", "--node", nodes[1].name).stdout.splitlines()) == 2
    assert disagg(folder, "history", "--until", "1d").stdout == "no requests in this time\n"
    for wrong, message in (
        (("--since", "soon"), "--since: 'soon' is no time; give how long ago"),
        (("--csv", "--json"), "--csv and --json exclude each other"),
        (("--node", "q"), "--node: no node has the name 'q'; there are"),
    ):
        run = disagg(folder, "history", *wrong)
        assert run.returncode == 1
        assert message in run.stderr


def test_a_failover_is_in_the_summary() -> None:
    failover = {"node": "d1", "code": "unreachable", "message": "it does not answer", "stall_s": 0.456}
    metrics = {"prefill_node": "p1", "prompt_tokens": 50, "prefill_time": 0.5, "prefill_speed": 60.0}
    metrics |= {
        "decode_node": "d2",
        "completion_tokens": 7,
        "decode_speed": 1234.5,
        "method": "local",
        "plan": "local",
    }
    assert summary(metrics | {"failovers": [failover], "exposed_transfer_time": 0.0025}) == [
        "prefill on p1: 30 of 50 tokens, 0.500 s, 60.0 tok/s; transfer: 2.5 ms exposed",
        "decode on d2: 7 tokens, 1,234 tok/s; local, local",
        "failover: d1: it does not answer (unreachable), 0.46 s without a token",
    ]


# the manual


@pytest.mark.parametrize("number", range(len(re.findall(r"^```python$", MANUAL.read_text(), re.MULTILINE))))
def test_samples_of_the_manual_run(number: int, nodes: list[Process], tmp_path: Path) -> None:
    models = {"qwen3-coder:30b": {"aliases": ["simulated:tiny"], "defaults": {"max_tokens": 8}}}
    write_config(tmp_path, config_of(*nodes) | {"models": models})
    sample = re.findall(r"^```python\n(.*?)^```$", MANUAL.read_text(), re.MULTILINE | re.DOTALL)[number]
    run = subprocess.run(
        [sys.executable, "-c", sample], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout


def test_commands_of_the_manual_exist() -> None:
    for name in ("generate", "chat", "status", "history"):
        help_text = subprocess.run([*COMMAND, name, "--help"], capture_output=True, text=True, timeout=TIMEOUT_S).stdout
        wanted = set(re.findall(rf"disagg {name}[^\n]*", MANUAL.read_text()))
        assert wanted
        assert {option for line in wanted for option in re.findall(r"--[a-z-]+", line)} <= set(
            re.findall(r"--[a-z-]+", help_text)
        )
