"""`disagg generate`, `chat`, `status` and `history` as processes over simulated nodes; and their manual."""

import csv
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from disaggregated_inference.api import FALLBACK_WARNING, ClusterStatus
from disaggregated_inference.cli.errors import as_data
from disaggregated_inference.cli.line_reader import LineReader
from disaggregated_inference.cli.main import app
from disaggregated_inference.cli.screen import summary
from disaggregated_inference.cli.status import render
from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.orchestrator.history import History
from tests.support.cluster import Process, config_of, free_port, state_of
from tests.support.command import run_forked
from tests.support.waiting import until

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "disaggregated_inference"]
MANUAL = Path(__file__).parents[2] / "docs" / "CLIENT.md"
SLOW = ("--profile", "custom:prefill=20000,decode=60", "--kv-memory", "256M")
LONG = "2000"  # tokens: half a minute, unless stopped
TIMEOUT_S = 120.0  # the machine may be busy
REFUSED = "g: it refused the token (401): `token` in the cluster file, else DISAGG_TOKEN, is not the node's"


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Process]]:
    model = "simulated:tiny"
    started = [Process(name, role, "simulated", model, *SLOW) for name, role in (("p1", "prefill"), ("d1", "decode"))]
    yield [node.ready() for node in started]
    for node in started:
        node.end()


@pytest.fixture
def folder(nodes: list[Process], tmp_path: Path) -> Path:
    """A folder with a cluster file at its default place."""
    write_config(tmp_path, config_of(*nodes))
    return tmp_path


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "cluster.json").write_text(json.dumps(config))


def environment_of(folder: Path, variables: dict[str, str]) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("DISAGG_CONFIG", "COLUMNS")}
    return environment | {"TERM": "xterm", "XDG_STATE_HOME": str(folder / "state")} | variables


def start(
    folder: Path, *arguments: str, variables: dict[str, str] | None = None, **options: Any
) -> "subprocess.Popen[str]":
    environment = environment_of(folder, variables or {})
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [*COMMAND, *arguments]
    return subprocess.Popen(command, cwd=folder, env=environment, **(pipes | {"text": True} | options))


def disagg(
    folder: Path, *arguments: str, typed: str | None = None, **variables: str
) -> "subprocess.CompletedProcess[str]":
    return run_forked(*arguments, typed=typed, folder=folder, environment=environment_of(folder, variables))


def json_lines(run: "subprocess.CompletedProcess[str]") -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.stdout.splitlines()]


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


# chat


def test_every_message_sends_all_earlier_ones(folder: Path) -> None:
    run = disagg(folder, "chat", "--json", "--max-tokens", "4", typed="one\n\ntwo\n/clear\none\n")
    first, second, anew = json_lines(run)
    assert (first["prompt"], second["prompt"], first["error"]) == ("one", "two", None)
    added = len("two") - len("one") + first["metrics"]["prompt_tokens"]
    assert second["metrics"]["prompt_tokens"] > added + 4
    assert anew["metrics"]["prompt_tokens"] == first["metrics"]["prompt_tokens"]
    assert run.returncode == 0


def test_long_messages_may_have_several_lines(folder: Path) -> None:
    run = disagg(
        folder, "chat", "--json", "--max-tokens", "1", typed='a\\\nb\n"""\nc\n\nd\n"""\n/etc/passwd is a file\n'
    )
    assert [line["prompt"] for line in json_lines(run)] == ["a\nb", "c\n\nd", "/etc/passwd is a file"]


def test_a_chat_can_be_saved_and_loaded(folder: Path) -> None:
    typed = "/system Be \\\nbrief.\none\n/save chat.json\n/clear\n/system\n/load chat.json\ntwo\n/save both.json\n"
    run = disagg(folder, "chat", "--max-tokens", "3", typed=typed)
    assert "saved 2 messages to chat.json" in run.stderr
    one, both = (json.loads((folder / name).read_text()) for name in ("chat.json", "both.json"))
    assert (one["system"], one["model"]) == ("Be \nbrief.", "simulated:tiny")
    assert [message["role"] for message in both["messages"]] == ["user", "assistant"] * 2
    assert both["messages"][:2] == one["messages"]
    assert [both["messages"][at]["content"] for at in (1, 3)] == run.stdout.splitlines()


def test_retry_replaces_the_last_answer(folder: Path) -> None:
    typed = "one\n/retry\n/save chat.json\n"
    run = disagg(folder, "chat", "--temperature", "3", "--max-tokens", "12", typed=typed)
    messages = json.loads((folder / "chat.json").read_text())["messages"]
    second = messages[1]["content"]
    assert len(messages) == 2
    assert run.stdout.endswith(second + "\n")
    assert run.stdout[: -len(second) - 1].strip("\n") not in ("", second)


def test_an_error_does_not_end_the_chat(folder: Path) -> None:
    (folder / "odd.json").write_text('{"messages": [{"role": "assistant", "content": "x"}]}')
    commands = "/metrics\n/retry\n/model nope\n/load cluster.json\n/load odd.json\n/save\n/save /no/where\n/dance\n"
    run = disagg(folder, "chat", "--max-tokens", "3", typed=commands + "one\n")
    assert run.returncode == 1  # input from a pipe: the exit code reports failures
    assert len(run.stderr.splitlines()) == run.stderr.count("error: ") == 8, run.stderr
    assert len(run.stdout.splitlines()) == 1


def test_retry_sends_an_unanswered_message_again(folder: Path, nodes: list[Process]) -> None:
    """No node is up, so both requests fail in the same way."""
    config = config_of(*nodes)
    for server in config["prefill_servers"] + config["decode_servers"]:
        server["port"] = free_port()
    write_config(folder, config)
    first, second = json_lines(disagg(folder, "chat", "--json", typed="one\n/retry\n"))
    assert first == second
    message = "Decode server unavailable - request failed: d1: it cannot be reached: connection refused"
    assert first["error"] == {"code": "no_decode_node", "message": message}


def test_ctrl_c_stops_an_answer_and_keeps_the_chat(folder: Path, nodes: list[Process]) -> None:
    with start(folder, "chat", "--max-tokens", LONG) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write("one\n")
        process.stdin.flush()
        first_text = process.stdout.read(12)
        process.send_signal(signal.SIGINT)
        written = first_text + process.stdout.readline()
        assert until(lambda: all(node.nothing_left() for node in nodes))
        _, err = process.communicate("/save chat.json\n", timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert "(stopped)" in err
    kept = json.loads((folder / "chat.json").read_text())["messages"][1]["content"]
    assert kept + "\n" == written


class Terminal:
    """A process at a terminal of its own."""

    def __init__(self, folder: Path, *arguments: str, columns: int = 80) -> None:
        self.output = ""
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, columns))
        self.process = start(folder, *arguments, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        self._end = ours

    def until(self, pattern: str) -> str:
        """The new output up to the pattern."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (found := re.search(pattern, self.output, re.DOTALL)):
            assert time.monotonic() < deadline, self.output
            if select.select([self._end], [], [], 0.1)[0]:
                self.output += os.read(self._end, 4096).decode()
        matched, self.output = self.output[: found.end()], self.output[found.end() :]
        return matched

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def interrupt(self) -> None:
        """It is not a controlling terminal, so the test sends the signal. It waits until the process sleeps: readline
        notices a signal between a key and its next select only with the next key."""
        assert until(lambda: state_of(self.process.pid) == "S")
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        code = self.process.wait(TIMEOUT_S)
        os.close(self._end)
        return code


@pytest.fixture
def terminal(folder: Path) -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def make(*arguments: str, columns: int = 80) -> Terminal:
        made.append(Terminal(folder, *arguments, columns=columns))
        return made[-1]

    yield make
    for found in made:
        if found.process.poll() is None:
            found.process.kill()
            found.end()


def test_a_chat_at_a_terminal(folder: Path, terminal: Callable[..., Terminal]) -> None:
    chat = terminal("chat", "--max-tokens", LONG)
    chat.until("simulated:tiny; type /help for commands.*>>> ")
    chat.type("one \\\n")
    chat.until(r"\.\.\. ")
    chat.type("two\n")
    chat.until(r"\[\d{4}\]")
    chat.interrupt()
    chat.until(r"\(stopped\).*>>> ")
    chat.type("half a li")
    chat.until("half a li")
    chat.interrupt()
    chat.until(r"\(press Ctrl-D or type /exit to leave\).*>>> ")
    chat.type("/help\n")
    listed = chat.until(">>> ")
    assert all(f"/{name}" in listed for name in ("help", "clear", "model", "save", "retry", "exit"))
    chat.type("\x04")
    assert chat.end() == 0
    assert "one" in (folder / "state" / "disaggregated-inference" / "chat").read_text()


def test_colours_are_for_terminals(terminal: Callable[..., Terminal]) -> None:
    shown = terminal("status")
    assert "\x1b[32m" in shown.until("all up")
    assert shown.end() == 0


# status


def test_status_is_a_line_per_node(folder: Path) -> None:
    disagg(folder, "generate", "Why?", "--max-tokens", "8")
    run = disagg(folder, "status")
    assert (run.returncode, run.stderr) == (0, "")
    header, first, second, *_ = run.stdout.splitlines()
    assert header.split() == ["node", "role", "engine", "state", "queue", "KV", "GiB", "prefill", "decode"]
    assert re.fullmatch(r"p1 +prefill +simulated +healthy +0/0/\d+ +[\d.]+/[\d.]+ +[\d.,]+@\d+ +-", first)
    assert re.fullmatch(r"d1 +decode +simulated +healthy +0/0/\d+ +[\d.]+/[\d.]+ +\S+ +[\d.,]+@1", second)
    assert "model simulated:tiny: prefill on p1; decode on d1\n" in run.stdout
    assert re.search(r"links: p1 -> d1 [\d.]+ Gb/s\nall up\n$", run.stdout)
    assert "\x1b" not in run.stdout


def test_status_of_a_cluster_that_is_down(nodes: list[Process], tmp_path: Path) -> None:
    config = config_of(*nodes)
    config["decode_servers"][0]["port"] = port = free_port()
    write_config(tmp_path, config)
    run = disagg(tmp_path, "status")
    assert run.returncode == 1
    assert re.search(rf"d1: it cannot be reached: connection refused .*127\.0\.0\.1:{port}", run.stdout)
    assert run.stdout.splitlines()[-1] == "decode down: cannot serve"
    assert "model simulated:tiny: prefill on p1; decode on none (d1: unreachable)\n" in run.stdout
    result = disagg(tmp_path, "status", "--json")
    assert result.returncode == 1
    assert [node["state"] for node in json.loads(result.stdout)["nodes"]] == ["healthy", "unreachable"]


def test_status_says_what_is_wrong_with_a_node(nodes: list[Process], tmp_path: Path) -> None:
    """A token that is not its own, or none; another role than the config has; something that is no node."""
    (tmp_path / "secret").write_text("SECRET\n")
    secret = ("--token-file", str(tmp_path / "secret"))
    guarded = Process("g", "prefill", "simulated", "simulated:tiny", *SLOW, *secret).ready()

    def status_of(**servers: list[dict[str, Any]]) -> tuple[list[str], str]:
        write_config(tmp_path, servers)
        result = json.loads(disagg(tmp_path, "status", "--json").stdout)
        return [node["state"] for node in result["nodes"]], disagg(tmp_path, "status").stdout

    try:
        states, shown = status_of(prefill_servers=[guarded.entry | {"token": "WRONG"}])
        assert states == ["wrong token"]
        assert (
            "g: it refused the token (401): `token` in the cluster file, else DISAGG_TOKEN, is not the node's (http://127.0.0.1"
            in shown
        )
        assert "g: it needs a token (401): set DISAGG_TOKEN" in status_of(prefill_servers=[guarded.entry])[1]
    finally:
        guarded.end()
    prefill, decode = nodes
    states, shown = status_of(prefill_servers=[decode.entry], decode_servers=[prefill.entry])
    assert states == ["wrong role", "wrong role"]
    assert "d1: it runs as a decode node, and the config has it under prefill_servers\n" in shown


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


def test_status_shows_the_name_that_the_nodes_use(nodes: list[Process], tmp_path: Path) -> None:
    config = config_of(*nodes)
    for server in config["prefill_servers"] + config["decode_servers"]:
        server["model"] = "qwen"
    write_config(tmp_path, config)
    run = disagg(tmp_path, "status")
    assert run.returncode == 0
    assert "warning: d1: it names its model simulated:tiny, the cluster file qwen: correct `model`" in run.stdout
    assert "model qwen (on nodes: simulated:tiny): prefill on p1; decode on d1\n" in run.stdout
    assert run.stdout.splitlines()[-1] == "all up; another model name on p1, d1"
    write_config(tmp_path, config | {"policies": {"strict_models": True}})
    strict = disagg(tmp_path, "status")
    assert strict.returncode == 1
    assert "d1: it names its model simulated:tiny, the cluster file qwen" in strict.stdout
    assert strict.stdout.splitlines()[-1] == "nothing is up"


def test_status_again_and_again(folder: Path, terminal: Callable[..., Terminal]) -> None:
    with start(folder, "status", "--watch", "0.1", "--json") as process:
        assert process.stdout
        verdicts = [json.loads(process.stdout.readline())["verdict"] for _ in range(3)]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, verdicts) == (0, ["all up"] * 3)
    watched = terminal("status", "--watch", "0.1")
    watched.until("all up.*all up.*all up")
    watched.interrupt()
    watched.until("\\[\\?25h")  # the cursor is back
    assert watched.end() == 0


def node_of(name: str, **about: Any) -> dict[str, Any]:
    rates = {"prefill": [{"size": 64, "tokens_per_s": 800.0}, {"size": 8192, "tokens_per_s": 46170.2}], "decode": []}
    node: dict[str, Any] = {
        "name": name,
        "role": "prefill",
        "engine": "torch",
        "model": "m",
        "state": "healthy",
        "why": "",
        "url": "http://127.0.0.1:8000",
        "node_model": "m",
    }
    node |= {"usable": True, "waiting": 3, "slots": {"used": 2, "most": 64}, "rates": rates | {"local_prefill": []}}
    return node | {"kv": {"limit_bytes": 64 << 30, "held_bytes": 3 << 30}} | about


def shown(nodes: list[dict[str, Any]], *refusals: dict[str, str], width: int = 80) -> list[str]:
    status = {"verdict": "all up", "models": {"m": "all up"}, "nodes": nodes, "links": []}
    status |= {
        "refusals": refusals,
        "warnings": [],
    }
    console = Console(file=StringIO(), width=width, markup=False, highlight=False)
    console.print(render(msgspec.convert(status, ClusterStatus)))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


def test_the_board_fits_a_small_terminal() -> None:
    rates = ((1, 96.6), (4, 300.0), (32, 2431.0))
    writes = [{"size": size, "tokens_per_s": tokens_per_s} for size, tokens_per_s in rates]
    writer = {"engine": "mlx", "role": "decode", "rates": {"prefill": [], "decode": writes, "local_prefill": []}}
    lines = shown([node_of("DGX Spark 1"), node_of("Studio 1", **writer)])
    assert lines[1] == "DGX Spark 1  prefill  torch   healthy  1/2/64  3.00/64.0  46,170@8192          -"
    assert [line.split()[-1] for line in lines[2:4]] == ["96.6@1", "2,431@32"]
    assert lines[4].startswith("queue: ")
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("width", [60, 50, 40])
def test_a_narrow_terminal_keeps_names_and_states(width: int) -> None:
    lines = shown([node_of("DGX Spark number 1"), node_of("Mac Studio", state="circuit half_open")], width=width)
    assert max(map(len, lines)) <= width
    assert [line.split("  ")[0] for line in lines[1:3]] == ["DGX Spark number 1", "Mac Studio"]
    assert "healthy" in lines[1]
    assert "circuit half_open" in lines[2]
    assert "…" not in "".join(lines)


def test_status_at_a_terminal_of_60_columns(terminal: Callable[..., Terminal]) -> None:
    at = terminal("status", columns=60)
    lines = re.sub(r"\x1b\[[\d;]*m", "", at.until("all up")).splitlines()
    assert at.end() == 0
    assert max(map(len, lines)) <= 60
    assert re.match(r"p1 +prefill .*healthy", lines[1])
    assert re.match(r"d1 +decode .*healthy", lines[2])


def test_a_node_that_loads_is_shown_without_numbers() -> None:
    lines = shown([node_of("p", state="loading", usable=False, why="this node is loading m into torch")])
    assert lines[1].split() == ["p", "prefill", "torch", "loading", "-", "-", "-", "-"]


def test_a_node_that_went_is_not_shown_as_it_was() -> None:
    lines = shown([node_of("p[1]", state="unreachable", usable=False, why="it does not answer")])
    assert lines[1].split() == ["p[1]", "prefill", "torch", "unreachable", "-", "-", "-", "-"]
    assert lines[3:5] == [
        "p[1]: it does not answer (http://127.0.0.1:8000)",
        "model m: prefill on none (p[1]: unreachable); decode on none",
    ]


def test_a_refused_pair_is_told() -> None:
    lines = shown([node_of("p"), node_of("d", role="decode")], {"prefill": "p", "decode": "d", "why": "other values"})
    assert "d refuses KV caches from p: other values" in lines


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


# the parts


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        ("a\nb", ["a", "b"]),
        ("a\\\n\\\nb\n", ["a\n\nb"]),
        ("a\\", ["a"]),
        ('"""one line"""\nb', ["one line", "b"]),
        ('"""a\n  b\nc""" \nd', ["a\n  b\nc", "d"]),
        ('"""a\nb', ["a\nb"]),
        ("a\r\nb\r\n", ["a", "b"]),
        ("", []),
    ],
)
def test_messages_in_lines(typed: str, messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO(typed))
    lines = LineReader()
    assert list(iter(lines.message, None)) == messages


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
