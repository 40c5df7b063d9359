"""Text to tokens, once, here: tokenizers and chat templates come from the nodes, by their hash, and are kept."""

import asyncio
import hashlib
import logging
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import msgspec

from disaggregated_inference.errors import BadRequest, DisaggError, NoDecodeNode
from disaggregated_inference.models.store import default_home
from disaggregated_inference.models.text_only import TextOnlyTokenizer
from disaggregated_inference.models.tokenizer import ModelTokenizer
from disaggregated_inference.orchestrator.node_client import LegBusy, LegFailed
from disaggregated_inference.orchestrator.node_state import NodeState
from disaggregated_inference.orchestrator.request import GenerateRequest
from disaggregated_inference.orchestrator.threads import in_thread

log = logging.getLogger(__name__)

_FETCH_S = 15.0  # tokenizers have some megabytes
_SHORT_CHARS = 2000  # below it, handing the work to a thread takes longer than the work
_MOST_KEPT = 16


class TokenizerCache:
    def __init__(self, home: Path | None = None) -> None:
        self._home = (home or default_home()) / "tokenizers"
        self._known: dict[str, ModelTokenizer] = {}
        self._fetching: dict[str, asyncio.Task[ModelTokenizer]] = {}
        self._few = asyncio.Semaphore(2)

    async def tokenizer(self, nodes: Iterable[NodeState]) -> ModelTokenizer:
        """Of these nodes' model. Fetched once, however many ask."""
        having = [node for node in nodes if node.about and not node.mismatch]
        if not having:
            raise NoDecodeNode()
        assert having[0].about
        if (model := having[0].about.fingerprint) is None:
            return TextOnlyTokenizer(having[0].model, having[0].about.capabilities)
        identity = hashlib.blake2b(f"{model.tokenizer}/{model.chat_template}".encode(), digest_size=16).hexdigest()
        if found := self._known.get(identity):
            return found
        if identity not in self._fetching or self._fetching[identity].done():
            self._fetching[identity] = asyncio.create_task(self._get(identity, having))
        return await asyncio.shield(self._fetching[identity])

    async def _get(self, identity: str, nodes: list[NodeState]) -> ModelTokenizer:
        try:
            found = await in_thread(lambda: self._from_disk(identity)) or await self._from_nodes(identity, nodes)
        finally:
            self._fetching.pop(identity, None)
        while len(self._known) >= _MOST_KEPT:
            self._known.pop(next(iter(self._known)))
        self._known[identity] = found
        return found

    def _from_disk(self, identity: str) -> ModelTokenizer | None:
        try:
            return ModelTokenizer.from_whole(msgspec.json.decode((self._home / f"{identity}.json").read_bytes()))
        except (OSError, msgspec.DecodeError, DisaggError):
            return None

    async def _from_nodes(self, identity: str, nodes: list[NodeState]) -> ModelTokenizer:
        for node in sorted(nodes, key=lambda node: not node.usable):
            try:
                body = await node.client.get("/model/tokenizer", _FETCH_S)
            except (LegFailed, LegBusy, DisaggError) as error:
                failure: Exception = error
                continue
            return await in_thread(partial(self._take, identity, body, node))
        raise NoDecodeNode() from failure

    def _take(self, identity: str, body: bytes, node: NodeState) -> ModelTokenizer:
        tokenizer = ModelTokenizer.from_whole(msgspec.json.decode(body))
        assert node.about
        assert node.about.fingerprint
        if tokenizer.identity != node.about.fingerprint.tokenizer:
            raise DisaggError(f"{node.name} handed out another tokenizer than the one it uses; restart it")
        try:
            self._home.mkdir(parents=True, exist_ok=True)
            partial = self._home / f"{identity}.{os.getpid()}.partial"
            partial.write_bytes(body)
            partial.replace(self._home / f"{identity}.json")
        except OSError as error:
            log.warning("the tokenizer is not kept on disk: %s", error)
        return tokenizer

    async def to_tokens(self, tokenizer: ModelTokenizer, ask: GenerateRequest, window: int) -> list[int]:
        """Off the event loop where it takes a while, and few at a time: many threads would keep the loop from running
        just as well."""
        size = len(ask.prompt or "") + sum(len(str(message.get("content"))) for message in ask.messages or [])
        if size < _SHORT_CHARS:
            return _encoded(tokenizer, ask, window)
        async with self._few:
            return await in_thread(lambda: _encoded(tokenizer, ask, window))


def _encoded(tokenizer: ModelTokenizer, ask: GenerateRequest, window: int) -> list[int]:
    text = ask.prompt or ""
    if ask.messages is not None:
        text = tokenizer.render_chat(ask.messages, **ask.template)
    tokens = tokenizer.encode_within(text, window)
    if not tokens:
        raise BadRequest("the prompt is empty")
    return tokens
