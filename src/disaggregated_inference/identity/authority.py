"""The cluster's own authority: makes, renews and revokes the certificates of its nodes and clients.

Its folder holds `ca.key` (which stays on this machine), `ca.pem`, `issued.json`, `revoked.pem`, and one folder for each
name, which the user copies to the machine of that name.
"""

import datetime
import ipaddress
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from disaggregated_inference.errors import ConfigError
from disaggregated_inference.identity import certificates as x509
from disaggregated_inference.identity.key_files import locked, make_folder, read_private, write_private

_NAME = re.compile(r"[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_NO_AUTHORITY = "make the cluster's authority with `disagg cluster keys init`, or name its folder with --keys"
_LOCK = ".lock"
CA, CA_KEY, CERTIFICATE, KEY, REVOKED = "ca.pem", "ca.key", "node.pem", "node.key", "revoked.pem"


class IssuedCertificate(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    serial: str  # hexadecimal
    hosts: tuple[str, ...]
    issued_at: datetime.datetime
    expires_at: datetime.datetime
    revoked_at: datetime.datetime | None = None

    @property
    def number(self) -> int:
        return int(self.serial, 16)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)


class Authority:
    """`folder` must hold one: `create` makes it. Every change reads `issued.json` again, under a lock: other commands
    may run at the same time."""

    def __init__(self, folder: Path, clock: Callable[[], datetime.datetime] = _now) -> None:
        self.folder, self._clock = folder, clock
        if not (folder / CA_KEY).exists():
            raise ConfigError(f"no authority in {folder}: {_NO_AUTHORITY}")
        key = x509.read_key(read_private(folder / CA_KEY, _NO_AUTHORITY), str(folder / CA_KEY))
        certificate = x509.read_certificate(read_private(folder / CA, _NO_AUTHORITY), str(folder / CA))
        self._pair = x509.KeyPair(key, certificate)
        self._issued = self._read()

    @classmethod
    def create(cls, folder: Path, clock: Callable[[], datetime.datetime] = _now) -> "Authority":
        make_folder(folder)
        with locked(folder / _LOCK):
            if (folder / CA_KEY).exists():
                remedy = "issue certificates with `disagg cluster keys issue`, or choose another folder with --keys"
                raise ConfigError(f"{folder} has an authority already: {remedy}")
            pair = x509.new_authority(clock())
            write_private(folder / "issued.json", b"[]")
            write_private(folder / REVOKED, x509.new_revocations(pair, (), clock()))
            write_private(folder / CA, pair.pem)
            write_private(folder / CA_KEY, pair.key_pem)  # last: a folder with it is complete
        return cls(folder, clock)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with locked(self.folder / _LOCK):
            self._issued = self._read()
            yield

    @property
    def issued(self) -> tuple[IssuedCertificate, ...]:
        return self._issued

    def issue(self, name: str, hosts: Sequence[str], days: int = x509.NODE_DAYS) -> Path:
        """The folder of a new name. Without hosts it is a client's."""
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is not a name: use small letters, digits and dashes, such as spark-1")
        with self._changing():
            if any(issued.name == name for issued in self._issued):
                remedy = f"renew it with `disagg cluster keys rotate {name}`"
                raise ConfigError(f"{name} has a certificate already: {remedy}")
            return self._issue(name, tuple(map(_require_host, hosts)), days)

    def rotate(self, name: str, hosts: Sequence[str] = (), days: int = x509.NODE_DAYS) -> Path:
        """A new key and certificate. The old one stays valid until it expires or is revoked."""
        with self._changing():
            last = self._of(name)[-1]
            return self._issue(name, tuple(map(_require_host, hosts)) or last.hosts, days)

    def names(self) -> tuple[str, ...]:
        """Those with a certificate that is not revoked."""
        return tuple(dict.fromkeys(issued.name for issued in self._issued if not issued.revoked_at))

    def revoke(self, name_or_serial: str) -> list[IssuedCertificate]:
        """All certificates of a name, or one by its serial. Every folder gets the new list."""
        with self._changing():
            return self._revoke(name_or_serial)

    def _revoke(self, name_or_serial: str) -> list[IssuedCertificate]:
        found = [each for each in self._issued if name_or_serial.lower() in (each.name, each.serial)]
        if not found:
            self._of(name_or_serial)  # raises
        now, serials = self._clock(), {each.serial for each in found}
        self._save(
            tuple(
                msgspec.structs.replace(each, revoked_at=each.revoked_at or now) if each.serial in serials else each
                for each in self._issued
            )
        )
        revoked = [each.number for each in self._issued if each.revoked_at]
        content = x509.new_revocations(self._pair, revoked, now)
        write_private(self.folder / REVOKED, content)
        for name in {each.name for each in self._issued}:
            if (self.folder / name).is_dir():
                write_private(self.folder / name / REVOKED, content)
        return found

    def _issue(self, name: str, hosts: tuple[str, ...], days: int) -> Path:
        now, folder = self._clock(), self.folder / name
        pair = x509.new_certificate(self._pair, name, hosts, now, days)
        entry = IssuedCertificate(
            name=name,
            serial=f"{pair.certificate.serial_number:x}",
            hosts=hosts,
            issued_at=now,
            expires_at=pair.certificate.not_valid_after_utc,
        )
        self._save((*self._issued, entry))  # first: a certificate that is not listed could not be revoked
        make_folder(folder)
        write_private(folder / CA, self._pair.pem)
        write_private(folder / REVOKED, read_private(self.folder / REVOKED, "run `disagg cluster keys revoke` again"))
        write_private(folder / KEY, pair.key_pem)
        write_private(folder / CERTIFICATE, pair.pem)
        return folder

    def _of(self, name: str) -> list[IssuedCertificate]:
        if found := [each for each in self._issued if each.name == name]:
            return found
        known = ", ".join(dict.fromkeys(each.name for each in self._issued)) or "none yet"
        raise ConfigError(f"no certificate has the name {name!r}; there are: {known}")

    def _read(self) -> tuple[IssuedCertificate, ...]:
        path = self.folder / "issued.json"
        try:
            return msgspec.json.decode(read_private(path, "restore it"), type=tuple[IssuedCertificate, ...])
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path} cannot be read: {error}; restore it from a copy") from error

    def _save(self, issued: tuple[IssuedCertificate, ...]) -> None:
        self._issued = issued
        write_private(self.folder / "issued.json", msgspec.json.format(msgspec.json.encode(issued), indent=1))


def _require_host(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        pass
    if not _HOST.fullmatch(text) or text.replace(".", "").isdigit():
        raise ConfigError(f"{text!r} is not a host: give an address or a host name, without a port")
    return text.lower()
