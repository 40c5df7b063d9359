"""A cluster's authority in a folder, and the identities that it issues."""

import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from disaggregated_inference.identity import Authority, Identity

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Cluster:
    """`folder_of(name)` issues a node's certificate for loopback at its first call; `client` has no hosts."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority.create(folder)

    def folder_of(self, name: str, hosts: tuple[str, ...] = LOOPBACK) -> Path:
        folder = self.authority.folder / name
        return folder if folder.exists() else self.authority.issue(name, hosts)

    def identity(self, name: str, hosts: tuple[str, ...] = LOOPBACK) -> Identity:
        return Identity(self.folder_of(name, hosts))

    @property
    def client(self) -> Path:
        return self.folder_of("client", ())


def ask(url: str, identity: Identity | None, body: Any = None) -> tuple[int, Any]:
    """One request of a member of the cluster. Raises what urllib raises where the connection fails."""
    context = identity.client_context if identity else ssl._create_unverified_context()
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60, context=context) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())
