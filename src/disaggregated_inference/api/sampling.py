"""How an answer is generated. Every allowed range stands here, once: clients, nodes and public APIs use these types."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from disaggregated_inference.defaults import MAX_REQUEST_S, MAX_TEMPERATURE
from disaggregated_inference.errors import BadRequest

MAX_CHOICES = 16
MAX_STOPS = 16
MOST_TOKENS = 1 << 31
_MAX_FORMAT_BYTES = 256 << 10

Count = Annotated[int, Meta(ge=1)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Temperature = Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)]
TopK = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Logprobs = Annotated[int, Meta(ge=0, le=20)]
ScoredTokens = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
MinTokens = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
StopString = Annotated[str, Meta(min_length=1)]
Stops = Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
MaxTokens = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]  # what public APIs accept
EchoMaxTokens = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]  # the same where 0 means: the prompt alone
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]  # what OpenAI has; nodes take unsigned ones, too
Seconds = Annotated[float, Meta(gt=0, le=MAX_REQUEST_S)]
CacheSalt = Annotated[str, Meta(max_length=128, pattern=r"^[A-Za-z0-9_.:-]*\Z")]  # as nodes get it
ClientSalt = Annotated[str, Meta(min_length=1, max_length=256)]  # as clients give it
SharedTokens = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
WaitSeconds = Annotated[float, Meta(ge=0, le=MAX_REQUEST_S)]


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The form that an answer must have. Each type but `json_object` has one field that describes it."""

    type: Literal["json_object", "json_schema", "regex", "grammar", "choice"]
    schema: dict[str, Any] | bool | None = None
    pattern: str | None = None
    grammar: str | None = None  # Lark
    choices: tuple[str, ...] = ()

    def require_valid(self) -> None:
        """Everything that can be checked without compiling the grammar."""
        wanted = _FORMAT_FIELDS[self.type]
        given = {name for name in _FORMAT_FIELDS.values() if name and getattr(self, name) not in (None, ())}
        if wanted and wanted not in given:
            raise BadRequest(f"format: the type {self.type} needs the field {wanted}", "format")
        if superfluous := sorted(given - {wanted}):
            raise BadRequest(f"format: the type {self.type} has no field {superfluous[0]}; leave it out", "format")
        if not all(self.choices):
            raise BadRequest("format: a choice is empty; every choice needs at least one character", "format")
        if (size := len(msgspec.json.encode(self))) > _MAX_FORMAT_BYTES:
            raise BadRequest(f"format: {size} bytes are too many; the limit is {_MAX_FORMAT_BYTES}", "format")


_FORMAT_FIELDS: dict[str, str | None] = {
    "json_object": None,
    "json_schema": "schema",
    "regex": "pattern",
    "grammar": "grammar",
    "choice": "choices",
}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The defaults are greedy: the likeliest token, until the model ends its answer or `max_tokens` is reached."""

    max_tokens: Count | None = None
    temperature: Temperature = 0.0
    top_p: Probability = 1.0
    top_k: TopK = 0  # 0: no limit
    min_p: Probability = 0.0
    seed: int | None = None  # 64 bits, with a sign or without
    repetition_penalty: RepetitionPenalty = 1.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: dict[TokenId, Bias] | None = None
    stop: str | tuple[StopString, ...] | None = None
    n: Choices = 1
    logprobs: Logprobs | None = None  # how many alternatives per token; None: no logprobs at all
    prompt_logprobs: Logprobs | None = None  # the same for the tokens of the prompt
    ignore_eos: bool = False  # an end token counts like any other, and does not end the answer
    min_tokens: MinTokens = 0  # no end token before the answer has this many tokens
    format: OutputFormat | None = None

    def __post_init__(self) -> None:
        """What a type alone cannot say. It runs wherever a request enters a process."""
        if self.max_tokens is not None and self.max_tokens < 1:
            raise BadRequest(f"max_tokens must be at least 1, not {self.max_tokens}", "max_tokens")
        if self.seed is not None and not -(1 << 63) <= self.seed < 1 << 64:
            raise BadRequest("seed must fit in 64 bits", "seed")
        if self.stop == "" or len(self.stop_strings) > MAX_STOPS:
            raise BadRequest(f"stop takes up to {MAX_STOPS} strings, none of them empty", "stop")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()

    @property
    def greedy(self) -> bool:
        """Whether the device's own argmax is the next token, so that the logits need not leave it. (Structured output
        needs the logits too; only the caller knows of it.)"""
        penalized = (self.repetition_penalty != 1, self.frequency_penalty, self.presence_penalty, self.logit_bias)
        return self.temperature == 0 and not any(penalized) and self.logprobs is None and not self.min_tokens

    def require_vocabulary(self, size: int) -> None:
        """Only a node knows how many tokens there are."""
        for token in self.logit_bias or ():
            if token >= size:
                message = f"logit_bias: token {token} is not in the vocabulary, which has {size} tokens"
                raise BadRequest(message, "logit_bias")
