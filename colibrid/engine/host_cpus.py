"""Which CPUs this process may use, and how many threads are worth it. Reads /proc, /sys and the affinity mask."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

_CGROUP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CPU_ROOT = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class HostCpus:
    """CPUs in the order in which threads should take them: first one of every core, then the cores' other threads."""

    ids: tuple[int, ...]
    cores: int  # the first so many of `ids` are cores of their own
    quota: float | None  # CPUs' worth of time that the control groups allow; None: no limit

    @property
    def auto_threads(self) -> int:
        """One thread a core, and never more than the quota has time for."""
        return max(1, self.cores if self.quota is None else min(self.cores, int(self.quota)))

    def among(self, members: Collection[int], sharers: int) -> HostCpus:
        """Those of `members`, with the time that is left when `sharers` engines share it."""
        cores = sum(cpu in members for cpu in self.ids[: self.cores])
        kept = tuple(cpu for cpu in self.ids if cpu in members)
        quota = None if self.quota is None else self.quota / sharers
        return HostCpus(ids=kept, cores=cores or len(kept), quota=quota)

    def pins(self, threads: int) -> tuple[int, ...]:
        """The CPU of each thread, or none when the system should decide.

        Threads are pinned only where they use every core that the process has: fewer would all sit on the same few
        cores as those of the next process that does the same.
        """
        return self.ids[:threads] if 1 < threads <= len(self.ids) and threads >= self.cores else ()


def host_cpus(cgroup: Path = _CGROUP, root: Path = _CGROUP_ROOT, topology: Path = _CPU_ROOT) -> HostCpus:
    """What the affinity mask and the control groups (version 2) leave this process."""
    allowed = sorted(os.sched_getaffinity(0))
    firsts: dict[str, int] = {}
    for cpu in allowed:
        firsts.setdefault(_core(topology, cpu), cpu)
    leading = sorted(firsts.values())
    others = [cpu for cpu in allowed if cpu not in firsts.values()]
    return HostCpus(ids=(*leading, *others), cores=len(leading), quota=_quota(cgroup, root))


def _core(topology: Path, cpu: int) -> str:
    """The name of the core that `cpu` is a thread of: the list of them all."""
    try:
        return (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text(encoding="ascii").strip()
    except OSError:
        return str(cpu)


def _quota(path: Path, root: Path) -> float | None:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    unified = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    if not unified:
        return None
    folder = root / unified[0]
    quotas = [_group_quota(place) for place in (folder, *folder.parents) if place.is_relative_to(root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _group_quota(folder: Path) -> float | None:
    """CPUs' worth of time of one control group; None without a limit."""
    try:
        limit, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None
