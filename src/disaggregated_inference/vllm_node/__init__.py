"""A prefill node whose engine is a vLLM in a process of its own, with this project's connector inside."""

from disaggregated_inference.vllm_connector.messages import LOGITS_PROCESSOR
from disaggregated_inference.vllm_node.arguments import EngineOptions, serve_arguments, serve_environment
from disaggregated_inference.vllm_node.attach import VllmPrefillNode, open_vllm_prefill
from disaggregated_inference.vllm_node.client import Computed, VllmAddress
from disaggregated_inference.vllm_node.connector_server import ConnectorServer
from disaggregated_inference.vllm_node.engine import VllmEngine
from disaggregated_inference.vllm_node.loading import VllmLoader
from disaggregated_inference.vllm_node.prefill_requests import Completions
from disaggregated_inference.vllm_node.process import VllmProcess, run_folder, spawn_guarded
from disaggregated_inference.vllm_node.settings import kv_transfer_config
from disaggregated_inference.vllm_node.staging import Staging
from disaggregated_inference.vllm_node.versions import find_python, probe

__all__ = [
    "LOGITS_PROCESSOR",
    "Completions",
    "Computed",
    "ConnectorServer",
    "EngineOptions",
    "Staging",
    "VllmAddress",
    "VllmEngine",
    "VllmLoader",
    "VllmPrefillNode",
    "VllmProcess",
    "find_python",
    "kv_transfer_config",
    "open_vllm_prefill",
    "probe",
    "run_folder",
    "serve_arguments",
    "serve_environment",
    "spawn_guarded",
]
