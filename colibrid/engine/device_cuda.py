"""The CUDA device as the worker sets it up, once, before C takes over: context, stream, arena, modules, host mappings.

The only file that imports cuda.bindings, and only when a device is asked for. After "ready" nothing here makes a
CUDA call until close. Everything that fails says in one line what is wrong and what to do.

    probe(0)                      -> DeviceInfo, or DeviceError
    with CudaDevice.open(0) as d:
        d.take_arena(bytes)       -> device address, 512-aligned; once
        d.load(cubins)            -> the kernels of the folder, once
        d.map_host(address, n)    -> device address of memory of ours (a memfd mapping), page-locked
        d.pinned(n)               -> HostMemory: page-locked and mapped, from the driver
        d.describe(...)           -> abi.DeviceDesc: all of it for C

All addresses and handles are plain integers. Not thread-safe: the worker's main thread owns the device.
"""

from __future__ import annotations

import ctypes
import importlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from colibrid.engine import abi
from colibrid.engine.cubins import CPU_HINT, DeviceError, ModuleImage, choose_images, read_image, read_manifest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DRIVER_API = 13000  # entry points are asked for in their CUDA 13.0 form
MINIMUM_CAPABILITY = (8, 0)

ENTRY_NAMES = (
    "cuCtxSetCurrent",
    "cuLaunchKernelEx",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuMemcpy2DAsync",
    "cuMemsetD8Async",
    "cuStreamSynchronize",
    "cuStreamQuery",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventElapsedTime",
    "cuEventDestroy",
    "cuStreamBeginCapture",
    "cuStreamEndCapture",
    "cuGraphInstantiate",
    "cuGraphUpload",
    "cuGraphLaunch",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGetErrorName",
)


# clb_read of kernels_cu/abi.h.
READ_KERNEL = "clb_read"
READ_THREADS = 256
READ_BLOCKS = 8  # a multiprocessor
READ_BYTES = 8 << 30  # at a time: 2 ms


class _ReadArguments(ctypes.Structure):
    _fields_ = (("input", ctypes.c_uint64), ("sum", ctypes.c_uint64), ("vectors", ctypes.c_uint64))


class CudaEntries(ctypes.Structure):
    """clb_cuda_entries of engine_c/src/driver.h; must stay alive while C uses the driver."""

    _fields_ = (
        ("abi_version", ctypes.c_uint32),
        ("struct_bytes", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ENTRY_NAMES),
    )


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    index: int
    name: str
    capability: tuple[int, int]
    driver_api: int  # 13000 = CUDA 13.0
    total_bytes: int
    multiprocessors: int
    block_shared_bytes: int  # most shared memory of one block, for kernels that ask for it


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Page-locked host memory: `address` for the CPU, `device_address` for kernels."""

    address: int
    device_address: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """A loaded kernel; parameter_bytes is the driver's word on its argument struct, which C compares with its own."""

    name: str
    function: int
    parameter_bytes: int


def probe(index: int = 0) -> DeviceInfo:
    """What GPU `index` is. DeviceError iff there is no driver, no such GPU, or one that cannot serve."""
    driver = _load_bindings()
    _init(driver)
    return _inspect(driver, index)


@dataclass(slots=True)
class CudaDevice:
    """Owns the context, stream, arena, modules and host mappings of one GPU; close() undoes them in reverse."""

    info: DeviceInfo
    context: int
    stream: int
    copy_stream: int = 0  # for weights, while the other one is captured
    arena: int = 0
    arena_bytes: int = 0
    kernels: tuple[Kernel, ...] = ()
    kernels_abi: int = 0  # CLB_KERNELS_ABI of the manifest
    warn: Callable[[str], None] = field(default=lambda _: None)
    driver: Any = None  # cuda.bindings.driver, for measurements
    _kept: list[object] = field(default_factory=list)  # what C points into
    _undo: list[Callable[[], object]] = field(default_factory=list)

    @classmethod
    def open(cls, index: int = 0, *, warn: Callable[[str], None] = lambda _: None) -> Self:
        """Make GPU `index` current in this thread. `warn` gets one line when something works but slowly."""
        driver = _load_bindings()
        _init(driver)
        info = _inspect(driver, index)
        device = _call(driver, "cuDeviceGet", index)
        device_context = _call(driver, "cuDevicePrimaryCtxRetain", device)
        self = cls(info=info, context=int(device_context), stream=0, warn=warn, driver=driver)
        self._undo.append(lambda: driver.cuDevicePrimaryCtxRelease(device))
        try:
            _call(driver, "cuCtxSetCurrent", device_context)
            self.stream, self.copy_stream = self._make_stream(), self._make_stream()
        except BaseException:
            self.close()
            raise
        return self

    def take_arena(self, size: int) -> int:
        """The device's one allocation. DeviceError iff it does not fit, with both numbers."""
        if self.arena:
            raise DeviceError(
                f"the arena was already taken ({self.arena_bytes} bytes); this is a bug, please report it"
            )
        free = self.free_bytes()
        if size > free:
            raise DeviceError(
                f"GPU {self.info.index} ({self.info.name}): {size >> 20} MiB are needed and {free >> 20} MiB are free; "
                "lower batch.slots or model.max_seq_len, or stop other programs that use this GPU"
            )
        address = _call(self.driver, "cuMemAlloc", size)
        self._undo.append(lambda: self.driver.cuMemFree(address))
        self.arena, self.arena_bytes = int(address), size
        return self.arena

    def free_bytes(self) -> int:
        """Device memory that nobody holds now."""
        free, _ = _call(self.driver, "cuMemGetInfo")
        return int(free)

    def load(self, folder: Path) -> tuple[Kernel, ...]:
        """Load all kernels of `folder`, which kernels_cu/build.py wrote.

        DeviceError iff the manifest or a file is missing or broken, or no image suits this GPU. Whether the kernels
        suit this engine is for C to say: it knows the sizes of the argument structs (clb_device_find).
        """
        self.kernels_abi, images = read_manifest(folder)
        chosen, fallback = choose_images(images, self.info.capability)
        if fallback:
            major, minor = self.info.capability
            self.warn(
                f"no cubin for compute capability {major}.{minor}: the driver compiles PTX for sm_80 now, which starts "
                f"slower and runs slower; build with `python3 kernels_cu/build.py --all`"
            )
        kernels: list[Kernel] = []
        for image in chosen:
            module = self._load_image(folder, image)
            kernels += [self._kernel(module, name) for name in sorted(image.kernels)]
        self.kernels = tuple(kernels)
        return self.kernels

    def map_host(self, address: int, size: int) -> int:
        """Page-lock memory of ours (address and size multiples of 4096) and return its device address.

        The mapping behind `address` must outlive this device.
        """
        if address % 4096 or size % 4096 or size <= 0:
            raise DeviceError(
                f"cannot map {size} bytes at offset {address % 4096} of a page: both must be multiples of 4096"
            )
        flags = int(self.driver.CU_MEMHOSTREGISTER_DEVICEMAP)
        _call(self.driver, "cuMemHostRegister", address, size, flags)
        self._undo.append(lambda: self.driver.cuMemHostUnregister(address))
        return int(_call(self.driver, "cuMemHostGetDevicePointer", address, 0))

    def pinned(self, size: int) -> HostMemory:
        """Zeroed page-locked memory for staging and for the device's messages."""
        address = int(_call(self.driver, "cuMemHostAlloc", size, int(self.driver.CU_MEMHOSTALLOC_DEVICEMAP)))
        self._undo.append(lambda: self.driver.cuMemFreeHost(address))
        ctypes.memset(address, 0, size)
        return HostMemory(address, int(_call(self.driver, "cuMemHostGetDevicePointer", address, 0)), size)

    def describe(self, *, pinned: HostMemory, channel_device: int) -> abi.DeviceDesc:
        """All of it for C. The description and what it points to live as long as this device."""
        table = (abi.DeviceKernel * len(self.kernels))(
            *(abi.DeviceKernel(k.name.encode(), k.function, k.parameter_bytes) for k in self.kernels)
        )
        entries = self._entries()
        self._kept += [table, entries]
        return abi.DeviceDesc(
            abi_version=abi.ABI_VERSION,
            struct_bytes=ctypes.sizeof(abi.DeviceDesc),
            kernels_abi=self.kernels_abi,
            kernel_count=len(self.kernels),
            kernels=table,
            entries=ctypes.addressof(entries),
            stream=self.stream,
            copy_stream=self.copy_stream,
            pinned=pinned.address,
            pinned_bytes=pinned.bytes,
            pinned_device=pinned.device_address,
            arena=self.arena,
            arena_bytes=self.arena_bytes,
            channel_device=channel_device,
            multiprocessors=self.info.multiprocessors,
            capability=self.info.capability[0] * 10 + self.info.capability[1],
        )

    def read_bandwidth(self, rounds: int = 4) -> float:
        """Bytes a second that the device reads of its arena, whose contents do not matter; for benches.

        The arena should be far larger than the device's caches.
        """
        function = next(kernel.function for kernel in self.kernels if kernel.name == READ_KERNEL)
        size = min(self.arena_bytes, READ_BYTES) // 16 * 16
        total = _call(self.driver, "cuMemAlloc", 4)
        try:
            arguments = _ReadArguments(self.arena, int(total), size // 16)
            self._read(function, arguments, 1)  # the clocks rise
            return size * rounds / self._read(function, arguments, rounds)
        finally:
            self.driver.cuMemFree(total)

    def _read(self, function: int, arguments: _ReadArguments, rounds: int) -> float:
        """Seconds."""
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        blocks = READ_BLOCKS * self.info.multiprocessors
        self.synchronise()
        started = time.perf_counter()
        for _ in range(rounds):
            _call(
                self.driver, "cuLaunchKernel", function, blocks, 1, 1, READ_THREADS, 1, 1, 0, self.stream,
                ctypes.addressof(pointers), 0,
            )  # fmt: skip
        self.synchronise()
        return time.perf_counter() - started

    def synchronise(self) -> None:
        """Wait until everything in the stream is done. DeviceError iff something in it failed."""
        _call(self.driver, "cuStreamSynchronize", self.stream)

    def close(self) -> None:
        """Undo everything in reverse order. Idempotent; errors are ignored, for the process is about to end."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_stream(self) -> int:
        stream = _call(self.driver, "cuStreamCreate", int(self.driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self._undo.append(lambda: self.driver.cuStreamDestroy(stream))
        return int(stream)

    def _entries(self) -> CudaEntries:
        table = CudaEntries(abi_version=abi.ABI_VERSION, struct_bytes=ctypes.sizeof(CudaEntries), context=self.context)
        for name in ENTRY_NAMES:
            address, _ = _call(self.driver, "cuGetProcAddress", name.encode(), DRIVER_API, 0)
            if not int(address):
                raise DeviceError(f"the NVIDIA driver has no {name}; update it to version 580 or newer, {CPU_HINT}")
            setattr(table, name, int(address))
        return table

    def _load_image(self, folder: Path, image: ModuleImage) -> Any:
        data = read_image(folder, image)
        module = _call(self.driver, "cuModuleLoadData", data + b"\0")  # PTX is a C string; a cubin ignores the byte
        self._undo.append(lambda: self.driver.cuModuleUnload(module))
        return module

    def _kernel(self, module: Any, name: str) -> Kernel:
        """One kernel, allowed all the shared memory that a block can have.

        build.py made sure that it has exactly one parameter.
        """
        function = _call(self.driver, "cuModuleGetFunction", module, name.encode())
        _, size = _call(self.driver, "cuFuncGetParamInfo", function, 0)
        attribute = self.driver.CUfunction_attribute
        static = _call(self.driver, "cuFuncGetAttribute", attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
        _call(
            self.driver,
            "cuFuncSetAttribute",
            function,
            attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            self.info.block_shared_bytes - int(static),
        )
        return Kernel(name, int(function), int(size))


def _load_bindings() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DeviceError(
            f"no GPU: cuda-bindings is not installed; pip install 'cuda-bindings>=13,<14', {CPU_HINT}"
        ) from error


def _init(driver: Any) -> None:
    """Call cuInit and check the driver's version. Without libcuda the bindings raise instead of answering."""
    try:
        (status,) = driver.cuInit(0)
    except Exception as error:
        raise DeviceError(
            f"no GPU: NVIDIA's driver (libcuda.so.1) was not found; install driver 580 or newer, {CPU_HINT}"
        ) from error
    if status == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        raise DeviceError(f"no GPU: the driver sees none; check nvidia-smi and CUDA_VISIBLE_DEVICES, {CPU_HINT}")
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"no GPU: cuInit answered {_name(driver, status)}; check nvidia-smi, {CPU_HINT}")
    version = int(_call(driver, "cuDriverGetVersion"))
    if version < DRIVER_API:
        raise DeviceError(
            f"the NVIDIA driver supports CUDA {version // 1000}.{version % 1000 // 10}, 13.0 is needed; "
            f"update it to version 580 or newer, {CPU_HINT}"
        )


def _inspect(driver: Any, index: int) -> DeviceInfo:
    count = int(_call(driver, "cuDeviceGetCount"))
    if not 0 <= index < count:
        raise DeviceError(f"GPU {index} does not exist: this machine has {count}; choose 0 to {count - 1}")
    device = _call(driver, "cuDeviceGet", index)
    attribute = driver.CUdevice_attribute

    def read(name: str) -> int:
        return int(_call(driver, "cuDeviceGetAttribute", getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device))

    capability = (read("COMPUTE_CAPABILITY_MAJOR"), read("COMPUTE_CAPABILITY_MINOR"))
    name = bytes(_call(driver, "cuDeviceGetName", 128, device)).split(b"\0", 1)[0].decode()
    if capability < MINIMUM_CAPABILITY:
        raise DeviceError(
            f"GPU {index} ({name}) has compute capability {capability[0]}.{capability[1]}, "
            f"8.0 or newer is needed; choose another GPU, {CPU_HINT}"
        )
    total = int(_call(driver, "cuDeviceTotalMem", device))
    return DeviceInfo(
        index=index,
        name=name,
        capability=capability,
        driver_api=int(_call(driver, "cuDriverGetVersion")),
        total_bytes=total,
        multiprocessors=read("MULTIPROCESSOR_COUNT"),
        block_shared_bytes=read("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
    )


def _call(driver: Any, name: str, *arguments: Any) -> Any:
    """One driver call: its value, its tuple of values, or None. DeviceError iff it fails."""
    status, *values = getattr(driver, name)(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"{name} answered {_name(driver, status)}; {_remedy(driver, status)}")
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def _name(driver: Any, status: Any) -> str:
    found, name = driver.cuGetErrorName(status)
    return name.decode() if found == driver.CUresult.CUDA_SUCCESS else f"error {int(status)}"


def _remedy(driver: Any, status: Any) -> str:
    result = driver.CUresult
    remedies = {
        result.CUDA_ERROR_OUT_OF_MEMORY: "stop other programs that use this GPU, or lower batch.slots",
        result.CUDA_ERROR_DEVICE_UNAVAILABLE: "another process holds this GPU exclusively; stop it or choose another GPU",
        result.CUDA_ERROR_NO_BINARY_FOR_GPU: "these kernels are for another GPU; rebuild them with `make cubins`",
        result.CUDA_ERROR_UNSUPPORTED_PTX_VERSION: "update the NVIDIA driver to version 580 or newer",
    }
    return str(remedies.get(status, f"check nvidia-smi and the kernel log, {CPU_HINT}"))
