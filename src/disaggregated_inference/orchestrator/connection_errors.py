"""What answers at the port of a node, where it is no node: the config names a gateway, an Ollama, a web server."""

import asyncio
import errno
import os
import re
import ssl
from contextlib import suppress
from typing import get_args

import aiohttp
import msgspec

from disaggregated_inference.api import AnyHealth, Role
from disaggregated_inference.cluster import Server

_LIMIT_BYTES = 4096
_PLAIN_HTTP = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")  # by versions of OpenSSL
_CHECK = "check `tls` in its entry"
_NOT_YET_VALID = 9  # X509_V_ERR_CERT_NOT_YET_VALID
_MAY_WANT_TLS = "if it has an identity, name ours: `identity` in the cluster file, or DISAGG_IDENTITY"


async def what_answers(session: aiohttp.ClientSession, server: Server, timeout_s: float) -> str:
    """With what to do about it; empty where this is not known."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _identify(session, server)
    except (aiohttp.ClientError, OSError):  # a TimeoutError is an OSError
        return ""


async def _identify(session: aiohttp.ClientSession, server: Server) -> str:
    _, health = await _get(session, f"{server.url}/health")
    if (role := _role(health)) in get_args(Role):  # a node after all: it refuses our token, for instance
        return ""
    if role == "gateway":
        return "a gateway answers there, not a node: write the host and port of a `disagg serve`"
    response, page = await _get(session, f"{server.url}/")
    if page.startswith(b"Ollama is running"):
        command = f"disagg serve --engine ollama --ollama-host {server.url}"
        return f"an Ollama answers there, not a node: start a node in front of it: `{command}`"
    models, _ = await _get(session, f"{server.url}/v1/models")
    if models.status == 200:
        return "a server of the OpenAI API answers there, not a node: write the host and port of a `disagg serve`"
    software = response.headers.get("Server", "")
    kind = f"a web server ({software[:40]})" if software else "a web server"
    return f"{kind} answers there, not a node: write the host and port of a `disagg serve`"


async def _get(session: aiohttp.ClientSession, url: str) -> tuple[aiohttp.ClientResponse, bytes]:
    """Without the node's token: another program must not get it."""
    async with session.get(url, allow_redirects=False) as response:
        return response, await response.content.read(_LIMIT_BYTES)


def _role(body: bytes) -> str | None:
    with suppress(ValueError, msgspec.DecodeError):
        return msgspec.json.decode(body, type=AnyHealth).role
    return None


def why_unreachable(error: Exception, server: Server) -> str:
    """Of an error of aiohttp, whose own messages name sockets and sessions."""
    cause = getattr(error, "os_error", None) or error
    place = server.url.partition("://")[2]
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"no address is known for the host {server.host}"
    if reason := _why_no_tls(getattr(error, "certificate_error", cause)):
        return f"TLS failed: {reason}"
    if isinstance(error, aiohttp.ClientResponseError):  # an answer that cannot be parsed
        return f"{place} does not speak HTTP; write the HTTP port of the node"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        closed = "the connection was closed without an answer"
        return closed if server.tls else f"{closed}; {_MAY_WANT_TLS}"
    number = _errno(cause)
    if number in errno.errorcode:
        return os.strerror(number).lower()
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__


def _why_no_tls(cause: Exception) -> str:
    """Empty if TLS is not the reason."""
    if isinstance(cause, ssl.SSLCertVerificationError):
        message = getattr(cause, "verify_message", None) or str(cause)
        if getattr(cause, "verify_code", 0) == _NOT_YET_VALID:
            return "its certificate is not valid yet by this machine's clock: set the clock here, or the authority's"
        return f"its certificate is not valid here: {message}; see `disagg cluster keys list`, or check `tls`"
    if "_ALERT_" in str(cause):
        return f"it refuses our certificate ({cause}); both need one of the same cluster"
    if not isinstance(cause, ssl.SSLError):
        return ""
    if cause.reason in _PLAIN_HTTP:
        return f"it speaks plain HTTP; if this cluster has an identity, start it with --identity; {_CHECK}"
    return f"{cause.reason}; {_CHECK}"


def _errno(cause: Exception) -> int:
    """A host with several addresses has several errors in one text; the first one counts."""
    number: int = getattr(cause, "errno", None) or 0
    found = re.search(r"\[Errno (\d+)\]", str(cause)) if number <= 0 else None
    return int(found[1]) if found else number
