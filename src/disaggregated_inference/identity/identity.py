"""The identity of this process in its cluster: key, certificate, the authority that it trusts, and whom it refuses."""

import datetime
import logging
import os
import ssl
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from cryptography import x509 as library
from cryptography.hazmat.primitives.serialization import Encoding

from disaggregated_inference.errors import ConfigError, IdentityRefused
from disaggregated_inference.identity import certificates as x509
from disaggregated_inference.identity.authority import CA, CERTIFICATE, KEY, REVOKED
from disaggregated_inference.identity.certificates import PeerIdentity
from disaggregated_inference.identity.contexts import RotatedContext
from disaggregated_inference.identity.key_files import exposed, read_private
from disaggregated_inference.timeouts import IdentityTimeouts

log = logging.getLogger(__name__)

VARIABLE = "DISAGG_IDENTITY"
_COPY = "copy the folder that `disagg cluster keys issue` made for this machine"
_MOST_KNOWN = 256
Context = TypeVar("Context", bound=ssl.SSLContext)
_SOON = datetime.timedelta(days=30)


class Identity:
    """Of one folder. Changed files are loaded again: new connections get the new certificate, old ones go on."""

    def __init__(self, folder: Path, timeouts: IdentityTimeouts = IdentityTimeouts()) -> None:
        self.folder, self._timeouts = folder, timeouts
        if not folder.is_dir():
            raise ConfigError(f"no identity in {folder}: {_COPY}")
        self._authority = x509.read_certificate(self._bytes(CA), str(folder / CA))
        self.server_context = self._configured(RotatedContext(ssl.PROTOCOL_TLS_SERVER))
        self.client_context = self._configured(RotatedContext(ssl.PROTOCOL_TLS_CLIENT))
        self.kv_client_context = self._configured(RotatedContext(ssl.PROTOCOL_TLS_CLIENT), check_hostname=False)
        self._known: OrderedDict[bytes, tuple[library.Certificate, PeerIdentity]] = OrderedDict()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._seen = self._stamps()  # before the files: a change while they are loaded is seen the next time
        self._load()
        self._warn()

    def _configured(self, context: Context, check_hostname: bool = True) -> Context:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if context.protocol == ssl.PROTOCOL_TLS_CLIENT:
            context.check_hostname = check_hostname
            context.sslobject_class = _checking(self)
        else:
            context.num_tickets = 0  # no session is resumed: each connection shows its certificate
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self._authority.public_bytes(Encoding.PEM).decode())
        return context

    @property
    def name(self) -> str:
        return self.me.name

    def sign(self, content: bytes) -> bytes:
        return x509.sign(self._pair.key, content)

    @property
    def certificate(self) -> bytes:
        """DER."""
        return self._pair.certificate.public_bytes(Encoding.DER)

    def require(self, der: bytes | None) -> PeerIdentity:
        """Whose certificate this is. Raises `IdentityRefused` for one that is not of this cluster, or is revoked."""
        _, peer = self._member(der or b"")
        if peer.serial in self._revoked:
            raise IdentityRefused(f"the certificate of {peer.name} was revoked")
        if peer.expires_at < datetime.datetime.now(datetime.UTC):
            raise IdentityRefused(f"the certificate of {peer.name} has expired: run `disagg cluster keys rotate`")
        return peer

    def require_signature(self, der: bytes, signature: bytes, content: bytes) -> PeerIdentity:
        signer = self.require(der)
        if not x509.is_signed(self._member(der)[0], signature, content):
            raise IdentityRefused(f"the signature is not that of {signer.name}")
        return signer

    def _member(self, der: bytes) -> tuple[library.Certificate, PeerIdentity]:
        """The authority's signature is checked once for each certificate."""
        with self._lock:
            if der in self._known:
                return self._known[der]
        try:
            certificate = library.load_der_x509_certificate(der)
        except ValueError:
            raise IdentityRefused("there is no certificate") from None
        peer = x509.require_member(certificate, self._authority, datetime.datetime.now(datetime.UTC))
        with self._lock:
            self._known[der] = certificate, peer
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        return certificate, peer

    def watch(self) -> "Identity":
        """Look for changed files until `close`."""
        threading.Thread(target=self._watch, name="identity", daemon=True).start()
        return self

    def close(self) -> None:
        self._closing.set()

    def _watch(self) -> None:
        while not self._closing.wait(self._timeouts.reload_s):
            self.refresh()

    def refresh(self) -> bool:
        """Load the files again if they have changed. Files that do not fit together (a copy that is still under way)
        change nothing; the next call tries again."""
        try:
            if (stamps := self._stamps()) == self._seen:
                return False
            self._load()
        except (ConfigError, OSError) as error:
            log.warning("the changed identity is not used: %s", error, extra={"folder": str(self.folder)})
            return False
        self._seen = stamps
        log.info("the identity was loaded again", extra={"peer": self.name, "serial": f"{self.me.serial:x}"})
        return True

    def _load(self) -> None:
        key_pem, pem = self._bytes(KEY), self._bytes(CERTIFICATE)
        key = x509.read_key(key_pem, str(self.folder / KEY))
        certificate = x509.read_certificate(pem, str(self.folder / CERTIFICATE))
        if key.public_key() != certificate.public_key():
            raise ConfigError(f"{self.folder / KEY} is not the key of {CERTIFICATE}: {_COPY}")
        try:
            me = x509.require_member(certificate, self._authority, datetime.datetime.now(datetime.UTC))
        except IdentityRefused as error:
            raise ConfigError(f"{self.folder / CERTIFICATE}: {error}") from error
        revoked = self._revocations()
        rotated = [(context, self.with_certificate(context)) for context in self.contexts]
        if (self._bytes(KEY), self._bytes(CERTIFICATE)) != (key_pem, pem):  # ssl reads files, not bytes
            raise ConfigError(f"the files in {self.folder} changed while they were loaded")
        for context, now in rotated:
            context.now = now
        self._pair, self.me, self._revoked = x509.KeyPair(key, certificate), me, revoked

    @property
    def contexts(self) -> tuple[RotatedContext, ...]:
        return self.server_context, self.client_context, self.kv_client_context

    def with_certificate(self, context: RotatedContext) -> ssl.SSLContext:
        fresh = self._configured(ssl.SSLContext(context.protocol), context.check_hostname)
        fresh.load_cert_chain(self.folder / CERTIFICATE, self.folder / KEY)
        return fresh

    def _revocations(self) -> frozenset[int]:
        path = self.folder / REVOKED
        return x509.read_revocations(self._bytes(REVOKED), self._authority, str(path)) if path.exists() else frozenset()

    def _bytes(self, name: str) -> bytes:
        return read_private(self.folder / name, _COPY)

    def _stamps(self) -> object:
        found = []
        for name in (CERTIFICATE, KEY, REVOKED):
            try:
                about = os.stat(self.folder / name)
            except FileNotFoundError:
                found.append((name,))
            else:
                found.append((name, about.st_mtime_ns, about.st_ino, about.st_size))  # type: ignore[arg-type]
        return found

    def _warn(self) -> None:
        if words := exposed(self.folder / KEY):
            log.warning(words)
        if self.me.expires_at - datetime.datetime.now(datetime.UTC) < _SOON:
            remedy = f"run `disagg cluster keys rotate {self.name}` and copy the folder again"
            log.warning("the certificate of %s expires on %s: %s", self.name, self.me.expires_at.date(), remedy)


def _checking(identity: Identity) -> type[ssl.SSLObject]:
    """TLS itself knows nothing of our list of revoked certificates: a client looks after its handshake."""

    class _CheckedObject(ssl.SSLObject):
        def do_handshake(self) -> None:
            super().do_handshake()
            try:
                identity.require(self.getpeercert(binary_form=True))
            except IdentityRefused as error:
                raise ssl.SSLCertVerificationError(str(error)) from error

    return _CheckedObject


def open_identity(given: str = "", environ: Mapping[str, str] = os.environ, **options: Any) -> Identity | None:
    """Of the folder that is given, else of the one in DISAGG_IDENTITY; None without either."""
    folder = given or environ.get(VARIABLE, "")
    return Identity(Path(folder).expanduser(), **options) if folder else None
