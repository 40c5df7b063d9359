"""HTTP from a machine to its own services."""

import ssl
import urllib.error
import urllib.request
from http.client import HTTPResponse
from typing import NamedTuple, TypeVar, cast

import msgspec

from disaggregated_inference.timeouts import ServiceTimeouts

Kind = TypeVar("Kind")


class Access(NamedTuple):
    """How this machine asks nodes."""

    token: str = ""
    tls: ssl.SSLContext | None = None


def ask(url: str, access: Access, kind: type[Kind], timeouts: ServiceTimeouts = ServiceTimeouts()) -> Kind:
    """What a service answers. Raises OSError, or ValueError if it is something else."""
    headers = {"Authorization": f"Bearer {access.token}"} if access.token else {}
    try:
        with open_url(urllib.request.Request(url, headers=headers), access.tls, timeouts.ask_s) as response:
            return msgspec.json.decode(response.read(), type=kind)
    except urllib.error.HTTPError as error:
        with error:  # a node that loads or drains answers 503, and says which
            return msgspec.json.decode(error.read(), type=kind)


def open_url(request: urllib.request.Request, tls: ssl.SSLContext | None, timeout_s: float) -> HTTPResponse:
    if request.type == "https" and not tls:  # the gateway's own certificate, asked on its own machine
        tls = ssl.create_default_context()
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls))
    return cast(HTTPResponse, opener.open(request, timeout=timeout_s))
