"""Devices for in_process.InProcessEngine: GPU 0, and the emulator behind a fake libcuda."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kernel_abi
import kernel_harness

from colibrid.engine import abi
from colibrid.engine.device_cuda import CudaEntries
from colibrid.engine.gpu import attach_gpu

if TYPE_CHECKING:
    from contextlib import ExitStack

    from colibrid.engine.channel import EngineChannel
    from colibrid.engine.configure import EngineSetup

ROOT = Path(__file__).resolve().parents[2]
MULTIPROCESSORS = 1  # of the emulator: few blocks, for it runs them one after another
FREE_BYTES = 1 << 30


def build_fake(folder: Path) -> ctypes.CDLL | None:
    """The fake libcuda, or None without a C compiler."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    target = folder / "libenginefake.so"
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{ROOT / 'engine_c' / 'include'}"]
    subprocess.run([compiler, *flags, "-o", str(target), str(ROOT / "tests/cuda/engine_fake.c")], check=True)
    library = ctypes.CDLL(str(target))
    library.engine_fake_kernel.restype = ctypes.c_void_p
    library.engine_fake_kernel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32]
    library.engine_fake_entries.argtypes = [ctypes.c_void_p]
    return library


class EmulatedDevice:
    """Host memory as device memory, the kernels' own source as kernels."""

    name = "emulated"

    def __init__(self, fake: ctypes.CDLL, emulator: ctypes.CDLL) -> None:
        self._fake = fake
        self.fail_at = 0  # the driver call of the next engine that fails
        launcher = ctypes.cast(emulator.emulator_launch, ctypes.c_void_p)
        rows = []
        for name, struct in kernel_harness.entries().items():
            size = ctypes.sizeof(kernel_abi.struct(struct))
            run = ctypes.cast(getattr(emulator, f"run_{name}"), ctypes.c_void_p)
            rows.append(abi.DeviceKernel(name.encode(), fake.engine_fake_kernel(run, launcher, size), size))
        self._kernels = (abi.DeviceKernel * len(rows))(*rows)
        self._entries = CudaEntries()
        self._kept: list[Any] = []

    def attach(self, setup: EngineSetup, channel: EngineChannel, stack: ExitStack) -> None:
        """A fresh device for one engine."""
        self._fake.engine_fake_reset(self.fail_at)
        self._fake.engine_fake_entries(ctypes.byref(self._entries))
        plan = setup.fit_gpu(FREE_BYTES)
        arena, pinned = self._memory(plan.arena, stack), self._memory(plan.pinned, stack)
        setup.use_device(
            abi.DeviceDesc(
                abi_version=abi.ABI_VERSION,
                struct_bytes=ctypes.sizeof(abi.DeviceDesc),
                kernels_abi=kernel_abi.constant("CLB_KERNELS_ABI"),
                kernel_count=len(self._kernels),
                kernels=self._kernels,
                entries=ctypes.addressof(self._entries),
                stream=1,
                copy_stream=2,
                pinned=pinned,
                pinned_bytes=plan.pinned,
                pinned_device=pinned,
                arena=arena,
                arena_bytes=plan.arena,
                channel_device=channel.base,
                multiprocessors=MULTIPROCESSORS,
                capability=80,
            )
        )

    def live(self) -> int:
        """Handles of the fake driver that were made and not destroyed."""
        return int(self._fake.engine_fake_live())

    def _memory(self, size: int, stack: ExitStack) -> int:
        """Poisoned memory at a multiple of 512."""
        block = ctypes.create_string_buffer(size + 512)
        ctypes.memset(block, 0xFF, len(block))
        self._kept.append(block)
        stack.callback(self._kept.remove, block)
        return ctypes.addressof(block) + -ctypes.addressof(block) % 512


class Gpu:
    """GPU 0 with cubins of a folder."""

    name = "cuda"

    def __init__(self, cubins: Path) -> None:
        self._cubins = cubins

    def attach(self, setup: EngineSetup, channel: EngineChannel, stack: ExitStack) -> None:
        """Open the GPU for one engine."""
        attach_gpu(setup, channel, stack, cubins=self._cubins)
