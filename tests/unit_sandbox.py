"""Runs a command as systemd would run it for a unit: namespaces, read-only paths, no devices, an unknown user without
privileges, limits, memory protection and system-call filters, all as the unit's own file says.

    unit_sandbox.py --unit FILE --work FOLDER [--visible FOLDER ...] [--key-file FILE] -- COMMAND ...

Needs root. Differs from systemd in this: `visible` folders (the code under test, which a unit finds below /usr) can be read
wherever they lie, /var/cache and /run show the unit's own folders only, and no user of the host is known. Exit code 77: this
kernel or container forbids it, with the reason on stderr.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import sys
from pathlib import Path

from unit_file import Unit
from unit_seccomp import restrict

UID = 61999  # of those that DynamicUser= takes
UNAVAILABLE = 77
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
PROTECTED = ("/proc/sys", "/proc/irq", "/proc/bus", "/proc/fs")
# What the launcher makes come true, and what is the manager's own business or follows from the rest.
APPLIED = frozenset(
    [
        "AmbientCapabilities",
        "CacheDirectory",
        "CapabilityBoundingSet",
        "DynamicUser",
        "Environment",
        "LimitCORE",
        "LimitMEMLOCK",
        "LimitNOFILE",
        "LoadCredential",
        "LockPersonality",
        "MemoryDenyWriteExecute",
        "NoNewPrivileges",
        "PrivateDevices",
        "PrivateIPC",
        "PrivateMounts",
        "PrivateTmp",
        "PrivateUsers",
        "ProcSubset",
        "ProtectControlGroups",
        "ProtectHome",
        "ProtectHostname",
        "ProtectKernelTunables",
        "ProtectProc",
        "ProtectSystem",
        "RestrictAddressFamilies",
        "RestrictNamespaces",
        "RestrictRealtime",
        "RestrictSUIDSGID",
        "RuntimeDirectory",
        "RuntimeDirectoryMode",
        "CacheDirectoryMode",
        "SystemCallArchitectures",
        "SystemCallErrorNumber",
        "SystemCallFilter",
        "UMask",
        "WorkingDirectory",
    ]
)
LEFT_TO_SYSTEMD = frozenset(
    [
        "After",
        "Description",
        "Documentation",
        "ExecReload",
        "ExecStart",
        "KeyringMode",
        "KillMode",
        "NotifyAccess",
        "OOMPolicy",
        "ProtectClock",
        "ProtectKernelLogs",
        "ProtectKernelModules",
        "RemoveIPC",
        "Restart",
        "RestartPreventExitStatus",
        "RestartSec",
        "StartLimitBurst",
        "StartLimitIntervalSec",
        "TimeoutStartSec",
        "TimeoutStopSec",
        "Type",
        "WantedBy",
        "WatchdogSec",
    ]
)

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER = 0x00020000, 0x04000000, 0x08000000, 0x10000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
_MOUNT_SETATTR, _AT_RECURSIVE = 442, 0x8000
_SET_DUMPABLE, _CAPBSET_READ, _CAPBSET_DROP, _SET_NO_NEW_PRIVS, _CAP_AMBIENT, _SET_MDWE = 4, 23, 24, 38, 47, 65
_CAP_V3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> int:
    result = int(getattr(_libc, name)(*arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments[:3]}: {os.strerror(number)}")
    return result


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    _call("mount", *encoded, ctypes.c_ulong(flags), None if data is None else data.encode())


def _read_only(path: str, *, below: bool = False) -> None:
    attributes = (ctypes.c_uint64 * 4)(_MS_RDONLY, 0, 0, 0)  # struct mount_attr
    _call("syscall", _MOUNT_SETATTR, -1, path.encode(), _AT_RECURSIVE if below else 0, ctypes.byref(attributes), 32)


def _tmpfs(path: str, mode: str, flags: int = _MS_NOSUID | _MS_NODEV) -> None:
    if Path(path).is_dir():
        _mount("tmpfs", path, "tmpfs", flags, f"mode={mode}")


def _own_folder(path: Path, mode: int) -> None:
    """A folder of the service's user that stays writable when what it lies in does not."""
    path.mkdir(parents=True, exist_ok=True)
    os.chown(path, UID, UID)
    path.chmod(mode)
    _mount(str(path), str(path), None, _MS_BIND)


def _file_systems(unit: Unit, visible: list[str], work: str, keys: bytes | None) -> None:
    """The unit's view of the files; `work` becomes its cache folder."""
    shown = {path: os.open(path, os.O_PATH) for path in visible}
    cache = os.open(work, os.O_PATH)
    os.chown(work, UID, UID)
    devices = {name: os.open(f"/dev/{name}", os.O_PATH) for name in DEVICES if Path(f"/dev/{name}").exists()}
    assert unit.last("ProtectSystem") == "strict", "what follows is that"
    _read_only("/", below=True)
    if unit.on("PrivateDevices"):
        _devices(devices)
    hidden = {"/run": "0755", "/var/cache": "0755"}
    if unit.on("ProtectHome"):
        hidden |= {"/home": "0755", "/root": "0755"}
    if unit.on("PrivateTmp"):
        hidden |= {"/tmp": "1777", "/var/tmp": "1777"}
    for path, mode in hidden.items():
        _tmpfs(path, mode)
    for path, descriptor in shown.items():
        Path(path).mkdir(parents=True, exist_ok=True)
        _mount(f"/proc/self/fd/{descriptor}", path, None, _MS_BIND | _MS_REC)
        _read_only(path, below=True)
    place = Path("/var/cache", unit.last("CacheDirectory"))
    place.mkdir()
    _mount(f"/proc/self/fd/{cache}", str(place), None, _MS_BIND)
    _call("syscall", _MOUNT_SETATTR, -1, str(place).encode(), 0, ctypes.byref((ctypes.c_uint64 * 4)(0, 1, 0, 0)), 32)
    place.chmod(int(unit.last("CacheDirectoryMode"), 8))
    _own_folder(Path("/run", unit.last("RuntimeDirectory")), int(unit.last("RuntimeDirectoryMode"), 8))
    if keys is not None:
        credentials = credentials_of(unit)
        credentials.parent.mkdir(parents=True)
        credentials.parent.chmod(0o755)
        credentials.write_bytes(keys)
        os.chown(credentials, UID, UID)
        credentials.chmod(0o400)
    for path in hidden.keys() - {"/tmp", "/var/tmp"}:
        if Path(path).is_dir():
            _read_only(path)
    _proc(unit)


def _devices(devices: dict[str, int]) -> None:
    _mount("tmpfs", "/dev", "tmpfs", _MS_NOSUID | _MS_NOEXEC, "mode=0755")
    for name, descriptor in devices.items():
        Path("/dev", name).touch()
        _mount(f"/proc/self/fd/{descriptor}", f"/dev/{name}", None, _MS_BIND)
    Path("/dev/fd").symlink_to("/proc/self/fd")
    Path("/dev/shm").mkdir()
    _read_only("/dev")
    _mount("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")


def _proc(unit: Unit) -> None:
    options = {"hidepid": unit.last("ProtectProc"), "subset": unit.last("ProcSubset")}
    options = {name: value for name, value in options.items() if value not in {"", "default", "all"}}
    text = ",".join(f"{name}={value}" for name, value in options.items())
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, text)
    if unit.on("ProtectKernelTunables"):
        for path in filter(os.path.exists, PROTECTED):
            _mount(path, path, None, _MS_BIND | _MS_REC)
            _read_only(path, below=True)


def credentials_of(unit: Unit) -> Path:
    """Where the unit's one credential lies."""
    return Path("/run/credentials/unit", unit.last("LoadCredential").partition(":")[0])


def _limits(unit: Unit) -> None:
    """Lower ones than the unit's where this process may not raise its own."""
    for key, number in (
        ("LimitNOFILE", resource.RLIMIT_NOFILE),
        ("LimitMEMLOCK", resource.RLIMIT_MEMLOCK),
        ("LimitCORE", resource.RLIMIT_CORE),
    ):
        value = resource.RLIM_INFINITY if unit.last(key) == "infinity" else int(unit.last(key))
        try:
            resource.setrlimit(number, (value, value))
        except ValueError:
            resource.setrlimit(number, resource.getrlimit(number)[1:] * 2)


def _drop_bounding() -> None:
    for number in range(64):
        if _libc.prctl(_CAPBSET_READ, number, 0, 0, 0) == 1:
            _call("prctl", _CAPBSET_DROP, number, 0, 0, 0)


def _drop_privileges(unit: Unit) -> None:
    """Another user, without any capability, in a user namespace of its own."""
    assert unit.values["CapabilityBoundingSet"] == unit.values["AmbientCapabilities"] == [""], "none are kept"
    assert unit.on("DynamicUser"), "the user has no name"
    _drop_bounding()
    os.setgroups([])
    os.setresgid(UID, UID, UID)
    os.setresuid(UID, UID, UID)
    _call("prctl", _SET_DUMPABLE, 1, 0, 0, 0)
    if unit.on("PrivateUsers"):
        _call("unshare", _NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{UID} {UID} 1")
        Path("/proc/self/gid_map").write_text(f"{UID} {UID} 1")
        _drop_bounding()
        _call("capset", ctypes.byref((ctypes.c_uint32 * 2)(_CAP_V3, 0)), ctypes.byref((ctypes.c_uint32 * 6)()))
    if unit.on("NoNewPrivileges"):
        _call("prctl", _SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if unit.on("MemoryDenyWriteExecute"):
        _libc.prctl(_SET_MDWE, 1, 0, 0, 0)  # before Linux 6.3 the filter is all there is


def _environment(unit: Unit, *, with_keys: bool) -> dict[str, str]:
    passed = ("PATH", "PYTHONPATH", "NOTIFY_SOCKET", "WATCHDOG_USEC")
    known = {name: os.environ[name] for name in passed if name in os.environ}
    known |= {
        "HOME": "/",
        "PYTHONDONTWRITEBYTECODE": "1",
        "CACHE_DIRECTORY": f"/var/cache/{unit.last('CacheDirectory')}",
    }
    known |= dict(word.split("=", 1) for word in unit.words("Environment"))
    return known | ({"CREDENTIALS_DIRECTORY": str(credentials_of(unit).parent)} if with_keys else {})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--unit", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--visible", action="append", default=[])
    parser.add_argument("--key-file")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    unit = Unit(Path(given.unit))
    unknown = unit.values.keys() - APPLIED - LEFT_TO_SYSTEMD
    assert not unknown, f"this launcher does not know {sorted(unknown)}; teach it"
    keys = None if given.key_file is None else Path(given.key_file).read_bytes()
    try:
        flags = _NEWNS | (_NEWUTS if unit.on("ProtectHostname") else 0) | (_NEWIPC if unit.on("PrivateIPC") else 0)
        _call("unshare", flags)
        _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
        _file_systems(unit, given.visible, given.work, keys)
        _limits(unit)
        os.umask(int(unit.last("UMask"), 8))
        os.chdir(unit.last("WorkingDirectory"))
        _drop_privileges(unit)
        restrict(unit)
    except OSError as error:
        sys.stderr.write(f"this machine forbids what the unit wants: {error}\n")
        sys.exit(UNAVAILABLE)
    os.execvpe(given.command[0], given.command, _environment(unit, with_keys=keys is not None))


if __name__ == "__main__":
    main()
