"""What a client may ask for, and what it is told when it may not."""

from typing import Any

import pytest

from disaggregated_inference.cluster.config import load_config
from disaggregated_inference.errors import BadRequest, ConfigError
from disaggregated_inference.orchestrator.request import asked, options_in, require_defaults

JSON = {"type": "json_object"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"temperature": float("nan")}, "temperature must be between 0 and 100, not nan"),
        ({"temperature": float("inf")}, "temperature must be between 0 and 100, not inf"),
        ({"temperature": -1}, "temperature must be between 0 and 100, not -1"),
        ({"presence_penalty": 3}, "presence_penalty must be between -2 and 2"),
        ({"logprobs": 21}, "logprobs must be between 0 and 20"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias: 5: nan"),
        ({"timeout": float("nan")}, "timeout"),
        ({"logit_bias": {"hello": 1}}, r"^logit_bias: 'hello' is no token: give token ids, such as .*5"),
        ({"logit_bias": {"-5": 1}}, "'-5' is no token"),
        ({"logit_bias": {"\N{ARABIC-INDIC DIGIT FIVE}": 1}}, "is no token"),
        ({"logit_bias": {"5" * 5000: 1}}, "is no token"),
        ({"logit_bias": {"5": 101}}, "logit_bias: 5: 101"),
        ({"request_id": "abc\n"}, "^request_id: .* is none; 1 to 100 letters, digits and any of"),
        ({"request_id": "a\nb"}, "^request_id: .* is none"),
        ({"request_id": ""}, "^request_id: '' is none"),
        ({"request_id": "a" * 101}, "^request_id"),
        ({"defaults": {}}, "defaults"),
        ({"messages": []}, "exactly one"),
        ({"stop": "\ud800"}, "cannot be sent as JSON"),
        ({"format": {"type": "regex", "pattern": "\ud800"}}, "cannot be sent as JSON"),
        ({"template": {"tools": object()}}, "cannot be sent as JSON"),
        ({"template": {"messages": []}}, "messages are not given in template"),
    ],
)
def test_what_cannot_be_asked(given: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        asked({}, prompt="x", **given)


def test_what_can() -> None:
    ask = asked({}, prompt="x", temperature=0, top_k=0, request_id="a.b:c-1", logit_bias={5: -100})
    assert (ask.request_id, ask.sampling()["logit_bias"]) == ("a.b:c-1", {5: -100.0})


def test_a_bias_may_come_from_a_file() -> None:
    """Whose keys are strings."""
    assert asked({}, prompt="x", logit_bias={"5": -100, 6: 1}).logit_bias == {5: -100.0, 6: 1.0}
    server = {"host": "127.0.0.1", "port": 1, "model": "m"}

    def config(bias: Any) -> Any:
        models = {"m": {"defaults": {"logit_bias": bias}}}
        return load_config({"decode_servers": [server], "models": models}, environ={})

    require_defaults(config({"5": -100}), "m")
    assert asked(config({"5": -100}).options_of("m").defaults, prompt="x").logit_bias == {5: -100.0}
    with pytest.raises(ConfigError, match=r"models\.m\.defaults: logit_bias: 'five' is no token"):
        require_defaults(config({"five": -100}), "m")


def test_defaults_are_read_as_a_request_is() -> None:
    defaults = {"response_format": JSON, "model_type": "m", "temperature": 0.5, "seed": None}
    ask = asked(defaults, prompt="x")
    assert (ask.format, ask.model, ask.temperature, ask.seed) == (JSON, "m", 0.5, None)
    assert asked(defaults, prompt="x", temperature=0.1).temperature == 0.1
    assert asked(defaults, prompt="x", response_format={"type": "text"}).format is None


@pytest.mark.parametrize("request_", ["str", None, 5, [], {5: "x"}])
def test_one_of_many_is_a_dict(request_: Any) -> None:
    with pytest.raises(BadRequest, match="a request is a dict of options"):
        options_in(request_)
    assert options_in({"prompt": "x"}) == {"prompt": "x"}
