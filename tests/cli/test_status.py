"""`disagg status` as a process over simulated nodes, and how it looks."""

import json
import re
import signal
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from disaggregated_inference.api import ClusterStatus
from disaggregated_inference.cli.status import render
from tests.support.cli_processes import SLOW, TIMEOUT_S, Terminal, disagg, start, write_config
from tests.support.cluster import Process, config_of, free_port

pytestmark = pytest.mark.slow


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
