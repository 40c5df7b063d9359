"""Copies of one model may turn the same tokens into other text. Only a node's own tokenizer may judge its text."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from disaggregated_inference.api import DecodeRequest, StreamEvent, TokenizerContent
from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.models import ModelFiles, ModelTokenizer
from disaggregated_inference.orchestrator.stream_check import BadEvents, TokenStreamCheck
from disaggregated_inference.orchestrator.tokenizer_cache import TokenizerCache, _Identities
from tests.support.cluster import Process, config_of

END = "<|endoftext|>"


def content_of(own: ModelTokenizer) -> TokenizerContent:
    return TokenizerContent(tokenizer=own.json, chat_template=own.chat_template, special=own.special)


def other_copy(content: TokenizerContent) -> TokenizerContent:
    """As another converter wrote it: one of the added tokens is not special."""
    tokenizer = json.loads(content.tokenizer)
    for token in tokenizer["added_tokens"]:
        token["special"] = token["special"] and token["content"] != END
    return msgspec.structs.replace(content, tokenizer=json.dumps(tokenizer))


def test_copies_that_write_other_text_have_another_text_identity(smollm2: ModelFiles) -> None:
    own = smollm2.tokenizer
    contents = content_of(own), other_copy(content_of(own))
    same, other = (ModelTokenizer.from_json(each.tokenizer, each.chat_template, each.special) for each in contents)
    assert own.identity == same.identity == other.identity, "one model"
    assert own.text_identity == same.text_identity != other.text_identity
    token = own.token_id(END)
    assert token is not None
    event = StreamEvent(token=token, text=END)
    request = DecodeRequest(tokens=[1], max_tokens=9, ignore_eos=True)
    TokenStreamCheck(request, None, other).check([event])
    with pytest.raises(BadEvents):
        TokenStreamCheck(request, None, own).check([event])


@pytest.mark.slow
def test_a_node_with_another_copy_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The orchestrator has the tokenizer of an earlier node in memory and on disk, changed by another hand."""
    monkeypatch.setenv("DISAGG_HOME", str(tmp_path))
    node = Process("d1", "decode", "simulated", "simulated:tiny", "--profile", "instant")
    try:
        node.ready()
        config = config_of(node, local="always")
        special: dict[str, Any] = {
            "model": "simulated:tiny",
            "prompt": "hello",
            "max_tokens": 6,
            "logit_bias": {2: 100.0},
        }
        with DisaggregatedClient(config) as client:
            expected = client.generate(**special, ignore_eos=True, temperature=0)[1]["tokens"]
        [cached] = (tmp_path / "tokenizers").glob("*.json")
        fields = msgspec.json.decode(cached.read_bytes())
        tokenizer = json.loads(fields["tokenizer"])
        for token in tokenizer["added_tokens"]:
            token["special"] = not token["special"]
        cached.write_text(json.dumps(fields | {"tokenizer": json.dumps(tokenizer)}))
        with DisaggregatedClient(config) as client:
            assert client.generate(**special, ignore_eos=True, temperature=0)[1]["tokens"] == expected
            assert client.status()["nodes"][0]["breaker"] == "closed"
        assert json.loads(json.loads(cached.read_text())["tokenizer"]) != tokenizer, "replaced by the node's own"
    finally:
        node.end()


def test_a_changed_file_is_not_used(smollm2: ModelFiles, tmp_path: Path) -> None:
    own, cache = smollm2.tokenizer, TokenizerCache(tmp_path)
    wanted = _Identities(own.identity, own.template_identity, own.text_identity)
    (tmp_path / "tokenizers").mkdir()
    for content, is_used in ((content_of(own), True), (other_copy(content_of(own)), False)):
        (tmp_path / "tokenizers" / "one.json").write_bytes(msgspec.json.encode(content))
        assert bool(cache._from_disk("one", wanted)) == is_used


def test_special_tokens_and_broken_characters_do_not_pile_up(smollm2: ModelFiles) -> None:
    own = smollm2.tokenizer
    stream, token = own.stream(), own.token_id(END)
    assert token is not None
    assert [stream.push(token) for _ in range(1000)] == [""] * 1000
    assert stream.held == 0
    half = next(at for at in range(own_size(own)) if own.token_bytes(at) == b"\xe2")
    check = TokenStreamCheck(DecodeRequest(tokens=[1], max_tokens=1000, ignore_eos=True), None, own)
    check.check([StreamEvent(token=half, text="") for _ in range(500)])
    text = check._choices[0].text
    assert text
    assert text._stream.held <= 64


def own_size(tokenizer: ModelTokenizer) -> int:
    return len(json.loads(tokenizer.json)["model"]["vocab"])
