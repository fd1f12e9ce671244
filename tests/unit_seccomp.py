"""What a unit's settings forbid by seccomp, as system-call filters of the process that calls `restrict`.

Through libseccomp, which systemd needs, too. Follows src/shared/seccomp-util.c of systemd in what it forbids, by name in
systemd.exec(5).
"""

from __future__ import annotations

import ctypes
import errno
import stat
from typing import TYPE_CHECKING

from unit_file import allowed_calls

if TYPE_CHECKING:
    from unit_file import Unit

_ALLOW = 0x7FFF0000
_LESS, _EQUAL, _GREATER, _MASKED = 2, 4, 6, 7
_FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10}
_NAMESPACES = (0x00000080, 0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
_WRITE, _EXEC = 2, 4
_SHM_EXEC = 0o100000
_O_CREAT = 0o100
_REALTIME = (1, 2, 6)  # SCHED_FIFO, SCHED_RR, SCHED_DEADLINE


class _Compare(ctypes.Structure):
    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def _refuse(number: int) -> int:
    return 0x00050000 | number


def _masked(arg: int, bits: int) -> _Compare:
    """All of `bits` are set."""
    return _Compare(arg, _MASKED, bits, bits)


class _Filter:
    """One filter; OSError for what libseccomp does not take."""

    def __init__(self, library: ctypes.CDLL, default: int) -> None:
        self._library = library
        self._context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(default)))

    def add(self, action: int, call: str, *compared: _Compare) -> None:
        number = self._library.seccomp_syscall_resolve_name(call.encode())
        if number < 0:  # of another architecture, or younger than the library
            return
        array = (_Compare * len(compared))(*compared)
        self._check(
            self._library.seccomp_rule_add_array(
                self._context, ctypes.c_uint32(action), number, ctypes.c_uint(len(compared)), array
            ),
            call,
        )

    def load(self) -> None:
        self._check(self._library.seccomp_load(self._context), "seccomp_load")

    def _check(self, result: int, what: str) -> None:
        if result < 0:
            raise OSError(-result, what)


def restrict(unit: Unit) -> None:
    """From now on, for this process and what it executes. Needs no_new_privs, or privileges."""
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    forbidden = _Filter(library, _ALLOW)
    _restrict_families(unit, forbidden)
    if unit.on("RestrictNamespaces"):
        for flag in _NAMESPACES:
            forbidden.add(_refuse(errno.EPERM), "clone", _masked(0, flag))
        for call in ("unshare", "setns"):
            forbidden.add(_refuse(errno.EPERM), call)
        forbidden.add(_refuse(errno.ENOSYS), "clone3")
    if unit.on("MemoryDenyWriteExecute"):
        forbidden.add(_refuse(errno.EPERM), "mmap", _masked(2, _WRITE | _EXEC))
        for call in ("mprotect", "pkey_mprotect"):
            forbidden.add(_refuse(errno.EPERM), call, _masked(2, _EXEC))
        forbidden.add(_refuse(errno.EPERM), "shmat", _masked(2, _SHM_EXEC))
    if unit.on("RestrictRealtime"):
        for policy in _REALTIME:
            forbidden.add(_refuse(errno.EPERM), "sched_setscheduler", _Compare(1, _EQUAL, policy, 0))
    if unit.on("LockPersonality"):
        forbidden.add(_refuse(errno.EPERM), "personality", _Compare(0, _GREATER, 0, 0))
    if unit.on("RestrictSUIDSGID"):
        _restrict_modes(forbidden)
    forbidden.load()
    assert unit.last("SystemCallErrorNumber") == "EPERM", "what a refused call gives"
    allowed = _Filter(library, _refuse(errno.EPERM))  # also refuses other architectures' calls
    for call in sorted(allowed_calls(unit)):
        allowed.add(_ALLOW, call)
    allowed.load()  # last: it may not allow seccomp itself


def _restrict_families(unit: Unit, forbidden: _Filter) -> None:
    families = sorted(_FAMILIES[word] for word in unit.words("RestrictAddressFamilies"))
    action = _refuse(errno.EAFNOSUPPORT)
    forbidden.add(action, "socket", _Compare(0, _LESS, families[0], 0))
    forbidden.add(action, "socket", _Compare(0, _GREATER, families[-1], 0))
    for family in set(range(families[0], families[-1])) - set(families):
        forbidden.add(action, "socket", _Compare(0, _EQUAL, family, 0))


def _restrict_modes(forbidden: _Filter) -> None:
    for bit in (stat.S_ISUID, stat.S_ISGID):
        for call, arg in (("chmod", 1), ("fchmod", 1), ("fchmodat", 2), ("mkdir", 1), ("mkdirat", 2), ("creat", 1)):
            forbidden.add(_refuse(errno.EPERM), call, _masked(arg, bit))
        for call, arg in (("open", 1), ("openat", 2)):
            forbidden.add(_refuse(errno.EPERM), call, _masked(arg, _O_CREAT), _masked(arg + 1, bit))
    forbidden.add(_refuse(errno.ENOSYS), "openat2")
