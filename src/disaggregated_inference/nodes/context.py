"""A context: everything a decode node needs to fetch a cache, as one opaque word people can paste into curl."""

import base64
import binascii

import msgspec

from disaggregated_inference.errors import TicketRefused


class Context(msgspec.Struct, frozen=True, kw_only=True):
    ticket: str
    secret: str
    tokens: int
    addresses: tuple[tuple[str, int], ...]  # in order of preference

    def encode(self) -> str:
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode()

    @classmethod
    def decode(cls, word: str) -> "Context":
        try:
            return msgspec.json.decode(base64.urlsafe_b64decode(word.encode()), type=cls)
        except (binascii.Error, msgspec.DecodeError, ValueError) as error:
            raise TicketRefused("this context is not one that a prefill node gave out") from error
