"""What runs inside vLLM: a KV connector that copies each layer's pages into memory shared with a node, and a logits
processor for the first token. vLLM has an environment of its own, so modules here import only each other, msgspec,
numpy, torch and vLLM. The node imports `messages` and `region`.

    --kv-transfer-config '{"kv_connector": "DisaggConnector", "kv_role": "kv_producer",
        "kv_connector_module_path": "disaggregated_inference.vllm_connector.connector",
        "kv_connector_extra_config": {"disagg_socket": "/run/disagg/vllm.sock"}}'
    --logits-processors disaggregated_inference.vllm_connector.first_token:FirstToken
"""
