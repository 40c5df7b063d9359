"""What control frames carry, as JSON: small, read by people in a packet dump, bounded by the frame's own limit."""

from typing import TypeVar

import msgspec

from disaggregated_inference.errors import DisaggError, ProtocolError
from disaggregated_inference.kv import Fingerprint, KVDType


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The receiver's first words: which ticket, by what right, under which model, and what it has already."""

    ticket: str
    secret: str
    fetch: str  # chosen by the receiver, the same on every connection of one fetch
    fingerprint: Fingerprint
    epoch: str = ""  # of the sender that is meant; empty: whoever answers
    held_tokens: int = 0
    prompt_hash: str = ""  # of the tokens that the receiver takes the cache to be of; empty: it does not know them
    codecs: tuple[str, ...] = ("raw",)
    stream: int = 0
    streams: int = 1
    request_id: str = ""  # for the sender's log
    tokens_only: bool = False  # not the cache, but the prompt's token ids; other connections of the fetch follow
    canary: bool = False  # not the ticket's own cache, but that of the canary prompt; the ticket stays unspent
    # Nothing now: someone waits for memory, and will come. The ticket stays unspent. Left out of every other HELLO.
    renew_only: bool | msgspec.UnsetType = msgspec.UNSET


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The sender's answer: what will come."""

    epoch: str
    prompt_tokens: int
    dtype: KVDType
    codec: str
    chunk_tokens: int  # no slice has more rows
    lease_s: float = 30.0  # a receiver that says nothing for so long is taken for gone
    rounding: float = 1.0  # how coarse its weights are: so much more may a canary differ


class End(msgspec.Struct, frozen=True, kw_only=True):
    """Everything was sent on this stream."""

    prompt_tokens: int
    queue_s: float = 0.0
    prefill_s: float = 0.0
    cached_tokens: int = 0  # of the prompt, that the sender had read before


class ErrorMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Why the connection ends early. `code` is one of errors.py's."""

    code: str
    message: str


def failure_of(error: BaseException) -> bytes:
    code = error.code if isinstance(error, DisaggError) else "internal_error"
    return msgspec.json.encode(ErrorMessage(code=code, message=str(error)[:1000]))


Message = TypeVar("Message", bound=msgspec.Struct)


def parse(content: bytes, kind: type[Message]) -> Message:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a {kind.__name__} that cannot be read: {error}") from error
