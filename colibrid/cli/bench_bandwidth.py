"""How fast this machine reads memory: the floor under everything that reads weights once a step."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from colibrid.engine.device_cuda import CudaDevice

ROUNDS = 5
PROBE_BYTES = 1 << 30  # far beyond any cache, so that a later round finds nothing of the one before


class BandwidthProbe:
    """A buffer of `size` bytes that `threads` threads read together, each its own part.

    A maximum over 32-bit numbers is the reading that runs closest to the memory (as fast as 64-byte loads by hand).
    The threads may use `cpus`, whatever the caller was pinned to: an engine pins the thread that opens it.
    """

    def __init__(self, threads: int, size: int, cpus: set[int]) -> None:
        self._cpus = cpus
        self._parts = np.array_split(np.ones(max(size // 4, threads), dtype=np.int32), threads)

    @property
    def threads(self) -> int:
        return len(self._parts)

    @property
    def reader(self) -> str:
        """Who reads, for people."""
        return f"{self.threads} thread{'' if self.threads == 1 else 's'}"

    def measure(self) -> float:
        """Bytes a second, the best of several rounds."""
        size = sum(part.nbytes for part in self._parts)
        return size / min(self._read_all() for _ in range(ROUNDS))

    def _read_all(self) -> float:
        """Seconds from the common start to the end of the last thread."""
        started = 0.0

        def start() -> None:
            nonlocal started
            started = time.perf_counter()

        barrier = threading.Barrier(len(self._parts), action=start)
        ends = [0.0] * len(self._parts)

        def read(index: int) -> None:
            os.sched_setaffinity(0, self._cpus)  # of this thread
            barrier.wait()
            self._parts[index].max()
            ends[index] = time.perf_counter()

        workers = [threading.Thread(target=read, args=(index,)) for index in range(len(self._parts))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return max(ends) - started


class GpuBandwidthProbe:
    """A GPU's memory: a kernel that reads the engine's own arena."""

    threads = 0  # of the CPU
    reader = "a kernel over the engine's arena"

    def __init__(self, device: CudaDevice) -> None:
        self._device = device

    def measure(self) -> float:
        """Bytes a second, the best of several rounds."""
        return max(self._device.read_bandwidth() for _ in range(ROUNDS))


def probe_threads(engine_threads: int, cpus: int) -> int:
    """As many as the engine has, and two where there are two CPUs: one alone does not always fill the memory bus."""
    return max(engine_threads, min(2, cpus))
