"""The certificate that a gateway shows: what is wrong with its files is said in words, before anyone connects."""

import ssl
from pathlib import Path

from disaggregated_inference.errors import BadRequest

_WORDS = {"KEY_VALUES_MISMATCH": "the key is not this certificate's", "NO_START_LINE": "there is no PEM in it"}


class Certificate:
    """Its files by name: they may have other content later, and whoever renews them says so by SIGHUP."""

    def __init__(self, cert: str = "", key: str = "") -> None:
        self.cert, self.key = cert, key

    def require(self) -> None:
        if self.key and not self.cert:
            raise BadRequest("--tls-key is a certificate's key: give the certificate, too, by --tls-cert")
        for option, path in (("--tls-cert", self.cert), ("--tls-key", self.key)):
            if path and not Path(path).is_file():
                raise BadRequest(f"{option} {path}: no such file")
        if self.cert:
            self.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def load_into(self, context: ssl.SSLContext) -> None:
        """For connections from now on. A context that got half of it would be of no use to anyone: `require` first."""
        try:
            context.load_cert_chain(self.cert, self.key or None, _no_password)
        except (OSError, ValueError) as error:  # of which ssl's errors are some
            missing = "" if self.key else "; where the key is in a file of its own, give --tls-key, too"
            raise BadRequest(f"{self._files}: {_words(error)}{missing}") from error

    @property
    def _files(self) -> str:
        return f"--tls-cert {self.cert}" + (f" --tls-key {self.key}" if self.key else "")


def _no_password() -> str:
    """A server cannot be asked for one when it starts by itself."""
    raise BadRequest("--tls-key is encrypted: give it without a password, readable by the gateway's user alone")


def _words(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        return _WORDS.get(error.reason or "", "not a certificate and its private key in PEM")
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
