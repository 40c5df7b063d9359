"""What a client asks the orchestrator for, and what the orchestrator asks nodes for. docs/API.md describes both."""

import re
import secrets
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from msgspec import UNSET, UnsetType

from disaggregated_inference.api.sampling import (
    MAX_CHOICES,
    CacheSalt,
    ClientSalt,
    Count,
    Logprobs,
    OutputFormat,
    SamplingParams,
    ScoredTokens,
    Seconds,
    SharedTokens,
    Temperature,
    TokenId,
    WaitSeconds,
)
from disaggregated_inference.defaults import TEMPERATURE
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.kv import Salt

_TICKET = re.compile(r"[\w.:-]{1,200}", re.ASCII)
_REQUEST_ID = re.compile(r"[\w.:-]{1,100}", re.ASCII)
MAX_KV_ADDRESSES = 16
KVSecurity = Literal["tls", "authenticated", "plain"]  # of KV connections, the strongest first
CallerName = Annotated[str, msgspec.Meta(max_length=100)]
LocalPrefill = Literal["auto", "never", "always"]
DEFAULT_NODE_TOKENS = 256  # of an answer, where a request to a node names no limit


class PrefillRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`POST /prefill`. One of prompt, messages and tokens."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tokens: list[int] | None = None
    ticket: str | None = None
    wait: bool = True  # false: answer as soon as there is memory; the fetch may begin before the prefill ends
    inline: bool = False  # true: the KV cache itself in the answer, as base64
    timeout_s: Seconds = 60.0
    queue_s: WaitSeconds = 30.0  # the part of it that the request may wait for memory
    kv_addresses: tuple[str, ...] = ()  # where the caller reaches this node's KV port, best first
    prompt_logprobs: Logprobs | None = None  # they go with the KV: `/decode` asks for as many
    scored_tokens: ScoredTokens = 0  # of the prompt, whose logprobs are known: only later ones are computed
    cache_salt: CacheSalt = ""  # only requests with the same salt share prefixes; the same as of `/decode`
    shared_tokens: SharedTokens = 0  # of the prompt, which may be found and left in the cache without a salt
    kv_security: KVSecurity | UnsetType = UNSET  # of the KV's link; one that the node offers

    def __post_init__(self) -> None:
        if len(self.kv_addresses) > MAX_KV_ADDRESSES:
            raise BadRequest(f"kv_addresses takes at most {MAX_KV_ADDRESSES} addresses")
        if self.inline and not self.wait:
            raise BadRequest("inline needs the whole cache: leave out wait, or set it to true")
        if self.inline and self.prompt_logprobs is not None:
            raise BadRequest("inline carries no prompt_logprobs: leave one of them out", "prompt_logprobs")
        if self.ticket is not None and not _TICKET.fullmatch(self.ticket):
            raise BadRequest("a ticket id has 1 to 200 characters, of A-Z a-z 0-9 . _ : -")

    @property
    def salt(self) -> Salt:
        return Salt(self.cache_salt, self.shared_tokens)


class PrefillMetrics(msgspec.Struct, frozen=True):
    prompt_tokens: int
    prefill_time: float
    prefill_speed: float
    queue_time: float
    cached_tokens: int = 0  # of the prompt, from this node's prefix cache


class PrefillResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    context: str  # what `/decode` redeems
    ticket: str
    prompt_tokens: int
    metrics: PrefillMetrics | None = None  # once the prompt was prefilled
    input_ids: tuple[int, ...] = ()
    kv_cache: str = ""  # base64; with `inline`


class GenerationParams(SamplingParams, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters, and what a decode node needs to know to continue an answer that another node began."""

    written: tuple[TokenId, ...] = ()  # tokens of the answer that the prompt already ends with
    choice: int = 0  # the number of the choice that is continued: each has random numbers of its own
    timeout_s: Seconds = 180.0
    queue_s: WaitSeconds = 30.0  # the part of it that the request may wait for memory
    progress: bool = False  # a stream also reports how much of the prompt has arrived
    scored_tokens: ScoredTokens = 0  # of the prompt, whose logprobs an earlier attempt has brought
    cache_salt: CacheSalt = ""  # only requests with the same salt share prefixes
    shared_tokens: SharedTokens = 0  # of the prompt, which may be found and left in the cache without a salt

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.written or self.choice) and self.n > 1:
            raise BadRequest("a continued completion has one choice: give written and choice with n = 1")
        if not 0 <= self.choice < MAX_CHOICES:
            raise BadRequest(f"choice must be between 0 and {MAX_CHOICES - 1}, not {self.choice}")

    @property
    def salt(self) -> Salt:
        return Salt(self.cache_salt, self.shared_tokens)

    def seeded(self) -> "GenerationParams":
        """With a seed to report and to continue with, if the answer is sampled and the request has none."""
        if not self.temperature or self.seed is not None:
            return self
        return msgspec.structs.replace(self, seed=new_seed())


class DecodeRequest(GenerationParams, frozen=True, kw_only=True, omit_defaults=True):
    """`POST /decode` (with a context or a KV cache) and `POST /generate` (with a prompt alone)."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tokens: list[int] | None = None
    context: str | None = None
    kv_cache: str | None = None  # base64
    stream: bool = False
    max_new_tokens: Count | None = None  # max_tokens by another name

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context is not None and self.kv_cache is not None:
            raise BadRequest("give context or kv_cache, not both")
        if self.kv_cache is not None and self.prompt_logprobs is not None:
            raise BadRequest("kv_cache carries no prompt_logprobs: give a prompt or a context", "prompt_logprobs")
        if None not in (self.max_tokens, self.max_new_tokens) and self.max_tokens != self.max_new_tokens:
            raise BadRequest("max_tokens and max_new_tokens are the same thing: give one of them")

    def params(self) -> GenerationParams:
        """With one name for each thing: this request is itself the parameters of the generation."""
        max_tokens = self.max_tokens or self.max_new_tokens or DEFAULT_NODE_TOKENS
        return msgspec.structs.replace(self, max_tokens=max_tokens, progress=self.progress and self.stream)


class TextGenerateRequest(DecodeRequest, frozen=True, kw_only=True, omit_defaults=True):
    """`POST /generate` of a node that takes text: its engine applies the chat template."""

    # Variables of the chat template; such engines know tools and thinking.
    template: dict[str, Any] = msgspec.field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None  # the same as in template
    images: Any = None  # refused: images belong to messages
    written_text: str = ""  # of a completion that another node began: this node continues it


class GenerateOptions(TypedDict, total=False):
    """Options of `generate`, `complete` and `stream`. An option that is None counts as not given: then the
    default of the model in the cluster file applies, or else the default named here.

    model: a name, an alias or a part of a name; default: the only model of the cluster
    messages: a chat, instead of prompt: [{"role": "user", "content": "..."}]
    tokens: token ids, instead of prompt
    template: variables of the chat template: tools, reasoning_effort, ...
    max_tokens: longest answer; default: 2000, or what the context window has left
    temperature: 0 is greedy; default: 0.2
    top_p, top_k, min_p: which tokens may be drawn; default: 1, 0, 0, which is all of them
    seed: the same seed gives the same answer; default: another one for every request
    repetition_penalty, frequency_penalty, presence_penalty: against repetitions; default: 1, 0, 0, which is off
    logit_bias: token id to -100 ... 100; default: no bias
    stop: a string or several; the answer ends before the first of them
    n: how many choices; default: 1
    logprobs: how many alternatives per token; default: no logprobs
    prompt_logprobs: the same for the tokens of the prompt; none of it may come from a prefix cache then
    min_tokens, ignore_eos: when the answer may end; default: 0, False
    format: structured output: {"type": "json_schema", "schema": {...}}, regex, grammar, choice
    response_format: the same in OpenAI's form
    timeout: seconds for the whole request; default: the cluster's limits for prefill and decode together (60 + 180)
    priority: higher first, while requests wait; default: 0
    caller: a name; callers take turns while requests wait
    cache_salt: requests share cached prefixes only with requests of the same salt; default: with all without one
    local: whether the decode node prefills the prompt itself: auto, never, always; default: the cluster's policy
    progress: a stream also reports how much of the prompt was read; default: False
    request_id: the request's name in logs and history; default: a random one
    model_type: an older name for model
    """

    model: str | None
    model_type: str | None
    messages: list[dict[str, Any]] | None
    tokens: list[int] | None
    template: dict[str, Any] | None
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: dict[int, float] | dict[str, float] | None
    stop: str | list[str] | tuple[str, ...] | None
    n: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    ignore_eos: bool | None
    min_tokens: int | None
    format: OutputFormat | dict[str, Any] | None
    response_format: dict[str, Any] | None
    timeout: float | None
    priority: int | None
    caller: str | None
    cache_salt: str | None
    local: LocalPrefill | None
    progress: bool | None
    request_id: str | None


class RequestOptions(GenerateOptions, total=False):
    """The same, with the prompt."""

    prompt: str | None


class GenerateRequest(SamplingParams, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A client's request, checked. One of prompt, messages and tokens."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tokens: list[TokenId] | None = None
    template: dict[str, Any] = msgspec.field(default_factory=dict)
    temperature: Temperature = TEMPERATURE
    timeout: Seconds | None = None
    priority: int = 0
    caller: CallerName = ""
    cache_salt: ClientSalt | None = None
    local: LocalPrefill | None = None
    progress: bool = False
    request_id: str = "-"

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum(given is not None for given in (self.prompt, self.messages, self.tokens)) != 1:
            raise BadRequest("give exactly one of prompt, messages and tokens")
        if self.messages == []:
            raise BadRequest("messages is empty: give at least one")
        if "messages" in self.template:
            raise BadRequest("messages are not given in template")
        if not _REQUEST_ID.fullmatch(self.request_id):
            form = "1 to 100 letters, digits and any of . _ : - make an id"
            raise BadRequest(f"request_id: {self.request_id[:40]!r} is none; {form}")

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters, as keyword arguments of a request to a node."""
        return {name: getattr(self, name) for name in SamplingParams.__struct_fields__}


def new_seed() -> int:
    return secrets.randbits(53)  # what every JSON reader keeps whole


def new_request_id() -> str:
    return secrets.token_hex(8)
