"""Cluster files."""

from pathlib import Path
from typing import Any

from disaggregated_inference.cluster import ClusterConfig, load_config

# The file of the set-up guide, byte for byte.
FOUR_SERVERS = """{
  "prefill_servers": [
    {
      "host": "169.254.150.103",
      "port": 8000,
      "model": "qwen",
      "name": "DGX Spark 1"
    },
    {
      "host": "169.254.150.104",
      "port": 8000,
      "model": "gpt-oss",
      "name": "DGX Spark 2"
    }
  ],
  "decode_servers": [
    {
      "host": "169.254.150.102",
      "port": 8001,
      "model": "qwen",
      "name": "Mac Studio 2"
    },
    {
      "host": "169.254.150.101",
      "port": 8001,
      "model": "gpt-oss",
      "name": "Mac Studio 1"
    }
  ]
}
"""
NO_NAMES: dict[str, Any] = {
    "prefill_servers": [
        {"host": "192.168.100.1", "port": 8000, "model": "qwen"},
    ],
    "decode_servers": [
        {"host": "169.254.150.101", "port": 8001, "model": "qwen"},
    ],
}


def cluster(
    *decode: dict[str, Any],
    prefill: tuple[dict[str, Any], ...] = (),
    environ: dict[str, str] | None = None,
    **more: Any,
) -> ClusterConfig:
    """Decode servers named a, b, ... with what is given."""
    servers = [{"host": name, "model": "qwen"} | given for name, given in zip("abcdefgh", decode, strict=False)]
    return load_config({"prefill_servers": list(prefill), "decode_servers": servers} | more, environ or {})


def written(folder: Path, text: str, name: str = "cluster.json") -> Path:
    path = folder / name
    path.write_text(text)
    return path


SERVER = {"host": "a", "model": "m"}
