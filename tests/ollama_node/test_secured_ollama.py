"""A node in front of an Ollama with an identity: mutual TLS, as every other node."""

import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.identity import Identity
from tests.support.cluster import Process, config_of
from tests.support.identities import Cluster, ask
from tests.support.recorded_ollama import RecordedOllama
from tests.support.waiting import until

pytestmark = pytest.mark.slow


def test_members_alone_are_served(tmp_path: Path) -> None:
    cluster, ollama = Cluster(tmp_path / "keys"), RecordedOllama()
    options = "--ollama-host", ollama.url, "--identity", str(cluster.folder_of("farm"))
    node = Process("farm", "decode", "ollama", "smollm2", *options)
    try:
        member, url = Identity(cluster.client), f"https://127.0.0.1:{node.ready().port}"
        with DisaggregatedClient(config_of(node) | {"identity": str(cluster.client)}) as client:
            assert client.generate(prompt="count from 3", max_tokens=4)[0] == " 4 5 6 7"
            assert "".join(delta.text for delta in client.stream(prompt="7", max_tokens=2)) == " 8 9"
        status, said = ask(f"{url}/status", member)
        assert (status, said["identity"], said["backend"]) == (200, "farm", "ollama")
        asked = len(ollama.asked)
        require_refused(node.port, cluster, tmp_path)
        assert len(ollama.asked) == asked
        cluster.authority.revoke("client")
        assert until(lambda: ask(f"{url}/health", member)[0] == 403, 30)
        assert ask(f"{url}/generate", member, {"prompt": "1"})[0] == 403
        assert len(ollama.asked) == asked
    finally:
        node.end()
        ollama.end()


def require_refused(port: int, cluster: Cluster, folder: Path) -> None:
    """One of another cluster that does not care who answers, one without a certificate, and one that speaks HTTP."""
    stranger = Cluster(folder / "other").identity("client")
    stranger.client_context.now.check_hostname = False
    stranger.client_context.now.verify_mode = ssl.CERT_NONE
    for identity in (stranger, None):
        for path, body in (("/health", None), ("/generate", {"prompt": "1", "max_tokens": 1})):
            with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
                ask(f"https://127.0.0.1:{port}{path}", identity, body)
    plain = urllib.request.Request(f"http://127.0.0.1:{port}/generate", json.dumps({"prompt": "1"}).encode())
    with pytest.raises((urllib.error.URLError, OSError)):
        urllib.request.urlopen(plain, timeout=30)
