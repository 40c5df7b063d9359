"""`disagg gateway` as a process of its own: TLS, CORS, signals, two gateways, keep-alives and frozen nodes."""

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
from disaggregated_inference.http import Certificate
from tests.support.cluster import Process
from tests.support.gateway import GatewayProcess, gateway_process, simulated_config, simulated_pair
from tests.support.waiting import until

MODEL = "simulated:tiny"
PROFILE = "custom:prefill=20000,decode=400"
SLOW = 30_000  # tokens, one for each letter: 1.5 s to read
SHORT, LONG = 12, 20_000  # the long one does not end while a test looks
ORIGIN = "https://chat.example"
BROWSER = {"Origin": ORIGIN}
SOON_S = 20.0

AWAY: Any = {"decode_servers": [{"host": "127.0.0.1", "port": 9, "model": "away"}]}

Expected = Callable[[str, int], str]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Process, Process]]:
    with simulated_pair(PROFILE) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def plain(pair: tuple[Process, Process], tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway without keys, for tests that do not change it."""
    folder = tmp_path_factory.mktemp("plain")
    with gateway_process(folder, simulated_config(*pair), "--keepalive", "0.1") as gateway:
        yield gateway


@pytest.fixture(scope="module")
def expected(pair: tuple[Process, Process]) -> Iterator[Expected]:
    """The cluster's completion without a gateway, or its beginning."""
    with DisaggregatedClient(simulated_config(*pair)) as client:
        yield lambda prompt, count: client.generate(**params(prompt, count))[0]


def params(prompt: str, count: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": MODEL, "messages": messages, "max_tokens": count, "temperature": 0, "ignore_eos": True}


def official(url: str, key: str = "none") -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


def completion_of(client: OpenAI, prompt: str, count: int = SHORT) -> str:
    ask = params(prompt, count)
    extra = {"ignore_eos": ask.pop("ignore_eos")}
    return client.chat.completions.create(**ask, extra_body=extra).choices[0].message.content or ""


def pieces_of(client: OpenAI, prompt: str, count: int) -> Iterator[str]:
    """The text of each event."""
    ask = params(prompt, count)
    extra = {"ignore_eos": ask.pop("ignore_eos")}
    with client.chat.completions.create(**ask, stream=True, extra_body=extra) as chunks:
        for chunk in chunks:
            if chunk.choices and (text := chunk.choices[0].delta.content):
                yield text


def post(url: str, path: str = "/v1/chat/completions", **more: Any) -> httpx.Response:
    body: dict[str, Any] = {} if "content" in more else {"json": params("hello", SHORT)}
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
            assert completion_of(client, "over TLS", 40) == text
            pieces = pieces_of(client, "over TLS", 40)
            received = next(pieces)
            # A certificate that was renewed is taken with SIGHUP; who is connected goes on. A wrong one is not taken.
            before = mine.shown
            mine.take_over(other)
            gateway.send_signal(signal.SIGHUP)
            assert until(lambda: shown(gateway.url) == other.shown != before, SOON_S), gateway.log_text()
            assert received + "".join(pieces) == text
        with official(gateway.url) as suspicious, pytest.raises(openai.APIConnectionError):
            completion_of(suspicious, "over TLS")
        Path(mine.key).write_text("nonsense")
        gateway.send_signal(signal.SIGHUP)
        assert until(lambda: "was not reloaded" in gateway.log_text(), SOON_S)
        assert shown(gateway.url) == other.shown


def test_invalid_certificates_are_refused(tmp_path: Path) -> None:
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
    gateway = GatewayProcess(tmp_path, AWAY, "--tls-cert", one.cert, "--tls-key", other.key)
    assert gateway.ended() == 1
    output = f"error: --tls-cert {one.cert} --tls-key {other.key}: the key does not match the certificate\n"
    assert gateway.log_text() == output
    gateway.end()


def test_a_port_in_use_is_refused(plain: GatewayProcess, tmp_path: Path) -> None:
    second = GatewayProcess(tmp_path, AWAY, "--port", str(httpx.URL(plain.url).port))
    assert second.ended() == 1
    assert re.fullmatch(r"error: cannot listen on 127\.0\.0\.1:\d+: .* in use; .*\n", second.log_text())
    second.end()


# Browsers.


PREFLIGHT = BROWSER | {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-stainless-lang",
}


def test_cors_allows_the_named_origins(pair: tuple[Process, Process], tmp_path: Path) -> None:
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
        unknown = params("hello", SHORT) | {"model": "x"}
        answers = [
            (200, post(url, headers=key)),
            (200, post(url, headers=key, json=params("hello", SHORT) | {"stream": True})),
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


def test_cors_is_off_by_default(plain: GatewayProcess) -> None:
    preflight = httpx.options(f"{plain.url}/v1/chat/completions", headers=PREFLIGHT)
    assert preflight.status_code == 403  # no key, and a page of another site
    for answer in (preflight, post(plain.url, headers=BROWSER), httpx.get(f"{plain.url}/v1/models", headers=BROWSER)):
        assert not [name for name in answer.headers if name.startswith("access-control")]


# Signals.


def half_sent(url: str, key: str, body: bytes) -> socket.socket:
    """A request whose body is not complete."""
    sock = socket.create_connection((httpx.URL(url).host, httpx.URL(url).port or 80), timeout=SOON_S)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
    sock.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body[:20])
    return sock


def whole_answer(sock: socket.socket) -> Any:
    with sock, sock.makefile("rb") as answer:
        return json.loads(answer.read().partition(b"\r\n\r\n")[2])


def test_sighup_reloads_config_and_keys(pair: tuple[Process, Process], expected: Expected, tmp_path: Path) -> None:
    keys, fresh = tmp_path / "keys.json", tmp_path / "fresh.json"
    alice, bob = new_key("alice", keys), new_key("bob", fresh)
    config = simulated_config(*pair)
    with gateway_process(tmp_path, config, "--keys", str(keys)) as gateway, official(gateway.url, alice) as old:
        pieces, body = pieces_of(old, "reload", LONG), json.dumps(params("half", SHORT)).encode()
        received = next(pieces)
        half = half_sent(gateway.url, alice, body)

        def reloaded(words: str) -> bool:
            before = gateway.log_text().count(words)
            gateway.send_signal(signal.SIGHUP)
            return until(lambda: gateway.log_text().count(words) > before, SOON_S)

        def names(key: str) -> list[str]:
            with official(gateway.url, key) as client:
                return [model.id for model in client.models.list()]

        assert names(alice) == [MODEL, "tiny-alias"]
        gateway.config.write_text(json.dumps(config | {"models": {MODEL: {"aliases": ["new-name"]}}}))
        shutil.copy(fresh, keys)
        assert reloaded("the config was reloaded")
        assert httpx.get(f"{gateway.url}/ready").status_code == 200  # at once: a load balancer looks at it
        with pytest.raises(openai.AuthenticationError):
            names(alice)
        with official(gateway.url, bob) as client:
            ask = params("hello", SHORT) | {"model": "new-name"}
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
        assert names(bob) == [MODEL, "new-name"]
        # Through all of it the stream that was open before went on.
        received += "".join(islice(pieces, 100))
        assert received == expected("reload", 101)
        pieces.close()  # type: ignore[attr-defined]
        assert until(lambda: free(pair), SOON_S)
        assert "Traceback" not in gateway.log_text()


def test_a_reload_keeps_history_and_metrics(pair: tuple[Process, Process], tmp_path: Path) -> None:
    config = simulated_config(*pair)
    with gateway_process(tmp_path, config) as gateway, official(gateway.url) as client:

        def reloaded(count: int) -> bool:
            gateway.send_signal(signal.SIGHUP)
            return until(lambda: gateway.log_text().count("the config was reloaded") == count, SOON_S)

        def served() -> tuple[int, int, int]:
            """Counts of successful and cancelled requests, and the history's."""
            response = httpx.get(f"{gateway.url}/cluster").json()
            assert response["latency"]["total_time"]
            return response["served"]["ok"], response["served"]["cancelled"], len(response["history"])

        completion_of(client, "one")
        pieces = pieces_of(client, "still going", LONG)
        next(pieces)
        assert reloaded(1)  # as it was
        assert served() == (1, 0, 1)
        gateway.config.write_text(json.dumps(config | {"policies": {"history": 7}}))
        assert reloaded(2)
        completion_of(client, "two")
        assert served() == (2, 0, 2)
        pieces.close()  # type: ignore[attr-defined]
        assert until(lambda: served() == (2, 1, 3), SOON_S)  # the old orchestrator's last
        assert "Traceback" not in gateway.log_text()


def refuses(url: str) -> bool:
    """No connection is accepted, or the gateway answers 503 while it drains."""
    try:
        return httpx.get(f"{url}/ready", timeout=SOON_S).status_code == 503
    except httpx.TransportError:
        return True


@pytest.mark.slow
def test_a_stop_waits_for_running_requests(pair: tuple[Process, Process], expected: Expected, tmp_path: Path) -> None:
    with gateway_process(tmp_path, simulated_config(*pair)) as gateway, official(gateway.url) as client:
        with ThreadPoolExecutor(3) as pool:
            texts = list(pool.map(lambda number: expected(f"drain {number}", 1200), range(3)))
        streams = [pieces_of(client, f"drain {number}", 1200) for number in range(2)]
        firsts = [next(stream) for stream in streams]
        with (
            ThreadPoolExecutor(2) as pool,
            httpx.stream("GET", f"{gateway.url}/cluster/events", timeout=SOON_S) as feed,
        ):
            whole = pool.submit(completion_of, client, "drain 2", 1200)
            assert until(lambda: pair[1].status()["waiting"] == 3, SOON_S)
            gateway.send_signal(signal.SIGTERM)
            assert until(lambda: refuses(gateway.url), SOON_S)
            output = [first + "".join(stream) for first, stream in zip(firsts, streams, strict=True)]
            assert [*output, whole.result(SOON_S)] == texts
            assert b"event: status" in feed.read()  # to its end
        assert gateway.ended() == 0
        assert refuses(gateway.url)
        assert "Traceback" not in gateway.log_text()


def test_a_stop_ends_requests_after_the_drain_time(pair: tuple[Process, Process], tmp_path: Path) -> None:
    with gateway_process(tmp_path, simulated_config(*pair), "--drain", "1") as gateway, official(gateway.url) as client:
        pieces = pieces_of(client, "slow", LONG)
        next(pieces)
        gateway.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down: the request was not done"):
            list(pieces)
        assert gateway.ended() == 0
        assert "Traceback" not in gateway.log_text()
    assert until(lambda: free(pair), SOON_S)


def test_a_second_signal_stops_at_once(pair: tuple[Process, Process], tmp_path: Path) -> None:
    with gateway_process(tmp_path, simulated_config(*pair)) as gateway, official(gateway.url) as client:
        pieces = pieces_of(client, "twice", LONG)
        next(pieces)
        gateway.send_signal(signal.SIGINT)
        assert until(lambda: refuses(gateway.url), SOON_S)
        assert gateway.process.poll() is None
        assert next(pieces)
        gateway.send_signal(signal.SIGTERM)
        gateway.ended()  # long before the drain is over
        with pytest.raises((openai.APIError, httpx2.TransportError)):
            list(pieces)
        assert "Traceback" not in gateway.log_text()
    assert until(lambda: free(pair), SOON_S)


# Neighbours.


@pytest.fixture
def second(pair: tuple[Process, Process], tmp_path: Path) -> Iterator[GatewayProcess]:
    with gateway_process(tmp_path, simulated_config(*pair)) as gateway:
        yield gateway


@pytest.mark.slow
def test_two_gateways_on_one_cluster(
    plain: GatewayProcess,
    second: GatewayProcess,
    pair: tuple[Process, Process],
    expected: Expected,
    record_property: Any,
) -> None:
    """Both gateways work at once; then one is killed during a decode and a prefill."""
    reader, writer = pair
    prompts = [f"neighbour {number}" for number in range(4)]
    texts = [expected(prompt, 100) for prompt in prompts]
    with official(plain.url) as here, official(second.url) as there, ThreadPoolExecutor(8) as pool:
        both = [pool.submit(completion_of, client, prompt, 100) for client in (here, there) for prompt in prompts]
        assert [answer.result(60) for answer in both] == texts * 2
        going, dying = ([pieces_of(client, prompt, LONG) for prompt in prompts] for client in (here, there))
        received = [next(stream) for stream in going + dying][: len(going)]
        read = pool.submit(completion_of, there, "z" * 100_000)  # for five seconds
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
        assert [first + "".join(islice(stream, 99)) for first, stream in zip(received, going, strict=True)] == texts
        for stream in going:
            stream.close()  # type: ignore[attr-defined]
    assert until(lambda: free(pair), SOON_S)


# Silence.


@pytest.mark.slow
def test_a_long_prefill_sends_keepalives(plain: GatewayProcess, expected: Expected) -> None:
    """On the wire. The prompts differ in their first letter: no prefix cache has a part of them."""
    found: dict[str, tuple[str, bytes]] = {}
    for letter, path in (
        ("a", "/v1/chat/completions"),
        ("b", "/v1/messages"),
        ("c", "/api/chat"),
        ("d", "/v1/responses"),
    ):
        ask = params(letter * SLOW, SHORT) | {"stream": True}
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


@pytest.mark.slow
def test_the_official_clients_ignore_keepalives(plain: GatewayProcess, expected: Expected) -> None:
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


@pytest.mark.slow
def test_lists_come_from_memory(plain: GatewayProcess, pair: tuple[Process, Process], record_property: Any) -> None:
    """The last test with this pair: the nodes need time to recover."""
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
            assert [model["id"] for model in client.get("/v1/models").json()["data"]] == [MODEL, "tiny-alias"]
        finally:
            for node in pair:
                node.thaw()
        assert until(lambda: client.get("/ready").status_code == 200, SOON_S)
        assert until(lambda: free(pair), SOON_S)
