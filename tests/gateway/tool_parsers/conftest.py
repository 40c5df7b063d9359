"""Tokenizers of other model families, made of the embedded one."""

from functools import lru_cache

import pytest
from tokenizers import AddedToken, Tokenizer

from disaggregated_inference.models import ModelFiles, ModelTokenizer
from tests.support.tool_calls import MARKS, Toks


@pytest.fixture(scope="module")
def toks(smollm2: ModelFiles) -> Toks:
    """The embedded model's tokenizer with other models' tokens and template."""

    @lru_cache
    def make(template: str = "", special: tuple[str, ...] = (), added: tuple[str, ...] = ()) -> ModelTokenizer:
        tokenizer = Tokenizer.from_str(smollm2.tokenizer.json)
        tokenizer.add_special_tokens(list(special))
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
        return ModelTokenizer(tokenizer, template)

    return make


@pytest.fixture(scope="module")
def gpt_oss(toks: Toks) -> ModelTokenizer:
    return toks("<|start|>{{ messages }}", MARKS)
