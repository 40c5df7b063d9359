"""Addresses to listen on: checks before anything starts, with errors that name the remedy."""

import errno
import ipaddress
import socket
from contextlib import suppress

from disaggregated_inference.errors import BadRequest


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_free_port(host: str, port: int) -> None:
    """Check before anything starts: uvicorn would only log a port that is taken, and exit."""
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # as asyncio does
                sock.bind(address)
    except OSError as error:
        raise listen_error(error, host, port) from error


def is_free(port: int) -> bool:
    """Whether a server could listen on this port of loopback."""
    with suppress(BadRequest):
        require_free_port("127.0.0.1", port)
        return True
    return False


def listen_error(
    error: OSError, host: str, port: int, port_option: str = "--port", host_option: str = "--host"
) -> BadRequest:
    """The options are those of the command that listens."""
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return BadRequest(f"cannot listen on {place}: {_remedy(error, host, port_option, host_option)}")


def _remedy(error: OSError, host: str, port_option: str, host_option: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"the port is in use; stop the program that listens there, or choose another port with {port_option}"
    unknown = isinstance(error, socket.gaierror) or error.errno == socket.EAI_NONAME
    if error.errno == errno.EADDRNOTAVAIL or unknown:
        what = "no address is known for this name" if unknown else "no such address here"
        own = "an address of this machine (`ip address` or `ifconfig` lists them), or 0.0.0.0 for all"
        return f"{what}; give {host_option} {own}"
    if error.errno == errno.EACCES:
        return f"this user may not use the port; choose one above 1023 with {port_option}"
    return f"{error.strerror or error}; check {host_option} and {port_option}"
