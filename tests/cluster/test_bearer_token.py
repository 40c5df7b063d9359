"""Where the token of the nodes comes from, in which order, and what the errors say. No message repeats a token."""

import re
from pathlib import Path
from typing import Any

import pytest

from disaggregated_inference.cluster import load_config, read_token, without_token
from disaggregated_inference.errors import ConfigError

SERVERS = {"decode_servers": [{"host": "a", "model": "m"}, {"host": "b", "model": "m", "token": "own"}]}


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text("  from-file\n")
    return str(path)


def test_the_command_line_comes_first_then_the_variable_then_its_file(file: str) -> None:
    both = {"DISAGG_TOKEN": " from-variable\n", "DISAGG_TOKEN_FILE": file}
    assert read_token(file=file, environ=both | {"DISAGG_TOKEN_FILE": "/nowhere"}) == "from-file"
    assert read_token(environ=both) == "from-variable"
    assert read_token(environ=both | {"DISAGG_TOKEN": ""}) == "from-file"
    assert read_token(environ={"DISAGG_TOKEN_FILE": ""}) == ""
    assert without_token(both | {"HOME": "h"}) == {"HOME": "h"}


def test_a_path_begins_at_home(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path(file).parent))
    assert read_token(file="~/token", environ={}) == "from-file"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; write the token there, or leave it out"),
        (b" \n", "is empty; write the token there"),
        (b"hidden\nhidden", "has characters that an HTTP header cannot carry; use one line of printable ASCII"),
        (b"hidden\xff", "has characters that an HTTP header cannot carry"),
        (b"hidden" * 1000, "has more than 4096 bytes; write only the token there"),
    ],
)
def test_a_file_that_contains_no_token(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    for source, arguments in (
        ("--token-file", {"file": str(path)}),
        ("DISAGG_TOKEN_FILE", {"environ": {"DISAGG_TOKEN_FILE": str(path)}}),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"{source}: {path} {message}")) as raised:
            read_token(**({"environ": {}} | arguments))
        assert "hidden" not in str(raised.value)


@pytest.mark.parametrize("path", ["/nowhere/token", ".", "a\0b", "~nobody-at-all/token"])
def test_a_file_that_cannot_be_read(path: str) -> None:
    with pytest.raises(ConfigError, match=r"--token-file: .* cannot be read: .*; name a file that contains the token"):
        read_token(file=path, environ={})


def test_mistakes_on_the_command_line_and_in_the_variable(file: str) -> None:
    with pytest.raises(ConfigError, match=r"--token is refused: .* set DISAGG_TOKEN or give --token-file") as refused:
        read_token("hidden", file, {})
    assert "hidden" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"^DISAGG_TOKEN has characters") as raised:
        read_token(environ={"DISAGG_TOKEN": "hidden\x07"})
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize(
    ("more", "environ", "token_file", "expected"),
    [
        ({}, {}, False, ""),
        ({}, {"DISAGG_TOKEN": "variable"}, False, "variable"),
        ({"token": "cluster"}, {"DISAGG_TOKEN": "variable"}, False, "cluster"),
        ({"token": "${DISAGG_TOKEN}"}, {"DISAGG_TOKEN": "variable"}, False, "variable"),
        ({"token": "cluster"}, {"DISAGG_TOKEN": "variable"}, True, "from-file"),
        ({"token": "cluster"}, {"DISAGG_TOKEN_FILE": "/nowhere"}, False, "cluster"),
    ],
)
def test_the_tokens_of_servers(
    file: str, more: dict[str, Any], environ: dict[str, str], token_file: bool, expected: str
) -> None:
    config = load_config(SERVERS | more, environ, file if token_file else "")
    assert [server.token for server in config.servers] == [expected, "own"]
    assert "own" not in repr(config)


def test_the_environment_of_this_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_TOKEN", "variable")
    assert load_config(SERVERS).servers[0].token == "variable"


def test_a_cluster_file_names_files_of_tokens(file: str) -> None:
    servers = [{"host": "a", "model": "m"}, {"host": "b", "model": "m", "token_file": file}]
    config = load_config({"decode_servers": servers, "token": "shared"}, {})
    assert [server.token for server in config.servers] == ["shared", "from-file"]
    config = load_config({"decode_servers": servers[:1], "token_file": file}, {"DISAGG_TOKEN": "other"})
    assert [server.token for server in config.servers] == ["from-file"]
    with pytest.raises(ConfigError, match=r"config: token_file: choose one of token and token_file"):
        load_config({"decode_servers": servers, "token": "x", "token_file": file}, {})
    with pytest.raises(ConfigError, match=r"decode_servers\[0\].token_file: /no/file cannot be read: No such file"):
        load_config({"decode_servers": [servers[0] | {"token_file": "/no/file"}]}, {})
