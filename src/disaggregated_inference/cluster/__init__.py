"""The cluster file: servers, models, links and policies."""

from disaggregated_inference.cluster.config import ClusterConfig, ModelOptions, Policies, Server, bare_name, load_config
from disaggregated_inference.cluster.reader import read_file

__all__ = ["ClusterConfig", "ModelOptions", "Policies", "Server", "bare_name", "load_config", "read_file"]
