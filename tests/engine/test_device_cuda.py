"""Setting up a GPU, on a scripted cuda.bindings: order, what C gets, and every refusal with its remedy."""

from __future__ import annotations

import ctypes
import hashlib
import json
import subprocess
import sys
from enum import IntEnum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from colibrid.engine import abi, device_cuda
from colibrid.engine.device_cuda import CudaDevice, DeviceError

if TYPE_CHECKING:
    from pathlib import Path


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_DEVICE_UNAVAILABLE = 46
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803


class Attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97


class Bindings:
    """cuda.bindings.driver as far as it is called. Host memory stands in for pinned memory; `log` keeps the calls."""

    CUresult = Result
    CUdevice_attribute = Attribute
    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES=1, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8
    )
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CU_MEMHOSTREGISTER_DEVICEMAP = 2
    CU_MEMHOSTALLOC_DEVICEMAP = 2

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fail: dict[str, Result] = {}
        self.version = 13000
        self.count = 1
        self.attributes = {75: 9, 76: 0, 16: 132, 97: 232448}
        self.dynamic_shared: list[int] = []  # what kernels were allowed
        self.free = 1 << 30
        self.missing_entry = ""
        self.fail_at = 0  # the number of the call that fails; 0: none
        self._pinned: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        values = {
            "cuInit": (), "cuDriverGetVersion": (self.version,), "cuDeviceGetCount": (self.count,),
            "cuDeviceGet": (0,), "cuDeviceGetName": (b"Testor 9000\0\0",), "cuDeviceTotalMem": (2 << 30,),
            "cuDevicePrimaryCtxRetain": (0xC0,), "cuStreamCreate": (0x57,), "cuMemGetInfo": (self.free, 2 << 30),
            "cuMemAlloc": (0xA000,), "cuModuleLoadData": (0x30D,), "cuModuleGetFunction": (0xF0,),
            "cuFuncGetParamInfo": (0, 64), "cuFuncGetAttribute": (448,), "cuMemHostGetDevicePointer": (0xD000,),
        }.get(name, ())  # fmt: skip

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.log.append(name)
            if name == "cuGetErrorName":
                return (Result.CUDA_SUCCESS, Result(arguments[0]).name.encode())
            if len(self.log) == self.fail_at:
                return (Result.CUDA_ERROR_OUT_OF_MEMORY, *(None for _ in values))
            if name in self.fail:
                return (self.fail[name], *(None for _ in values))
            if name == "cuFuncSetAttribute":
                self.dynamic_shared.append(arguments[2])
            if name == "cuDeviceGetAttribute":
                return (Result.CUDA_SUCCESS, self.attributes[int(arguments[0])])
            if name == "cuGetProcAddress":
                found = 0 if arguments[0].decode() == self.missing_entry else 0xE000 + len(arguments[0])
                assert arguments[1] == 13000
                return (Result.CUDA_SUCCESS, found, 0)
            if name == "cuMemHostAlloc":
                self._pinned.append(ctypes.create_string_buffer(b"\xff" * arguments[0]))
                return (Result.CUDA_SUCCESS, ctypes.addressof(self._pinned[-1]))
            return (Result.CUDA_SUCCESS, *values)

        return call


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Bindings:
    bindings = Bindings()
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", bindings)
    return bindings


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    entry = {
        "file": "router.sm_80.ptx", "source": "router", "arch": "sm_80", "kind": "ptx",
        "sha256": hashlib.sha256(b"text").hexdigest(), "kernels": {"clb_bucket": {}},
    }  # fmt: skip
    (tmp_path / "router.sm_80.ptx").write_bytes(b"text")
    (tmp_path / "manifest.json").write_text(json.dumps({"abi_version": 3, "images": [entry]}))
    return tmp_path


def test_reading_the_arena_leaves_nothing_behind(driver: Bindings, kernels: Path) -> None:
    """The bench's read gives bytes a second; whichever of its calls fails, its memory is given back and the call named."""
    manifest = json.loads((kernels / "manifest.json").read_text())
    manifest["images"][0]["kernels"] = {"clb_read": {}}
    (kernels / "manifest.json").write_text(json.dumps(manifest))
    with CudaDevice.open() as device:
        device.take_arena(1 << 20)
        device.load(kernels)
        driver.log.clear()
        assert device.read_bandwidth() > 0
        calls = list(dict.fromkeys(driver.log))
        assert driver.log.count("cuLaunchKernel") == 1 + 4
        assert driver.log[-1] == "cuMemFree"
        for name in set(calls) - {"cuMemFree"}:
            driver.log.clear()
            driver.fail = {name: Result.CUDA_ERROR_INVALID_VALUE}
            with pytest.raises(DeviceError, match=f"{name} answered CUDA_ERROR_INVALID_VALUE"):
                device.read_bandwidth()
            assert ("cuMemFree" in driver.log) == (name != "cuMemAlloc")
        driver.fail = {}


def test_importing_needs_no_cuda() -> None:
    """The module is imported on machines without any CUDA software: it reaches for the bindings only when asked."""
    program = "import sys, colibrid.engine.device_cuda; sys.exit('cuda' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_without_cuda_bindings_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cuda-bindings: one line with the command to install it."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(DeviceError, match=r"^no GPU: cuda-bindings is not installed; pip install 'cuda-bindings"):
        device_cuda.probe()


def test_without_a_driver_cuinit_raises(driver: Bindings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bindings raise instead of answering when libcuda is absent: that means no GPU."""

    def raising(_: int) -> None:
        raise RuntimeError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(driver, "cuInit", raising, raising=False)
    with pytest.raises(DeviceError, match=r"^no GPU: NVIDIA's driver \(libcuda\.so\.1\) was not found; install"):
        device_cuda.probe()


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (Result.CUDA_ERROR_NO_DEVICE, "no GPU: the driver sees none; check nvidia-smi and CUDA_VISIBLE_DEVICES"),
        (Result.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "no GPU: cuInit answered CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
    ],
)
def test_a_failing_init_says_why(driver: Bindings, status: Result, text: str) -> None:
    """No device and any other answer of cuInit are told apart."""
    driver.fail["cuInit"] = status
    with pytest.raises(DeviceError, match=text):
        device_cuda.probe()


def test_an_old_driver_is_refused_with_both_versions(driver: Bindings) -> None:
    """A driver below CUDA 13.0 is named with what it has and what is needed."""
    driver.version = 12040
    with pytest.raises(DeviceError, match=r"supports CUDA 12\.4, 13\.0 is needed; update it to version 580"):
        device_cuda.probe()


def test_an_index_out_of_range_is_refused(driver: Bindings) -> None:
    """GPU numbers outside the machine's are refused with the range."""
    with pytest.raises(DeviceError, match="GPU 1 does not exist: this machine has 1; choose 0 to 0"):
        device_cuda.probe(1)


def test_an_old_gpu_is_refused_by_name(driver: Bindings) -> None:
    """Compute capability below 8.0 is refused with the GPU's name."""
    driver.attributes[75] = 7
    driver.attributes[76] = 5
    with pytest.raises(DeviceError, match=r"GPU 0 \(Testor 9000\) has compute capability 7\.5, 8\.0 or newer"):
        device_cuda.probe()


def test_probe_tells_what_the_gpu_is(driver: Bindings) -> None:
    """Name, capability, memory and versions come back."""
    assert device_cuda.probe() == device_cuda.DeviceInfo(0, "Testor 9000", (9, 0), 13000, 2 << 30, 132, 232448)


def test_close_undoes_everything_in_reverse(driver: Bindings, kernels: Path) -> None:
    """Mappings, modules, arena, stream and context are given back, last taken first, and only once."""
    device = CudaDevice.open()
    device.take_arena(4096)
    device.load(kernels)
    device.map_host(8192, 4096)
    device.pinned(64)
    driver.log.clear()
    device.close()
    device.close()
    assert driver.log == [
        "cuMemFreeHost", "cuMemHostUnregister", "cuModuleUnload", "cuMemFree", "cuStreamDestroy", "cuStreamDestroy",
        "cuDevicePrimaryCtxRelease",
    ]  # fmt: skip


@pytest.mark.parametrize("call", ["cuCtxSetCurrent", "cuStreamCreate"])
def test_a_failing_open_holds_nothing(driver: Bindings, call: str) -> None:
    """When opening fails half-way the context is released, and the message says which call failed."""
    driver.fail[call] = Result.CUDA_ERROR_DEVICE_UNAVAILABLE
    with pytest.raises(DeviceError, match=rf"{call} answered CUDA_ERROR_DEVICE_UNAVAILABLE; another process holds"):
        CudaDevice.open()
    assert driver.log[-1] == "cuDevicePrimaryCtxRelease"


def test_an_arena_that_does_not_fit_names_both_numbers(driver: Bindings) -> None:
    """Too large an arena is refused before the driver is asked; a second one is a bug."""
    with CudaDevice.open() as device:
        with pytest.raises(DeviceError, match=r"4096 MiB are needed and 1024 MiB are free; lower batch\.slots"):
            device.take_arena(4 << 30)
        assert "cuMemAlloc" not in driver.log
        assert device.take_arena(4096) == 0xA000
        with pytest.raises(DeviceError, match="already taken"):
            device.take_arena(4096)


@pytest.mark.parametrize(("address", "size"), [(4097, 4096), (4096, 100), (4096, 0)])
def test_only_whole_pages_can_be_mapped(driver: Bindings, address: int, size: int) -> None:
    """The driver would round silently; we refuse."""
    with CudaDevice.open() as device, pytest.raises(DeviceError, match="multiples of 4096"):
        device.map_host(address, size)


def test_ptx_is_loaded_with_a_warning(driver: Bindings, kernels: Path) -> None:
    """Where no cubin fits, PTX is taken and one line says what it costs and how to build the right one."""
    warnings: list[str] = []
    with CudaDevice.open(warn=warnings.append) as device:
        assert device.load(kernels) == (device_cuda.Kernel("clb_bucket", 0xF0, 64),)
    assert len(warnings) == 1
    assert "no cubin for compute capability 9.0" in warnings[0]


def test_a_module_that_does_not_load_says_so(driver: Bindings, kernels: Path) -> None:
    """A cubin for another GPU is the driver's refusal with our remedy."""
    driver.fail["cuModuleLoadData"] = Result.CUDA_ERROR_NO_BINARY_FOR_GPU
    with CudaDevice.open() as device, pytest.raises(DeviceError, match="for another GPU; rebuild them with"):
        device.load(kernels)


def test_the_description_carries_everything(driver: Bindings, kernels: Path) -> None:
    """C gets arena, pinned memory, channel mapping, kernels with the driver's sizes, and all entry points."""
    with CudaDevice.open() as device:
        device.take_arena(4096)
        device.load(kernels)
        pinned = device.pinned(64)
        assert ctypes.string_at(pinned.address, 64) == bytes(64)
        desc = device.describe(pinned=pinned, channel_device=0xCCCC)
        entries = device_cuda.CudaEntries.from_address(desc.entries)
        assert (desc.abi_version, desc.struct_bytes) == (abi.ABI_VERSION, ctypes.sizeof(abi.DeviceDesc))
        assert (desc.kernels_abi, desc.kernel_count, desc.stream) == (3, 1, 0x57)
        assert (desc.arena, desc.arena_bytes, desc.channel_device) == (0xA000, 4096, 0xCCCC)
        assert (desc.pinned, desc.pinned_bytes, desc.pinned_device) == (pinned.address, 64, 0xD000)
        kernel = desc.kernels[0]
        assert (kernel.name, kernel.function, kernel.parameter_bytes) == (b"clb_bucket", 0xF0, 64)
        assert entries.context == 0xC0
        assert all(getattr(entries, name) for name in device_cuda.ENTRY_NAMES)


def test_a_missing_entry_point_asks_for_a_newer_driver(driver: Bindings, kernels: Path) -> None:
    """A driver function that is not there is named."""
    driver.missing_entry = "cuGraphUpload"
    with CudaDevice.open() as device:
        device.load(kernels)
        pinned = device.pinned(64)
        with pytest.raises(DeviceError, match="has no cuGraphUpload; update it to version 580"):
            device.describe(pinned=pinned, channel_device=1)


PAIRS = (
    ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease"), ("cuStreamCreate", "cuStreamDestroy"),
    ("cuModuleLoadData", "cuModuleUnload"), ("cuMemAlloc", "cuMemFree"), ("cuMemHostAlloc", "cuMemFreeHost"),
    ("cuMemHostRegister", "cuMemHostUnregister"),
)  # fmt: skip


def test_whichever_call_fails_what_was_made_is_given_back(driver: Bindings, kernels: Path) -> None:
    """The n-th driver call of setting a device up fails, for every n: one line names it, and nothing is left behind."""
    for number in range(1, 1000):
        driver.log.clear()
        driver.fail_at = number
        device = None
        try:
            device = CudaDevice.open()
            device.load(kernels)
            device.take_arena(4096)
            pinned = device.pinned(64)
            device.describe(pinned=pinned, channel_device=device.map_host(8192, 4096))
        except DeviceError as error:
            failing = driver.log[number - 1]
            assert f"{failing} answered CUDA_ERROR_OUT_OF_MEMORY" in str(error)
        else:
            assert number > 30
            break
        finally:
            driver.fail_at = 0
            if device is not None:
                device.close()
        made = driver.log[: number - 1] + driver.log[number:]  # what failed made nothing
        for make, undo in PAIRS:
            assert made.count(make) == made.count(undo), (failing, make)
    else:
        pytest.fail("it never comes to its end")
