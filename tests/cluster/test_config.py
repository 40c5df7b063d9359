"""The cluster file: where it is found, what it may contain, and what that means."""

import re
from pathlib import Path
from typing import Any

import pytest

from disaggregated_inference.cli.config import ConfigFormat, sample
from disaggregated_inference.cluster import ModelOptions, Policies, load_config
from disaggregated_inference.errors import BadRequest, ConfigError, ModelNotFound
from tests.support.cluster_files import FOUR_SERVERS, NO_NAMES, SERVER, cluster, written


def test_the_documented_file(tmp_path: Path) -> None:
    path = written(tmp_path, FOUR_SERVERS, "config_current.json")
    config = load_config(str(path))
    assert (config.source, config.warnings, config.policies) == (str(path), (), Policies())
    assert config.names == ("qwen", "gpt-oss")
    assert [server.url for server in config.servers_of("qwen3-coder:30b")] == [
        "http://169.254.150.103:8000",
        "http://169.254.150.102:8001",
    ]
    assert [server.name for server in config.servers_of("disaggregated:gpt-oss:120b")] == [
        "DGX Spark 2",
        "Mac Studio 1",
    ]
    assert [server.role for server in config.servers] == ["prefill", "prefill", "decode", "decode"]


def test_the_documented_dict() -> None:
    config = load_config(NO_NAMES)
    assert [server.name for server in config.servers] == ["192.168.100.1:8000", "169.254.150.101:8001"]
    assert (config.resolve_model(None), config.resolve_model(""), config.resolve_model()) == ("qwen", "qwen", "qwen")
    assert (config.source, config.warnings) == ("", ())


@pytest.mark.parametrize("format", list(ConfigFormat))
def test_samples_load_without_a_warning(tmp_path: Path, format: ConfigFormat) -> None:
    config = load_config(written(tmp_path, sample(format), f"cluster.{format}"), environ={})
    assert config.warnings == ()
    assert config.names == ("qwen3-coder:30b", "gpt-oss:120b")
    for requested in ("qwen", "disaggregated:qwen3-coder:30b"):
        assert [server.name for server in config.servers_of(requested)] == ["DGX Spark 1", "Mac Studio 2"]
    assert [server.name for server in config.servers_of("gpt-oss")] == ["DGX Spark 2", "Mac Studio 1"]
    assert [server.port for server in config.servers] == [8000, 8000, 8001, 8001]
    macs = {server.name: server.host for server in config.decode_servers}
    assert macs == {"Mac Studio 1": "169.254.150.101", "Mac Studio 2": "169.254.150.102"}


def test_the_rich_sample(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, sample(ConfigFormat.TOML), "cluster.toml"), environ={})
    first = config.prefill_servers[0]
    assert first.kv_addresses == ("192.168.100.1:9000", "169.254.150.103:9000")
    assert (first.engine, first.power_w, first.price_per_hour, first.tls) == ("torch", 240, 0.25, False)
    assert config.options_of("qwen").defaults == {"temperature": 0.2, "max_tokens": 2000}
    assert config.options_of("gpt-oss").decode_timeout_s == 300
    assert config.policies == Policies(), "a sample shows the defaults"
    assert [(link.prefill, link.gbps) for link in config.links] == [("DGX Spark 1", 10), ("DGX Spark 2", 10)]


def test_the_sample_of_the_vllm_page(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "VLLM.md").read_text()
    block = page.split("```toml\n")[1].split("```")[0]
    config = load_config(written(tmp_path, block, "cluster.toml"), environ={})
    assert config.warnings == ()
    (prefill,), (decode,) = config.prefill_servers, config.decode_servers
    assert (prefill.engine, decode.engine, prefill.model) == ("vllm", "mlx", decode.model)
    assert prefill.arguments[0] == "--vllm-python"


# Where the file is.


def test_where_the_file_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no cluster file: .*disagg config example > cluster\.json.* --local"):
        load_config(environ={})
    (tmp_path / "disaggregated_inference").mkdir()
    order = ["disaggregated_inference/config_current.json", "cluster.toml", "cluster.json", "elsewhere.json"]
    for place in order[:3]:
        written(tmp_path, sample(ConfigFormat.TOML if place.endswith("toml") else ConfigFormat.JSON), place)
        assert load_config(environ={}).source == place
    named = written(tmp_path, FOUR_SERVERS, order[3])
    assert load_config(environ={"DISAGG_CONFIG": str(named)}).source == str(named)
    assert load_config(environ={"DISAGG_CONFIG": ""}).source == "cluster.json"
    monkeypatch.setenv("DISAGG_CONFIG", str(named))
    assert load_config().source == str(named)


def test_home_is_spelled_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    written(tmp_path, FOUR_SERVERS)
    assert load_config("~/cluster.json").source == str(tmp_path / "cluster.json")


@pytest.mark.parametrize("name", ["cluster.json", "cluster.toml", "cluster.conf", "cluster"])
@pytest.mark.parametrize("format", list(ConfigFormat))
def test_the_content_decides_not_the_name(tmp_path: Path, name: str, format: ConfigFormat) -> None:
    assert len(load_config(written(tmp_path, sample(format), name)).servers) == 4


def test_a_byte_order_mark(tmp_path: Path) -> None:
    assert len(load_config(written(tmp_path, "\ufeff" + FOUR_SERVERS)).servers) == 4


# Servers.


def test_all_of_a_server() -> None:
    given = {
        "host": "b", "port": 9, "model": "m", "name": " B ", "engine": "mlx", "token": "t", "power_w": 1,
        "kv_addresses": ["b", "10.0.0.1:9000", "[fe80::1]:9000", "fe80::1"], "price_per_hour": 0.5, "tls": True,
    }  # fmt: skip
    server = load_config({"decode_servers": [given]}).decode_servers[0]
    assert (server.name, server.url, server.roles) == ("B", "https://b:9", ("decode",))
    assert (server.engine, server.token, server.power_w, server.price_per_hour) == ("mlx", "t", 1, 0.5)
    assert server.kv_addresses == tuple(given["kv_addresses"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("::1", "http://[::1]:8001"),
        ("[2001:db8::7]", "http://[2001:db8::7]:8001"),
        ("fe80::1%en0", "http://[fe80::1%en0]:8001"),
        ("mac-studio_1.local", "http://mac-studio_1.local:8001"),
        ("127.0.0.1", "http://127.0.0.1:8001"),
    ],
)
def test_hosts(host: str, url: str) -> None:
    server = cluster({"host": host}).servers[0]
    assert (server.url, server.name) == (url, url.removeprefix("http://"))


def test_a_server_that_does_both() -> None:
    config = load_config({"prefill_servers": [SERVER | {"role": "both"}]})
    assert (config.servers[0].roles, config.servers[0].port) == (("prefill", "decode"), 8001)
    linked = {
        "prefill_servers": [SERVER | {"role": "both", "name": "x"}],
        "decode_servers": [SERVER | {"host": "b", "name": "y"}],
    }
    assert load_config(linked | {"links": [{"prefill": "x", "decode": d, "gbps": 1} for d in "xy"]}).warnings == ()


def test_one_machine_with_two_nodes() -> None:
    assert len(cluster({}, {"host": "a", "port": 9001}, prefill=({"host": "a", "model": "qwen"},)).servers) == 3


def test_tokens() -> None:
    environ = {"ALL": "from-environment\n", "ONE": "1"}
    config = cluster({}, {"token": "own"}, {"token": "x${ONE}y"}, token="${ALL}", environ=environ)
    assert [server.token for server in config.servers] == ["from-environment", "own", "x1y"]
    assert config.token == "from-environment"
    for text in (repr(config), repr(config.servers[0])):
        assert "from-environment" not in text
    with pytest.raises(ConfigError, match=r"decode_servers\[1\]\.token: EMPTY is not set"):
        cluster({}, {"token": "${EMPTY}"}, environ={"EMPTY": ""})


def test_frozen() -> None:
    with pytest.raises(AttributeError):
        load_config(NO_NAMES).servers[0].host = "b"  # type: ignore[misc]


# Models.

BOTH = [{"model": "qwen3-coder:30b"}, {"model": "gpt-oss:120b"}]


@pytest.mark.parametrize(
    ("requested", "found"),
    [
        ("qwen3-coder:30b", "qwen3-coder:30b"),
        ("disaggregated:qwen3-coder:30b", "qwen3-coder:30b"),
        (" disaggregated: qwen ", "qwen3-coder:30b"),
        ("qwen", "qwen3-coder:30b"),
        ("QWEN3", "qwen3-coder:30b"),
        ("GPT-OSS:120B", "gpt-oss:120b"),
        ("gpt-oss:120b-mxfp4", "gpt-oss:120b"),
    ],
)
def test_names_of_models(requested: str, found: str) -> None:
    config = cluster(*BOTH)
    assert config.resolve_model(requested) == found
    assert [server.model for server in config.servers_of(requested)] == [found]


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ("llama", 'no model "llama"; the cluster has qwen3-coder:30b, gpt-oss:120b'),
        ("o", 'no model "o"; the cluster has'),
        ("qw", 'no model "qw"; the cluster has'),
        ("", "name a model; the cluster has qwen3-coder:30b, gpt-oss:120b"),
        (None, "name a model; the cluster has"),
        ("disaggregated:", "name a model; the cluster has"),
        ("x" * 500, 'no model "xxx'),
    ],
)
def test_names_of_no_model(requested: str | None, message: str) -> None:
    for ask in (cluster(*BOTH).resolve_model, cluster(*BOTH).servers_of, cluster(*BOTH).options_of):
        with pytest.raises(ModelNotFound, match=re.escape(message)) as raised:
            ask(requested)
        assert len(str(raised.value)) < 200


@pytest.mark.parametrize("requested", [5, ["qwen"], {"name": "qwen"}, b"qwen"])
def test_a_model_name_must_be_text(requested: Any) -> None:
    with pytest.raises(BadRequest, match="model: expected a name, got"):
        load_config(NO_NAMES).resolve_model(requested)


def test_the_whole_name_beats_a_part_of_another() -> None:
    config = cluster({"model": "qwen"}, {"model": "qwen3"})
    assert (config.resolve_model("qwen"), config.resolve_model("Qwen3")) == ("qwen", "qwen3")
    with pytest.raises(ModelNotFound, match="qwen or qwen3"):
        config.resolve_model("qwen3-coder:30b")


@pytest.mark.parametrize(
    ("requested", "found", "is_part"),
    [
        ("qwen3-coder:30b", "qwen3-coder:30b", False),
        ("disaggregated:QWEN3-CODER:30B", "qwen3-coder:30b", False),
        ("coder", "qwen3-coder:30b", True),
        ("gpt-oss:120b-mxfp4", "gpt-oss:120b", True),
    ],
)
def test_a_match_knows_whether_the_whole_name_fits(requested: str, found: str, is_part: bool) -> None:
    assert cluster(*BOTH).match_model(requested) == (found, is_part)


def test_parts_of_fewer_than_three_characters_match_nothing() -> None:
    config = cluster({"model": "m1"}, {"model": "qwen3"})
    assert config.resolve_model("m1") == "m1"
    for requested in ("n3", "m1-large", "q"):
        with pytest.raises(ModelNotFound, match=f'no model "{requested}"; the cluster has m1, qwen3'):
            config.resolve_model(requested)
    assert config.resolve_model("wen") == "qwen3"


def test_a_part_of_two_models_is_refused_with_both() -> None:
    config = cluster({"model": "qwen3-coder"}, {"model": "qwen3"}, {"model": "other"})
    with pytest.raises(ModelNotFound, match=r'^"qwe" may be qwen3-coder or qwen3: write the full name; the cluster'):
        config.resolve_model("qwe")
    assert config.match_model("qwe", ["qwen3", "other"]) == ("qwen3", True), "of those that a key may use"
    with pytest.raises(ModelNotFound, match=r'no model "qwen3"; the cluster has other$'):
        config.match_model("qwen3", ["other"])


def test_two_spellings_are_two_models_unless_united() -> None:
    prefill = ({"host": "p", "model": "qwen"},)
    apart = cluster({"model": "qwen3-coder:30b"}, prefill=prefill)
    assert apart.names == ("qwen", "qwen3-coder:30b")
    assert 'no decode server has the model "qwen"' in apart.warnings[0]
    united = cluster({"model": "qwen3-coder:30b"}, prefill=prefill, models={"qwen3-coder:30b": {"aliases": ["qwen"]}})
    assert (united.names, united.warnings) == (("qwen3-coder:30b",), ())
    assert [server.host for server in united.servers_of("qwen")] == ["p", "a"]
    assert [server.model for server in united.servers_of("qwen")] == ["qwen", "qwen3-coder:30b"], "as in the file"


def test_aliases_count_in_any_case_and_in_part() -> None:
    config = cluster({"model": "m1"}, {"model": "m2"}, models={"m1": {"aliases": ["Coder"]}, "m3": {"aliases": ["co"]}})
    assert [config.resolve_model(name) for name in ("Coder", "coder", "qwen-coder:30b", "cod")] == ["m1"] * 4
    with pytest.raises(ModelNotFound):
        config.resolve_model("m3")


def test_options() -> None:
    config = cluster({}, {"model": "other"}, models={"qwen": {"context_window": 32768, "prefill_timeout_s": 5}})
    assert config.options_of("QWEN") == ModelOptions(context_window=32768, prefill_timeout_s=5)
    assert config.options_of("other") == ModelOptions()


def test_several_servers_of_a_model() -> None:
    config = cluster({}, {"model": "other"}, {"model": "disaggregated:qwen"})
    assert [server.host for server in config.servers_of("qwen")] == ["a", "c"]
    assert config.names == ("qwen", "other")
