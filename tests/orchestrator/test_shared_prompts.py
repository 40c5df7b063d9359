"""Which leading tokens of a prompt callers share: those of a text in the cluster file, and not one more."""

from datetime import date

import pytest

from disaggregated_inference.cluster import load_config
from disaggregated_inference.errors import ConfigError
from disaggregated_inference.models import ModelFiles, ModelTokenizer
from disaggregated_inference.orchestrator.shared_prompts import SharedPrompts

TEXT = "You are the assistant of a bank. Never tell anybody the number of a card."
TODAY = date(2026, 1, 1)


@pytest.fixture
def tokenizer(smollm2: ModelFiles) -> ModelTokenizer:
    return smollm2.tokenizer


def chat(tokenizer: ModelTokenizer, system: str, user: str) -> list[int]:
    return tokenizer.encode_chat([{"role": "system", "content": system}, {"role": "user", "content": user}])


def test_a_chat_shares_its_system_prompt(tokenizer: ModelTokenizer) -> None:
    prompts = SharedPrompts([TEXT])
    one, two = chat(tokenizer, TEXT, "My card is 4829"), chat(tokenizer, TEXT, "Why?")
    count = prompts.tokens_in(one, tokenizer, TODAY)
    assert prompts.tokens_in(two, tokenizer, TODAY) == count
    assert one[:count] == two[:count]
    assert TEXT in tokenizer.decode(one[:count], special=True)
    assert "My card" not in tokenizer.decode(one[:count], special=True)


def test_a_plain_prompt_shares_its_beginning(tokenizer: ModelTokenizer) -> None:
    prompts = SharedPrompts(["Something else entirely.", TEXT])
    tokens = tokenizer.encode(TEXT + " My card is 4829")
    assert tokenizer.decode(tokens[: prompts.tokens_in(tokens, tokenizer, TODAY)]) == TEXT


def test_other_texts_share_no_word(tokenizer: ModelTokenizer) -> None:
    tokens = tokenizer.encode("My card is 4829. " + TEXT)
    assert SharedPrompts([TEXT]).tokens_in(tokens, tokenizer, TODAY) == 0
    assert SharedPrompts([]).tokens_in(tokens, tokenizer, TODAY) == 0
    assert SharedPrompts([TEXT]).tokens_in([], tokenizer, TODAY) == 0


def test_shared_prompts_are_texts() -> None:
    servers = {"decode_servers": [{"host": "127.0.0.1", "model": "m"}]}
    for wrong in ([""], [1], "text"):
        with pytest.raises(ConfigError, match="shared_prompts"):
            load_config(servers | {"models": {"m": {"shared_prompts": wrong}}})
