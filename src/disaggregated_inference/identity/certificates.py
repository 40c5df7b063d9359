"""X.509 for one cluster: its own authority, certificates with a name and hosts, and the list of revoked ones.

Keys are ECDSA on P-256 and signatures SHA-256: every TLS 1.3 library takes them. A certificate's identity is a URI,
`disagg://CLUSTER/NAME`. Certificates with hosts are for nodes; those without are for clients of nodes.
"""

import datetime
import ipaddress
import secrets
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from disaggregated_inference.errors import ConfigError, IdentityRefused

AUTHORITY_DAYS = 3650
NODE_DAYS = 365
_SKEW = datetime.timedelta(hours=1)  # clocks of two machines may differ
_MINUTE = "%Y-%m-%d %H:%M"
_ECDSA = ec.ECDSA(hashes.SHA256())


class PeerIdentity(NamedTuple):
    """Who a certificate of this cluster belongs to."""

    name: str
    serial: int
    hosts: tuple[str, ...]  # none: a client, which serves nothing
    expires_at: datetime.datetime

    @property
    def is_node(self) -> bool:
        return bool(self.hosts)


class KeyPair(NamedTuple):
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def key_pem(self) -> bytes:
        form = serialization.PrivateFormat.PKCS8
        return self.key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)


def new_authority(now: datetime.datetime) -> KeyPair:
    key, cluster = ec.generate_private_key(ec.SECP256R1()), secrets.token_hex(8)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"disagg cluster {cluster}")])
    usage = _usage(key_cert_sign=True, crl_sign=True)
    builder = (
        _builder(name, name, key, now, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_names([], f"disagg://{cluster}"), critical=False)
    )
    return KeyPair(key, builder.sign(key, hashes.SHA256()))


def new_certificate(
    authority: KeyPair, name: str, hosts: Sequence[str], now: datetime.datetime, days: int = NODE_DAYS
) -> KeyPair:
    key, issuer = ec.generate_private_key(ec.SECP256R1()), authority.certificate
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
    authority_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = (
        _builder(subject, issuer.subject, key, now, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(_names(hosts, f"{_uri(issuer)}/{name}"), critical=False)
        .add_extension(authority_id, critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return KeyPair(key, builder.sign(authority.key, hashes.SHA256()))


def new_revocations(authority: KeyPair, serials: Iterable[int], now: datetime.datetime) -> bytes:
    """A signed list (a CRL, in PEM). It has no end: a list that is out of date is better than a cluster that stops."""
    builder = x509.CertificateRevocationListBuilder().issuer_name(authority.certificate.subject).last_update(now)
    builder = builder.next_update(now + datetime.timedelta(days=AUTHORITY_DAYS))
    for serial in sorted(serials):
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now)
        builder = builder.add_revoked_certificate(entry.build())
    return builder.sign(authority.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def read_revocations(pem: bytes, authority: x509.Certificate, place: str) -> frozenset[int]:
    """Raises `ConfigError` for a list that this cluster's authority did not sign."""
    try:
        revocations = x509.load_pem_x509_crl(pem)
    except ValueError as error:
        raise ConfigError(f"{place} is not a list of revoked certificates: copy it again") from error
    if not revocations.is_signature_valid(public_key(authority)):
        raise ConfigError(f"{place} is not of this cluster's authority: copy it again")
    return frozenset(entry.serial_number for entry in revocations)


def read_certificate(pem: bytes, place: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise ConfigError(f"{place} is not a certificate (PEM): issue it again, or copy it again") from error


def read_key(pem: bytes, place: str) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{place} is not a private key (PEM, without a password): copy it again") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{place} is not a key of `disagg cluster keys`: issue it again")
    return key


def public_key(certificate: x509.Certificate) -> ec.EllipticCurvePublicKey:
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise IdentityRefused("the certificate is not of this cluster: its key is of another kind")
    return key


def describe(certificate: x509.Certificate) -> PeerIdentity:
    """What the certificate says. Whether it is true: `require_member`."""
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    serves = ExtendedKeyUsageOID.SERVER_AUTH in purposes
    name = urlsplit(_uri(certificate)).path.lstrip("/")
    return PeerIdentity(
        name, certificate.serial_number, tuple(hosts) if serves else (), certificate.not_valid_after_utc
    )


def require_member(certificate: x509.Certificate, authority: x509.Certificate, now: datetime.datetime) -> PeerIdentity:
    """Raises `IdentityRefused` unless this cluster's authority issued the certificate, and its time is now."""
    try:
        certificate.verify_directly_issued_by(authority)
        found = describe(certificate)
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        raise IdentityRefused("the certificate is not of this cluster's authority") from None
    if now < (begin := certificate.not_valid_before_utc):
        clocks = f"is not valid before {begin:{_MINUTE}} UTC, and this machine's clock says {now:{_MINUTE}} UTC"
        remedy = "set the clock of this machine; or, if that is right, the clock of the authority's, and rotate"
        raise IdentityRefused(f"the certificate of {found.name} {clocks}: {remedy}")
    if now > certificate.not_valid_after_utc:
        raise IdentityRefused(f"the certificate of {found.name} has expired: run `disagg cluster keys rotate`")
    return found


def sign(key: ec.EllipticCurvePrivateKey, content: bytes) -> bytes:
    return key.sign(content, _ECDSA)


def is_signed(certificate: x509.Certificate, signature: bytes, content: bytes) -> bool:
    try:
        public_key(certificate).verify(signature, content, _ECDSA)
    except InvalidSignature:
        return False
    return True


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime.datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(**given: bool) -> x509.KeyUsage:
    parts = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
        *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**{part: given.get(part, False) for part in parts})


def _names(hosts: Sequence[str], uri: str) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([*map(_host_name, hosts), x509.UniformResourceIdentifier(uri)])


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _uri(certificate: x509.Certificate) -> str:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    uris: list[str] = names.get_values_for_type(x509.UniformResourceIdentifier)
    return uris[0] if len(uris) == 1 else ""
