"""Tokens that nodes refuse and models under another name: what clients get, and what every view shows."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from disaggregated_inference.api import ErrorDetail
from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.cluster import Policies
from disaggregated_inference.errors import ClusterError, NoDecodeNode
from disaggregated_inference.orchestrator import DisaggregatedInference
from disaggregated_inference.orchestrator.heartbeat import Heartbeats
from disaggregated_inference.orchestrator.node_state import NodeState
from tests.support.cluster import Process, config_of, free_port
from tests.support.http_stub import served
from tests.support.waiting import until

TOKEN = "the-token-itself"
SIMULATED = ("simulated", "simulated:tiny", "--profile", "instant", "--kv-memory", "256M")
REFUSED = "it refused the token (401): `token` in the cluster file, else DISAGG_TOKEN, is not the node's"
NEEDED = "it needs a token (401): set DISAGG_TOKEN"
SENTENCE = "Decode server unavailable - request failed"
ASK: dict[str, Any] = {"prompt": "Why?", "max_tokens": 2, "temperature": 0}
OTHERWISE = (
    "it names its model simulated:tiny, the cluster file qwen: correct `model`, or list the other name under `aliases`"
)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Process]]:
    """Nodes that need a token. One reads it from a file."""
    file = tmp_path_factory.mktemp("tokens") / "token"
    file.write_text(TOKEN + "\n")
    started = [
        Process("p1", "prefill", *SIMULATED, "--token-file", str(file)),
        Process("d1", "decode", *SIMULATED, "--token-file", str(file)),
    ]
    yield [node.ready() for node in started]
    for node in started:
        node.end()


@pytest.fixture(scope="module")
def open_nodes() -> Iterator[list[Process]]:
    started = [Process("p1", "prefill", *SIMULATED), Process("d1", "decode", *SIMULATED)]
    yield [node.ready() for node in started]
    for node in started:
        node.end()


def renamed(config: dict[str, Any], model: str = "qwen", **more: Any) -> dict[str, Any]:
    servers = {key: [item | {"model": model} for item in config[key]] for key in ("prefill_servers", "decode_servers")}
    return config | servers | more


# Tokens


@pytest.mark.parametrize(("token", "cause"), [("wrong", REFUSED), ("", NEEDED)])
def test_an_error_names_the_cause_of_each_decode_node(guarded: list[Process], token: str, cause: str) -> None:
    config = config_of(*guarded) | {"token": token}
    config["decode_servers"].append({"host": "127.0.0.1", "port": free_port(), "model": "simulated:tiny", "name": "d2"})
    with DisaggregatedClient(config) as client:
        with pytest.raises(NoDecodeNode) as raised:
            client.generate(**ASK)
        health = client.health()
    assert str(raised.value) == f"{SENTENCE}: d1: {cause}; d2: it cannot be reached: connection refused"
    assert [node["state"] for node in health["nodes"].values()] == ["wrong token", "wrong token", "unreachable"]
    assert "wrong" not in str(raised.value).replace("wrong token", "")


def test_a_token_that_is_refused_after_a_restart_is_the_cause(guarded: list[Process]) -> None:
    """The tokens of the request are known, so that it goes as far as the route."""
    config = config_of(*guarded) | {"token": "wrong"}
    with DisaggregatedClient(config) as client, pytest.raises(NoDecodeNode, match=f"{SENTENCE}: d1: it refused the"):
        client.generate(tokens=[1, 2, 3], max_tokens=2)


def test_clients_read_the_variable(guarded: list[Process], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = config_of(*guarded)
    monkeypatch.setenv("DISAGG_TOKEN", TOKEN)
    with DisaggregatedClient(config) as client:
        _, metrics = client.generate(**ASK)
        assert metrics["method"] == "disaggregated_simulated"
    monkeypatch.delenv("DISAGG_TOKEN")
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setenv("DISAGG_TOKEN_FILE", str(tmp_path / "token"))

    async def ask() -> dict[str, Any]:
        async with DisaggregatedInference(config) as cluster:
            return await cluster.generate(**ASK)

    assert asyncio.run(ask())["method"] == "disaggregated_simulated"


def test_a_prefill_node_that_refuses_the_token_is_named(guarded: list[Process]) -> None:
    config = config_of(*guarded)
    config["decode_servers"][0]["token"] = TOKEN
    with DisaggregatedClient(config) as client:
        _, metrics = client.generate(**ASK)
    assert metrics["warning"] == "Using fallback mode - slower performance"
    assert metrics["warning_reason"] == f"p1: {NEEDED}"
    message = f"no prefill node can read this prompt, and the config allows no fallback: p1: {NEEDED}"
    with DisaggregatedClient(config | {"policies": {"fallback": False}}) as client:
        with pytest.raises(ClusterError) as raised:
            client.generate(**ASK)
        assert str(raised.value) == message


def test_a_cluster_without_decode_servers_says_so(open_nodes: list[Process]) -> None:
    with DisaggregatedClient(config_of(open_nodes[0])) as client, pytest.raises(NoDecodeNode) as raised:
        client.generate(**ASK)
    assert str(raised.value) == f"{SENTENCE}: the cluster file has no decode server for simulated:tiny"


def test_a_node_in_the_wrong_list_is_a_cause(open_nodes: list[Process]) -> None:
    prefill, decode = open_nodes
    config = config_of(prefill, decode)
    config["prefill_servers"], config["decode_servers"] = config["decode_servers"], config["prefill_servers"]
    with DisaggregatedClient(config) as client, pytest.raises(NoDecodeNode) as raised:
        client.generate(**ASK)
    assert "; p1: it runs as a prefill node, and the config has it under decode_servers" in str(raised.value)


# Names


def test_another_name_is_a_warning_in_every_view(
    open_nodes: list[Process], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    file = str(tmp_path / "history.sqlite")
    config = renamed(config_of(*open_nodes, history_file=file))
    with caplog.at_level(logging.WARNING), DisaggregatedClient(config) as client:
        _, metrics = client.generate(model="qwen", **ASK)
        health, status = client.health(), client.status()
        [record] = client.history()
    assert (metrics["model"], metrics["node_model"]) == (record["model"], record["node_model"])
    assert (metrics["model"], metrics["node_model"]) == ("qwen", "simulated:tiny")
    assert health["verdict"] == status["verdict"] == "all up; another model name on p1, d1"
    assert health["warnings"] == status["warnings"] == [f"{name}: {OTHERWISE}" for name in ("p1", "d1")]
    for node in (*health["nodes"].values(), *status["nodes"]):
        assert (node["model"], node["node_model"], node["warning"]) == ("qwen", "simulated:tiny", OTHERWISE)
        assert (node["state"], node["why"], node["usable"]) == ("healthy", "", True)
    logged = [record.message for record in caplog.records if "names its model" in record.message]
    assert sorted(logged) == sorted(health["warnings"]), "once for each node, not at every poll"


def test_strict_models_send_such_nodes_nothing(open_nodes: list[Process]) -> None:
    prefill, decode = open_nodes
    config = renamed(config_of(*open_nodes, strict_models=True))
    with DisaggregatedClient(config) as client:
        with pytest.raises(NoDecodeNode) as raised:
            client.generate(**ASK)
        health = client.health()
    assert str(raised.value) == f"{SENTENCE}: d1: {OTHERWISE}"
    assert health["verdict"] == "nothing is up"
    assert [node["state"] for node in health["nodes"].values()] == ["mismatch", "mismatch"]
    assert (prefill.status()["waiting"], decode.status()["waiting"]) == (0, 0)


@pytest.mark.parametrize("strict", [False, True])
def test_an_alias_makes_the_name_right(open_nodes: list[Process], strict: bool) -> None:
    models = {"qwen": {"aliases": ["Simulated_Tiny"]}}
    with DisaggregatedClient(renamed(config_of(*open_nodes, strict_models=strict), models=models)) as client:
        _, metrics = client.generate(**ASK)
        assert (metrics["model"], metrics["node_model"]) == ("qwen", "simulated:tiny")
        assert (client.health()["warnings"], client.health()["verdict"]) == ([], "all up")


def test_the_node_with_the_right_name_is_the_model(open_nodes: list[Process]) -> None:
    """Two decode nodes with another model outnumber it, and get nothing."""
    others = [Process(name, "decode", "simulated", "simulated:qwen3-30b-a3b", *SIMULATED[2:]) for name in ("d2", "d3")]
    try:
        for node in others:
            node.ready()
        config = renamed(config_of(open_nodes[1], *others, local="always"), "simulated:tiny")
        with DisaggregatedClient(config) as client:
            assert until(lambda: client.health()["verdict"] == "a node is down, others serve")
            assert [node["usable"] for node in client.health()["nodes"].values()] == [True, False, False]
            assert client.generate(**ASK)[1]["node_model"] == "simulated:tiny"
    finally:
        for node in others:
            node.end()


def test_the_answer_of_a_part_has_the_real_name(open_nodes: list[Process]) -> None:
    with DisaggregatedClient(config_of(*open_nodes)) as client:
        assert client.generate(model="tiny", **ASK)[1]["model"] == "simulated:tiny"
        [result] = client.generate_many([ASK | {"model": "ti"}])["results"]
        message = 'no model "ti"; the cluster has simulated:tiny'
        assert result["error"] == {"code": "model_not_found", "message": message}
        typed = client.complete_many([ASK, ASK | {"model": "ti"}])
        assert [record.model for record in typed.records] == ["simulated:tiny"]
        assert typed.errors == [typed.results[1]] == [ErrorDetail("model_not_found", message)]


@pytest.mark.parametrize(
    ("own", "shown"), [("", None), ("\x1b[2Jqwen\n", "[2Jqwen"), ("x" * 10_000, "x" * 200), ("/m/Qwen.gguf", None)]
)
def test_a_node_may_name_its_model_as_it_likes(own: str, shown: str | None) -> None:
    """An empty name is no name; control characters and the rest of a very long one are not shown."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"context_window": 8, "status": "healthy", "model": own})

    async def run() -> None:
        async with served("/{any}", answer) as server, aiohttp.ClientSession() as session:
            node = NodeState(server, "qwen", session, Heartbeats(), Policies(), ("qwen",))
            await node.poll()
            assert node.usable
            assert bool(node.warning) == (shown is not None)
            assert f"it names its model {shown}, " in node.warning or not shown
            assert node.warning.isprintable()

    asyncio.run(run())
