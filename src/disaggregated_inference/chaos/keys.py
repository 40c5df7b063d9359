"""The authority of a chaos run: a certificate for each node and one for the clients, in the run's own folder."""

from pathlib import Path

from disaggregated_inference.identity import Authority, Identity

_HOSTS = ("127.0.0.1", "::1", "localhost")


class ChaosKeys:
    def __init__(self, folder: Path) -> None:
        self._authority = Authority.create(folder)
        self.client = Identity(self._authority.issue("clients", ()))

    def folder_of(self, name: str) -> Path:
        """Of a node."""
        return self._authority.issue(name, _HOSTS)
