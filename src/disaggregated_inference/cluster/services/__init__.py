"""Services of a machine: systemd, launchd, or our own supervisor; and what they say of themselves."""

from disaggregated_inference.cluster.services import supervise
from disaggregated_inference.cluster.services.background import Background
from disaggregated_inference.cluster.services.launchd import Launchd, LaunchdUser
from disaggregated_inference.cluster.services.service import (
    SUPERVISOR,
    Place,
    Service,
    ServiceManager,
    ServiceState,
)
from disaggregated_inference.cluster.services.systemd import Systemd, SystemdUser
from disaggregated_inference.errors import ConfigError
from disaggregated_inference.timeouts import DeployTimeouts

MANAGERS: dict[str, type[ServiceManager]] = {
    each.kind: each for each in (Systemd, SystemdUser, Launchd, LaunchdUser, Background)
}


def manager_of(kind: str, place: Place, timeouts: DeployTimeouts = DeployTimeouts()) -> ServiceManager:
    if kind not in MANAGERS:
        raise ConfigError(f"unknown service kind {kind!r}: use one of {', '.join(MANAGERS)}")
    return MANAGERS[kind](place, timeouts)


__all__ = [
    "MANAGERS",
    "SUPERVISOR",
    "Place",
    "Service",
    "ServiceManager",
    "ServiceState",
    "manager_of",
    "supervise",
]
