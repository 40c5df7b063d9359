"""Requests that pages of other sites send from a browser on this machine.

A server on loopback without a key trusts all who reach it. A browser reaches it for every page that the user opens:
from another site, which `Origin` names; or under a name of that site, whose owner lets it resolve to 127.0.0.1, so that
the page may even read the responses (DNS rebinding). Then `Host` has that name. No page can choose these headers.
"""

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import Scope

from disaggregated_inference.errors import ForeignSite
from disaggregated_inference.http.listening import is_loopback

# No name below these can be registered, so that no site has one.
_LOCAL_ENDINGS = (".localhost", ".local", ".internal", ".home.arpa")

_NO_NAME = "no.name"


def require_own_site(scope: Scope, remedy: str, origins: Collection[str] = ()) -> None:
    """Of a request to a server without a key. `origins`: other sites whose pages may call. `remedy`: how a user allows
    what is refused here. Connections from other machines pass: only a browser on this one is the user's own."""
    server = scope.get("server")
    if not server or not is_loopback(server[0]) or "*" in origins:
        return
    host = origin = ""
    for name, value in scope["headers"]:
        if name == b"host":
            host = value.decode("latin-1")
        elif name == b"origin":
            origin = value.decode("latin-1")
    if host and not _is_local_name(_name_of(f"//{host}")) and host not in map(_place_of, origins):
        raise ForeignSite(
            f"{host[:100]!r} is no name of this machine: a page of another site may have sent this; {remedy}"
        )
    if origin and origin not in origins and not _is_own_page(origin, host):
        raise ForeignSite(f"a page of {origin[:100]!r} sent this, which is another site; {remedy}")


def _is_own_page(origin: str, host: str) -> bool:
    """`null`: a page that hides where it is from. Other schemes belong to programs and extensions, not to sites."""
    scheme, separator, place = origin.partition("://")
    if not separator:
        return False
    if scheme not in ("http", "https"):
        return True
    name = _name_of(origin)
    return place == host or is_loopback(name) or name.endswith(".localhost")


def _is_local_name(name: str) -> bool:
    """An address, a name without dots, or one that no site can have."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." not in name.rstrip(".") or name.rstrip(".").endswith(_LOCAL_ENDINGS)
    return True


def _place_of(origin: str) -> str:
    return origin.partition("://")[2]


def _name_of(url: str) -> str:
    """In lower case, without port and brackets."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:  # brackets that hold no address
        return _NO_NAME
