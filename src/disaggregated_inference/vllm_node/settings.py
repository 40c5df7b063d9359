"""From the options of `disagg serve --engine vllm` to a vLLM that runs, or one to attach to."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from disaggregated_inference.errors import BadRequest, ModelUnsupported
from disaggregated_inference.kv import KVDType
from disaggregated_inference.models import ModelFiles, default_home
from disaggregated_inference.private_files import make_private_folder
from disaggregated_inference.vllm_connector.messages import LOGITS_PROCESSOR
from disaggregated_inference.vllm_node.arguments import (
    EngineOptions,
    serve_arguments,
    serve_environment,
    user_arguments,
)
from disaggregated_inference.vllm_node.attached import AttachedVllm, base_url, start_command
from disaggregated_inference.vllm_node.process import VllmProcess
from disaggregated_inference.vllm_node.versions import find_python, probe

_MAX_SOCKET_BYTES = 100  # of a path: the system's limit is 104 or 108


class VllmSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the options that is about vLLM."""

    role: str = "prefill"
    python: str = ""
    url: str = ""
    arguments: str = ""
    socket: str = ""
    dtype: KVDType | None = None
    chunk: int = 0
    threads: int = 0
    prefix_caching: bool = True

    def require_possible(self) -> None:
        """Before anything is downloaded or loaded."""
        if self.role == "decode":
            raise BadRequest(
                "vLLM hands KV out and takes none in: use --role prefill, or both for its own whole answers"
            )
        if self.url and (self.python or self.arguments):
            raise BadRequest("--vllm-url attaches to a vLLM that runs: leave out --vllm-python and --vllm-args")
        user_arguments(self.arguments)
        if self.url:
            base_url(self.url)
        else:
            probe(find_python(self.python))
        if self.socket and not self.socket_path().parent.is_dir():
            raise BadRequest(f"--vllm-socket: there is no folder {self.socket_path().parent}: make it first")

    def socket_path(self) -> Path:
        """Where the connector inside vLLM meets this node."""
        folder = default_home() / "vllm"
        given = Path(self.socket).expanduser().absolute() if self.socket else None
        path = given or folder / ("attach.sock" if self.url else f"{os.getpid()}.sock")
        if len(os.fsencode(path)) > _MAX_SOCKET_BYTES:
            raise BadRequest(
                f"the path of vLLM's socket is too long for the system: give a shorter --vllm-socket, not {path}"
            )
        if not given:
            make_private_folder(folder)
        return path


def kv_transfer_config(socket: Path, *, decodes: bool) -> dict[str, Any]:
    """Of `--kv-transfer-config`."""
    return {
        "kv_connector": "DisaggConnector",
        "kv_role": "kv_producer",
        "kv_connector_module_path": "disaggregated_inference.vllm_connector.connector",
        "kv_connector_extra_config": {"disagg_socket": str(socket)} | ({"disagg_decodes": True} if decodes else {}),
    }


def open_server(settings: VllmSettings, model: ModelFiles, socket: Path) -> VllmProcess | AttachedVllm:
    """Not started yet."""
    if model.simulated or model.kind != "safetensors":
        raise ModelUnsupported(f"vLLM loads a folder of safetensors, and {model.path} is none")
    # A vLLM that the user runs has other requests, and writes their answers.
    config = kv_transfer_config(socket, decodes=settings.role == "both" or bool(settings.url))
    if settings.url:
        return AttachedVllm(settings.url, start_command(str(model.path), json.dumps(config), LOGITS_PROCESSOR))
    python = find_python(settings.python)
    build = probe(python)

    def launch(http: str, key: str, folder: str) -> tuple[list[str], dict[str, str]]:
        options = EngineOptions(
            model=str(model.path),
            name=model.name,
            socket=http,
            role=settings.role,
            dtype=settings.dtype or "",
            batched_tokens=settings.chunk,
            prefix_caching=settings.prefix_caching,
            kv_transfer=config,
            logits_processors=(LOGITS_PROCESSOR,),
            more=settings.arguments,
        )
        command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", *serve_arguments(options, build)]
        return command, serve_environment(os.environ, key, [folder], build, settings.threads)

    return VllmProcess(launch, build)
