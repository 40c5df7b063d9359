"""From what a person or a program wrote to a struct, with an error that names the field and what it may be."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from disaggregated_inference.api.requests import GenerateOptions, GenerateRequest, new_request_id
from disaggregated_inference.api.sampling import OutputFormat
from disaggregated_inference.api.type_values import allowed_values
from disaggregated_inference.errors import BadRequest, UnknownOption

_TOKEN_ID = re.compile("[0-9]{1,10}")  # as JSON and TOML have it, whose keys are strings
_FORMATS = ("json_object", "json_schema", "regex", "grammar", "choice")

Kind = TypeVar("Kind")


def convert(content: object, kind: type[Kind]) -> Kind:
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise invalid(error, kind) from error


_PLACE = re.compile(r"`\$\.?([^`]*)`")
_NOT_ALLOWED = re.compile(r"Invalid enum value (.+)")
_LIMITS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}
_LIMIT = re.compile(r"Expected `\w+`( of length)? (>=|<=|>|<) (\S+)")


class Misfit(NamedTuple):
    """What msgspec says of a value. `path`: such as `messages[0].role`; empty: the whole."""

    path: str
    reason: str


def misfit(error: msgspec.ValidationError, kind: Any) -> Misfit:
    """Of a value that is no `kind`. Messages of msgspec end with the place: `Expected `float` <= 1.0 - at `$.top_p``.
    Where only some values are allowed, it does not name them."""
    reason, _, place = str(error).partition(" - at ")
    found = _PLACE.search(place)
    path = found[1] if found else ""
    if (refused := _NOT_ALLOWED.fullmatch(reason)) and (allowed := allowed_values(kind, path)):
        reason = f"{refused[1]} is none of {', '.join(allowed)}"
    return Misfit(path, reason)


def invalid(error: msgspec.ValidationError, kind: Any) -> BadRequest:
    found = misfit(error, kind)
    param = re.match(r"\w+", found.path)
    return BadRequest(with_reason(*found), param=param[0] if param else None)


def with_reason(name: str, reason: str) -> str:
    """The field and msgspec's reason, in plain words where it is a limit."""
    if limit := _LIMIT.fullmatch(reason):
        of_length, sign, value = limit.groups()
        size = f"{_LIMITS[sign]} {value.removesuffix('.0')}"
        return f"{name} must {'have a length of' if of_length else 'be'} {size}"
    return f"{name}: {reason}" if name else reason


def generate_request(given: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> GenerateRequest:
    """A client's options over the model's defaults in the cluster file, checked."""
    options = {"request_id": new_request_id()} | _plain(defaults or {}) | _plain(given)
    require_known(options, GenerateRequest.__struct_fields__)
    request = convert(options, GenerateRequest)
    try:
        msgspec.json.encode((request.sampling(), request.template))
    except (UnicodeEncodeError, TypeError, ValueError) as error:
        raise BadRequest(f"the request cannot be sent as JSON: {error}") from error
    if request.format:
        request.format.require_valid()
    return request


def require_known(options: Iterable[str], known: Iterable[str]) -> None:
    known = [*known, "model_type", "response_format"]
    for name in options:
        if name not in known:
            raise UnknownOption(f"unknown option {name!r}{_remedy(name, known)}", name)


def _remedy(name: str, known: list[str]) -> str:
    """`stream` is an argument of the sync client's `generate`, and no option."""
    if name == "stream":
        return "; call stream() to get the text while it is generated"
    near = difflib.get_close_matches(name, [*known, "stream"], 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is None, and by our names."""
    options = {name: value for name, value in given.items() if value is not None}
    if "model_type" in options:
        options.setdefault("model", options.pop("model_type"))
    if "response_format" in options:
        options["format"] = output_format(options.pop("response_format"))
    if isinstance(options.get("logit_bias"), dict):
        options["logit_bias"] = {_token_id(key): bias for key, bias in options["logit_bias"].items()}
    return options


def _token_id(key: Any) -> Any:
    if isinstance(key, str) and not _TOKEN_ID.fullmatch(key):
        raise BadRequest(f'logit_bias: {key[:40]!r} is no token: give token ids, such as {{"5": -100}}', "logit_bias")
    return int(key) if isinstance(key, str) else key


def output_format(wanted: Any) -> OutputFormat | None:
    """OpenAI's `{"type": "json_schema", "json_schema": {"schema": ...}}` as ours. None: plain text."""
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "text":
        return None
    if kind not in _FORMATS:
        raise BadRequest(
            f"response_format: its type must be text, {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}", "response_format"
        )
    if kind == "json_schema" and isinstance(wanted.get("json_schema"), dict):
        wanted = {"type": kind, "schema": wanted["json_schema"].get("schema")}
    try:
        return msgspec.convert(wanted, OutputFormat)
    except msgspec.ValidationError as error:
        raise BadRequest(f"response_format: {invalid(error, OutputFormat)}", "response_format") from error


def options_of(request: GenerateOptions | Mapping[str, Any]) -> dict[str, Any]:
    """One of several requests, as keyword arguments."""
    if not isinstance(request, dict) or not all(isinstance(name, str) for name in request):
        raise BadRequest('a request is a dict of options, such as {"prompt": "Why?"}')
    return dict(request)
