"""A client's request is checked once, before a node works for it, with an error that names the option."""

import re
from typing import Any

import msgspec
import pytest

from disaggregated_inference.api import GenerateOptions, GenerateRequest, OutputFormat, generate_request
from disaggregated_inference.api.validation import options_of
from disaggregated_inference.cluster import Policies, load_config
from disaggregated_inference.defaults import MAX_TOKENS
from disaggregated_inference.errors import BadRequest, ConfigError, UnknownOption
from disaggregated_inference.orchestrator import require_defaults

JSON = {"type": "json_object"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"temperature": float("nan")}, "temperature must be at least 0"),
        ({"temperature": float("inf")}, "temperature must be at most 100"),
        ({"temperature": -1}, "temperature must be at least 0"),
        ({"presence_penalty": 3}, "presence_penalty must be at most 2"),
        ({"logprobs": 21}, "logprobs must be at most 20"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias"),
        ({"timeout": float("nan")}, "timeout"),
        ({"logit_bias": {"hello": 1}}, r"^logit_bias: 'hello' is no token: give token ids, such as .*5"),
        ({"logit_bias": {"-5": 1}}, "'-5' is no token"),
        ({"logit_bias": {"\N{ARABIC-INDIC DIGIT FIVE}": 1}}, "is no token"),
        ({"logit_bias": {"5" * 5000: 1}}, "is no token"),
        ({"logit_bias": {"5": 101}}, "logit_bias.* must be at most 100"),
        ({"request_id": "abc\n"}, "^request_id: .* is none; 1 to 100 letters, digits and any of"),
        ({"request_id": "a\nb"}, "^request_id: .* is none"),
        ({"request_id": ""}, "^request_id: '' is none"),
        ({"request_id": "a" * 101}, "^request_id"),
        ({"tempreature": 1}, "unknown option 'tempreature'; did you mean 'temperature'"),
        ({"strem": True}, "unknown option 'strem'; did you mean 'stream'"),
        ({"stream": True}, r"unknown option 'stream'; call stream\(\) to get the text"),
        ({"local": "sometimes"}, "^local: 'sometimes' is none of always, auto, never$"),
        ({"format": {"type": "json"}}, r"^format\.type: 'json' is none of choice, grammar, json_object"),
        ({"messages": []}, "exactly one"),
        ({"stop": "\ud800"}, "cannot be sent as JSON"),
        ({"format": {"type": "regex", "pattern": "\ud800"}}, "cannot be sent as JSON"),
        ({"template": {"tools": object()}}, "cannot be sent as JSON"),
        ({"template": {"messages": []}}, "messages are not given in template"),
    ],
)
def test_invalid_requests(given: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        generate_request({"prompt": "x", **given})


def test_valid_requests() -> None:
    request = generate_request(
        {"prompt": "x", "temperature": 0, "top_k": 0, "request_id": "a.b:c-1", "logit_bias": {5: -100}}
    )
    assert (request.request_id, request.sampling()["logit_bias"]) == ("a.b:c-1", {5: -100.0})


def test_logit_bias_accepts_string_keys() -> None:
    """Whose keys are strings."""
    assert generate_request({"prompt": "x", "logit_bias": {"5": -100, 6: 1}}).logit_bias == {5: -100.0, 6: 1.0}
    server = {"host": "127.0.0.1", "port": 1, "model": "m"}

    def config(bias: Any) -> Any:
        models = {"m": {"defaults": {"logit_bias": bias}}}
        return load_config({"decode_servers": [server], "models": models}, environ={})

    require_defaults(config({"5": -100}), "m")
    assert generate_request({"prompt": "x"}, config({"5": -100}).options_of("m").defaults).logit_bias == {5: -100.0}
    with pytest.raises(ConfigError, match=r"models\.m\.defaults: logit_bias: 'five' is no token"):
        require_defaults(config({"five": -100}), "m")


def test_config_defaults_are_checked_like_a_request() -> None:
    defaults = {"response_format": JSON, "model_type": "m", "temperature": 0.5, "seed": None}
    request = generate_request({"prompt": "x"}, defaults)
    assert (request.format, request.model, request.temperature, request.seed) == (
        OutputFormat(type="json_object"),
        "m",
        0.5,
        None,
    )
    assert generate_request({"prompt": "x", "temperature": 0.1}, defaults).temperature == 0.1
    assert generate_request({"prompt": "x", "response_format": {"type": "text"}}, defaults).format is None


@pytest.mark.parametrize("request_", ["str", None, 5, [], {5: "x"}])
def test_generate_many_takes_dicts(request_: Any) -> None:
    with pytest.raises(BadRequest, match="a request is a dict of options"):
        options_of(request_)
    assert options_of({"prompt": "x"}) == {"prompt": "x"}


def test_an_unknown_option_is_also_a_type_error() -> None:
    with pytest.raises(TypeError, match="did you mean 'max_tokens'"):
        generate_request({"prompt": "x", "max_token": 1})
    with pytest.raises(UnknownOption) as caught:
        generate_request({"prompt": "x", "zzz": 1})
    assert (caught.value.param, str(caught.value)) == ("zzz", "unknown option 'zzz'")


def test_the_defaults_in_the_docstring_are_those_of_a_request() -> None:
    fields = {field.name: field.default for field in msgspec.structs.fields(GenerateRequest)}
    told = dict(re.findall(r"^ *([\w, ]+): .*?; default: (.*)$", GenerateOptions.__doc__ or "", re.MULTILINE))
    for names in ("top_p, top_k, min_p", "repetition_penalty, frequency_penalty, presence_penalty", "temperature", "n"):
        values = ", ".join(f"{fields[name]:g}" for name in names.split(", "))
        assert told[names].startswith(values), names
    for names in ("min_tokens, ignore_eos", "priority", "progress"):
        assert told[names] == ", ".join(str(fields[name]) for name in names.split(", "))
    policies = Policies()
    assert told["timeout"].endswith(f"({policies.prefill_timeout_s:g} + {policies.decode_timeout_s:g})")
    assert told["max_tokens"].startswith(f"{MAX_TOKENS}, or")


def test_the_options_of_the_clients_are_the_fields_of_a_request() -> None:
    aliases = {"model_type", "response_format"}
    assert set(GenerateOptions.__annotations__) - aliases | {"prompt"} == set(GenerateRequest.__struct_fields__)
