"""What nodes are asked, and how a body becomes one of these. See docs/API.md."""

import asyncio
import base64
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from disaggregated_inference.errors import BadRequest, BodyTooLarge, Cancelled, RequestTooSlow
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.node.context import MOST_ADDRESSES, PrefillContext
from disaggregated_inference.node.generation import GenerationParams
from disaggregated_inference.node.kv_listener import parse_address
from disaggregated_inference.node.sampling import SamplingParams
from disaggregated_inference.node.structured_output import OutputFormat

_TICKET = re.compile(r"[\w.:-]{1,200}", re.ASCII)
BODY_LIMIT_BYTES = 16 << 20
INLINE_LIMIT_BYTES = 64 << 20  # of KV in a request or response; base64 makes a third more of it
BODY_S = 30.0  # a body must be whole within this, and a second more for every so many bytes that came
_SLOWEST_BYTES_S = 16 << 10


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt in one of three forms."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tokens: list[int] | None = None

    def to_tokens(self, model: ModelFiles) -> list[int]:
        given = [name for name in ("prompt", "messages", "tokens") if getattr(self, name) is not None]
        if len(given) != 1:
            raise BadRequest(f"give exactly one of prompt, messages and tokens, not {len(given)}")
        tokens = self.tokens if self.tokens is not None else self._encoded(model)
        if not tokens:
            raise BadRequest("the prompt is empty")
        return tokens

    def _encoded(self, model: ModelFiles) -> list[int]:
        tokenizer = model.tokenizer
        text = tokenizer.render_chat(self.messages) if self.messages is not None else self.prompt or ""
        return tokenizer.encode_within(text, model.spec.context_window)


class PrefillRequest(Prompt, frozen=True, kw_only=True):
    ticket: str | None = None
    wait: bool = True  # false: answer at once, the fetch may begin before the prefill ends
    inline: bool = False  # true: the cache itself in the answer, as base64
    timeout_s: float = 60.0
    queue_s: float = 30.0  # of it, for memory
    kv_addresses: tuple[str, ...] = ()  # where the caller says this node's KV port is reached, best first

    def addressed(self, context: PrefillContext) -> PrefillContext:
        if not self.kv_addresses:
            return context
        port = context.addresses[0][1]
        given = tuple(parse_address(text, port) for text in self.kv_addresses)
        return msgspec.structs.replace(context, addresses=given)

    def require_sensible(self) -> None:
        if len(self.kv_addresses) > MOST_ADDRESSES:
            raise BadRequest(f"at most {MOST_ADDRESSES} kv_addresses")
        for text in self.kv_addresses:
            parse_address(text, 1)
        if self.inline and not self.wait:
            raise BadRequest("inline needs the whole cache: leave out wait, or set it to true")
        if self.ticket is not None and not _TICKET.fullmatch(self.ticket):
            raise BadRequest("a ticket id has 1 to 200 characters, of A-Z a-z 0-9 . _ : -")


class DecodeRequest(Prompt, frozen=True, kw_only=True):
    context: str | None = None
    kv_cache: str | None = None
    stream: bool = False
    progress: bool = False  # of a stream: how much of the prompt is here, as it comes
    max_new_tokens: int | None = None
    max_tokens: int | None = None  # the same, by the name other APIs have
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    stop: str | tuple[str, ...] | None = None
    n: int = 1
    logprobs: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    format: OutputFormat | None = None
    written: tuple[int, ...] = ()
    choice: int = 0
    timeout_s: float = 180.0
    queue_s: float = 30.0

    def rules(self) -> GenerationParams:
        if self.context is not None and self.kv_cache is not None:
            raise BadRequest("give context or kv_cache, not both")
        if None not in (self.max_tokens, self.max_new_tokens) and self.max_tokens != self.max_new_tokens:
            raise BadRequest("max_tokens and max_new_tokens are the same thing: give one of them")
        self._require_some_tokens()
        return GenerationParams(
            max_tokens=self.max_tokens or self.max_new_tokens or 256,
            n=self.n,
            sampling=self._sampling,
            format=self.format,
            written=self.written,
            choice=self.choice,
            timeout_s=self.timeout_s,
            queue_s=self.queue_s,
            progress=self.progress and self.stream,
        )

    def _require_some_tokens(self) -> None:
        for name in ("max_tokens", "max_new_tokens"):
            asked: int | None = getattr(self, name)
            if asked is not None and asked < 1:
                raise BadRequest(f"{name} must be at least 1, not {asked}")

    @property
    def _sampling(self) -> SamplingParams:
        shared = {name: getattr(self, name) for name in SamplingParams.__struct_fields__}
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        return SamplingParams(**shared | {"stop": stop or (), "logit_bias": self.logit_bias or {}})

    def tape(self) -> bytes:
        try:
            return base64.b64decode(self.kv_cache or "", validate=True)
        except ValueError as error:
            raise BadRequest(f"kv_cache is not base64: {error}") from error


Body = TypeVar("Body", bound=msgspec.Struct)


async def body_of(request: Request, kind: type[Body], limit_bytes: int = BODY_LIMIT_BYTES) -> Body:
    try:
        body = await _received(request, limit_bytes)
    except ClientDisconnect:  # nobody gets this answer
        raise Cancelled("the client is gone") from None
    except TimeoutError:
        raise RequestTooSlow("the request's body did not come in time: send it faster, or less of it") from None
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body cannot be read as this request: {error}") from error


async def _received(request: Request, limit_bytes: int) -> bytearray:
    body, until = bytearray(), asyncio.get_running_loop().time() + BODY_S
    async with asyncio.timeout_at(until) as deadline:
        async for part in request.stream():
            body += part
            if len(body) > limit_bytes:
                raise BodyTooLarge(f"a request body of more than {limit_bytes} bytes")
            deadline.reschedule(until + len(body) / _SLOWEST_BYTES_S)
    return body
