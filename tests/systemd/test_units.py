"""The units of systemd/: accepted by systemd, closed, and in step with the daemon's own times and limits."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from unit_file import FOLDER, Unit, allowed_calls
from unit_sandbox import APPLIED, LEFT_TO_SYSTEMD

from colibrid.cli.access import CREDENTIAL
from colibrid.cli.daemon import _CLOSE_S
from colibrid.cli.doctor_host import _RESERVED
from colibrid.cli.heartbeat import _CURE_S
from colibrid.cli.main import EXIT_CONFIG
from colibrid.config.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

UNITS = ("colibrid.service", "colibrid@.service", "colibrid.socket")
PROGRAM = "/usr/local/lib/colibrid/bin/colibrid"

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


@pytest.fixture
def unit() -> Unit:
    return Unit(FOLDER / "colibrid.service")


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A root with the units, whose program exists, and the drop-in beside them."""
    folder = tmp_path / "etc" / "systemd" / "system"
    folder.mkdir(parents=True)
    for name in UNITS:
        (folder / name).write_text((FOLDER / name).read_text().replace(PROGRAM, sys.executable))
    return tmp_path


def add_gpu(host: Path) -> None:
    for name in ("colibrid.service.d", "colibrid@.service.d"):
        folder = host / "etc" / "systemd" / "system" / name
        folder.mkdir()
        shutil.copy(FOLDER / "gpu.conf", folder)


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", "--no-pager", *arguments], capture_output=True, text=True, check=False)


def exposure(host: Path, name: str) -> float:
    done = analyze("security", "--offline=true", f"--root={host}", name)
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    return float(found[1])


@needs_systemd
@pytest.mark.parametrize("gpu", [False, True])
def test_units_are_valid(host: Path, *, gpu: bool) -> None:
    """systemd accepts the units and the drop-in without a word."""
    if gpu:
        add_gpu(host)
    folder = host / "etc" / "systemd" / "system"
    names = [str(folder / name) for name in ("colibrid.service", "colibrid@one.service", "colibrid.socket")]
    shutil.copy(folder / "colibrid@.service", folder / "colibrid@one.service")
    done = analyze("verify", *names)
    ours = [line for line in done.stderr.splitlines() if "colibrid" in line or str(folder) in line]
    assert (done.returncode, ours) == (0, [])


@needs_systemd
@pytest.mark.parametrize("name", ["colibrid.service", "colibrid@.service"])
def test_units_are_closed(host: Path, name: str) -> None:
    """`systemd-analyze security` gives at most 1.5, and 2.0 with the devices of GPUs."""
    assert exposure(host, name) <= 1.5
    add_gpu(host)
    assert exposure(host, name) <= 2.0


def test_times_of_the_unit_exceed_the_daemons(unit: Unit) -> None:
    """The watchdog waits longer than finding and replacing a hung engine takes, a stop longer than draining."""
    settings = Settings()
    assert unit.seconds("WatchdogSec") > settings.engine.stall_timeout_s + _CURE_S
    assert unit.seconds("TimeoutStopSec") > settings.server.drain_timeout_s + 2 * _CLOSE_S
    starts = int(unit.last("StartLimitBurst"))
    assert unit.seconds("StartLimitIntervalSec") > starts * unit.seconds("RestartSec")


def test_limits_of_the_unit_fit_the_settings(unit: Unit) -> None:
    """Descriptors for all connections, memory that may be locked, no core dumps."""
    assert int(unit.last("LimitNOFILE")) >= Settings().limits.connections + _RESERVED
    assert unit.last("LimitMEMLOCK") == "infinity"
    assert unit.last("LimitCORE") == "0"


def test_unit_fits_the_daemon(unit: Unit) -> None:
    """READY=1 is waited for, exit code 78 is final, SIGTERM goes to the daemon alone, a dead engine is the daemon's."""
    expected = {
        "Type": "notify",
        "KillMode": "mixed",
        "OOMPolicy": "continue",
        "DynamicUser": "yes",
        "Restart": "on-failure",
    }
    assert {key: unit.last(key) for key in expected} == expected
    assert str(EXIT_CONFIG) in unit.words("RestartPreventExitStatus")
    assert unit.last("LoadCredential") == f"{CREDENTIAL}:/etc/colibrid/keys"
    assert unit.last("WorkingDirectory") == f"/var/cache/{unit.last('CacheDirectory')}"
    assert unit.values["ExecReload"] == [
        "/bin/kill -HUP $MAINPID", f"+/usr/bin/cmp /etc/colibrid/keys %d/{CREDENTIAL}"
    ]  # fmt: skip


def test_launcher_knows_every_setting(unit: Unit) -> None:
    """What the unit sets is either applied by the launcher of the tests or the manager's own business, not both."""
    assert unit.values.keys() <= APPLIED | LEFT_TO_SYSTEMD
    assert not APPLIED & LEFT_TO_SYSTEMD


def test_template_differs_in_names_only(unit: Unit) -> None:
    """colibrid@.service is colibrid.service but for the configuration and the folders of an instance."""
    template = Unit(FOLDER / "colibrid@.service")
    different = {key for key in unit.values | template.values if unit.values.get(key) != template.values.get(key)}
    assert different == {"Description", "ExecStart", "CacheDirectory", "RuntimeDirectory", "WorkingDirectory"}
    assert template.last("ExecStart") == f"{PROGRAM} serve --config /etc/colibrid/%i.yaml"
    assert template.last("CacheDirectory") == template.last("RuntimeDirectory") == "colibrid-%i"


def test_drop_in_opens_devices_only(unit: Unit) -> None:
    """For GPUs, the list of devices is the driver's; besides it only generated code becomes possible."""
    drop_in = Unit(FOLDER / "gpu.conf")
    assert drop_in.values.keys() - {"Wants", "After", "ExecStartPre"} == {
        "PrivateDevices", "DevicePolicy", "DeviceAllow", "ProcSubset", "MemoryDenyWriteExecute"
    }  # fmt: skip
    assert drop_in.last("DevicePolicy") == "closed"
    assert all(word.split()[0].startswith("char-nvidia") for word in drop_in.values["DeviceAllow"])
    assert drop_in.last("ProcSubset") == "all"


def test_socket_is_the_default_address() -> None:
    """Socket activation listens where the daemon would, and hands over the listening socket itself."""
    sockets, server = Unit(FOLDER / "colibrid.socket"), Settings().server
    assert sockets.values["ListenStream"] == [f"{server.host}:{server.port}"]
    assert sockets.last("Accept") in {"", "no"}


@needs_systemd
def test_filter_leaves_what_the_daemon_calls(unit: Unit) -> None:
    """Groups of privileged calls are gone from the filter; pinning threads is not."""
    allowed = allowed_calls(unit)
    assert "sched_setaffinity" in allowed
    assert not {"chown", "setuid", "setgroups", "mbind", "setpriority", "mount", "ptrace", "bpf"} & allowed
