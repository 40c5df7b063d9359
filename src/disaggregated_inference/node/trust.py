"""Whom a node believes: which contexts it accepts, which addresses it dials, whose KV it keeps for other requests."""

import binascii
import hmac
import ipaddress
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

from disaggregated_inference.api import context_mac, join_context, split_context
from disaggregated_inference.errors import BadRequest, IdentityRefused, TicketRefused
from disaggregated_inference.http import is_loopback
from disaggregated_inference.identity import Identity, PeerIdentity
from disaggregated_inference.kv_transfer import Address, TlsPeer
from disaggregated_inference.node.context import PrefillContext

KVSecurity = Literal["tls", "authenticated", "plain"]

_NOT_SEALED = "the context is not sealed with this node's token: give both nodes the same token, or an identity"
_NOT_SIGNED = "the context is not signed by a node of this cluster: start the prefill node with its --identity"
_NOT_LOOPBACK = (
    "the context leads beyond this machine, and this node has neither identity nor token: give it one of them, or"
    " declare the link trusted with --trusted-link"
)


@dataclass(frozen=True, slots=True)
class Trust:
    """Of one node. `trusted_link`: the words with which its user declares the network between the nodes trusted."""

    identity: Identity | None = None
    token: str = ""
    trusted_link: str = ""
    kv_security: KVSecurity = "plain"

    def seal(self, context: PrefillContext) -> str:
        """What a client carries to the decode node."""
        if not self.identity:
            body = msgspec.json.encode(msgspec.structs.replace(context, security=self.kv_security))
            return join_context(body, *([context_mac(body, self.token)] if self.token else []))
        signed = msgspec.structs.replace(context, signer=self.identity.name, security=self.kv_security)
        body = msgspec.json.encode(signed)
        return join_context(body, self.identity.certificate, self.identity.sign(body))

    def open(self, text: str) -> PrefillContext:
        """Raises `TicketRefused` before anything is dialled."""
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


def choose_security(given: str, identity: Identity | None) -> KVSecurity:
    """Of the KV connections of a prefill node."""
    if given not in ("", *get_args(KVSecurity)):
        raise BadRequest(f"unknown --kv-security {given!r}: use {', '.join(get_args(KVSecurity))}")
    if given == "tls" and not identity:
        raise BadRequest("--kv-security tls needs an identity: give --identity, see `disagg cluster keys --help`")
    chosen: KVSecurity = "authenticated" if given == "authenticated" else "plain" if given == "plain" else "tls"
    return chosen if given or identity else "plain"


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
    if trust.kv_security == "plain" and any(not is_loopback(host) for host in kv_hosts):
        raise BadRequest(f"--kv-security plain beyond loopback needs the words of its user: {words}")
