"""Whom a node believes: which contexts it accepts, which addresses it dials, whose KV it keeps for other requests."""

import binascii
import hmac
import ipaddress
import logging
from dataclasses import dataclass
from typing import get_args

import msgspec

from disaggregated_inference.api import KVSecurity, context_mac, join_context, split_context
from disaggregated_inference.errors import BadRequest, IdentityRefused, TicketRefused
from disaggregated_inference.http import is_loopback
from disaggregated_inference.identity import Identity, PeerIdentity, open_identity
from disaggregated_inference.kv_transfer import Address, TlsPeer
from disaggregated_inference.node.context import PrefillContext
from disaggregated_inference.node.settings import NodeSettings

log = logging.getLogger(__name__)

_NOT_SEALED = "the context is not sealed with this node's token: give both nodes the same token, or an identity"
_NOT_SIGNED = "the context is not signed by a node of this cluster: start the prefill node with its --identity"
_NOT_LOOPBACK = (
    "the context leads beyond this machine, and this node has neither identity nor token: give it one of them, or"
    " declare the link trusted with --trusted-link"
)
_PLAIN_BEYOND_LOOPBACK = (
    "the KV would come in plain beyond this machine: declare the link trusted here too with --trusted-link, or take"
    " plain from the prefill node's --kv-security"
)
_STRENGTH: dict[KVSecurity, int] = {"plain": 0, "authenticated": 1, "tls": 2}


@dataclass(frozen=True, slots=True)
class Trust:
    """Of one node. `trusted_link`: the words with which its user declares the network between the nodes trusted.
    `kv_security`: of KV connections to it, where a link has none of its own. `kv_modes`: all that its user named."""

    identity: Identity | None = None
    token: str = ""
    trusted_link: str = ""
    kv_security: KVSecurity = "plain"
    kv_modes: tuple[KVSecurity, ...] = ()

    @property
    def offered(self) -> tuple[KVSecurity, ...]:
        """The modes in which a decode node may fetch KV from this node."""
        return self.kv_modes or (self.kv_security,)

    def mode_of(self, wanted: KVSecurity | msgspec.UnsetType) -> KVSecurity:
        """Of one transfer; `wanted` is what the cluster file says of its link."""
        if wanted is msgspec.UNSET:
            return self.kv_security
        if wanted not in self.offered:
            listed = ",".join(self.offered)
            raise TicketRefused(f"the cluster file has a link with {wanted}, and --kv-security here is {listed}")
        return wanted

    def seal(self, context: PrefillContext) -> str:
        """What a client carries to the decode node."""
        if not self.identity:
            body = msgspec.json.encode(context)
            return join_context(body, *([context_mac(body, self.token)] if self.token else []))
        body = msgspec.json.encode(msgspec.structs.replace(context, signer=self.identity.name))
        return join_context(body, self.identity.certificate, self.identity.sign(body))

    def open(self, text: str) -> PrefillContext:
        """Raises `TicketRefused` before anything is dialled."""
        context = self._opened(text)
        self._require_strong(context)
        return context

    def _require_strong(self, context: PrefillContext) -> None:
        """A mode that is not weaker than the weakest which this node's user named. Where none is named, the mode is
        the signer's choice, but plain beyond loopback is one that this node's user must declare, too."""
        if self.kv_modes:
            if _STRENGTH[context.security] < min(_STRENGTH[mode] for mode in self.kv_modes):
                listed = ",".join(self.kv_modes)
                raise TicketRefused(f"the KV would come with {context.security}, and --kv-security here is {listed}")
            return
        is_declared = bool(self.trusted_link) or _on_loopback(context.addresses)
        if self.identity and context.security == "plain" and not is_declared:
            raise TicketRefused(_PLAIN_BEYOND_LOOPBACK)

    def _opened(self, text: str) -> PrefillContext:
        try:
            body, *seal = split_context(text)
        except (binascii.Error, ValueError) as error:
            raise TicketRefused("this is not a context of a prefill node") from error
        if self.identity:
            return self._signed(body, seal, self.identity)
        context = PrefillContext.read(body)
        if len(seal) > 1 or context.signer or context.security == "tls":
            raise TicketRefused("the context is of a node with an identity: start this node with its --identity too")
        if self.token and not (seal and hmac.compare_digest(seal[0], context_mac(body, self.token))):
            raise TicketRefused(_NOT_SEALED)
        if not (self.token or self.trusted_link or _on_loopback(context.addresses)):
            raise TicketRefused(_NOT_LOOPBACK)
        return context

    def _signed(self, body: bytes, seal: list[bytes], identity: Identity) -> PrefillContext:
        if len(seal) != 2:
            raise TicketRefused(_NOT_SIGNED)
        try:
            signer = identity.require_signature(seal[0], seal[1], body)
        except IdentityRefused as error:
            raise TicketRefused(f"{_NOT_SIGNED} ({error})") from error
        context = PrefillContext.read(body)
        if not signer.is_node or context.signer != signer.name:
            raise TicketRefused(_NOT_SIGNED)
        if foreign := [host for host, _ in context.addresses if _canonical(host) not in signer.hosts]:
            remedy = "issue its certificate with all its addresses (--host)"
            raise TicketRefused(f"{foreign[0]} is not an address of {signer.name}: {remedy}")
        return context

    def tls_peer(self, context: PrefillContext) -> TlsPeer | None:
        """The only node that may answer at the context's addresses; None where the connection is not encrypted."""
        identity = self.identity
        if context.security != "tls" or not identity:
            return None

        def require(certificate: bytes | None) -> None:
            peer = identity.require(certificate)
            if not peer.is_node or peer.name != context.signer:
                raise IdentityRefused(f"{peer.name} answers there, not {context.signer}")

        return TlsPeer(context.signer, identity.kv_client_context, require)

    def require_fetcher(self, certificate: bytes | None) -> PeerIdentity | None:
        """Who fetches KV from this node with TLS must be a node of the cluster: a stolen context is not enough."""
        if not self.identity:
            return None
        peer = self.identity.require(certificate)
        if not peer.is_node:
            raise IdentityRefused(f"{peer.name} is not a node: its certificate has no hosts")
        return peer

    def is_authentic(self, context: PrefillContext) -> bool:
        """Whether the KV surely comes from the node that signed the context."""
        return bool(context.signer) and context.security != "plain"

    def may_keep(self, context: PrefillContext) -> bool:
        """Whether its KV may serve other requests, from the prefix cache."""
        return self.is_authentic(context) or bool(self.trusted_link) or _on_loopback(context.addresses)

    def peer_key(self, context: PrefillContext) -> tuple[object, str]:
        """Under which a peer check is remembered: a lie about an epoch must not reach another node's result."""
        return context.signer if self.is_authentic(context) else context.addresses, context.epoch


def _canonical(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower()


def _on_loopback(addresses: tuple[Address, ...]) -> bool:
    return all(is_loopback(host) for host, _ in addresses)


def open_trust(settings: NodeSettings) -> Trust:
    identity = open_identity(settings.identity)
    modes = choose_security(settings.kv_security, identity)
    if identity:
        if not identity.me.is_node:
            raise BadRequest(f"{identity.folder} is of a client: issue a certificate with --host for this node")
        identity.watch()
    if settings.trusted_link:
        if len(settings.trusted_link.split()) < 2:
            raise BadRequest('--trusted-link needs words: say which link it is, such as "the cable to mac-1"')
        log.warning("the link is declared trusted: %s", settings.trusted_link)
    return Trust(identity, settings.token, settings.trusted_link, default_security(modes, identity), modes)


def choose_security(given: str, identity: Identity | None) -> tuple[KVSecurity, ...]:
    """The modes of a `--kv-security` such as `tls,authenticated`; the first is for links that have none of their own.
    Empty where nothing is given."""
    modes: list[KVSecurity] = []
    for name in given.split(",") if given else ():
        found = next((mode for mode in get_args(KVSecurity) if mode == name.strip()), None)
        if not found:
            raise BadRequest(f"unknown --kv-security {name.strip()!r}: use {', '.join(get_args(KVSecurity))}")
        modes.append(found)
    if "tls" in modes and not identity:
        raise BadRequest("--kv-security tls needs an identity: give --identity, see `disagg cluster keys --help`")
    return tuple(dict.fromkeys(modes))


def default_security(modes: tuple[KVSecurity, ...], identity: Identity | None) -> KVSecurity:
    """Of the KV connections of a prefill node, where a link has none of its own."""
    return modes[0] if modes else "tls" if identity else "plain"


def require_trusted_link(hosts: list[str], kv_hosts: list[str], trust: Trust) -> None:
    """Beyond loopback a node has an identity, or its user declares the link trusted."""
    beyond = [host for host in hosts if not is_loopback(host)]
    if trust.trusted_link or not beyond:
        return
    words = '--trusted-link "WORDS", such as --trusted-link "the cable between spark-1 and mac-1"'
    if not trust.identity:
        raise BadRequest(
            f"refusing to listen on {beyond[0]} without an identity: make one with `disagg cluster keys init` and"
            f" `issue`, and give --identity DIR; or say in words why nothing else is on this link: {words}"
        )
    if "plain" in trust.offered and any(not is_loopback(host) for host in kv_hosts):
        raise BadRequest(f"--kv-security plain beyond loopback needs the words of its user: {words}")


def require_token(hosts: list[str], trust: Trust, insecure: bool) -> None:
    """The HTTP port gives out tickets, and a ticket's secret opens the KV port: one token protects both. With an
    identity, TLS knows every client."""
    open_hosts = [host for host in hosts if not is_loopback(host)]
    if open_hosts and not (trust.identity or trust.token or insecure):
        raise BadRequest(
            f"refusing to listen on {open_hosts[0]} without a token: set DISAGG_TOKEN or --token-file, or give an"
            " identity (--identity), or --insecure if you mean it"
        )
