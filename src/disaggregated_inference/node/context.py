"""The prefill context: everything a decode node needs to fetch the KV of a prompt, as one opaque string."""

import base64
import binascii
import hashlib
from array import array
from collections.abc import Sequence

import msgspec

from disaggregated_inference.api import KVSecurity
from disaggregated_inference.errors import TicketRefused
from disaggregated_inference.kv_transfer import Address

MAX_ADDRESSES = 16


def prompt_hash(tokens: Sequence[int]) -> str:
    return hashlib.blake2b(array("I", tokens).tobytes(), digest_size=12).hexdigest()


class PrefillContext(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    ticket: str
    secret: str
    epoch: str  # of the prefill node; a restart changes it
    tokens: int
    prompt_hash: str
    addresses: tuple[Address, ...]  # in order of preference
    signer: str = ""  # name of the prefill node, if it has an identity
    security: KVSecurity = "plain"  # of its KV connections

    def encode(self) -> str:
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode()

    @classmethod
    def decode(cls, text: str) -> "PrefillContext":
        """Of its first part; whether its seal is right is not checked here (`Trust.open`)."""
        try:
            return cls.read(base64.urlsafe_b64decode(text.partition(".")[0].encode()))
        except (binascii.Error, ValueError) as error:
            raise TicketRefused("this is not a context of a prefill node") from error

    @classmethod
    def read(cls, body: bytes) -> "PrefillContext":
        try:
            context = msgspec.json.decode(body, type=cls)
        except (msgspec.DecodeError, ValueError) as error:
            raise TicketRefused("this is not a context of a prefill node") from error
        hosts = all(0 < len(host) <= 253 and 0 < port < 65536 for host, port in context.addresses)
        if context.tokens < 1 or not context.epoch or not hosts or not 0 < len(context.addresses) <= MAX_ADDRESSES:
            raise TicketRefused("this is not a context of a prefill node")
        return context
