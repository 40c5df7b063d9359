"""The gateway of this machine, asked on the machine itself: which nodes it can use, and a prompt through it."""

import json
import time
import urllib.error
import urllib.request

import msgspec

from disaggregated_inference.api import ErrorDetail, ModelVerdict
from disaggregated_inference.cluster.config import Server, load_config
from disaggregated_inference.cluster.services.machine_http import Access, ask, open_url
from disaggregated_inference.cluster.services.service import Service
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.identity import open_identity
from disaggregated_inference.timeouts import ServiceTimeouts

_PROMPT = "Say one word about the sea."
_MAX_TOKENS = 8


class GatewayReadiness(msgspec.Struct, frozen=True, kw_only=True):
    """`/ready`."""

    verdict: str = ""


class NodeAnswerToGateway(msgspec.Struct, frozen=True, kw_only=True):
    """`/status` of a node, or its error."""

    status: str = ""
    error: ErrorDetail | None = None


class GatewayAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`needs_key`: it works, and refuses a prompt without an API key."""

    model: str
    error: str = ""
    needs_key: bool = False
    tokens: int = 0
    seconds: float = 0.0
    request_id: str = ""


def prompt_through(
    service: Service, model: str, api_key: str, timeouts: ServiceTimeouts = ServiceTimeouts()
) -> GatewayAnswer:
    began_at = time.monotonic()
    while True:
        answer = _prompt(service, model, api_key, timeouts)
        elapsed_s = time.monotonic() - began_at
        if not answer.error or elapsed_s > timeouts.ready_s:
            return msgspec.structs.replace(answer, seconds=elapsed_s)
        time.sleep(timeouts.ready_poll_s)


def _prompt(service: Service, model: str, api_key: str, timeouts: ServiceTimeouts) -> GatewayAnswer:
    messages = [{"role": "user", "content": _PROMPT}]
    body = {"model": model, "max_tokens": _MAX_TOKENS, "temperature": 0, "messages": messages}
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    url = f"{service.url}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with open_url(request, None, timeouts.answer_s) as response:
            usage = json.load(response)["usage"]
            id = response.headers.get("x-request-id", "")
            return GatewayAnswer(model=model, tokens=int(usage["completion_tokens"]), request_id=id)
    except urllib.error.HTTPError as error:
        with error:
            needs_key = error.code == 401 and not api_key
            return GatewayAnswer(model=model, needs_key=needs_key, error="" if needs_key else _refusal(error))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return GatewayAnswer(model=model, error=str(getattr(error, "reason", error)))


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        return f"{json.load(error)['error']['message']} (HTTP {error.code})"
    except (ValueError, KeyError, TypeError, OSError):
        return f"HTTP {error.code}"


def gateway_view(service: Service) -> str:
    """Why the gateway cannot use all nodes; empty: it can."""
    try:
        verdict = ask(f"{service.url}/ready", Access(), GatewayReadiness).verdict
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
    if verdict == ModelVerdict.ALL_UP:
        return ""
    reasons = [reason for server in _servers(service) if (reason := _not_reached(server, service))]
    return f"{verdict} ({'; '.join(reasons)})" if reasons else verdict


def _servers(service: Service) -> tuple[Server, ...]:
    file = service.arguments[service.arguments.index("--config") + 1]
    try:
        return load_config(file, service.environment).servers
    except DisaggError:
        return ()


def _not_reached(server: Server, service: Service) -> str:
    """Why this machine, with the gateway's token and certificate, gets no status of a node."""
    identity = open_identity(service.environment.get("DISAGG_IDENTITY", "")) if server.tls else None
    access = Access(server.token, identity.client_context if identity else None)
    try:
        told = ask(f"{server.url}/status", access, NodeAnswerToGateway)
    except (OSError, ValueError, DisaggError) as error:
        return f"{server.name}: {getattr(error, 'reason', error)}"
    if told.status:
        return "" if told.status == "healthy" else f"{server.name}: {told.status}"
    return f"{server.name}: {told.error.message if told.error else 'no status'}"
