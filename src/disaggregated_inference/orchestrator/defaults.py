"""Defaults of requests in the cluster file: they must be what a request may have."""

from disaggregated_inference.api import generate_request
from disaggregated_inference.cluster import ClusterConfig
from disaggregated_inference.errors import BadRequest, ConfigError, ModelNotFound

_PER_REQUEST = ("prompt", "messages", "tokens", "request_id", "caller")


def require_defaults(config: ClusterConfig, model: str) -> None:
    defaults = config.options_of(model).defaults
    try:
        for name in _PER_REQUEST:
            if name in defaults:
                raise BadRequest(f"{name} belongs to one request, not to all of them: leave it out")
        named = generate_request({"prompt": "x"}, defaults).model
        if named and config.resolve_model(named) != model:
            raise BadRequest(f"model: {named} is another model: leave it out")
    except (BadRequest, ModelNotFound) as error:
        place = f"{config.source or 'the config'}: models.{model}.defaults"
        raise ConfigError(f"{place}: {error}; docs/CLIENT.md lists the options") from error
