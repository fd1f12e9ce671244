"""colibrid.cli.access."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from colibrid.cli.access import CREDENTIAL, check_access, check_hosts, has_keys, keys_file, log_access, read_access
from colibrid.config.environment import Environment, read_environment
from colibrid.config.settings import Settings
from colibrid.errors import ConfigError

KEY = "secret-key-1"
NOTHING = read_environment({})


def settings(**sections: Any) -> Settings:
    return msgspec.convert(sections, Settings)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / CREDENTIAL
    path.write_text(f"{KEY}\n")
    return path


def passed(folder: Path) -> Environment:
    return read_environment({"CREDENTIALS_DIRECTORY": str(folder)})


def test_names_of_the_file(file: Path) -> None:
    """The newer name, the older one and the service manager's credential all lead to the keys; a name wins over it."""
    for given, environment in (
        (settings(auth={"keys_file": str(file)}), NOTHING),
        (settings(server={"api_key_file": str(file)}), NOTHING),
        (settings(), passed(file.parent)),
        (settings(auth={"keys_file": str(file)}), passed(Path("/nowhere"))),
    ):
        assert read_access(given, environment, ()).find(KEY) is not None
    assert keys_file(settings(), NOTHING) is keys_file(settings(), passed(Path("/nowhere"))) is None
    both = settings(auth={"keys_file": "a"}, server={"api_key_file": "b"})
    with pytest.raises(ConfigError, match=r"older name of auth\.keys_file"):
        keys_file(both, NOTHING)


def test_keys_of_the_command_line(file: Path) -> None:
    """Keys on the command line are accepted, but not beside a file, and not short."""
    assert read_access(settings(), NOTHING, [KEY]).find(KEY) is not None
    with pytest.raises(ConfigError, match="both given"):
        read_access(settings(auth={"keys_file": str(file)}), NOTHING, [KEY])
    with pytest.raises(ConfigError, match="shorter than 8"):
        check_access(settings(), NOTHING, ["short"])


@pytest.mark.parametrize(
    ("server", "text"),
    [
        ({"allowed_origins": ["*"]}, "no API key is set"),
        ({"allowed_hosts": ["a:1"]}, "server.allowed_hosts"),
        ({"trusted_proxies": ["x"]}, "server.trusted_proxies"),
        ({"api_key_file": "/no/such"}, "server.api_key_file /no/such cannot be read"),
    ],
)
def test_what_is_wrong_is_told_early(server: dict[str, Any], text: str) -> None:
    """Before anything expensive is done, wrong keys and names are configuration errors."""
    with pytest.raises(ConfigError, match=text):
        check_access(settings(server=server), NOTHING, ())


def test_open_addresses_need_keys() -> None:
    """An address that others reach is refused without keys; loopback addresses and paths are not."""
    check_hosts(["127.0.0.1", "::1", None], with_keys=False)
    check_hosts(["0.0.0.0"], with_keys=True)
    for host in ("0.0.0.0", "::", "192.168.1.5"):
        with pytest.raises(ConfigError, match="no API key is set"):
            check_hosts(["127.0.0.1", host], with_keys=False)
    assert has_keys(settings(), NOTHING, [KEY])
    assert not has_keys(settings(), NOTHING, [])


def test_operators_are_warned(file: Path) -> None:
    """The log counts keys, and warns of plain ones that every user can read and of keys on the command line."""
    given = settings(auth={"keys_file": str(file)})
    file.chmod(0o644)
    with capture_logs() as logs:
        log_access(given, NOTHING, (), read_access(given, NOTHING, ()))
    assert [line["event"] for line in logs] == ["keys_read", "keys_readable_by_others"]
    assert (logs[0]["count"], logs[0]["plain"]) == (1, 1)
    file.chmod(0o600)
    with capture_logs() as logs:
        log_access(given, NOTHING, (), read_access(given, NOTHING, ()))
        log_access(settings(), NOTHING, [KEY], read_access(settings(), NOTHING, [KEY]))
    assert [line["event"] for line in logs] == ["keys_read", "api_key_on_command_line"]
    assert KEY not in str(logs)
