"""The daemon in the sandbox of systemd/colibrid.service (unit_sandbox.py), and that this sandbox is one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from daemon_process import DaemonProcess, wait_for
from unit_file import FOLDER, Unit
from unit_sandbox import UID, credentials_of

from colibrid.http.credentials import Key, digest_of, write_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KEY = "a-key-for-this-test"
HEADERS = {"authorization": f"Bearer {KEY}"}
NORWAY = {"messages": [{"role": "user", "content": "What is the capital of Norway?"}], "temperature": 0}
CHOICE = {"prompt": "Oslo or Rome?", "max_tokens": 8, "structured_outputs": {"regex": "(Oslo|Rome)"}}

# Each tries one thing that an intruder would, and prints what became of it.
ATTEMPTS = """
import ctypes, errno, json, mmap, os, resource, socket
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = libc.mprotect.argtypes = None

def name(code):
    return errno.errorcode.get(code, str(code))

def tried(call):
    try:
        call()
    except OSError as error:
        return name(error.errno)
    return "done"

def native(result):
    return name(ctypes.get_errno()) if result in (-1, ctypes.c_size_t(-1).value) else "done"

def mapped(protection):
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return libc.mmap(None, ctypes.c_size_t(4096), protection, anonymous, -1, ctypes.c_long(0))

def written(path):
    def write():
        with open(path, "w") as file:
            file.write("x")
    return tried(write)

status = dict(line.split(":", 1) for line in open("/proc/self/status"))
page = mapped(3)
print(json.dumps({
    "ids": [os.getuid(), os.geteuid(), os.getgid(), os.getegid()],
    "capabilities": sorted({status[name].strip() for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}),
    "no_new_privs": status["NoNewPrivs"].strip(),
    "writes": {path: written(path) for path in (
        "/etc/x", "/usr/x", "/var/x", "/var/cache/x", "/run/x", "/dev/x", "/sys/x", "/proc/sys/vm/swappiness", "/root/x",
        "/var/cache/colibrid/x", "/run/colibrid/x", "/tmp/x", "/dev/shm/x")},
    "devices": sorted(os.listdir("/dev")),
    "processes": [entry for entry in os.listdir("/proc") if entry == "1"],
    "meminfo": os.path.exists("/proc/meminfo"),
    "chown": tried(lambda: os.chown("/tmp/x", 0, 0)),
    "setuid bit": tried(lambda: os.chmod("/tmp/x", 0o4755)),
    "namespace": native(libc.unshare(0x10000000)),
    "mount": native(libc.mount(b"none", b"/tmp", b"tmpfs", ctypes.c_ulong(0), None)),
    "ptrace": native(libc.ptrace(16, 1, None, None)),
    "personality": native(libc.personality(ctypes.c_ulong(0x0040000))),
    "netlink": tried(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)),
    "packets": tried(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)),
    "raw": tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)),
    "tcp": tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM)),
    "write and execute": native(mapped(7)),
    "write, then execute": native(libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(4096), 5)),
    "realtime": tried(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))),
    "affinity": tried(lambda: os.sched_setaffinity(0, os.sched_getaffinity(0))),
    "core": resource.getrlimit(resource.RLIMIT_CORE),
    "umask": os.umask(0),
}))
"""


def test_sandbox_holds(sandbox: Callable[..., list[str]]) -> None:
    """In it, nothing but three folders can be written, and what the unit forbids fails with the unit's error."""
    done = subprocess.run([*sandbox(), sys.executable, "-c", ATTEMPTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found.pop("ids") == [UID] * 4
    assert found.pop("capabilities") == ["0" * 16]
    writes = found.pop("writes")
    writable = {path for path, result in writes.items() if result == "done"}
    assert writable == {"/var/cache/colibrid/x", "/run/colibrid/x", "/tmp/x", "/dev/shm/x"}
    assert {result for path, result in writes.items() if path not in writable} == {"EROFS"}
    assert set(found.pop("devices")) <= {"null", "zero", "full", "random", "urandom", "tty", "fd", "shm"}
    assert found == {
        "no_new_privs": "1",
        "processes": [],
        "meminfo": True,
        "chown": "EPERM",
        "setuid bit": "EPERM",
        "namespace": "EPERM",
        "mount": "EPERM",
        "ptrace": "EPERM",
        "personality": "EPERM",
        "netlink": "EAFNOSUPPORT",
        "packets": "EAFNOSUPPORT",
        "raw": "EPERM",
        "tcp": "done",
        "write and execute": "EPERM",
        "write, then execute": "EPERM",
        "realtime": "EPERM",
        "affinity": "done",
        "core": [0, 0],
        "umask": 0o077,
    }


def test_daemon_serves_in_the_sandbox(sandbox: Callable[..., list[str]], tmp_path: Path) -> None:
    """In it the daemon converts, reads the credential, answers (grammars, too), reloads, replaces an engine, and drains."""
    key_file = tmp_path / "keys"
    key_file.write_text(write_line(Key(id="tester", digest=digest_of(KEY))) + "\n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0colibrid-sandbox-{os.getpid()}")
        manager.setblocking(False)
        environment = {"NOTIFY_SOCKET": f"@colibrid-sandbox-{os.getpid()}", "WATCHDOG_USEC": "30000000"}
        launcher = sandbox("--key-file", str(key_file))
        options = ("--set", "server.admin_socket=/run/colibrid/admin", "--device", "cpu")
        with DaemonProcess(tmp_path, *options, environment=environment, launcher=launcher) as daemon:
            received: list[bytes] = []
            for message in (b"READY=1", b"WATCHDOG=1"):
                wait_for(lambda found=message: _heard(manager, received, found), daemon)
            assert daemon.wait_event("keys_read")["file"] == str(credentials_of(Unit(FOLDER / "colibrid.service")))
            assert daemon.request("POST", "/v1/chat/completions", NORWAY)[0] == 401
            _answers(daemon)
            assert daemon.request("POST", "/v1/completions", CHOICE, HEADERS)[1]["choices"][0]["text"] in {
                "Oslo",
                "Rome",
            }
            daemon.signal(signal.SIGHUP)
            daemon.wait_event("reloaded")
            engine = daemon.wait_event("engine_started")["pid"]
            os.kill(engine, signal.SIGKILL)
            wait_for(lambda: [event for event in daemon.events if event["event"] == "engine_started"][1:], daemon)
            wait_for(lambda: daemon.request("GET", "/readyz")[0] == 200, daemon)
            _answers(daemon)
            daemon.signal(signal.SIGTERM)
            assert daemon.wait() == 0, daemon.stderr
        assert list((tmp_path / "packs").iterdir()), "the bundled checkpoint is converted into the cache folder"


def _heard(manager: socket.socket, received: list[bytes], message: bytes) -> bool:
    """Reads what the manager was told; a queue that is full loses messages."""
    with contextlib.suppress(BlockingIOError):
        while True:
            received.append(manager.recv(4096))
    return any(message in one.splitlines() for one in received)


def _answers(daemon: DaemonProcess) -> None:
    status, answer = daemon.request("POST", "/v1/chat/completions", NORWAY, HEADERS)
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"] == "The capital of Norway is Oslo."
