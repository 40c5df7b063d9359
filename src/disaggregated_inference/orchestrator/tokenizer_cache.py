"""Tokenizers and chat templates, fetched from the nodes by their hash and cached. Text becomes tokens here, once."""

import asyncio
import hashlib
import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from disaggregated_inference.api import GenerateRequest, ModelInfo, TokenizerContent
from disaggregated_inference.errors import BadRequest, DisaggError, NoDecodeNode
from disaggregated_inference.models import MissingTokenizer, ModelTokenizer, default_home
from disaggregated_inference.orchestrator.leg_errors import LegBusy, LegFailed
from disaggregated_inference.orchestrator.node_state import NodeState
from disaggregated_inference.orchestrator.threads import in_thread
from disaggregated_inference.orchestrator.unavailable_nodes import no_decode_node
from disaggregated_inference.private_files import make_folders

log = logging.getLogger(__name__)

_SHORT_CHARS = 2000  # below it, a thread costs more than the work itself
_MAX_CACHED = 16


class TokenizerCache:
    def __init__(self, home: Path | None = None, fetch_s: float = 15.0) -> None:
        self._home = (home or default_home()) / "tokenizers"
        self._fetch_s = fetch_s
        self._cached: dict[_Identities, ModelTokenizer] = {}
        self._fetching: dict[str, asyncio.Task[ModelTokenizer]] = {}
        self._workers = asyncio.Semaphore(2)

    async def tokenizer(self, nodes: Sequence[NodeState]) -> ModelTokenizer:
        """Of these nodes' model. Concurrent callers share one fetch."""
        sources = [node for node in nodes if node.info and not node.mismatch]
        if not sources:
            raise no_decode_node(nodes[0].model, nodes)
        assert sources[0].info
        if sources[0].info.fingerprint is None:
            return MissingTokenizer(sources[0].model, sources[0].info.capabilities)
        wanted = _identities_of(sources[0].info)
        if found := self._cached.get(wanted):
            return found
        identity = hashlib.blake2b("/".join(wanted).encode(), digest_size=16).hexdigest()
        if identity not in self._fetching or self._fetching[identity].done():
            self._fetching[identity] = asyncio.create_task(self._get(identity, wanted, sources))
        return await asyncio.shield(self._fetching[identity])

    async def _get(self, identity: str, wanted: "_Identities", nodes: list[NodeState]) -> ModelTokenizer:
        try:
            found = await in_thread(partial(self._from_disk, identity, wanted))
            found = found or await self._from_nodes(identity, nodes)
        finally:
            self._fetching.pop(identity, None)
        while len(self._cached) >= _MAX_CACHED:
            self._cached.pop(next(iter(self._cached)))
        self._cached[wanted] = found
        return found

    def _from_disk(self, identity: str, wanted: "_Identities") -> ModelTokenizer | None:
        """None also for a file that was changed: the node's own replaces it."""
        try:
            found = _read((self._home / f"{identity}.json").read_bytes())
        except (OSError, DisaggError):
            return None
        return found if _is(found, wanted) else None

    async def _from_nodes(self, identity: str, nodes: list[NodeState]) -> ModelTokenizer:
        failures: list[str] = []
        for node in sorted(nodes, key=lambda node: not node.usable):
            try:
                body = await node.client.get("/model/tokenizer", self._fetch_s)
                return await in_thread(partial(self._take, identity, body, node))
            except (LegFailed, LegBusy, DisaggError) as error:
                named = isinstance(error, (LegFailed, LegBusy))
                failures.append(str(error) if named else f"{node.name}: {error}")
                log.warning("no tokenizer from %s", failures[-1], extra={"node": node.name})
        raise NoDecodeNode(failures)

    def _take(self, identity: str, body: bytes, node: NodeState) -> ModelTokenizer:
        tokenizer = _read(body)
        assert node.info
        if not _is(tokenizer, _identities_of(node.info)):
            raise DisaggError("it hands out another tokenizer than it uses; restart it")
        try:
            self._keep(identity, body)
        except OSError as error:
            remedy = "set DISAGG_HOME to a folder that this user can write to"
            log.warning("the tokenizer could not be written to disk: %s; %s", error, remedy)
        return tokenizer

    def _keep(self, identity: str, body: bytes) -> None:
        make_folders(self._home)
        partial = self._home / f"{identity}.{os.getpid()}.partial"
        try:
            partial.write_bytes(body)
            partial.replace(self._home / f"{identity}.json")
        finally:
            partial.unlink(missing_ok=True)  # of a full disk

    async def encode(self, tokenizer: ModelTokenizer, request: GenerateRequest, window: int) -> list[int]:
        """Long texts on a thread, and few at a time: many threads would hold up the event loop too."""
        size = len(request.prompt or "") + sum(len(str(message.get("content"))) for message in request.messages or [])
        if size < _SHORT_CHARS:
            return _encoded(tokenizer, request, window)
        async with self._workers:
            return await in_thread(lambda: _encoded(tokenizer, request, window))


class _Identities(NamedTuple):
    """Of a tokenizer, as its node tells them; `text` is empty for a node that does not."""

    tokenizer: str
    chat_template: str
    text: str


def _identities_of(info: ModelInfo) -> _Identities:
    assert info.fingerprint
    return _Identities(info.fingerprint.tokenizer, info.fingerprint.chat_template, info.text_identity)


def _is(tokenizer: ModelTokenizer, wanted: _Identities) -> bool:
    is_model = (tokenizer.identity, tokenizer.template_identity) == (wanted.tokenizer, wanted.chat_template)
    return is_model and wanted.text in ("", tokenizer.text_identity)


def _read(body: bytes) -> ModelTokenizer:
    try:
        content = msgspec.json.decode(body, type=TokenizerContent)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DisaggError(f"its tokenizer cannot be read: {error}") from error
    return ModelTokenizer.from_json(content.tokenizer, content.chat_template, content.special)


def _encoded(tokenizer: ModelTokenizer, request: GenerateRequest, window: int) -> list[int]:
    if request.messages is not None:
        tokens = tokenizer.encode_chat(request.messages, window, **request.template)
    else:
        tokens = tokenizer.encode_within(request.prompt or "", window)
    if not tokens:
        raise BadRequest("the prompt is empty")
    return tokens
