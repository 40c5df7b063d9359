"""`disagg serve --engine vllm`: from the options to a running vLLM and the node in front of it."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from starlette.applications import Starlette

from disaggregated_inference.engines import available_bytes
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.kv_transfer import Address
from disaggregated_inference.models import ModelFiles, ModelStore
from disaggregated_inference.node import Begin, Node, NodeSettings, Trust, parse_size, start_readings
from disaggregated_inference.vllm_node.attach import VllmPrefillNode, open_vllm_prefill
from disaggregated_inference.vllm_node.attached import AttachedVllm
from disaggregated_inference.vllm_node.client import VllmAddress, VllmClient
from disaggregated_inference.vllm_node.connector_check import ConnectorWatch
from disaggregated_inference.vllm_node.connector_server import ConnectorServer
from disaggregated_inference.vllm_node.generation import WholeAnswers
from disaggregated_inference.vllm_node.node import VllmNode, VllmServer, vllm_app
from disaggregated_inference.vllm_node.prefill_requests import Completions
from disaggregated_inference.vllm_node.settings import VllmSettings, open_server
from disaggregated_inference.vllm_node.staging import Staging

_STAGING_SHARE = 4  # a quarter of the free memory, for KV on its way from vLLM to decode nodes
_MAX_STAGING_BYTES = 8 << 30  # by default: with CUDA it is pinned, all of it
_NOT_OF_VLLM = {
    "idle_unload_s": "vLLM keeps its model in memory",
    "prefix_disk": "vLLM has a prefix cache of its own",
    "profile": "it is of the simulated engine",
}


class VllmLoader:
    """Made before anything is loaded: raises what is wrong with the options."""

    def __init__(self, settings: NodeSettings) -> None:
        for name, why in _NOT_OF_VLLM.items():
            if getattr(settings, name):
                raise BadRequest(f"leave out --{name.removesuffix('_s').replace('_', '-')}: {why}")
        self._vllm = VllmSettings(
            role=settings.role,
            python=settings.vllm_python,
            url=settings.vllm_url,
            arguments=settings.vllm_args,
            socket=settings.vllm_socket,
            dtype=settings.dtype,
            chunk=settings.chunk,
            threads=settings.threads,
            prefix_caching=parse_size(settings.prefix_memory, "--prefix-memory") != 0,
        )
        self._vllm.require_possible()
        default = min(available_bytes() // _STAGING_SHARE, _MAX_STAGING_BYTES)
        self._staging_bytes = parse_size(settings.kv_memory, "--kv-memory") or default
        self._opened = ExitStack()  # what is closed after the node

    def app(self, served: Node, token: str | None) -> Starlette:
        return vllm_app(served, token)

    def load(self, settings: NodeSettings, addresses: Sequence[Address], begin: Begin, trust: Trust) -> Node:
        name = settings.model
        begin(f"looking for {name}")
        files = ModelStore().resolve(name, lambda step, part: begin(f"{name}: {step}", part), "safetensors")
        staging = Staging(self._staging_bytes)
        self._opened.callback(staging.close)
        border = ConnectorServer(self._vllm.socket_path(), files.spec, staging)
        self._opened.callback(border.close)
        server = open_server(self._vllm, files, border.path)
        self._opened.callback(server.stop)
        server.start(begin)
        client, served_name = VllmClient(lambda: _address(server)), partial(_served_name, server, files)
        advice = server.advice if isinstance(server, AttachedVllm) else ""
        watch = ConnectorWatch(border, client, served_name, lambda: server.state == "ready", advice)
        self._opened.callback(watch.close)
        prefill = open_vllm_prefill(
            files,
            border,
            staging,
            Completions(lambda: _address(server), served_name),
            kv_addresses=addresses,
            queue=settings.queue,
            lease_s=settings.lease_s,
            stopped=server.why_stopped,
            begin=begin,
            trust=trust,
        )
        answers = self._answers(settings, client, files, served_name, prefill)
        return self._node(files, server, prefill, answers, begin)

    def _answers(
        self,
        settings: NodeSettings,
        client: VllmClient,
        files: ModelFiles,
        name: Callable[[], str],
        prefill: VllmPrefillNode,
    ) -> WholeAnswers:
        assert prefill.border.engine
        vllm = prefill.border.engine.scheduler
        return WholeAnswers(client, files, name, vllm.max_tokens, vllm.max_sequences, settings.queue)

    def _node(
        self, files: ModelFiles, server: VllmServer, prefill: VllmPrefillNode, answers: WholeAnswers, begin: Begin
    ) -> Node:
        begin("measuring this machine")
        asyncio.run(answers.measure(prefill.chunked_prefill.rates))
        readings = start_readings(prefill.kv_memory.engine)
        return VllmNode(
            model=files,
            kv_memory=prefill.kv_memory,
            prefill=prefill,
            readings=readings,
            server=server,
            answers=answers,
            attached=prefill.trouble,
            stalled_s=lambda: prefill.stalled_s,
        )

    def close(self) -> None:
        """After the node has drained. vLLM and its processes end here."""
        self._opened.close()


def _address(server: VllmServer) -> VllmAddress:
    return VllmAddress(server.url, server.key)


def _served_name(server: VllmServer, files: ModelFiles) -> str:
    return server.model.id if isinstance(server, AttachedVllm) else files.name
