"""Tokenizers: round trips, chat templates, streams of text, and what makes two of them the same."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disaggregated_inference.errors import ModelUnsupported
from disaggregated_inference.models import ModelFiles

Folder = Callable[[str], Path]


@pytest.mark.parametrize("text", ["na\u00efve", "\n\t x", "\u65e5\u672c\u8a9e \U0001f642", "a<|im_end|>b"])
def test_tokens_have_bytes_even_where_they_are_half_a_character(smollm2: ModelFiles, text: str) -> None:
    tokenizer = smollm2.tokenizer
    assert b"".join(tokenizer.token_bytes(token) for token in tokenizer.encode(text)).decode() == text


class TestTokenizer:
    def test_digits_are_split(self, smollm2: ModelFiles) -> None:
        """The GGUF loses this; without it `12` would be one token the model never learned."""
        tokenizer = smollm2.tokenizer
        for text in ("    5", "  12", "2024-11-15", "x1y22z333"):
            pieces = [tokenizer.decode([token]) for token in tokenizer.encode(text)]
            assert all(len(piece.strip()) == 1 for piece in pieces if any(c.isdigit() for c in piece))
            assert "".join(pieces) == text

    @settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        text=st.text(
            st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs", "Cc"], exclude_characters="<"), max_size=80
        )
    )
    def test_round_trip(self, text: str, smollm2: ModelFiles) -> None:
        assert smollm2.tokenizer.decode(smollm2.tokenizer.encode(text)) == text

    def test_chat_template(self, smollm2: ModelFiles) -> None:
        text = smollm2.tokenizer.render_chat([{"role": "user", "content": "Hi"}])
        assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        assert smollm2.tokenizer.encode(text)[0] == 1

    def test_agrees_with_transformers(self, smollm2: ModelFiles) -> None:
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(smollm2.path)
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2? 你好 🙂"}]
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert smollm2.tokenizer.encode_chat(messages) == expected

    def test_stream_never_emits_half_a_character(self, smollm2: ModelFiles) -> None:
        text = "naïve 你好 🙂🏽 done"
        stream = smollm2.tokenizer.stream()
        pieces = [stream.push(token) for token in smollm2.tokenizer.encode(text)]
        assert "".join(pieces) == text
        assert "\ufffd" not in "".join(pieces)

    def test_identity_is_about_meaning(self, tiny_folder: Folder, tmp_path: Path) -> None:
        copy = tmp_path / "copy"
        shutil.copytree(tiny_folder("llama"), copy)
        path = copy / "tokenizer.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content, indent=None, sort_keys=True))
        mine, same = (ModelFiles("x", folder).tokenizer.identity for folder in (tiny_folder("llama"), copy))
        assert mine == same
        vocabulary = content["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        path.write_text(json.dumps(content))
        assert ModelFiles("x", copy).tokenizer.identity != mine

    def test_no_template_is_a_clear_error(self, tiny_folder: Folder, tmp_path: Path) -> None:
        copy = tmp_path / "plain"
        shutil.copytree(tiny_folder("llama"), copy)
        (copy / "tokenizer_config.json").unlink()
        with pytest.raises(ModelUnsupported, match="no chat template"):
            ModelFiles("x", copy).tokenizer.render_chat([])
