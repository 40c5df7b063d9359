"""Mistakes in a cluster file: an error or a warning that says what to do, whatever the file holds."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disaggregated_inference.cluster import ClusterConfig, ModelOptions, Server, load_config
from disaggregated_inference.errors import ConfigError
from tests.support.cluster_files import FOUR_SERVERS, SERVER, cluster, written


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
        ({"decode_servers": [SERVER, "b"]}, 'decode_servers[1]: expected an object, got "b"; compare with'),
        ({"decode_servers": SERVER}, "decode_servers: expected a list, got an object"),
        ({"decode_servers": None}, "decode_servers: expected a list, got null"),
        ({"decode_servers": [], "prefill_servers": []}, "no servers; list some"),
        ({"decode_servers": [SERVER | {"port": 10**5000}]}, "not plain data"),
        ({"decode_servers": [{"model": "m"}]}, "decode_servers[0].host: missing; write a host name or address"),
        ({"decode_servers": [{"hots": "a", "model": "m"}]}, '.host: missing; write a host name or address, '
         'such as "169.254.150.103"; is "hots" a typo?'),
        ({"decode_servers": [{"host": "a"}]}, "decode_servers[0].model: missing; write the name of a model"),
        ({"decode_servers": [SERVER, SERVER]}, "decode_servers[1]: a:8001 is already in decode_servers[0]; list each"),
        ({"decode_servers": [SERVER, SERVER | {"host": "A", "name": "b"}]}, "a:8001 is already in decode_servers[0]"),
        ({"decode_servers": [SERVER | {"name": "x"}], "prefill_servers": [B | {"name": "x"}]},
         'decode_servers[0].name: "x" is already the name of prefill_servers[0]; give each server a different name'),
        ({"decode_servers": [SERVER], "prefill_servers": [SERVER | {"port": 8001}]},
         'list it once, with "role": "both"'),
        ({"decode_servers": [SERVER | {"name": "x"}], "prefill_servers": [SERVER | {"role": "both"}]},
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
    written(tmp_path, json.dumps({"decode_servers": [SERVER, SERVER | {"host": "b", "port": "80x1"}]}))
    with pytest.raises(ConfigError) as raised:
        load_config("cluster.json")
    message = 'cluster.json: decode_servers[1].port: expected a port from 1 to 65535, such as 8001, got "80x1"'
    assert str(raised.value) == message


def test_a_cycle_is_not_plain_data() -> None:
    raw: dict[str, Any] = {"decode_servers": [SERVER]}
    raw["models"] = raw
    with pytest.raises(ConfigError, match="not plain data"):
        load_config(raw)


# Warnings.


@pytest.mark.parametrize(
    ("raw", "warnings"),
    [
        ({"decode_servers": [SERVER], "comment": "x", "_": 1}, ["config: comment: unknown key, ignored",
                                                          "config: _: unknown key, ignored"]),
        ({"decode_servers": [SERVER | {"engin": "mlx"}]},
         ['config: decode_servers[0].engin: unknown key, ignored; did you mean "engine"?']),
        ({"decode_servers": [SERVER], "prefil_servers": []},
         ['config: prefil_servers: unknown key, ignored; did you mean "prefill_servers"?']),
        ({"decode_servers": [SERVER], "policies": {"retry": 1}},
         ['config: policies.retry: unknown key, ignored; did you mean "retries"?']),
        ({"decode_servers": [SERVER], "models": {"m": {"alias": []}}},
         ['config: models.m.alias: unknown key, ignored; did you mean "aliases"?']),
        ({"decode_servers": [SERVER], "source": "x", "warnings": []}, ["config: source: unknown key, ignored",
                                                                  "config: warnings: unknown key, ignored"]),
        ({"decode_servers": [SERVER], 1: 2}, ["config: 1: unknown key, ignored"]),
        ({"decode_servers": [SERVER | {"host": "0.0.0.0"}]},
         ["config: decode_servers[0].host: 0.0.0.0 is an address to listen on; "
          "write the address where others reach the server"]),
        ({"prefill_servers": [SERVER]},
         ['config: decode_servers: no decode server has the model "m" of a prefill server; '
          'add one, or list the model\'s other name under "aliases" in "models"']),
        ({"prefill_servers": [SERVER | {"role": "both"}]}, []),
        ({"decode_servers": [SERVER], "models": {"n": {}}},
         ['config: models.n: no server has this model; if servers use another name, add it to "aliases"']),
    ],
)  # fmt: skip
def test_warnings(raw: dict[str, Any], warnings: list[str]) -> None:
    assert list(load_config(raw, environ={}).warnings) == warnings


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
