"""A request as a client makes it, and as a decode node understands it."""

import secrets
from typing import Annotated, Any

import msgspec

from disaggregated_inference.cluster.config import ClusterConfig
from disaggregated_inference.errors import BadRequest, ConfigError

# What a decode node takes by the same name; see docs/API.md.
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "stop",
    "n",
    "logprobs",
    "ignore_eos",
    "min_tokens",
    "format",
)


class Ask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of prompt, messages and tokens; everything else has a default. None: the model's own default, or ours."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]] | None = None
    template: dict[str, Any] = {}  # what the chat template takes beside messages: tools, reasoning_effort, ...
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None  # 2000, or what the window has left
    temperature: float = 0.2
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stop: str | list[str] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    logprobs: int | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    format: dict[str, Any] | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0, le=86400)] | None = None  # seconds for all of it
    priority: int = 0
    progress: bool = False  # a stream also tells how much of the prompt was read
    request_id: Annotated[str, msgspec.Meta(pattern=r"^[\w.:-]{1,100}$")] = "-"

    def sampling(self) -> dict[str, Any]:
        """What was said, and a seed where chance takes part: without one, nobody could take over."""
        said = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.temperature and self.seed is None:
            said["seed"] = secrets.randbits(53)  # what every JSON reader keeps whole
        return said


def asked(defaults: dict[str, Any], **given: Any) -> Ask:
    """Of a client's keyword arguments, over the model's defaults in the config. `response_format` is OpenAI's name for
    `format`, `model_type` an old one for `model`."""
    said = {name: value for name, value in given.items() if value is not None}
    if "model_type" in said:
        said.setdefault("model", said.pop("model_type"))
    if "response_format" in said:
        shape = format_of(said.pop("response_format"))
        said |= {"format": shape} if shape else {}
    if sum(name in said for name in ("prompt", "messages", "tokens")) != 1:
        raise BadRequest("give exactly one of prompt, messages and tokens")
    if said.get("messages") == []:
        raise BadRequest("messages is empty: give at least one")
    try:
        return msgspec.convert({"request_id": secrets.token_hex(8)} | defaults | said, Ask)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the request cannot be understood: {error}") from error


def require_defaults(config: ClusterConfig, model: str) -> None:
    """What the config says for every request must be what a request may say."""
    try:
        asked(config.options_of(model).defaults, prompt="x")
    except BadRequest as error:
        place = f"{config.source or 'the config'}: models.{model}.defaults"
        raise ConfigError(f"{place}: {error}; docs/CLIENT.md lists the options") from error


def format_of(wanted: Any) -> dict[str, Any] | None:
    """`{"type": "json_schema", "json_schema": {"schema": ...}}` as a node's `format`."""
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "text":
        return None
    if kind == "json_schema" and isinstance(wanted.get("json_schema"), dict):
        return {"type": "json_schema", "schema": wanted["json_schema"].get("schema")}
    if kind in ("json_object", "json_schema", "regex", "grammar", "choice"):
        return dict(wanted)
    raise BadRequest("response_format: a type of text, json_object, json_schema, regex, grammar or choice is needed")
