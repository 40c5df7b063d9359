"""The TLS certificate of a gateway. Errors in its files show at the start, in plain words."""

import ssl
from pathlib import Path

from disaggregated_inference.errors import BadRequest

_REASONS = {"KEY_VALUES_MISMATCH": "the key does not match the certificate", "NO_START_LINE": "no PEM data found"}


class Certificate:
    """The names of its files. SIGHUP loads their new content."""

    def __init__(self, cert: str = "", key: str = "") -> None:
        self.cert, self.key = cert, key

    def require(self) -> None:
        if self.key and not self.cert:
            raise BadRequest("--tls-key needs its certificate: give it by --tls-cert")
        for option, path in (("--tls-cert", self.cert), ("--tls-key", self.key)):
            if path and not Path(path).is_file():
                raise BadRequest(f"{option} {path}: no such file")
        if self.cert:
            self.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def load_into(self, context: ssl.SSLContext) -> None:
        """For new connections. Call `require` first: a context with only one of the two files does not work."""
        try:
            context.load_cert_chain(self.cert, self.key or None, _no_password)
        except (OSError, ValueError) as error:  # also ssl's errors
            missing = "" if self.key else "; if the key is in its own file, give --tls-key"
            raise BadRequest(f"{self._files}: {_reason(error)}{missing}") from error

    @property
    def _files(self) -> str:
        return f"--tls-cert {self.cert}" + (f" --tls-key {self.key}" if self.key else "")


def _no_password() -> str:
    """A server cannot ask for a password."""
    raise BadRequest("--tls-key is encrypted: give a key without a password, readable only by the gateway's user")


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        return _REASONS.get(error.reason or "", "not a certificate and its private key in PEM")
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
