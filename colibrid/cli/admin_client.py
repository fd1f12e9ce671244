"""Asks a running daemon over its admin socket."""

from __future__ import annotations

import http.client
import json
import socket
from typing import TYPE_CHECKING, Any, TypeVar

import click

from colibrid.cli.options import load_settings
from colibrid.config.environment import read_environment
from colibrid.errors import ColibridError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

_F = TypeVar("_F", bound="Callable[..., Any]")
_TIMEOUT_S = 300.0  # an answer may wait for a large file to be read
_ERRORS_FROM = 400


class AdminError(ColibridError):
    """The daemon did not do what it was asked for, or is not there."""


class _Connection(http.client.HTTPConnection):
    """HTTP over a socket's path."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class AdminClient:
    """One daemon's admin socket; each call is a connection of its own."""

    def __init__(self, path: str) -> None:
        self._path = path

    def get(self, route: str) -> Any:
        """The JSON answer of GET."""
        return self._call("GET", route, None)

    def post(self, route: str, body: object) -> Any:
        """The JSON answer of POST."""
        return self._call("POST", route, json.dumps(body).encode())

    def _call(self, method: str, route: str, body: bytes | None) -> Any:
        connection = _Connection(self._path)
        try:
            connection.request(method, route, body, {} if body is None else {"Content-Type": "application/json"})
            response = connection.getresponse()
            status, raw = response.status, response.read()
        except PermissionError:
            raise AdminError(
                f"the admin socket {self._path} belongs to another user; run this as the daemon's"
            ) from None
        except (FileNotFoundError, ConnectionRefusedError):
            raise AdminError(
                f"no daemon listens on {self._path}; start one with server.admin_socket set to this path"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise AdminError(f"the daemon at {self._path} did not answer ({error}); look at its log") from None
        finally:
            connection.close()
        return _decoded(status, raw)


def _decoded(status: int, raw: bytes) -> Any:
    try:
        answer = json.loads(raw)
        if status < _ERRORS_FROM:
            return answer
        message = answer["error"]["message"]
    except (ValueError, LookupError, TypeError):
        raise AdminError(f"what answers there (HTTP {status}) is no admin socket of colibrid; check the path") from None
    raise AdminError(message)


def admin_options(function: _F) -> _F:
    """--config, --set and --admin-socket, for `admin_client`."""
    function = click.option("--admin-socket", metavar="PATH", help="The daemon's socket: server.admin_socket.")(
        function
    )
    function = click.option(
        "--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Any setting of the configuration file."
    )(function)
    return click.option("--config", "config_file", metavar="FILE", help="The daemon's YAML, which names the socket.")(
        function
    )


def admin_client(config_file: str | None, sets: tuple[str, ...], admin_socket: str | None) -> AdminClient:
    """A client of the daemon that the options mean. ConfigError when they name no socket."""
    if admin_socket is not None:
        return AdminClient(admin_socket)
    path = load_settings(read_environment(), config_file, sets, {}).settings.server.admin_socket
    if path is None:
        raise ConfigError(
            "server.admin_socket is not set; give the daemon's --config or --admin-socket, and set it for the daemon"
        )
    return AdminClient(path)
