"""Checks of the machine, which know nothing of a model: kernel, CPUs, huge pages, limits, clock, user."""

from __future__ import annotations

import os
import platform
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from colibrid.cli.finding import Finding, error, ok, refused, warning
from colibrid.engine.host_cpus import host_cpus
from colibrid.engine.library import CUBIN_FOLDER, KernelModules, Library
from colibrid.errors import ColibridError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from colibrid.config.settings import Settings

_HUGE_BYTES = 2 << 20
_RESERVED = 64  # descriptors for everything but clients, as in http/gate
_SLOW_CLOCKS = frozenset({"hpet", "acpi_pm", "jiffies", "refined-jiffies"})


@dataclass(frozen=True, slots=True)
class Host:
    """Where the machine is looked at."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    run: Path = Path("/run")

    def read(self, path: Path) -> str | None:
        """The text of a file of the system; None where it has none."""
        try:
            return path.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None


def host_findings(settings: Settings, host: Host) -> Iterator[Finding]:
    """All of this module."""
    yield check_kernel()
    yield check_installation()
    yield from check_cpus(host)
    if settings.engine.device != "cuda":
        yield from check_huge_pages(settings, host)
    yield from check_limits(settings)
    yield check_clock(host)
    yield check_user(os.geteuid())


def check_kernel() -> Finding:
    """System calls that a daemon cannot do without, which old kernels lack and containers may forbid."""
    release = platform.release()
    calls: dict[str, Callable[[], int]] = {
        "pidfd_open": lambda: os.pidfd_open(os.getpid()),
        "memfd_create": lambda: os.memfd_create("colibrid-doctor", os.MFD_CLOEXEC),
    }
    for name, call in calls.items():
        try:
            os.close(call())
        except OSError as reason:
            return error(
                "kernel",
                f"Linux {release}: {name} failed ({reason.strerror})",
                "use Linux 5.3 or later; in a container, take a seccomp profile that allows it",
            )
    return ok("kernel", f"Linux {release}")


def check_installation() -> Finding:
    """The native library and every kernel module are there, and are the ones that were built."""
    try:
        Library()
        with KernelModules() as modules:
            count = len(modules.names)
    except ColibridError as reason:
        return refused("installation", reason)
    cuda = "with CUDA kernels" if (CUBIN_FOLDER / "manifest.json").is_file() else "without CUDA kernels"
    return ok("installation", f"Python {platform.python_version()}, {count} CPU kernel modules, {cuda}")


def check_cpus(host: Host) -> Iterator[Finding]:
    """Which instructions the kernels may use, and for how much of the time."""
    cpus = host_cpus(host.proc / "self" / "cgroup", host.sys / "fs" / "cgroup", host.sys / "devices" / "system" / "cpu")
    info = host.read(host.proc / "cpuinfo") or ""
    words = set(next((line for line in info.splitlines() if line.startswith(("flags", "Features"))), "").split())
    x86 = platform.machine() in ("x86_64", "AMD64")
    best = next((name for name in ("avx512_bf16", "avx512f", "avx2") if name in words), None)
    if x86 and words and best is None:
        yield warning(
            "instructions",
            "this CPU, or what the virtual machine shows of it, has no AVX2: plain kernels compute, several times slower",
            "give the virtual machine the host's CPU model, or use another machine",
        )
    else:
        yield ok("instructions", best or platform.machine())
    quota = "" if cpus.quota is None else f", with time for {cpus.quota:.1f} of them"
    text = f"{cpus.cores} cores{quota}: {cpus.auto_threads} threads compute"
    if cpus.quota is not None and cpus.quota < 1:
        yield warning("cpus", text, "raise the control group's cpu.max (CPUQuota=, --cpus) to whole CPUs")
    else:
        yield ok("cpus", text)


def check_huge_pages(settings: Settings, host: Host) -> Iterator[Finding]:
    """Weights are read through huge pages, which spares address translation; without them serving is slower."""
    tiers = settings.memory.tiers
    policies = {tiers.weights.huge_pages, tiers.kv.huge_pages, tiers.temp.huge_pages}
    if "try" in policies:
        path = host.sys / "kernel" / "mm" / "transparent_hugepage" / "enabled"
        enabled = host.read(path) or "[never]"
        if "[never]" in enabled:
            yield warning("huge pages", "transparent huge pages are off", f"echo madvise > {path}")
        else:
            yield ok("huge pages", f"transparent: {enabled.partition('[')[2].partition(']')[0]}")
    if "require" in policies:
        folder = host.sys / "kernel" / "mm" / "hugepages" / f"hugepages-{_HUGE_BYTES >> 10}kB"
        free = int(host.read(folder / "free_hugepages") or 0)
        if free == 0:
            yield error(
                "huge pages",
                "memory.tiers asks for huge pages (require), and none is reserved",
                f"echo NUMBER > {folder / 'nr_hugepages'} (2 MiB each), or write huge_pages: try",
            )
        else:
            yield ok("huge pages", f"{free} of 2 MiB are free")


def check_limits(settings: Settings) -> Iterator[Finding]:
    """What one process may have."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    wanted = settings.limits.connections + _RESERVED
    if files != resource.RLIM_INFINITY and files < wanted:
        yield warning(
            "open files",
            f"the limit is {files}: {max(files - _RESERVED, 1)} connections at a time, not limits.connections "
            f"{settings.limits.connections}",
            f"ulimit -n {wanted} (systemd: LimitNOFILE={wanted}), or lower limits.connections",
        )
    else:
        yield ok("open files", "no limit" if files == resource.RLIM_INFINITY else f"up to {files}")
    if resource.getrlimit(resource.RLIMIT_CORE)[0] != 0:
        yield warning(
            "core dumps",
            "they are on, and would hold prompts and keys",
            "ulimit -c 0 (systemd: LimitCORE=0)",
        )
    else:
        yield ok("core dumps", "off")


def check_clock(host: Host) -> Finding:
    """Keys expire by this clock, certificates too, and every request is timed."""
    built = Path(__file__).stat().st_mtime
    if time.time() < built - 86400:
        return error(
            "clock",
            f"it says {time.strftime('%Y-%m-%d', time.gmtime())}, before this program was installed",
            "set it: timedatectl set-ntp true",
        )
    source = host.read(host.sys / "devices" / "system" / "clocksource" / "clocksource0" / "current_clocksource")
    if source in _SLOW_CLOCKS:
        return warning(
            "clock",
            f"the kernel reads time from {source}, which takes a microsecond or more each time",
            "boot with tsc=reliable if the CPU has a constant TSC, or look for the reason in dmesg",
        )
    timesync = host.run / "systemd" / "timesync"
    if timesync.is_dir() and not (timesync / "synchronized").exists():
        return warning("clock", "it has not been synchronised since the start", "timedatectl set-ntp true")
    return ok("clock", f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}" + (f", from {source}" if source else ""))


def check_user(uid: int) -> Finding:
    """A server should not be able to do everything."""
    if uid == 0:
        return warning(
            "user",
            "this is root, which nothing here needs",
            "run it as another user; systemd/colibrid.service makes one of its own",
        )
    return ok("user", f"uid {uid}")
