"""`disagg gateway` as a process of its own: certificates, browsers, signals, neighbours, silence and frozen nodes."""

import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import httpx2
import ollama
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.gateway.key_file import new_key
from disaggregated_inference.http.tls import Certificate
from tests.conftest import until
from tests.support.cluster import Process
from tests.support.gateway import GatewayProcess, gateway_process, simulated_config, simulated_pair

MODEL = "simulated:tiny"
PROFILE = "custom:prefill=20000,decode=400"
SLOW = 30_000  # tokens, one for each letter: 1.5 s to read
SHORT, LONG = 12, 20_000  # the long one does not end while a test looks
ORIGIN = "https://chat.example"
BROWSER = {"Origin": ORIGIN}
SOON_S = 20.0

NOBODY: Any = {"decode_servers": [{"host": "127.0.0.1", "port": 9, "model": "away"}]}

Expected = Callable[[str, int], str]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Process, Process]]:
    with simulated_pair(PROFILE) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def plain(pair: tuple[Process, Process], tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """Without keys, for all who change nothing about it."""
    folder = tmp_path_factory.mktemp("plain")
    with gateway_process(folder, simulated_config(*pair), "--keepalive", "0.1") as gateway:
        yield gateway


@pytest.fixture(scope="module")
def expected(pair: tuple[Process, Process]) -> Iterator[Expected]:
    """What the cluster says without a gateway, or its beginning."""
    with DisaggregatedClient(simulated_config(*pair)) as client:
        yield lambda prompt, count: client.generate(**asked(prompt, count))[0]


def asked(prompt: str, count: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": MODEL, "messages": messages, "max_tokens": count, "temperature": 0, "ignore_eos": True}


def official(url: str, key: str = "none") -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


def said_by(client: OpenAI, prompt: str, count: int = SHORT) -> str:
    ask = asked(prompt, count)
    extra = {"ignore_eos": ask.pop("ignore_eos")}
    return client.chat.completions.create(**ask, extra_body=extra).choices[0].message.content or ""


def pieces_of(client: OpenAI, prompt: str, count: int) -> Iterator[str]:
    """One for each token."""
    ask = asked(prompt, count)
    extra = {"ignore_eos": ask.pop("ignore_eos")}
    with client.chat.completions.create(**ask, stream=True, extra_body=extra) as chunks:
        for chunk in chunks:
            if chunk.choices and (text := chunk.choices[0].delta.content):
                yield text


def post(url: str, path: str = "/v1/chat/completions", **more: Any) -> httpx.Response:
    body: dict[str, Any] = {} if "content" in more else {"json": asked("hello", SHORT)}
    return httpx.post(url + path, timeout=60, **body | more)


def free(pair: tuple[Process, Process]) -> bool:
    return all(node.nothing_left() for node in pair)


# Certificates.


class Pem:
    def __init__(self, folder: Path, name: str) -> None:
        self.cert, self.key = str(folder / f"{name}.crt"), str(folder / f"{name}.key")
        make = [
            "openssl",
            "req",
            "-x509",
            "-nodes",
            "-days",
            "30",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
        ]
        where = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
        subprocess.run([*make, *where, "-keyout", self.key, "-out", self.cert], check=True, capture_output=True)

    @property
    def shown(self) -> bytes:
        return ssl.PEM_cert_to_DER_cert(Path(self.cert).read_text())

    def take_over(self, other: "Pem") -> None:
        shutil.copy(other.cert, self.cert)
        shutil.copy(other.key, self.key)


def shown(url: str) -> bytes:
    address = httpx.URL(url).host, httpx.URL(url).port or 443
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(address))


def test_tls(pair: tuple[Process, Process], expected: Expected, tmp_path: Path) -> None:
    mine, other = Pem(tmp_path, "mine"), Pem(tmp_path, "other")
    with gateway_process(tmp_path, simulated_config(*pair), "--tls-cert", mine.cert, "--tls-key", mine.key) as gateway:
        assert gateway.url.startswith("https://")
        trusting = httpx2.Client(verify=ssl.create_default_context(cafile=mine.cert))
        with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, http_client=trusting) as client:
            text = expected("over TLS", 40)
            assert said_by(client, "over TLS", 40) == text
            pieces = pieces_of(client, "over TLS", 40)
            heard = next(pieces)
            # A certificate that was renewed is taken with SIGHUP; who is connected goes on. A wrong one is not taken.
            before = mine.shown
            mine.take_over(other)
            gateway.tell(signal.SIGHUP)
            assert until(lambda: shown(gateway.url) == other.shown != before, SOON_S), gateway.said()
            assert heard + "".join(pieces) == text
        with official(gateway.url) as suspicious, pytest.raises(openai.APIConnectionError):
            said_by(suspicious, "over TLS")
        Path(mine.key).write_text("nonsense")
        gateway.tell(signal.SIGHUP)
        assert until(lambda: "was not read again" in gateway.said(), SOON_S)
        assert shown(gateway.url) == other.shown


def test_certificates_that_are_none(tmp_path: Path) -> None:
    one, other, empty = Pem(tmp_path, "one"), Pem(tmp_path, "other"), tmp_path / "empty.pem"
    empty.touch()
    locked = str(tmp_path / "locked.key")
    lock = ["openssl", "ec", "-in", one.key, "-aes256", "-passout", "pass:x", "-out", locked]
    subprocess.run(lock, check=True, capture_output=True)
    wrong = {
        ("nowhere.pem", one.key): "--tls-cert nowhere.pem: no such file",
        (one.cert, "nowhere.pem"): "--tls-key nowhere.pem: no such file",
        ("", one.key): "by --tls-cert",
        (one.cert, ""): "give --tls-key",
        (one.key, one.cert): "not a certificate and its private key",
        (str(empty), one.key): "empty.pem",
        (one.cert, locked): "is encrypted",
    }
    for files, words in wrong.items():
        with pytest.raises(BadRequest, match=re.escape(words)):
            Certificate(*files).require()
    gateway = GatewayProcess(tmp_path, NOBODY, "--tls-cert", one.cert, "--tls-key", other.key)
    assert gateway.ended() == 1
    said = f"error: --tls-cert {one.cert} --tls-key {other.key}: the key is not this certificate's\n"
    assert gateway.said() == said
    gateway.end()


def test_a_port_that_is_taken(plain: GatewayProcess, tmp_path: Path) -> None:
    second = GatewayProcess(tmp_path, NOBODY, "--port", str(httpx.URL(plain.url).port))
    assert second.ended() == 1
    assert re.fullmatch(r"error: cannot listen on 127\.0\.0\.1:\d+: .* in use; .*\n", second.said())
    second.end()


# Browsers.


PREFLIGHT = BROWSER | {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-stainless-lang",
}


def test_browsers_are_let_in_where_they_are_wanted(pair: tuple[Process, Process], tmp_path: Path) -> None:
    key = {"Authorization": "Bearer " + new_key("web", tmp_path / "keys.json")} | BROWSER
    arguments = ("--cors", ORIGIN + "/", "--cors", "http://localhost:3000", "--keys", str(tmp_path / "keys.json"))
    with gateway_process(tmp_path, simulated_config(*pair), *arguments) as gateway:
        url = gateway.url
        asking = httpx.options(f"{url}/v1/chat/completions", headers=PREFLIGHT)  # browsers send no key with it
        assert asking.status_code == 200
        assert asking.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in asking.headers["access-control-allow-methods"]
        allowed = asking.headers["access-control-allow-headers"]
        assert all(name in allowed for name in ("authorization", "content-type", "x-stainless-lang"))
        unknown = asked("hello", SHORT) | {"model": "x"}
        answers = [
            (200, post(url, headers=key)),
            (200, post(url, headers=key, json=asked("hello", SHORT) | {"stream": True})),
            (200, httpx.get(f"{url}/v1/models", headers=key)),
            (401, post(url, headers=BROWSER)),
            (401, post(url, "/v1/messages", headers=BROWSER)),
            (404, post(url, headers=key, json=unknown)),
            (404, post(url, "/api/chat", headers=key, json=unknown)),
            (404, httpx.get(f"{url}/nowhere", headers=key)),
            (405, httpx.get(f"{url}/v1/chat/completions", headers=key)),
            (400, post(url, headers=key, json={"model": MODEL})),
            (400, post(url, "/api/chat", headers=key, content=b"{")),
        ]
        for status, answer in answers:
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == ORIGIN
            assert answer.headers["access-control-expose-headers"] == "*"
        stranger = post(url, headers=key | {"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in stranger.headers
        assert httpx.options(url, headers=PREFLIGHT | {"Origin": "https://evil.example"}).status_code == 400


def test_browsers_are_not_let_in_by_default(plain: GatewayProcess) -> None:
    preflight = httpx.options(f"{plain.url}/v1/chat/completions", headers=PREFLIGHT)
    assert preflight.status_code == 405
    for answer in (preflight, post(plain.url, headers=BROWSER), httpx.get(f"{plain.url}/v1/models", headers=BROWSER)):
        assert not [name for name in answer.headers if name.startswith("access-control")]


# Signals.


def half_sent(url: str, key: str, body: bytes) -> socket.socket:
    """A request whose body is not all there."""
    sock = socket.create_connection((httpx.URL(url).host, httpx.URL(url).port or 80), timeout=SOON_S)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
    sock.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body[:20])
    return sock


def whole_answer(sock: socket.socket) -> Any:
    with sock, sock.makefile("rb") as answer:
        return json.loads(answer.read().partition(b"\r\n\r\n")[2])


def test_a_new_config_and_new_keys(pair: tuple[Process, Process], expected: Expected, tmp_path: Path) -> None:
    keys, fresh = tmp_path / "keys.json", tmp_path / "fresh.json"
    alice, bob = new_key("alice", keys), new_key("bob", fresh)
    config = simulated_config(*pair)
    with gateway_process(tmp_path, config, "--keys", str(keys)) as gateway, official(gateway.url, alice) as old:
        pieces, body = pieces_of(old, "reload", LONG), json.dumps(asked("half", SHORT)).encode()
        heard = next(pieces)
        half = half_sent(gateway.url, alice, body)

        def reloaded(words: str) -> bool:
            before = gateway.said().count(words)
            gateway.tell(signal.SIGHUP)
            return until(lambda: gateway.said().count(words) > before, SOON_S)

        def names(key: str) -> list[str]:
            with official(gateway.url, key) as client:
                return [model.id for model in client.models.list()]

        assert names(alice) == [MODEL]
        gateway.config.write_text(json.dumps(config | {"models": {MODEL: {"aliases": ["new-name"]}}}))
        shutil.copy(fresh, keys)
        assert reloaded("the config was read again")
        assert httpx.get(f"{gateway.url}/ready").status_code == 200  # at once: a load balancer looks at it
        with pytest.raises(openai.AuthenticationError):
            names(alice)
        with official(gateway.url, bob) as client:
            ask = asked("hello", SHORT) | {"model": "new-name"}
            extra = {"ignore_eos": ask.pop("ignore_eos")}
            assert client.chat.completions.create(**ask, extra_body=extra).choices[0].message.content == expected(
                "hello", SHORT
            )
        half.sendall(body[20:])
        assert whole_answer(half)["choices"][0]["message"]["content"] == expected("half", SHORT)
        for name, wrong in (
            (gateway.config, b"{"),
            (gateway.config, b'{"decode_servers": [{"port": "x"}]}'),
            (keys, b"[]"),
        ):
            right = name.read_bytes()
            name.write_bytes(wrong)
            assert reloaded("the old one stays")
            name.write_bytes(right)
        gateway.config.unlink()
        assert reloaded("the old one stays")
        assert names(bob) == [MODEL]
        # Through all of it the stream that was open before went on.
        heard += "".join(islice(pieces, 100))
        assert heard == expected("reload", 101)
        pieces.close()  # type: ignore[attr-defined]
        assert until(lambda: free(pair), SOON_S)
        assert "Traceback" not in gateway.said()


def test_what_was_served_is_remembered_over_a_new_config(pair: tuple[Process, Process], tmp_path: Path) -> None:
    config = simulated_config(*pair)
    with gateway_process(tmp_path, config) as gateway, official(gateway.url) as client:

        def reloaded(count: int) -> bool:
            gateway.tell(signal.SIGHUP)
            return until(lambda: gateway.said().count("the config was read again") == count, SOON_S)

        def served() -> tuple[int, int, int]:
            """Well, cancelled, and as the history has them."""
            told = httpx.get(f"{gateway.url}/cluster").json()
            assert told["latency"]["total_time"]
            return told["served"]["ok"], told["served"]["cancelled"], len(told["history"])

        said_by(client, "one")
        pieces = pieces_of(client, "still going", LONG)
        next(pieces)
        assert reloaded(1)  # as it was
        assert served() == (1, 0, 1)
        gateway.config.write_text(json.dumps(config | {"policies": {"history": 7}}))
        assert reloaded(2)
        said_by(client, "two")
        assert served() == (2, 0, 2)
        pieces.close()  # type: ignore[attr-defined]
        assert until(lambda: served() == (2, 1, 3), SOON_S)  # the old orchestrator's last
        assert "Traceback" not in gateway.said()


def refuses(url: str) -> bool:
    """Nobody listens, or it says that it is busy with ending."""
    try:
        return httpx.get(f"{url}/ready", timeout=SOON_S).status_code == 503
    except httpx.TransportError:
        return True


def test_who_is_there_may_finish(pair: tuple[Process, Process], expected: Expected, tmp_path: Path) -> None:
    with gateway_process(tmp_path, simulated_config(*pair)) as gateway, official(gateway.url) as client:
        texts = [expected(f"drain {number}", 1200) for number in range(3)]
        streams = [pieces_of(client, f"drain {number}", 1200) for number in range(2)]
        firsts = [next(stream) for stream in streams]
        with (
            ThreadPoolExecutor(2) as pool,
            httpx.stream("GET", f"{gateway.url}/cluster/events", timeout=SOON_S) as feed,
        ):
            whole = pool.submit(said_by, client, "drain 2", 1200)
            assert until(lambda: pair[1].status()["waiting"] == 3, SOON_S)
            gateway.tell(signal.SIGTERM)
            assert until(lambda: refuses(gateway.url), SOON_S)
            said = [first + "".join(stream) for first, stream in zip(firsts, streams, strict=True)]
            assert [*said, whole.result(SOON_S)] == texts
            assert b"event: status" in feed.read()  # to its end
        assert gateway.ended() == 0
        assert refuses(gateway.url)
        assert "Traceback" not in gateway.said()


def test_who_is_too_slow_is_told(pair: tuple[Process, Process], tmp_path: Path) -> None:
    with gateway_process(tmp_path, simulated_config(*pair), "--drain", "1") as gateway, official(gateway.url) as client:
        pieces = pieces_of(client, "slow", LONG)
        next(pieces)
        gateway.tell(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down: the request was not done"):
            list(pieces)
        assert gateway.ended() == 0
        assert "Traceback" not in gateway.said()
    assert until(lambda: free(pair), SOON_S)


def test_who_says_it_twice_means_now(pair: tuple[Process, Process], tmp_path: Path) -> None:
    with gateway_process(tmp_path, simulated_config(*pair)) as gateway, official(gateway.url) as client:
        pieces = pieces_of(client, "twice", LONG)
        next(pieces)
        gateway.tell(signal.SIGINT)
        assert until(lambda: refuses(gateway.url), SOON_S)
        assert gateway.process.poll() is None
        assert next(pieces)
        gateway.tell(signal.SIGTERM)
        gateway.ended()  # long before the drain is over
        with pytest.raises((openai.APIError, httpx2.TransportError)):
            list(pieces)
        assert "Traceback" not in gateway.said()
    assert until(lambda: free(pair), SOON_S)


# Neighbours.


@pytest.fixture
def second(pair: tuple[Process, Process], tmp_path: Path) -> Iterator[GatewayProcess]:
    with gateway_process(tmp_path, simulated_config(*pair)) as gateway:
        yield gateway


def test_two_gateways_on_one_cluster(
    plain: GatewayProcess,
    second: GatewayProcess,
    pair: tuple[Process, Process],
    expected: Expected,
    record_property: Any,
) -> None:
    """Both at once; then one is killed while its answers are written and a prompt is read for it."""
    reader, writer = pair
    prompts = [f"neighbour {number}" for number in range(4)]
    texts = [expected(prompt, 100) for prompt in prompts]
    with official(plain.url) as here, official(second.url) as there, ThreadPoolExecutor(8) as pool:
        both = [pool.submit(said_by, client, prompt, 100) for client in (here, there) for prompt in prompts]
        assert [answer.result(60) for answer in both] == texts * 2
        going, dying = ([pieces_of(client, prompt, LONG) for prompt in prompts] for client in (here, there))
        heard = [next(stream) for stream in going + dying][: len(going)]
        read = pool.submit(said_by, there, "z" * 100_000)  # for five seconds
        assert until(lambda: reader.status()["waiting_tokens"] > 0, SOON_S)
        assert until(lambda: writer.status()["slots"]["used"] == 9, SOON_S)
        second.process.kill()
        killed_at = time.monotonic()
        assert until(lambda: writer.status()["slots"]["used"] == 4, SOON_S), writer.status()
        assert until(reader.nothing_left, SOON_S), reader.status()
        record_property("report", f"what a killed gateway held was free after {time.monotonic() - killed_at:.2f} s")
        for stream in dying:
            with pytest.raises((openai.APIError, httpx2.TransportError)):
                list(stream)
        assert isinstance(read.exception(SOON_S), openai.APIConnectionError)
        assert [first + "".join(islice(stream, 99)) for first, stream in zip(heard, going, strict=True)] == texts
        for stream in going:
            stream.close()  # type: ignore[attr-defined]
    assert until(lambda: free(pair), SOON_S)


# Silence.


def test_a_prompt_that_takes_long_is_no_silence(plain: GatewayProcess, expected: Expected) -> None:
    """As it is on the line. The simulated prompts differ in their first letter: nobody holds any part of them."""
    found: dict[str, tuple[str, bytes]] = {}
    for letter, path in (
        ("a", "/v1/chat/completions"),
        ("b", "/v1/messages"),
        ("c", "/api/chat"),
        ("d", "/v1/responses"),
    ):
        ask = asked(letter * SLOW, SHORT) | {"stream": True}
        if path == "/v1/responses":
            ask = {"model": MODEL, "input": letter * SLOW, "max_output_tokens": SHORT, "temperature": 0, "stream": True}
        if path == "/api/chat":
            ask["options"] = {"num_predict": SHORT, "temperature": 0}
        answer = post(plain.url, path, json=ask)
        found[path] = answer.headers["content-type"], answer.content
    assert found["/v1/chat/completions"][1].startswith(b": keep-alive\n\n: keep-alive\n\n")
    assert found["/v1/messages"][1].startswith(b": keep-alive\n\n: keep-alive\n\n")
    assert found["/v1/messages"][1].index(b"event: message_start") < found["/v1/messages"][1].index(b"event: ping")
    assert found["/v1/responses"][1].startswith(b"event: response.created")
    assert found["/v1/responses"][1].count(b": keep-alive\n\n") > 1
    lines = [json.loads(line) for line in found["/api/chat"][1].splitlines()]
    assert [line["message"]["content"] for line in lines[:2]] == ["", ""]
    assert not any(line["done"] for line in lines[:-1])
    assert "".join(line["message"]["content"] for line in lines) == expected("c" * SLOW, SHORT)


def test_the_official_clients_do_not_stumble_over_signs_of_life(plain: GatewayProcess, expected: Expected) -> None:
    with official(plain.url) as client:
        assert "".join(pieces_of(client, "e" * SLOW, SHORT)) == expected("e" * SLOW, SHORT)
        ask: Any = {"model": MODEL, "input": "f" * SLOW, "max_output_tokens": SHORT, "temperature": 0}
        with client.responses.create(**ask, stream=True) as events:
            texts = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(texts) == expected("f" * SLOW, SHORT)
    messages: Any = [{"role": "user", "content": "g" * SLOW}]
    with (
        Anthropic(base_url=plain.url, api_key="none", max_retries=0) as anthropic,
        anthropic.messages.stream(
            model=MODEL, messages=messages, max_tokens=SHORT, extra_body={"temperature": 0}
        ) as stream,
    ):
        assert stream.get_final_text() == expected("g" * SLOW, SHORT)
    with ollama.Client(plain.url, timeout=60) as program:
        messages[0]["content"] = "h" * SLOW
        options = {"num_predict": SHORT, "temperature": 0}
        lines = program.chat(MODEL, messages, options=options, stream=True)
        assert "".join(line.message.content or "" for line in lines) == expected("h" * SLOW, SHORT)


def test_lists_come_from_memory(plain: GatewayProcess, pair: tuple[Process, Process], record_property: Any) -> None:
    """The last test with this pair, or the next one would have to wait until it is well again."""
    with httpx.Client(base_url=plain.url, timeout=SOON_S) as client:
        client.get("/v1/models").raise_for_status()
        for node in pair:
            node.freeze()
        try:
            for path in ("/v1/models", f"/v1/models/{MODEL}", "/api/tags", "/health"):
                took_s = []
                for _ in range(10):
                    started = time.monotonic()
                    assert client.get(path).status_code == 200
                    took_s.append(time.monotonic() - started)
                    time.sleep(0.05)
                record_property("report", f"{path} with all nodes frozen: {1000 * max(took_s):.1f} ms at most")
                assert sorted(took_s)[len(took_s) // 2] < 1, "a list that asked the nodes would be slow each time"
            assert until(lambda: client.get("/ready").status_code == 503, SOON_S)
            assert [model["id"] for model in client.get("/v1/models").json()["data"]] == [MODEL]
        finally:
            for node in pair:
                node.thaw()
        assert until(lambda: client.get("/ready").status_code == 200, SOON_S)
        assert until(lambda: free(pair), SOON_S)
