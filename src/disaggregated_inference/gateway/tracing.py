"""Where traces go, if anywhere. `spans` needs OpenTelemetry's SDK (the extra `tracing`) and is loaded on demand."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.applications import Starlette

from disaggregated_inference.errors import BadRequest, ConfigError
from disaggregated_inference.timeouts import GatewayTimeouts

if TYPE_CHECKING:
    from disaggregated_inference.gateway.spans import Traces


class Collector:
    """`--otlp`, or OpenTelemetry's own variables. The SDK reads further ones, such as OTEL_EXPORTER_OTLP_HEADERS."""

    def __init__(self, otlp: str, environment: Mapping[str, str] = os.environ) -> None:
        base = otlp or environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
        exact = "" if otlp else environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
        self.url = exact or (base.rstrip("/") + "/v1/traces" if base else "")
        self.service = environment.get("OTEL_SERVICE_NAME") or "disagg-gateway"
        if self.url and not _is_http(self.url):
            raise BadRequest(f"{self.url!r} is not an HTTP address: give --otlp http://HOST:4318")

    def traces(self, app: Starlette, timeouts: GatewayTimeouts = GatewayTimeouts()) -> "Traces | None":
        """None where no collector is named."""
        if not self.url:
            return None
        try:
            from disaggregated_inference.gateway.spans import Traces
        except ImportError as error:
            install = "pip install 'disaggregated-inference[tracing]'"
            raise ConfigError(f"traces need OpenTelemetry's SDK ({error}): {install}, or leave out --otlp") from error
        return Traces(app, self.url, self.service, timeouts)


def _is_http(url: str) -> bool:
    try:
        return urlsplit(url).scheme in ("http", "https") and bool(urlsplit(url).hostname)
    except ValueError:
        return False
