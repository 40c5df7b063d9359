"""The cluster file: servers, models, links and policies."""

from disaggregated_inference.cluster.bearer_token import read_token, without_token
from disaggregated_inference.cluster.config import (
    ClusterConfig,
    ModelOptions,
    Policies,
    PrefixSharing,
    Server,
    find_config,
    load_config,
)
from disaggregated_inference.cluster.model_match import bare_name
from disaggregated_inference.cluster.reader import join_address, read_file, split_address
from disaggregated_inference.cluster.reference import reference

__all__ = [
    "ClusterConfig",
    "ModelOptions",
    "Policies",
    "PrefixSharing",
    "Server",
    "bare_name",
    "find_config",
    "join_address",
    "load_config",
    "read_file",
    "read_token",
    "reference",
    "split_address",
    "without_token",
]
