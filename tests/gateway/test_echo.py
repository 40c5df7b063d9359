"""`echo` of /v1/completions: the prompt in the text, and its logprobs, as evaluation harnesses read them."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.support.gateway import served, simulated_config, simulated_pair

SIMULATED = "simulated:tiny"


@pytest.fixture(scope="module")
def quick() -> Iterator[OpenAI]:
    with simulated_pair() as pair, served(simulated_config(*pair)) as url:
        yield OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60)


def test_echo_alone(quick: OpenAI) -> None:
    params: Any = {"model": SIMULATED, "temperature": 0, "max_tokens": 4}
    plain = quick.completions.create(prompt="one two", **params).choices[0]
    echoed = quick.completions.create(prompt="one two", **params, echo=True).choices[0]
    assert (echoed.text, echoed.logprobs) == ("one two" + plain.text, None)
    tokens = quick.completions.create(prompt=[300, 301], **params, echo=True).choices[0]
    assert tokens.text.startswith("[0300][0301]")
    chunks = list(quick.completions.create(prompt="one two", **params, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == echoed.text
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_alone(quick: OpenAI, stream: bool) -> None:
    """`max_tokens` 0: nothing is generated for the client, and nothing counted."""
    params: Any = {"model": SIMULATED, "prompt": ["one", "two three"], "max_tokens": 0, "echo": True, "logprobs": 2}
    if stream:
        chunks = list(quick.completions.create(**params, stream=True, stream_options={"include_usage": True}))
        choices = [choice for chunk in chunks for choice in chunk.choices]
        usage = chunks[-1].usage
    else:
        answer = quick.completions.create(**params)
        choices, usage = answer.choices, answer.usage
    assert usage
    assert (usage.completion_tokens, usage.total_tokens) == (0, usage.prompt_tokens)
    for index, prompt in enumerate(params["prompt"]):
        mine = [choice for choice in choices if choice.index == index]
        assert "".join(choice.text for choice in mine) == prompt
        assert mine[-1].finish_reason == "length"
        tokens = [token for choice in mine if choice.logprobs for token in choice.logprobs.tokens or []]
        assert "".join(tokens) == prompt
    with_metrics = quick.completions.create(**params, extra_body={"include_metrics": True})
    assert with_metrics.disagg[0]["completion_tokens"] == 0


def test_choices_share_the_logprobs_of_their_prompt(quick: OpenAI) -> None:
    params: Any = {"model": SIMULATED, "max_tokens": 2, "n": 2, "temperature": 1, "seed": 3, "echo": True}
    answer = quick.completions.create(prompt=[[300, 301], [302, 303, 304]], logprobs=1, **params)
    for choice, count in zip(answer.choices, (2, 2, 3, 3), strict=True):
        assert choice.logprobs
        assert choice.logprobs.token_logprobs
        assert len(choice.logprobs.token_logprobs) == count + 2
        assert choice.logprobs.token_logprobs[0] is None
    first, second = (choice.logprobs.token_logprobs[:2] for choice in answer.choices[:2] if choice.logprobs)
    assert first == second


@pytest.mark.parametrize(
    ("more", "param", "why"),
    [
        ({"max_tokens": 0}, "max_tokens", "0 needs echo"),
        ({"max_tokens": -1, "echo": True}, "max_tokens", "at least 0"),
        ({"echo": True, "logprobs": 21}, "logprobs", "at most 20"),
        ({"echo": "yes"}, "echo", "bool"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "give /v1/completions echo and logprobs"),
        ({"echo": True, "suffix": "end"}, "suffix", "describe the gap"),
        ({"echo": True, "prompt": ""}, None, "empty"),
    ],
)
def test_what_stays_refused_says_why(quick: OpenAI, more: dict[str, Any], param: str | None, why: str) -> None:
    with pytest.raises(openai.BadRequestError, match=why) as caught:
        quick.completions.create(model=SIMULATED, prompt="a", extra_body=more)
    assert caught.value.param == param
    chat: Any = {"model": SIMULATED, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    with pytest.raises(openai.BadRequestError, match="is for /v1/completions"):
        quick.chat.completions.create(**chat, extra_body={"echo": True})
    with pytest.raises(openai.BadRequestError, match="max_tokens must be at least 1"):
        quick.chat.completions.create(**chat | {"max_tokens": 0})
