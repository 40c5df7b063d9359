"""The deployed gateway: a prompt for each model through it. It is asked on its own machine, by ssh: it may listen on
loopback alone."""

import os
from collections.abc import Sequence

import msgspec

from disaggregated_inference.cluster.config import ClusterConfig
from disaggregated_inference.cluster.deploy.plan import GATEWAY, plan_machines
from disaggregated_inference.cluster.deploy.session import MachineSession, on_machines
from disaggregated_inference.cluster.services.gateway_probe import GatewayAnswer
from disaggregated_inference.cluster.services.report import ReportRequest
from disaggregated_inference.errors import DeployRefused, DisaggError
from disaggregated_inference.timeouts import DeployTimeouts

API_KEY = "DISAGG_API_KEY"  # environment variable with a key of the gateway, where it needs one


async def ask_gateway(
    config: ClusterConfig, models: Sequence[str], timeouts: DeployTimeouts = DeployTimeouts()
) -> list[GatewayAnswer]:
    """One answer for each model, in this order."""

    async def ask(session: MachineSession) -> list[GatewayAnswer]:
        release = await session.release()
        services = [service for service in release.services if service.name == GATEWAY] if release else []
        if not services:
            raise DeployRefused(session.name, "no gateway is deployed there: run `disagg cluster deploy` first")
        request = ReportRequest(services=tuple(services), models=tuple(models), api_key=os.environ.get(API_KEY, ""))
        told = await session.ask(request, more_s=timeouts.gateway_s * len(models))
        return msgspec.json.decode(told, type=list[GatewayAnswer])

    plans = plan_machines(config, [config.gateway.machine])
    (outcome,) = await on_machines(plans, config, ask, lambda machine, text: None, timeouts)
    if outcome.error:
        raise outcome.error
    assert outcome.result is not None
    return outcome.result


def figure_of(answer: GatewayAnswer) -> str:
    """What a prompt through the gateway gave. Raises if it gave nothing."""
    if answer.error:
        raise DisaggError(answer.error)
    if answer.needs_key:
        return f"it refuses a prompt without an API key, as it must; set {API_KEY} to send one through it"
    if not answer.tokens:
        raise DisaggError(f"the answer has no tokens (request {answer.request_id})")
    return f"{answer.tokens} tokens in {answer.seconds:.2f} s, request {answer.request_id}"
