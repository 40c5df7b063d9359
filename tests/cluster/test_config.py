"""The cluster file: what it may contain, what that means, and the errors and warnings for mistakes."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from disaggregated_inference.cli.config import ConfigFormat, config_app, sample
from disaggregated_inference.cluster import ClusterConfig, ModelOptions, Policies, Server, load_config
from disaggregated_inference.errors import BadRequest, ConfigError, ModelNotFound

# The file of the set-up guide, byte for byte.
FOUR_SERVERS = """{
  "prefill_servers": [
    {
      "host": "169.254.150.103",
      "port": 8000,
      "model": "qwen",
      "name": "DGX Spark 1"
    },
    {
      "host": "169.254.150.104",
      "port": 8000,
      "model": "gpt-oss",
      "name": "DGX Spark 2"
    }
  ],
  "decode_servers": [
    {
      "host": "169.254.150.102",
      "port": 8001,
      "model": "qwen",
      "name": "Mac Studio 2"
    },
    {
      "host": "169.254.150.101",
      "port": 8001,
      "model": "gpt-oss",
      "name": "Mac Studio 1"
    }
  ]
}
"""
NO_NAMES: dict[str, Any] = {
    "prefill_servers": [
        {"host": "192.168.100.1", "port": 8000, "model": "qwen"},
    ],
    "decode_servers": [
        {"host": "169.254.150.101", "port": 8001, "model": "qwen"},
    ],
}


def cluster(
    *decode: dict[str, Any],
    prefill: tuple[dict[str, Any], ...] = (),
    environ: dict[str, str] | None = None,
    **more: Any,
) -> ClusterConfig:
    """Decode servers named a, b, ... with what is given."""
    servers = [{"host": name, "model": "qwen"} | given for name, given in zip("abcdefgh", decode, strict=False)]
    return load_config({"prefill_servers": list(prefill), "decode_servers": servers} | more, environ or {})


def written(folder: Path, text: str, name: str = "cluster.json") -> Path:
    path = folder / name
    path.write_text(text)
    return path


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


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cluster.json", b'{"prefill_servers": [\n  {"host": "a",}\n]}', "cluster.json: line 2, column 16: "),
        ("cluster.json", b"{'prefill_servers': []}", "double quotes"),
        ("cluster.json", b"", "no servers; list some"),
        ("cluster.json", b"?", "line 1, column 1: "),
        ("cluster.json", b'{"a": 1, "a": 2}', 'key "a" appears twice in one object'),
        ("cluster.json", b'{"token": "\\ud800"}', "not plain data"),
        ("cluster.json", b'{"queue": ' + b"9" * 5000 + b"}", "not JSON"),
        ("cluster.json", b"[" * 100_000, "not JSON"),
        ("cluster.json", b"[]", 'expected an object with "prefill_servers" and "decode_servers", got a list'),
        ("cluster.json", b"{}", "no servers; list some under prefill_servers and decode_servers"),
        ("cluster.json", b"\xff\xfe{\x00", "not UTF-8 at byte 0; save it as UTF-8"),
        ("cluster.toml", b"[[prefill_servers]\n", "not TOML: "),
        ("cluster.toml", b'a = 1\nb = "x\n', "(at line 2, column 7)"),
        ("cluster.toml", b"a = " + b"[" * 100_000, "not TOML"),
        ("cluster.toml", b"token = 1979-05-27", "token: expected a string"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        load_config(path)
    assert str(raised.value).startswith(f"{path}: ")


@pytest.mark.parametrize("path", ["nowhere/cluster.json", ".", "a\0b", "x" * 5000, "~nobody-at-all/cluster.json"])
def test_paths_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be read: .*disagg config example"):
        load_config(path)


def test_a_path_that_is_empty() -> None:
    with pytest.raises(ConfigError, match="the path of the cluster file is empty"):
        load_config("")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = written(tmp_path, FOUR_SERVERS)
    path.chmod(0)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        load_config(path)


# Errors.

A = {"host": "a", "model": "m"}
B = {"host": "b", "model": "m"}
LINK = {"prefill": "b:8000", "decode": "a:8001", "gbps": 1}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"port": "80x1"}, '.port: expected a port from 1 to 65535, such as 8001, got "80x1"'),
        ({"port": 70000}, ".port: expected a port from 1 to 65535, such as 8001, got 70000"),
        ({"port": 0}, ".port: expected a port from 1 to 65535, such as 8001, got 0"),
        ({"port": True}, ".port: expected a port from 1 to 65535, such as 8001, got true"),
        ({"port": None}, ".port: expected a port from 1 to 65535, such as 8001, got null"),
        ({"model": ""}, '.model: expected the name of a model, such as "qwen", got ""'),
        ({"model": "disaggregated: "}, ".model: expected the name of a model"),
        ({"host": ""}, ".host: expected a host name or address"),
        (
            {"host": "http://a:8001"},
            '.host: expected a host name or address, such as "169.254.150.103", got "http://a:8001"',
        ),
        ({"host": "a:8001"}, ".host: expected a host name or address"),
        ({"host": "169.254.150.999"}, ".host: expected a host name or address"),
        ({"host": "a b"}, ".host: expected a host name or address"),
        ({"host": "fe80::1%a/b"}, ".host: expected a host name or address"),
        ({"host": ["a"]}, '.host: expected a host name or address, such as "169.254.150.103", got a list'),
        ({"kv_addresses": "a"}, '.kv_addresses: expected a list such as ["10.0.0.1", "192.168.100.1:9000"], got "a"'),
        ({"kv_addresses": ["a", 1]}, ".kv_addresses[1]: expected HOST or HOST:PORT"),
        ({"kv_addresses": ["a:x"]}, ".kv_addresses[0]: expected HOST or HOST:PORT"),
        ({"kv_addresses": ["a:99999"]}, ".kv_addresses[0]: expected HOST or HOST:PORT"),
        ({"power_w": -1}, ".power_w: expected watts, such as 240, got -1"),
        ({"price_per_hour": "1 $"}, '.price_per_hour: expected a number >= 0, such as 0.25, got "1 $"'),
        ({"tls": "yes"}, '.tls: expected true or false, got "yes"'),
        ({"role": "writer"}, '.role: expected "prefill", "decode" or "both", got "writer"'),
        ({"role": "prefill"}, ".role: this is the list of decode servers; move it"),
        ({"token": ["hidden"]}, '.token: expected a string, or "${NAME}" for an environment variable'),
        ({"token": "hidden\n\x07"}, ".token: has characters that an HTTP header cannot carry"),
        ({"token": "hidden${NOT_THERE}"}, ".token: NOT_THERE is not set in the environment; export"),
    ],
)
def test_mistakes_in_a_server(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape("config: decode_servers[1]" + message)) as raised:
        cluster({}, given)
    assert raised.value.status == 400
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ([], 'expected an object with "prefill_servers" and "decode_servers", got a list'),
        (7, "got 7"),
        ({"decode_servers": [A, "b"]}, 'decode_servers[1]: expected an object, got "b"; compare with'),
        ({"decode_servers": A}, "decode_servers: expected a list, got an object"),
        ({"decode_servers": None}, "decode_servers: expected a list, got null"),
        ({"decode_servers": [], "prefill_servers": []}, "no servers; list some"),
        ({"decode_servers": [A | {"port": 10**5000}]}, "not plain data"),
        ({"decode_servers": [{"model": "m"}]}, "decode_servers[0].host: missing; write a host name or address"),
        ({"decode_servers": [{"hots": "a", "model": "m"}]}, '.host: missing; write a host name or address, '
         'such as "169.254.150.103"; is "hots" a typo?'),
        ({"decode_servers": [{"host": "a"}]}, "decode_servers[0].model: missing; write the name of a model"),
        ({"decode_servers": [A, A]}, "decode_servers[1]: a:8001 is already in decode_servers[0]; list each"),
        ({"decode_servers": [A, A | {"host": "A", "name": "b"}]}, "a:8001 is already in decode_servers[0]"),
        ({"decode_servers": [A | {"name": "x"}], "prefill_servers": [B | {"name": "x"}]},
         'decode_servers[0].name: "x" is already the name of prefill_servers[0]; give each server a different name'),
        ({"decode_servers": [A], "prefill_servers": [A | {"port": 8001}]}, 'list it once, with "role": "both"'),
        ({"decode_servers": [A | {"name": "x"}], "prefill_servers": [A | {"role": "both"}]},
         "a:8001 is already in prefill_servers[0]"),
    ],
)  # fmt: skip
def test_mistakes_in_lists(raw: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^config: .*{re.escape(message)}|^config: {re.escape(message)}"):
        load_config(raw, environ={})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"links": [LINK | {"prefill": "x"}]}, '[0].prefill: no prefill server has the name "x"; there are b:8000'),
        ({"links": [LINK | {"decode": "a:801"}]},
         'links[0].decode: no decode server has the name "a:801"; did you mean "a:8001"?'),
        ({"links": [LINK | {"decode": "b:8000"}]}, "links[0].decode: no decode server has the name"),
        ({"links": [LINK | {"gbps": 0}]}, "links[0].gbps: expected gigabits per second, such as 10, got 0"),
        ({"links": [LINK, LINK]}, "links[1]: b:8000 to a:8001 is listed twice"),
        ({"links": [{"decode": "a:8001"}]}, "links[0].prefill: missing; write the name of a prefill server"),
        ({"models": []}, "models: expected an object, got a list"),
        ({"models": {"m": None}}, "models.m: expected an object"),
        ({"models": {"": {}}}, "a model's name or alias is empty"),
        ({"models": {"m": {"aliases": "x"}}}, 'models.m.aliases: expected a list such as ["qwen"], got "x"'),
        ({"models": {"m": {"aliases": [" "]}}}, "a model's name or alias is empty"),
        ({"models": {"m": {"context_window": "32K"}}},
         'models.m.context_window: expected a number of tokens, such as 32768, got "32K"'),
        ({"models": {"m": {"defaults": [1]}}},
         'models.m.defaults: expected an object such as {"temperature": 0.2}, got a list'),
        ({"models": {"m": {"aliases": ["x"]}, "n": {"aliases": ["x"]}}},
         'models.n: "x" is already a name in models.m; use each name once'),
        ({"models": {"m": {"aliases": ["n"]}, "n": {}}}, 'models.n: "n" is already a name in models.m'),
        ({"models": {"m": {}, "disaggregated:m": {}}}, '"m" is already a name in models.m'),
        ({"policies": []}, "policies: expected an object"),
        ({"policies": {"retries": -1}}, "policies.retries: expected an integer >= 0, got -1"),
        ({"policies": {"poll_s": 0}}, "policies.poll_s: expected a number of seconds > 0, got 0"),
        ({"policies": {"poll_s": float("inf")}}, "policies.poll_s: expected a number of seconds"),
        ({"policies": {"poll_s": float("nan")}}, "policies.poll_s: expected a number of seconds"),
        ({"policies": {"poll_s": 10**400}}, "policies.poll_s: expected a number of seconds"),
        ({"policies": {"local": "maybe"}},
         'policies.local: expected "auto", "never" or "always", got "maybe"'),
        ({"policies": {"fallback": 1}}, "policies.fallback: expected true or false, got 1"),
        ({"policies": {"history_file": Path("x")}}, "not plain data"),
        ({"token": 5}, 'token: expected a string, or "${NAME}"'),
    ],
)  # fmt: skip
def test_mistakes_outside_servers(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        cluster({"model": "m"}, prefill=(B,), **more)


def test_the_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, json.dumps({"decode_servers": [A, A | {"host": "b", "port": "80x1"}]}))
    with pytest.raises(ConfigError) as raised:
        load_config("cluster.json")
    message = 'cluster.json: decode_servers[1].port: expected a port from 1 to 65535, such as 8001, got "80x1"'
    assert str(raised.value) == message


def test_a_cycle_is_not_plain_data() -> None:
    raw: dict[str, Any] = {"decode_servers": [A]}
    raw["models"] = raw
    with pytest.raises(ConfigError, match="not plain data"):
        load_config(raw)


# Warnings.


@pytest.mark.parametrize(
    ("raw", "warnings"),
    [
        ({"decode_servers": [A], "comment": "x", "_": 1}, ["config: comment: unknown key, ignored",
                                                          "config: _: unknown key, ignored"]),
        ({"decode_servers": [A | {"engin": "mlx"}]},
         ['config: decode_servers[0].engin: unknown key, ignored; did you mean "engine"?']),
        ({"decode_servers": [A], "prefil_servers": []},
         ['config: prefil_servers: unknown key, ignored; did you mean "prefill_servers"?']),
        ({"decode_servers": [A], "policies": {"retry": 1}},
         ['config: policies.retry: unknown key, ignored; did you mean "retries"?']),
        ({"decode_servers": [A], "models": {"m": {"alias": []}}},
         ['config: models.m.alias: unknown key, ignored; did you mean "aliases"?']),
        ({"decode_servers": [A], "source": "x", "warnings": []}, ["config: source: unknown key, ignored",
                                                                  "config: warnings: unknown key, ignored"]),
        ({"decode_servers": [A], 1: 2}, ["config: 1: unknown key, ignored"]),
        ({"decode_servers": [A | {"host": "0.0.0.0"}]},
         ["config: decode_servers[0].host: 0.0.0.0 is an address to listen on; "
          "write the address where others reach the server"]),
        ({"prefill_servers": [A]},
         ['config: decode_servers: no decode server has the model "m" of a prefill server; '
          'add one, or list the model\'s other name under "aliases" in "models"']),
        ({"prefill_servers": [A | {"role": "both"}]}, []),
        ({"decode_servers": [A], "models": {"n": {}}},
         ['config: models.n: no server has this model; if servers use another name, add it to "aliases"']),
    ],
)  # fmt: skip
def test_warnings(raw: dict[str, Any], warnings: list[str]) -> None:
    assert list(load_config(raw, environ={}).warnings) == warnings


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
    config = load_config({"prefill_servers": [A | {"role": "both"}]})
    assert (config.servers[0].roles, config.servers[0].port) == (("prefill", "decode"), 8001)
    linked = {
        "prefill_servers": [A | {"role": "both", "name": "x"}],
        "decode_servers": [A | {"host": "b", "name": "y"}],
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


# Anything at all.

KEYS = sorted(
    {*ClusterConfig.__struct_fields__, *Server.__struct_fields__, *ModelOptions.__struct_fields__, "gbps", "x"}
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["a", "both", "${X}"])
)
ANY_JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner),
    max_leaves=25,
)
NAMES = st.sampled_from(["a", "b", "m", "qwen", "disaggregated:qwen", "x y"])
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "host": st.sampled_from(["a", "b", "::1", "10.0.0.1"]),
    "port": st.integers(1, 65535),
    "model": NAMES,
    "name": NAMES,
    "role": st.just("both"),
    "kv_addresses": st.lists(st.sampled_from(["a", "a:1", "[::1]:2"])),
    "power_w": st.none() | st.floats(0, 1e6),
    "aliases": st.lists(NAMES, max_size=2),
    "comment": ANY_JSON,
}


def likely(needed: tuple[str, ...], *more: str) -> st.SearchStrategy[Any]:
    """Mostly valid; sometimes anything."""
    valid = st.fixed_dictionaries(
        {name: LIKELY[name] for name in needed}, optional={name: LIKELY[name] for name in more}
    )
    invalid = st.fixed_dictionaries(
        {name: LIKELY[name] for name in needed}, optional={name: LIKELY[name] | ANY_JSON for name in more}
    )
    return st.one_of(valid, valid, valid, invalid, ANY_JSON)


SERVERS = st.lists(likely(("host", "model"), "port", "name", "role", "kv_addresses", "power_w", "comment"), max_size=3)
CLUSTERISH = st.fixed_dictionaries(
    {"decode_servers": SERVERS},
    optional={
        "prefill_servers": SERVERS,
        "models": st.dictionaries(NAMES, likely((), "aliases", "comment"), max_size=2),
        "links": st.lists(ANY_JSON, max_size=1),
        "policies": st.just({}) | ANY_JSON,
    },
)


@settings(deadline=None, max_examples=400)
@given(ANY_JSON.filter(lambda raw: raw is not None and not isinstance(raw, str)) | CLUSTERISH)
def test_anything_is_a_cluster_or_a_config_error(raw: Any) -> None:
    try:
        config = load_config(raw, environ={})
    except ConfigError:
        return
    assert config.servers
    for server in config.servers:
        assert server in config.servers_of(server.model)


@settings(deadline=None, max_examples=150)
@given(text=st.text() | ANY_JSON.map(json.dumps), name=st.sampled_from(["any.json", "any.toml", "any"]))
def test_any_file_is_a_cluster_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, text: str, name: str
) -> None:
    path = tmp_path_factory.getbasetemp() / name
    path.write_text(text, errors="surrogatepass", encoding="utf-8")
    try:
        assert load_config(path, environ={}).servers
    except ConfigError as error:
        message = str(error)
        assert message.startswith(f"{path}: ")


# The command.

runner = CliRunner()


def test_check_lists_servers_and_models(tmp_path: Path) -> None:
    text = FOUR_SERVERS.rstrip().removesuffix("}") + ', "comment": 1, "models": {"q3": {"aliases": ["qwen"]}}}'
    path = written(tmp_path, text)
    result = runner.invoke(config_app, ["check", str(path)])
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"{path}: 4 servers, 2 models",
        "prefill  DGX Spark 1   http://169.254.150.103:8000  qwen",
        "prefill  DGX Spark 2   http://169.254.150.104:8000  gpt-oss",
        "decode   Mac Studio 2  http://169.254.150.102:8001  qwen",
        "decode   Mac Studio 1  http://169.254.150.101:8001  gpt-oss",
        "model q3 (also qwen): prefill on DGX Spark 1; decode on Mac Studio 2",
        "model gpt-oss: prefill on DGX Spark 2; decode on Mac Studio 1",
        f"warning: {path}: comment: unknown key, ignored",
    ]


def test_check_as_json_hides_tokens(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(NO_NAMES | {"token": "hidden"}))
    result = runner.invoke(config_app, ["check", str(path), "--json"])
    data = json.loads(result.stdout)
    assert "hidden" not in result.stdout
    assert (data["ok"], data["token"], data["decode_servers"][0]["token"]) == (True, True, True)
    assert data["served"] == {"qwen": ["192.168.100.1:8000", "169.254.150.101:8001"]}
    assert data["warnings"] == []


def test_check_fails_with_the_error(tmp_path: Path) -> None:
    path = written(tmp_path, "{}")
    result = runner.invoke(config_app, ["check", str(path)])
    assert result.exit_code == 1
    assert isinstance(result.exception, ConfigError), "the command line prints it as one line"
    result = runner.invoke(config_app, ["check", str(path), "--json"])
    assert result.exit_code == 1
    message = f"{path}: no servers; list some under prefill_servers and decode_servers"
    assert json.loads(result.stdout) == {"ok": False, "error": {"code": "config_error", "message": message}}


def test_check_takes_the_file_as_other_commands_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(written(tmp_path, FOUR_SERVERS))
    monkeypatch.setenv("DISAGG_CONFIG", "/nowhere")
    plain = runner.invoke(config_app, ["check", path])
    assert runner.invoke(config_app, ["check", "-c", path]).stdout == plain.stdout != ""
    assert runner.invoke(config_app, ["check", path, "--config", path]).exit_code == 2


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"temperature": -3}, "temperature must be at least 0"),
        ({"top_p": float("nan")}, "top_p must be at least 0"),
        ({"request_id": "always"}, "request_id belongs to one request"),
        ({"prompt": "x"}, "prompt belongs to one request"),
        ({"messages": []}, "messages belongs to one request"),
        ({"model": "gpt-oss"}, "model: gpt-oss is another model"),
        ({"model_type": "nope"}, 'no model "nope"'),
        ({"response_format": {"type": "nope"}}, "response_format: its type must be text"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_check_reads_defaults_as_a_request(tmp_path: Path, defaults: dict[str, Any], message: str) -> None:
    path = str(written(tmp_path, json.dumps(json.loads(FOUR_SERVERS) | {"models": {"qwen": {"defaults": defaults}}})))
    error = runner.invoke(config_app, ["check", path]).exception
    assert isinstance(error, ConfigError)
    assert str(error).startswith(f"{path}: models.qwen.defaults: ")
    assert message in str(error)


def test_check_accepts_all_sampling_params(tmp_path: Path) -> None:
    defaults = {"model_type": "qwen", "response_format": {"type": "json_object"}, "temperature": 0, "seed": None}
    raw = json.loads(FOUR_SERVERS) | {"models": {"qwen": {"defaults": defaults}}}
    assert runner.invoke(config_app, ["check", str(written(tmp_path, json.dumps(raw)))]).exit_code == 0


def test_example(tmp_path: Path) -> None:
    assert runner.invoke(config_app, ["example"]).stdout == sample(ConfigFormat.JSON)
    assert runner.invoke(config_app, ["example", "--format", "toml"]).stdout == sample(ConfigFormat.TOML)
    assert runner.invoke(config_app, ["example", "--format", "yaml"]).exit_code == 2
