"""Run kernels of kernels_cu/ on arrays: on GPU 0, or on the CPU through the emulator (emulator.h).

    machine.put(array) -> address        machine.poisoned(shape, dtype) -> Output
    machine.run("clb_linear_bf16", args, grid=(8, 1, 1), block=256, shared=65536)
    machine.get(output) -> array

Addresses are good until machine.reset(). Also here: the number formats of abi.h with numpy, and their inverses.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cuda_harness
import kernel_abi
import numpy as np
from cuda_mirrors import Launch
from kernel_abi import constant
from numpy.typing import NDArray

Array = NDArray[Any]
ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels_cu"
_ENTRY = re.compile(
    r'extern "C" __global__ void\s+(?:__(?:launch_bounds|maxnreg)__\([^)]*\)\s+)?(\w+)\(const __grid_constant__ (\w+) \w+\)'
)
POISON = 0xFF  # NaN in every float type, a huge integer


@dataclass(frozen=True)
class Output:
    """Memory that a kernel should write."""

    address: int
    shape: tuple[int, ...]
    dtype: Any


def entries() -> dict[str, str]:
    """Every kernel of kernels_cu/ and the name of its argument struct."""
    found = (_ENTRY.findall(path.read_text()) for path in sorted(KERNELS.glob("*.cu")))
    return dict(pair for pairs in found for pair in pairs)


def build_emulator(folder: Path) -> ctypes.CDLL | None:
    """All kernels compiled for the CPU, or None without a C++ compiler."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        return None
    here = ROOT / "tests" / "cuda"
    table = folder / "table.cpp"
    rows = entries()
    table.write_text(
        "\n".join(
            f'extern "C" void {name}(const {struct}); '
            f'extern "C" void run_{name}(const void* a) {{ {name}(*static_cast<const {struct}*>(a)); }}'
            for name, struct in rows.items()
        )
    )
    for header in ("cuda_bf16.h", "cuda_fp16.h"):  # emulator.h has what the kernels need of them
        (folder / header).write_text("")
    flags = ["-std=c++17", "-O2", "-fPIC", "-w", "-ffp-contract=off", "-ftls-model=global-dynamic"]
    flags += ["-include", str(here / "emulator.h"), f"-I{KERNELS}", f"-I{folder}"]
    objects, running = [], []
    for source in [*sorted(KERNELS.glob("*.cu")), here / "emulator.cpp", table]:
        target = folder / f"{source.stem}.o"
        objects.append(str(target))
        running.append(subprocess.Popen([compiler, *flags, "-x", "c++", "-c", str(source), "-o", str(target)]))
    if any(process.wait() for process in running):
        raise RuntimeError("the emulator does not compile")
    library = folder / "libemulated.so"
    subprocess.run([compiler, "-shared", "-o", str(library), *objects, "-lm"], check=True)
    made = ctypes.CDLL(str(library))
    made.emulator_launch.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_uint32]
    made.emulator_launch.restype = None
    return made


def _three(values: int | tuple[int, ...]) -> Any:
    given = (values,) if isinstance(values, int) else values
    return (ctypes.c_uint32 * 3)(*given, *([1] * (3 - len(given))))


class Emulated:
    """The kernels' own source on the CPU. Memory is numpy's."""

    name = "emulated"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._kept: list[Array] = []
        self.order(0)

    def order(self, reverse: int) -> None:
        """Threads run first to last (0) or last to first (1)."""
        ctypes.c_uint32.in_dll(self._library, "emulator_order").value = reverse

    def _aligned(self, size: int) -> Array:
        raw = np.empty(size + 512, np.uint8)
        start = -raw.ctypes.data % 256
        self._kept.append(raw)
        return raw[start : start + size]

    def put(self, array: Array) -> int:
        flat = np.ascontiguousarray(array)
        memory = self._aligned(flat.nbytes)
        memory[:] = flat.reshape(-1).view(np.uint8)
        return int(memory.ctypes.data)

    def poisoned(self, shape: tuple[int, ...], dtype: Any) -> Output:
        memory = self._aligned(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        memory[:] = POISON
        return Output(int(memory.ctypes.data), shape, np.dtype(dtype))

    def get(self, output: Output) -> Array:
        size = int(np.prod(output.shape)) * output.dtype.itemsize
        raw = np.frombuffer((ctypes.c_uint8 * size).from_address(output.address), np.uint8).copy()
        return raw.view(output.dtype).reshape(output.shape)

    def run(self, kernel: str, args: Any, *, grid: Any, block: Any, shared: int = 0) -> None:
        function = ctypes.cast(getattr(self._library, f"run_{kernel}"), ctypes.c_void_p)
        self._library.emulator_launch(function, ctypes.byref(args), _three(grid), _three(block), shared)

    def reset(self) -> None:
        self._kept.clear()

    def close(self) -> None:
        self.reset()


class OnGpu:
    """The cubins on GPU 0, through the engine's own launch."""

    name = "cuda"

    def __init__(self, library: ctypes.CDLL, cubins: Path, *, arena_bytes: int = 2 << 30) -> None:
        self.gpu = cuda_harness.Gpu(cubins, arena_bytes=arena_bytes)
        self.driver = cuda_harness.make_driver(library, self.gpu)
        self._start = self._free = self.gpu.arena(arena_bytes - (1 << 20))

    def order(self, reverse: int) -> None:
        """A GPU has its own."""

    def _take(self, size: int) -> int:
        address = self._free
        self._free += (size + 255) // 256 * 256
        return address

    def _check(self, status: int) -> None:
        assert status == 0, f"status {status}: {self.driver.last_name.decode()}"

    def put(self, array: Array) -> int:
        flat = np.ascontiguousarray(array)
        address = self._take(flat.nbytes)
        if flat.nbytes:
            self._check(
                self.driver.copy_in(ctypes.byref(self.driver), self.gpu.stream, address, flat.ctypes.data, flat.nbytes)
            )
            self._wait()
        return address

    def poisoned(self, shape: tuple[int, ...], dtype: Any) -> Output:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        address = self._take(size)
        if size:
            self._check(self.driver.fill(ctypes.byref(self.driver), self.gpu.stream, address, POISON, size))
        return Output(address, shape, np.dtype(dtype))

    def get(self, output: Output) -> Array:
        made = np.empty(output.shape, output.dtype)
        if made.nbytes:
            self._check(
                self.driver.copy_out(
                    ctypes.byref(self.driver), self.gpu.stream, made.ctypes.data, output.address, made.nbytes
                )
            )
            self._wait()
        return made

    def launch(self, kernel: str, args: Any, *, grid: Any, block: Any, shared: int = 0, edge: int = 1) -> Launch:
        """A launch of the engine; `args` must stay alive."""
        return Launch(
            function=self.gpu.kernels[kernel], args=ctypes.addressof(args), grid=_three(grid), block=_three(block),
            shared_bytes=shared, edge=edge,
        )  # fmt: skip

    def run(self, kernel: str, args: Any, *, grid: Any, block: Any, shared: int = 0) -> None:
        launch = self.launch(kernel, args, grid=grid, block=block, shared=shared)
        self._check(self.driver.launch(ctypes.byref(self.driver), self.gpu.stream, ctypes.byref(launch)))
        self._wait()

    def _wait(self) -> None:
        self._check(self.driver.stream_wait(ctypes.byref(self.driver), self.gpu.stream))

    def reset(self) -> None:
        self._free = self._start

    def close(self) -> None:
        self.gpu.close()


def many_launch(machine: Emulated | OnGpu, blocks: int) -> dict[str, int]:
    """How a many-row kernel is launched there: the form on wgmma has larger blocks."""
    wide = isinstance(machine, OnGpu) and machine.gpu.device.info.capability == (9, 0)
    form = "MANY_WIDE" if wide else "MANY"
    threads = kernel_abi.constant("CLB_MANY_WIDE_THREADS") if wide else 256
    return {"grid": blocks, "block": threads, "shared": kernel_abi.constant(f"CLB_{form}_SHARED")}


Machine = Emulated | OnGpu

# ------------------------------------------------------------------ number formats


def to_half(values: Array, precision: str) -> NDArray[np.uint16]:
    """Bits of bf16 or fp16, rounded to nearest even."""
    if precision == "fp16":
        return np.asarray(values, np.float32).astype(np.float16).view(np.uint16)
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_half(bits: Array, precision: str) -> NDArray[np.float32]:
    if precision == "fp16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def scale_of(precision: str) -> float:
    """What split rows of this type are multiplied by."""
    return 0.015625 if precision == "fp16" else 1.0


def split_rows(values: Array, precision: str) -> NDArray[np.uint32]:
    """(T, cols) float32 as split rows (T, cols) words."""
    scaled = np.asarray(values, np.float32) * np.float32(scale_of(precision))
    high = to_half(scaled, precision)
    low = to_half(scaled - from_half(high, precision), precision)
    rows, cols = scaled.shape
    halves = np.stack([high, low]).reshape(2, rows, cols // 16, 2, 4, 2)  # half, row, tile, eight, q, parity
    words = np.ascontiguousarray(halves.transpose(1, 2, 4, 0, 3, 5))
    return words.view(np.uint32).reshape(rows, cols)


def unsplit_rows(words: Array, precision: str) -> NDArray[np.float32]:
    """The inverse of split_rows, as float32 sums of the two halves."""
    rows, cols = words.shape
    halves = np.ascontiguousarray(words).view(np.uint16).reshape(rows, cols // 16, 4, 2, 2, 2)
    both = np.ascontiguousarray(halves.transpose(3, 0, 1, 4, 2, 5)).reshape(2, rows, cols)
    total = from_half(both[0], precision) + from_half(both[1], precision)
    return total / np.float32(scale_of(precision))


def half_rows(values: Array) -> NDArray[np.float16]:
    """(T, cols) float32 as half rows."""
    return (np.asarray(values, np.float32) * np.float32(scale_of("fp16"))).astype(np.float16)


def unhalf_rows(halves: Array) -> NDArray[np.float32]:
    """The inverse of half_rows."""
    return halves.astype(np.float32) / np.float32(scale_of("fp16"))


def half_sums(values: Array) -> NDArray[np.float32]:
    """Sums of squares of 64 columns: (T, cols) -> (T, cols / 64 rounded up)."""
    squares = np.pad(values.astype(np.float64) ** 2, ((0, 0), (0, -values.shape[1] % 64)))
    return squares.reshape(values.shape[0], squares.shape[1] // 64, 64).sum(2).astype(np.float32)


def tile_sums(values: Array) -> NDArray[np.float32]:
    """Sums of squares of 16 columns: (T, cols) -> (T, cols / 16)."""
    rows, cols = values.shape
    return (values.astype(np.float64) ** 2).reshape(rows, cols // 16, 16).sum(2).astype(np.float32)


def relative(actual: Array, expected: Array) -> float:
    """The relative L2 error; NaN anywhere gives NaN."""
    return float(np.linalg.norm(actual.astype(np.float64) - expected) / max(np.linalg.norm(expected), 1e-30))


def mma_weights(values: Array, precision: str) -> tuple[Array, NDArray[np.float32]]:
    """(rows, cols) float32 -> the bytes of mma weights, and the values that they hold, float32."""
    bits = to_half(values, precision)
    rows, cols = (-(-size // 16) * 16 for size in bits.shape)
    padded = np.zeros((rows, cols), np.uint16)
    padded[: bits.shape[0], : bits.shape[1]] = bits
    parts = padded.reshape(rows // 16, 2, 8, cols // 16, 2, 4, 2)  # tile, half, g | tile, half, q, parity
    return parts.transpose(0, 3, 2, 5, 4, 1, 6).reshape(-1), from_half(bits, precision)


def normed(residual: Array, norm: Array, epsilon: float) -> NDArray[np.float64]:
    """RMSNorm in float64."""
    wide = residual.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(1, keepdims=True) + epsilon) * norm


def shared_parts(shared_width: int, width: int) -> int:
    """In how many parts the engine has clb_expert_down take the columns of the shared expert."""
    most = constant("CLB_SHARED_MAX_PARTS")
    return 0 if shared_width == 0 else max(1, min(most, shared_width // max(width, 16 * 64)))
