"""Payloads of control frames, as JSON: small, readable in a packet dump, and limited by `CONTROL_LIMIT_BYTES`."""

from typing import TypeVar

import msgspec

from disaggregated_inference.errors import DisaggError, ProtocolError
from disaggregated_inference.kv import Fingerprint, KVDType


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The receiver's first frame: ticket and secret, its model, and the tokens it holds already."""

    ticket: str
    secret: str
    fetch: str  # chosen by the receiver, the same on every connection of one fetch
    fingerprint: Fingerprint
    epoch: str = ""  # of the expected sender; empty: any
    held_tokens: int = 0
    prompt_hash: str = ""  # of the prompt that the receiver expects; empty: it does not know the tokens
    codecs: tuple[str, ...] = ("raw",)
    stream: int = 0
    streams: int = 1
    request_id: str = ""  # for the sender's log
    tokens_only: bool = False  # send the prompt's token ids instead of KV; other connections of the fetch follow
    canary: bool = False  # send the KV of the canary prompt instead; the ticket stays unspent
    # Renew the lease only: the receiver waits for memory. The ticket stays unspent. Absent from every other HELLO.
    renew_only: bool | msgspec.UnsetType = msgspec.UNSET
    # Send prompt logprobs too, with this many alternatives, for the tokens after the first `scored_tokens`.
    prompt_logprobs: int | msgspec.UnsetType = msgspec.UNSET
    scored_tokens: int | msgspec.UnsetType = msgspec.UNSET
    # In the authenticated mode the secret stays empty on the wire, and the nonce is a part of the key.
    keyed: bool | msgspec.UnsetType = msgspec.UNSET
    nonce: str | msgspec.UnsetType = msgspec.UNSET


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The sender's answer: what it will send."""

    epoch: str
    prompt_tokens: int
    dtype: KVDType
    codec: str
    chunk_tokens: int  # no slice has more rows
    lease_s: float = 30.0  # a receiver that sends no RENEW for this long is gone
    rounding: float = 1.0  # of its weights; a canary prompt may differ accordingly
    nonce: str | msgspec.UnsetType = msgspec.UNSET  # the sender's part of the key, in the authenticated mode


class End(msgspec.Struct, frozen=True, kw_only=True):
    """Everything was sent on this stream."""

    prompt_tokens: int
    queue_s: float = 0.0
    prefill_s: float = 0.0
    cached_tokens: int = 0  # of the prompt, from the sender's prefix cache
    # From this connection's HELLO to the end of computing; negative: it had ended before. A duration from an event that
    # both sides saw, since their clocks differ.
    computed_s: float = 0.0


class ErrorMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Why the connection ends early. `code` is one of those in errors.py."""

    code: str
    message: str


def encode_error(error: BaseException) -> bytes:
    code = error.code if isinstance(error, DisaggError) else "internal_error"
    return msgspec.json.encode(ErrorMessage(code=code, message=str(error)[:1000]))


Message = TypeVar("Message", bound=msgspec.Struct)


def decode_message(content: bytes, kind: type[Message]) -> Message:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"cannot decode a {kind.__name__} message: {error}") from error
