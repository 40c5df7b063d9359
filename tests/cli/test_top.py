"""`disagg top`: its picture at every size, and in a real terminal."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from rich.console import Console

from disaggregated_inference.api import ClusterPage, ErrorDetail, RequestRecord, TargetsPage
from disaggregated_inference.cli.top import run
from disaggregated_inference.cli.top_feed import TopFeed, TopState
from disaggregated_inference.cli.top_screen import render
from disaggregated_inference.gateway.key_file import new_key
from disaggregated_inference.orchestrator import summary
from tests.support.cluster import Process, free_port
from tests.support.command import run_forked
from tests.support.gateway import GatewayProcess, gateway_process, simulated_config, simulated_pair
from tests.support.terminal import Terminal
from tests.support.waiting import until


def node_of(name: str, **more: Any) -> dict[str, Any]:
    usual = {"name": name, "role": "decode", "state": "healthy", "usable": True, "why": "", "waiting": 1, "running": 1}
    usual |= {"slots": {"used": 1, "most": 8}, "url": "http://169.254.150.103:8001", "readings": None}
    return usual | {"model": "qwen3-coder:30b", "engine": "mlx"} | more


def link_of(prefill: str, decode: str, **more: Any) -> dict[str, Any]:
    usual = {"prefill": prefill, "decode": decode, "bytes_per_s": 1.1e9, "line_rate_bytes_s": 1.25e9, "measured": True}
    return usual | {"payload_bytes": 64_000_000, "connections": 4, "warning": ""} | more


def target_of(name: str, goal: float, unit: str, measured: float | None, better: str = "higher") -> dict[str, Any]:
    met = None if measured is None else (measured < goal) == (better == "lower")
    return {"name": name, "goal": goal, "unit": unit, "measured": measured, "better": better, "met": met, "what": "x"}


TARGETS = [
    target_of("end_to_end", 15, "s", 7.04, "lower"),
    target_of("requests_per_second", 10, "1/s", 0.2),
    target_of("parallel_efficiency", 1.5, "x", 1.43),
    target_of("uptime", 99.9, "%", 99.9999),
    target_of("errors", 0.1, "%", 0.0, "lower"),
    target_of("failover", 5, "s", None, "lower"),
    target_of("cost_per_request", 0.01, "$", 0.000123, "lower"),
    target_of("requests_per_kwh", 50, "1/kWh", 4433.0),
    target_of("utilisation", 60, "%", 12.5),
]


def with_links(prefills: int = 1, decodes: int = 1, requests: int = 20) -> TopState:
    """Every prefill node has a link to every decode node, and only the first link was used."""
    state = state_of(requests=requests)
    nodes = [
        *(node_of(f"spark-{n}", role="prefill", engine="vllm") for n in range(prefills)),
        *(node_of(f"mac-{n}") for n in range(decodes)),
    ]
    change(state, nodes=nodes, links=[link_of("spark-0", "mac-0")])
    state.judged(page(targets=TARGETS))
    return state


def page(**parts: Any) -> TargetsPage:
    return msgspec.convert(parts, TargetsPage)


def change(state: TopState, **parts: Any) -> None:
    """Other parts of the status, as a gateway would tell them."""
    state.status = msgspec.convert(msgspec.to_builtins(state.status) | parts, ClusterPage)


def change_node(top: TopState, which: int, **fields: Any) -> None:
    nodes = msgspec.to_builtins(top.status)["nodes"]
    change(top, nodes=[node | fields if place == which else node for place, node in enumerate(nodes)])


def tell(state: TopState, **parts: Any) -> None:
    """An event with another status."""
    state.happened("status", msgspec.json.encode(msgspec.to_builtins(state.status) | parts))


SPARK: dict[str, Any] = {
    "cpu_share": 0.07,
    "memory_used_bytes": 80 << 30,
    "memory_total_bytes": 119 << 30,
    "memory_shared": True,
}
SPARK |= {"power_w": 61.4, "gpus": [{"name": "NVIDIA GB10", "utilisation": 0.95, "temperature_c": 64}]}


def request_of(number: int, **more: Any) -> RequestRecord:
    usual: dict[str, Any] = {
        "time": 1000.0 + number,
        "model": "qwen3-coder:30b",
        "ok": True,
        "total_time": 9.3,
        "prefill_time": 0.8,
    }
    usual |= {"prefill_speed": 1500.0, "decode_time": 8.5, "decode_speed": 60.0, "completion_tokens": 500}
    usual |= {"kind": "disaggregated", "method": "disaggregated_mlx", "energy_j": 812.0, "energy_source": "measured"}
    return RequestRecord(**(usual | more))


def state_of(
    nodes: int = 4, requests: int = 20, models: tuple[str, ...] = ("qwen3-coder:30b", "gpt-oss:120b")
) -> TopState:
    state = TopState("http://127.0.0.1:8080")
    found = [node_of(f"mac-studio-{n}", readings=SPARK if n == 0 else None) for n in range(nodes)]
    cluster = {"verdict": "all up", "nodes": found, "models": dict.fromkeys(models, "all up")}
    cluster |= {"links": [], "refusals": [], "warnings": []}
    history = [request_of(n) for n in range(requests)][::-1]
    told = cluster | {
        "history": [each.row() for each in history],
        "summary": msgspec.to_builtins(summary(history, models)),
    }
    state.began(msgspec.convert(told, ClusterPage))
    return state


def picture(state: TopState, width: int = 80, height: int = 24) -> list[str]:
    with open(os.devnull, "w") as nowhere:
        console = Console(width=width, height=height, file=nowhere, record=True, highlight=False, markup=False)
        console.print(render(state, width, height, now=0.0))
        return console.export_text().splitlines()


def test_the_screen_as_the_user_drew_it() -> None:
    state = state_of()
    state.requests.appendleft(request_of(99, ok=False, error=ErrorDetail("no_decode_node"), energy_j=None))
    lines = picture(state)
    text = "\n".join(lines)
    assert "all up  http://127.0.0.1:8080" in lines[0]
    assert "qwen3-coder:30b" in lines[1]
    assert "All requests" in lines[1]
    assert "Prefill  0.80s 1,500 t/s" in text
    assert "Total    9.30s med of 20" in text
    assert "Decode   8.50s  60.0 t/s" in text
    assert "no answer yet" in text, "the other model"
    assert "Speedup" in text
    first = next(line for line in lines if line.startswith("mac-studio-0"))
    assert first.split()[-5:] == ["7%", "86/128GB", "95%", "61W", "64°C"]
    assert first.split()[-6] == "0/1/8", "a request in a slot does not wait"
    other = next(line for line in lines if line.startswith("mac-studio-1"))
    assert other.split()[-5:] == ["-"] * 5, "what a machine does not tell is not invented"
    assert "no_decode_node" in text
    assert "812J meas" in text


def test_a_cached_prompt_has_no_speed() -> None:
    state = state_of(requests=0)
    request = request_of(1, prompt_tokens=800, cached_tokens=799, prefill_speed=0.4)
    state.requests.appendleft(request)
    state.happened("summary", msgspec.json.encode(summary([request], ["qwen3-coder:30b"])))
    text = "\n".join(picture(state))
    assert "cached -> 60.0" in text
    assert "Prefill  0.80s    cached" in text


@pytest.mark.parametrize("nodes", [0, 1, 4, 16])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 20), (40, 10), (200, 60), (20, 5), (10, 4)])
@pytest.mark.parametrize("models", [(), ("m",), ("a very long name of a model/" * 3, "b", "c", "d", "e")])
def test_it_fits_every_screen(nodes: int, width: int, height: int, models: tuple[str, ...]) -> None:
    for requests in (0, 1, 50):
        lines = picture(state_of(nodes, requests, models), width, height)
        assert len(lines) <= height
        assert all(len(line.rstrip()) <= width for line in lines)


@pytest.mark.parametrize(("prefills", "decodes"), [(1, 1), (2, 2), (8, 8), (0, 3)])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 20), (40, 10), (200, 60), (38, 30), (20, 5), (10, 4)])
def test_links_and_targets_fit_every_screen(prefills: int, decodes: int, width: int, height: int) -> None:
    for requests in (0, 1, 50):
        lines = picture(with_links(prefills, decodes, requests), width, height)
        assert len(lines) <= height
        assert all(len(line.rstrip()) <= width for line in lines)


def test_a_pair_is_whole_on_a_usual_screen() -> None:
    """Models, health and requests come first, and links and targets stand below them."""
    lines = picture(with_links())
    assert len(lines) == 24
    heads = [next(n for n, line in enumerate(lines) if line.startswith(head)) for head in ("node", "#", "link", "tar")]
    requests = heads[2] - heads[1] - 1
    assert heads == sorted(heads)
    assert requests >= 5
    assert lines[heads[2]].split() == ["link", "state", "now", "measured", "line", "rate", "reached", "moved"]
    assert " ".join(lines[heads[2] + 1].split()) == "spark-0 -> mac-0 quiet - 1.1 GB/s 1.3 GB/s 88% 64 MB"
    text = "\n".join(line.rstrip() for line in lines[heads[3] :])
    assert text.startswith("target                goal measured met  target             goal  measured met")
    assert "End to end            <15s    7.04s yes  Failover            <5s         - -" in text
    assert "Requests per second    >10      0.2 no   Cost per request <$0.01 $0.000123 yes" in text
    assert "Parallel efficiency  >1.5x    1.43x no   Requests per kWh    >50     4,430 yes" in text
    assert "Uptime              >99.9% 99.9999% yes  Utilisation        >60%     12.5% no" in text, "it is not 100 %"


def test_where_rows_are_few_links_are_cut_and_targets_counted() -> None:
    lines = picture(with_links(2, 4), height=25)
    assert len(lines) == 25
    link = next(n for n, line in enumerate(lines) if line.startswith("link"))
    assert all("qwen3-coder:30b" in line for line in lines[link - 5 : link]), "requests come first"
    assert lines[link + 1].startswith("spark-0 -> mac-0")
    assert lines[-2].startswith("+"), lines[-2]
    assert "more links" in lines[-2]
    assert lines[-1].startswith("targets: 5 met, 1 not known, 3 not met: Requests per second, Parallel")
    without = picture(with_links(2, 4), height=18)
    assert not any(line.startswith("link") for line in without)


def test_a_tall_screen_has_all() -> None:
    text = "\n".join(picture(with_links(4, 4), 120, 60))
    assert text.count("spark-") == 4 + 16
    assert text.count("not yet") == 15, "links that were not used"
    assert "more" not in text
    assert "Utilisation" in text
    few = with_links(requests=50)
    assert sum("qwen3-coder:30b " in line for line in picture(few, 120, 60)) > 30, "what is left goes to requests"


def test_once_leaves_nothing_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    full = with_links(8, 8, requests=50)

    async def once(feed: TopFeed) -> bytes:
        assert isinstance(full.status, ClusterPage)
        feed.state.began(full.status)
        feed.state.judged(TargetsPage(targets=full.targets))
        return msgspec.json.encode(full.status)

    monkeypatch.setattr(TopFeed, "once", once)
    run("http://127.0.0.1:8080", "", once=True, as_json=False)
    text = capsys.readouterr().out
    assert text.count(" -> mac-") == 64
    assert text.count(" 9.30 yes") == 50
    assert "Utilisation" in text
    assert "more" not in text


def test_what_a_link_does() -> None:
    state = with_links(3, 1)
    change_node(state, 2, usable=False, state="unreachable")
    change(state, refusals=[{"prefill": "spark-1", "decode": "mac-0", "why": "another model"}])
    found = {line.split()[0]: line.split() for line in picture(state, 120, 60) if " -> mac-0" in line}
    assert [found[f"spark-{n}"][3] for n in range(3)] == ["quiet", "refused", "down"]
    assert "mac-0 refuses KV of spark-1: another model" in picture(state, 120, 60)[1]
    tell(state, links=[link_of("spark-0", "mac-0", payload_bytes=74_000_000)])
    assert 0 < state.flows["spark-0", "mac-0"] <= 20e6, "10 MB, counted over half a second at least"
    state.flows["spark-0", "mac-0"] = 20e6
    line = next(line for line in picture(state, 120, 60) if line.startswith("spark-0 ->"))
    assert line.split()[3:6] == ["flowing", "20", "MB/s"]
    state.trouble = "Connection refused"
    assert "flowing" not in "\n".join(picture(state, 120, 60)), "what flowed before is over"
    tell(state, links=[link_of("spark-0", "mac-0", payload_bytes=1)])
    assert not state.flows, "a node that restarts counts from 0"


def test_a_simulated_line_is_called_so() -> None:
    state = with_links()
    for which in range(2):
        change_node(state, which, engine="simulated")
    line = next(line for line in picture(state) if line.startswith("spark-0 ->"))
    assert "simulated 1.3 GB/s       -" in line, "no share of a line that is not there"


def test_all_models_have_a_card_where_there_is_room() -> None:
    models = tuple(f"model-{n}" for n in range(7))
    assert "All of 7 models" in picture(state_of(models=models))[1]
    tall = "\n".join(picture(state_of(models=models), 80, 60))
    assert all(model in tall for model in models)


def test_alarms_and_troubles_come_first() -> None:
    state = state_of()
    change_node(state, 0, why="it does not answer", state="unreachable", usable=False)
    alarm = {"name": "fallback_share", "state": "alarm", "measured": 12.5, "limit": 5, "unit": "%"}
    state.judged(page(alarms=[alarm | {"what": "answers by fallback", "why": "look there"}]))
    lines = picture(state, 100)
    assert lines[1].startswith("ALARM answers by fallback: 12.5 %, limit 5; look there")
    assert lines[2].startswith("mac-studio-0: it does not answer")
    change(state, warnings=["KV goes with 2 Gb/s, the cluster file expects 10"])
    assert picture(state, 100)[3].startswith("KV goes with 2 Gb/s"), "the dashboard says so, too"
    state.trouble = "Connection refused"
    assert "reconnecting: Connection refused" in picture(state, 70)[0]
    assert "connecting" in picture(TopState("http://x"))[0]


def test_text_of_nodes_and_clients_cannot_draw() -> None:
    state = state_of(nodes=1, requests=0)
    nodes = [
        node_of("a\x1b[31mb\nc", why="x\x1b]0;title\x07y\r\n"),
        node_of("p\x1b[2J\u202e[red]\n", role="prefill"),
    ]
    refusal = {"prefill": "p\x1b[2J\u202e[red]\n", "decode": "a\x1b[31mb\nc", "why": "\x1b[0m"}
    change(state, nodes=nodes, refusals=[refusal])
    state.judged(page(targets=[target_of("up\x1b[2J\ntime[red]", 1, "\x1b[", 2.0)]))
    state.requests.appendleft(request_of(1, model="\x1b[2J[red]m"))
    text = "\n".join(picture(state, 100))
    assert "p[2J[red]  -> a[31mb c refused" in text
    assert "Up[2j time[red]" in text
    assert not any(bad in text for bad in ("\x1b", "\x07", "\r", "\u202e"))
    assert "[red]m" in text


# In a terminal, with a real gateway.


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Process, Process]]:
    with simulated_pair() as pair:
        yield pair


@pytest.mark.slow
def test_in_a_terminal(pair: tuple[Process, Process], tmp_path: Path) -> None:
    """Shows requests as they end, follows the window, waits for a gateway that restarts, and quits cleanly."""
    port = str(free_port())
    gateway = GatewayProcess(tmp_path, simulated_config(*pair), "--port", port).ready()
    terminal = Terminal("top", "--url", gateway.url)
    try:
        assert terminal.sees("all up"), terminal.shown
        before = len(terminal.shown)
        answer = httpx.post(f"{gateway.url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=60)
        assert answer.status_code == 200
        assert terminal.sees("med of 1", before)
        assert until(lambda: b"\x1b[?1049h" in terminal.shown), "a screen of its own"
        gateway.send_signal(signal.SIGSTOP)  # nothing else makes it draw now
        for columns, lines in ((60, 20), (100, 30)):
            before = len(terminal.shown)
            terminal.resize(columns, lines, terminal.process.pid)
            assert terminal.draws(columns, lines, before), (terminal.process.poll(), terminal.shown[-3000:])
            assert "all up" in terminal.screens(before)[-1][0], "it was not the silence that made it draw"
        gateway.end()
        assert terminal.sees("reconnecting")
        before = len(terminal.shown)
        gateway = GatewayProcess(tmp_path, simulated_config(*pair), "--port", port).ready()
        assert terminal.sees("all up", before)
        terminal.type(b"x")
        time.sleep(0.1)
        assert terminal.process.poll() is None, "only q quits"
        terminal.type(b"q")
        assert terminal.ended() == 0
        assert until(lambda: b"\x1b[?1049l" in terminal.shown), "the old screen is back"
        assert terminal.is_as_before()
    finally:
        terminal.close()
        gateway.end()


@pytest.mark.slow
def test_ctrl_c_and_refusals(pair: tuple[Process, Process], tmp_path: Path) -> None:
    key = new_key("root", tmp_path / "keys.json", operator=True)
    limited = new_key("some", tmp_path / "keys.json", models=["other"])
    with gateway_process(tmp_path, simulated_config(*pair), "--keys", str(tmp_path / "keys.json")) as gateway:
        (tmp_path / "key").write_text(key)
        terminal = Terminal("top", "--url", gateway.url, "--token-file", str(tmp_path / "key"))
        try:
            assert terminal.sees("all up")
            terminal.process.send_signal(signal.SIGINT)
            assert terminal.ended() == 0
            assert terminal.is_as_before()
        finally:
            terminal.close()
        asked = ("--url", gateway.url, "--token-file", str(tmp_path / "key"))
        once = run_forked("top", "--once", *asked)
        assert once.returncode == 0
        assert "simulated:tiny" in once.stdout
        assert "\nlink " in once.stdout
        assert "\nUptime " in once.stdout
        assert '"verdict": "all up' in run_forked("top", "--json", *asked).stdout
        terminal = Terminal("top", "--url", gateway.url)
        try:
            assert terminal.sees("needs an API key: set DISAGG_TOKEN, or give --token-file FILE")
            assert terminal.ended() == 1
        finally:
            terminal.close()
        wrong = run_forked("top", "--once", "--url", f"http://127.0.0.1:{pair[1].port}")
        assert "is no gateway of this version: it has no /cluster" in wrong.stderr
        (tmp_path / "key").write_text(limited)
        refused = run_forked("top", "--once", *asked)
        assert "limited to some models" in refused.stderr
        (tmp_path / "key").write_text("of-another-gateway")
        wrong = run_forked("top", "--once", *asked)
        assert wrong.stderr.endswith("refuses the API key in --token-file, else DISAGG_TOKEN: give one of its keys\n")
        assert "of-another-gateway" not in wrong.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("localhost:8080", "error: --url: 'localhost:8080' is no address of a gateway; give one such as http://"),
        (
            "http://127.0.0.1:1",
            "error: http://127.0.0.1:1: no gateway answers there: Connection refused; start one with `disagg gateway`",
        ),
    ],
)
def test_mistakes(url: str, message: str) -> None:
    mistaken = run_forked("top", "--once", "--url", url)
    assert (mistaken.returncode, mistaken.stdout) == (1, "")
    assert mistaken.stderr.startswith(message)
