"""`disagg chat` as a process, also at a terminal, over simulated nodes."""

import json
import signal
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest

from disaggregated_inference.cli.line_reader import LineReader
from tests.support.cli_processes import LONG, TIMEOUT_S, Terminal, disagg, json_lines, start, write_config
from tests.support.cluster import Process, config_of, free_port
from tests.support.waiting import until

pytestmark = pytest.mark.slow


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
