"""Where a request comes from: which names of this server it may use, which web pages may send it, whom a proxy speaks for.

A page that a browser shows can send requests to 127.0.0.1, and with DNS rebinding it can read the answers, too: its Host
header then holds the page's own name. So loopback addresses answer to their own names only, and pages of other origins
are refused unless they are listed.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from colibrid.errors import ConfigError
from colibrid.http.errors import ForbiddenError, shown
from colibrid.ops.addresses import is_loopback

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from multidict import MultiMapping

    from colibrid.config.settings import ServerSettings

_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[^:@\[\]/]+))(?::[0-9]{0,5})?")
_ORIGIN = re.compile(r"https?://[^/@\s]+")
_MAX_HOPS = 16  # addresses of one X-Forwarded-For that are looked at
UNIX = "unix"  # the address of a client that has connected to a socket's path

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end."""

    address: str  # an IP address, or UNIX
    secure: bool  # the client speaks TLS, to us or to a proxy that we trust


class Origins:
    """What the settings of a server say about where requests come from. Immutable."""

    def __init__(self, settings: ServerSettings, *, has_keys: bool) -> None:
        """Raises ConfigError naming the setting that is wrong."""
        hosts = settings.allowed_hosts
        self._hosts = None if hosts is None else frozenset(_host(name) for name in hosts)
        self._pages = frozenset(_origin(page, has_keys=has_keys) for page in settings.allowed_origins or ())
        proxies = settings.trusted_proxies or ()
        self._trusts_unix = UNIX in proxies
        self._proxies = tuple(_network(text) for text in proxies if text != UNIX)

    def peer(self, name: object, headers: MultiMapping[str], *, secure: bool) -> Peer:
        """Who has sent `headers` from the socket `name`: what a proxy says counts iff it is trusted."""
        address = address_of(name)
        if not self._trusted(address):
            return Peer(address, secure)
        proto = _all_of(headers, "X-Forwarded-Proto")[-1]
        if proto in ("http", "https"):
            secure = proto == "https"
        for hop in reversed(_all_of(headers, "X-Forwarded-For")[-_MAX_HOPS:]):  # each proxy adds whom it saw at the end
            found = _address(hop)
            if found is None:
                break
            address = found
            if not self._trusted(found):
                break
        return Peer(address, secure)

    def check_host(self, headers: Mapping[str, str], bound: str) -> None:
        """ForbiddenError for a Host that is no name of a server bound to `bound`."""
        if bound == UNIX:  # no page has a socket's path
            return
        local = _LOCAL_NAMES | {bound.lower()} if is_loopback(bound) else frozenset[str]()
        host = headers.get("Host")
        if host is None or (self._hosts is None and not local):
            return
        if _hostname(host) not in local | (self._hosts or frozenset()):
            raise ForbiddenError(
                f"The Host header {shown(host)} is not a name of this server; use one that is, such as localhost on its"
                " own machine, or have server.allowed_hosts extended.",
                code="host_not_allowed",
            )

    def check_page(self, headers: Mapping[str, str], peer: Peer) -> str | None:
        """The page's origin if it is another's and may ask; None if it is our own, or nobody's.

        Raises ForbiddenError for other pages.
        """
        origin = headers.get("Origin")
        if origin is None:
            return None
        scheme, _, host = origin.partition("://")
        own = host != "" and host.lower() == headers.get("Host", "").lower()
        if own and (scheme == "https" or (scheme == "http" and not peer.secure)):
            return None
        if "*" in self._pages or origin.lower() in self._pages:
            return origin
        raise ForbiddenError(
            "Requests from web pages of other origins are refused; call the server from a program, or have"
            " server.allowed_origins extended.",
            code="origin_not_allowed",
        )

    def _trusted(self, address: str) -> bool:
        if address == UNIX:
            return self._trusts_unix
        return bool(self._proxies) and any(ipaddress.ip_address(address) in network for network in self._proxies)


def address_of(name: object) -> str:
    """The address in the name of a client's socket."""
    return _address(name[0]) or UNIX if isinstance(name, tuple) else UNIX


def _all_of(headers: MultiMapping[str], name: str) -> list[str]:
    """The values of a header that is a list: some proxies add to its last line, others add a line."""
    return [value.strip() for value in ",".join(headers.getall(name, ())).split(",")]


def _hostname(host: str) -> str | None:
    """The name in `name:port`, `[v6]:port` or either without port, in lower case; none in anything else."""
    found = _HOST.fullmatch(host)
    return None if found is None else (found["v6"] or found["name"]).lower()


def _address(text: str) -> str | None:
    """The address in its one form, an IPv4 one within IPv6 as IPv4; None for other text."""
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


def _host(name: str) -> str:
    bare = name.removeprefix("[").removesuffix("]").lower()
    if _address(bare) is None and not re.fullmatch(r"[a-z0-9._-]+", bare):
        raise ConfigError(f"server.allowed_hosts: {name!r} is no name or address; write it without scheme and port")
    return bare


def _origin(page: str, *, has_keys: bool) -> str:
    if page == "*":
        if not has_keys:
            raise ConfigError(
                "server.allowed_origins: '*' lets every web page ask, and no API key is set; list the pages, or set"
                " auth.keys_file"
            )
        return page
    if not _ORIGIN.fullmatch(page.lower()):
        raise ConfigError(
            f"server.allowed_origins: {page!r} is no origin; write it as https://app.example.org, without a path"
        )
    return page.lower()


def _network(text: str) -> _Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        raise ConfigError(
            f"server.trusted_proxies: {text!r} is no address, no network such as 10.0.0.0/8 and not unix; correct it"
        ) from None


def cors_headers(origin: str | None) -> Sequence[tuple[str, str]]:
    """Headers that let the page of `origin` read an answer."""
    if origin is None:
        return ()
    return (
        ("Access-Control-Allow-Origin", origin),
        ("Vary", "Origin"),
        ("Access-Control-Expose-Headers", "x-request-id, Retry-After, openai-processing-ms, Server-Timing"),
    )
