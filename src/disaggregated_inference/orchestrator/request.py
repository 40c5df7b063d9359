"""A request as a client makes it, and as a decode node understands it."""

import re
import secrets
from typing import Annotated, Any

import msgspec

from disaggregated_inference.cluster.config import ClusterConfig
from disaggregated_inference.errors import BadRequest, ConfigError, ModelNotFound

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
# As nodes have them, who would say the same later. What is no number (nan) is in none of them.
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (0, 1 << 31),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "min_tokens": (0, 1 << 31),
    "logprobs": (0, 20),
}
_BIASES = (-100, 100)
_TOKEN_ID = re.compile("[0-9]{1,10}")  # as JSON and TOML have it, whose keys are strings
_REQUEST_ID = re.compile(r"[\w.:-]{1,100}", re.ASCII)
_OF_ONE_REQUEST = ("prompt", "messages", "tokens", "request_id")


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    request_id: str = "-"

    def sampling(self) -> dict[str, Any]:
        """What was said, and a seed where chance takes part: without one, nobody could take over."""
        said = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.temperature and self.seed is None:
            said["seed"] = secrets.randbits(53)  # what every JSON reader keeps whole
        return said


def options_in(request: Any) -> dict[str, Any]:
    """One of several requests, as keyword arguments."""
    if not isinstance(request, dict) or not all(isinstance(name, str) for name in request):
        raise BadRequest('a request is a dict of options, such as {"prompt": "Why?"}')
    return request


def asked(defaults: dict[str, Any], /, **given: Any) -> GenerateRequest:
    """Of a client's keyword arguments, over the model's defaults in the config."""
    said = _said(given)
    if sum(name in said for name in ("prompt", "messages", "tokens")) != 1:
        raise BadRequest("give exactly one of prompt, messages and tokens")
    if said.get("messages") == []:
        raise BadRequest("messages is empty: give at least one")
    try:
        ask = msgspec.convert({"request_id": secrets.token_hex(8)} | _said(defaults) | said, GenerateRequest)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the request cannot be understood: {error}") from error
    _require_in_range(ask)
    _require_json(ask)
    return ask


def _require_json(ask: GenerateRequest) -> None:
    """What cannot be sent is refused here, before anybody works for it."""
    try:
        msgspec.json.encode((ask.sampling(), ask.template))
    except (UnicodeEncodeError, TypeError, ValueError) as error:
        raise BadRequest(f"the request cannot be sent as JSON: {error}") from error
    if "messages" in ask.template:
        raise BadRequest("messages are not given in template")


def _said(given: dict[str, Any]) -> dict[str, Any]:
    """By our names: `response_format` is OpenAI's for `format`, `model_type` an old one for `model`."""
    said = {name: value for name, value in given.items() if value is not None}
    if "model_type" in said:
        said.setdefault("model", said.pop("model_type"))
    if "response_format" in said:
        shape = format_of(said.pop("response_format"))
        said["format"] = shape or said.get("format")  # None: as text, whatever the defaults say
    if isinstance(said.get("logit_bias"), dict):
        said["logit_bias"] = {_token_id(key): bias for key, bias in said["logit_bias"].items()}
    return said


def _token_id(key: Any) -> Any:
    if isinstance(key, str) and not _TOKEN_ID.fullmatch(key):
        raise BadRequest(f'logit_bias: {key[:40]!r} is no token: give token ids, such as {{"5": -100}}')
    return int(key) if isinstance(key, str) else key


def _require_in_range(ask: GenerateRequest) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(ask, name)
        if value is not None and not low <= value <= high:
            raise BadRequest(f"{name} must be between {low} and {high}, not {value}")
    low, high = _BIASES
    for token, bias in (ask.logit_bias or {}).items():
        if not low <= bias <= high:
            raise BadRequest(f"logit_bias: {token}: {bias}; tokens of the vocabulary, {low} to {high}")
    if not _REQUEST_ID.fullmatch(ask.request_id):
        words = "1 to 100 letters, digits and any of . _ : - make an id"
        raise BadRequest(f"request_id: {ask.request_id[:40]!r} is none; {words}")


def require_defaults(config: ClusterConfig, model: str) -> None:
    """What the config says for every request must be what a request may say, and what all of them may."""
    defaults = config.options_of(model).defaults
    try:
        for name in _OF_ONE_REQUEST:
            if name in defaults:
                raise BadRequest(f"{name} is for one request, not for all of them: leave it out")
        named = asked(defaults, prompt="x").model
        if named and config.resolve_model(named) != model:
            raise BadRequest(f"model: {named} is another one: leave it out")
    except (BadRequest, ModelNotFound) as error:
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
