"""What the CUDA tests and bench/gpu_check.sh share: building the trial library and the cubins, ctypes mirrors, devices.

Two backends with one face: Gpu (a real device through colibrid.engine.device_cuda) and Fake (a fake libcuda whose
kernels are the host twin). Needs the standard library and colibrid's engine.abi and engine.device_cuda only; numpy is
used by the callers.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kernel_abi
from cuda_mirrors import BucketArgs, Driver, HostRouting, Launch, RouterArgs, SeamConfig

from colibrid.engine import abi, device_cuda

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "cuda"
KERNELS = ("seam_gather", "clb_router_fp32", "clb_bucket", "seam_publish")
PARAMETER_BYTES = (48, 136, 64, 72)  # of KERNELS
ROWS = 8
ROUTER_THREADS = 1024
BLOCK_TOKENS = 64

_P = ctypes.c_void_p
_U64 = ctypes.c_uint64


def build_library(folder: Path) -> ctypes.CDLL | None:
    """The trial library, or None without a C compiler."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    engine = ROOT / "engine_c"
    target = folder / "libseam.so"
    sources = [HERE / name for name in ("seam_trial.c", "seam_measure.c", "seam_fake.c")]
    sources += [engine / "src" / name for name in ("channel.c", "routing.c", "driver_cuda.c")]
    flags = ["-std=c11", "-D_POSIX_C_SOURCE=200809L", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    includes = [f"-I{engine / 'include'}", f"-I{engine / 'src'}"]
    subprocess.run([compiler, *flags, *includes, "-o", str(target), *map(str, sources), "-lm"], check=True)
    library = ctypes.CDLL(str(target))
    library.seam_arena_bytes.restype = _U64
    library.seam_pinned_bytes.restype = _U64
    library.seam_table.restype = _U64
    library.seam_table.argtypes = [_P]
    library.seam_driver.restype = ctypes.POINTER(Driver)
    library.seam_driver.argtypes = [_P]
    library.seam_graph.restype = _P
    library.seam_graph.argtypes = [_P]
    library.seam_close.argtypes = [_P]
    library.seam_close.restype = None
    library.seam_turn.argtypes = [_P, ctypes.POINTER(ctypes.c_uint32)]
    library.seam_measure.argtypes = [_P, ctypes.c_uint32, ctypes.c_uint32, _P, _P]
    library.seam_period.argtypes = [_P, ctypes.c_uint32, ctypes.c_uint32, _P, _P]
    library.seam_time.argtypes = [_P, _P, _P, ctypes.c_uint32, ctypes.c_uint32, _P]
    library.clb_device_attach.argtypes = [_P, _P, _P]
    library.seam_open.argtypes = [_P, _P, _P]
    library.clb_command_push.argtypes = [_P, _P, ctypes.c_uint32]
    library.clb_event_pop.argtypes = [_P, _P, ctypes.c_uint32]
    library.clb_result_advance.argtypes = [_P, ctypes.c_uint32, _U64]
    library.clb_channel_init.argtypes = [_P, _U64, _P]
    library.seam_fake_kernel.restype = _P
    library.seam_fake_reset.argtypes = [ctypes.c_uint32]
    library.seam_fake_lazy.argtypes = [ctypes.c_uint32]
    return library


def kernel_sources() -> list[Path]:
    """The kernels and the trial's."""
    return [*sorted((ROOT / "kernels_cu").glob("*.cu")), HERE / "seam_kernels.cu"]


def is_current(folder: Path) -> bool:
    """Whether the folder holds images of all sources, newer than these and their headers."""
    try:
        made = (folder / "manifest.json").stat().st_mtime
        held = {image["source"] for image in json.loads((folder / "manifest.json").read_text())["images"]}
    except (OSError, ValueError, KeyError):
        return False
    sources = kernel_sources()
    read = [*sources, *(ROOT / "kernels_cu").glob("*.*h")]
    return {source.stem for source in sources} <= held and all(path.stat().st_mtime <= made for path in read)


def build_cubins(folder: Path) -> str | None:
    """Compile all kernels and the trial's; None, or why not."""
    script = ROOT / "kernels_cu" / "build.py"
    sources = list(map(str, kernel_sources()))
    done = subprocess.run(
        [sys.executable, str(script), "--out", str(folder), *sources], capture_output=True, text=True, check=False
    )
    if done.returncode == 3:
        return "nvcc was not found"
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    return None


class Mapping:
    """A memfd mapping, as the channel is one: 4096-aligned, shared, zeroed."""

    def __init__(self, size: int) -> None:
        self.bytes = (size + 4095) // 4096 * 4096
        fd = os.memfd_create("seam", os.MFD_CLOEXEC)
        os.ftruncate(fd, self.bytes)
        self.view = mmap.mmap(fd, self.bytes)
        os.close(fd)
        self._anchor = ctypes.c_char.from_buffer(self.view)
        self.address = ctypes.addressof(self._anchor)


class Fake:
    """Host memory as device memory; see seam_fake.c."""

    name = "fake"

    def __init__(self, library: ctypes.CDLL, *, arena_bytes: int = 64 << 20) -> None:
        self._entries = device_cuda.CudaEntries()
        self._library = library
        self._turns = 0
        library.seam_fake_reset(0)
        library.seam_fake_lazy(1)
        library.seam_fake_entries(ctypes.byref(self._entries))
        self._table = (abi.DeviceKernel * len(KERNELS))(
            *(
                abi.DeviceKernel(name.encode(), library.seam_fake_kernel(i), PARAMETER_BYTES[i])
                for i, name in enumerate(KERNELS)
            )
        )
        self.kernels = {kernel.name.decode(): kernel.function for kernel in self._table}
        self.stream = 0
        self._memory = Mapping(arena_bytes)
        self._free = self._memory.address
        self._kept: list[Mapping] = []

    def tick(self) -> None:
        """Let the pretended device finish a step every other turn, so that two are in flight in between."""
        self._turns += 1
        if self._turns % 2 == 0:
            self._library.seam_fake_tick()

    def arena(self, size: int) -> int:
        """The rest of the arena begins at the returned address."""
        address = (self._free + 255) // 256 * 256
        self._free = address + size
        assert self._free <= self._memory.address + self._memory.bytes, "the test's arena is too small"
        return address

    def describe(self, channel: Mapping, pinned_bytes: int, arena_bytes: int) -> abi.DeviceDesc:
        pinned = Mapping(pinned_bytes)
        self._kept.append(pinned)
        return abi.DeviceDesc(
            abi_version=abi.ABI_VERSION, struct_bytes=ctypes.sizeof(abi.DeviceDesc), kernels_abi=kernel_abi.constant("CLB_KERNELS_ABI"),
            kernel_count=len(KERNELS), kernels=self._table, entries=ctypes.addressof(self._entries),
            stream=self.stream, pinned=pinned.address, pinned_bytes=pinned.bytes, pinned_device=pinned.address,
            arena=self.arena(arena_bytes), arena_bytes=arena_bytes, channel_device=channel.address,
        )  # fmt: skip

    def close(self) -> None:
        self._kept.clear()


class Gpu:
    """GPU 0 with the trial's cubins loaded; one arena for everything."""

    name = "cuda"

    def __init__(self, cubins: Path, *, arena_bytes: int = 64 << 20) -> None:
        self.device = device_cuda.CudaDevice.open(0)
        try:
            self._free = self.device.take_arena(arena_bytes)
            self._end = self._free + arena_bytes
            self.kernels = {kernel.name: kernel.function for kernel in self.device.load(cubins)}
        except BaseException:
            self.device.close()
            raise
        self.stream = self.device.stream

    def arena(self, size: int) -> int:
        address = (self._free + 255) // 256 * 256
        self._free = address + size
        assert self._free <= self._end, "the test's arena is too small"
        return address

    def tick(self) -> None:
        """A real device goes on by itself."""

    def pinned(self, size: int) -> device_cuda.HostMemory:
        return self.device.pinned(size)

    def describe(self, channel: Mapping, pinned_bytes: int, arena_bytes: int) -> abi.DeviceDesc:
        """The worker's description, with a part of the arena, so that several users can share it."""
        desc = self.device.describe(
            pinned=self.pinned(pinned_bytes), channel_device=self.device.map_host(channel.address, channel.bytes)
        )
        desc.arena, desc.arena_bytes = self.arena(arena_bytes), arena_bytes
        return desc

    def close(self) -> None:
        self.device.close()


class Trial:
    """One seam trial over a fresh channel: a daemon's view and an engine's turn in one thread."""

    def __init__(
        self,
        library: ctypes.CDLL,
        backend: Fake | Gpu,
        table: Any,  # (rows, experts) float32 numpy array: the stand-in model
        *,
        k: int,
        k_max: int,
        score: int = 0,
        renormalise: int = 1,
        records: int = 8,
        slots: int = ROWS,
        edge: int = 1,
    ) -> None:
        rows, experts = table.shape
        self.library, self.backend, self.slots, self.records = library, backend, slots, records
        self.shape = abi.ChannelConfig(
            abi_version=abi.ABI_VERSION, struct_bytes=ctypes.sizeof(abi.ChannelConfig), slots=slots, layers=1,
            vocab_size=rows, hidden=16, max_experts=experts, max_seq_len=64, result_records=records,
        )  # fmt: skip
        self.layout = abi.ChannelLayout()
        _ok(library.clb_channel_plan(ctypes.byref(self.shape), ctypes.byref(self.layout)))
        self.memory = Mapping(self.layout.total_bytes)
        self.base = self.memory.address
        _ok(library.clb_channel_init(self.base, self.memory.bytes, ctypes.byref(self.shape)))
        self.desc = backend.describe(
            self.memory, library.seam_pinned_bytes(), library.seam_arena_bytes(experts, k_max, rows)
        )
        self.config = SeamConfig(
            channel_base=self.base, channel=ctypes.pointer(self.shape), device=ctypes.pointer(self.desc),
            channel_bytes=self.memory.bytes, rows=rows, experts=experts, k=k, k_max=k_max, score=score,
            renormalise=renormalise, routed_scale=1.0, edge=edge,
        )  # fmt: skip
        self.handle, self.error = _P(), abi.Error()
        self.status = int(
            library.seam_open(ctypes.byref(self.config), ctypes.byref(self.handle), ctypes.byref(self.error))
        )
        if self.status == 0:
            driver = library.seam_driver(self.handle)
            address = library.seam_table(self.handle)
            _ok(driver.contents.copy_in(driver, backend.stream, address, table.ctypes.data, table.nbytes))
            _ok(driver.contents.stream_wait(driver, backend.stream))

    def open(
        self,
        slot: int,
        generation: int,
        prompt: list[int],
        max_tokens: int,
        *,
        k: int = 0,
        threshold: float = 0.0,
        stops: tuple[int, ...] = (),
    ) -> None:
        """Fill the request block and push OPEN and PREFILL."""
        block = self.base + self.layout.requests + slot * self.layout.request_stride
        request = abi.Request.from_address(block)
        request.generation, request.prompt_tokens, request.max_tokens = generation, len(prompt), max_tokens
        request.stop_count = len(stops)
        (ctypes.c_int32 * len(prompt)).from_address(block + self.layout.request_tokens)[:] = prompt
        if stops:
            (ctypes.c_int32 * len(stops)).from_address(block + self.layout.request_stops)[:] = stops
        policy = abi.ExpertPolicy.from_address(block + self.layout.request_policy)
        policy.k, policy.threshold = k, threshold
        self.push(
            abi.Command(kind=abi.CommandKind.OPEN, slot=slot, generation=generation),
            abi.Command(kind=abi.CommandKind.PREFILL, slot=slot, generation=generation, start=0, count=len(prompt)),
        )

    def push(self, *commands: abi.Command) -> None:
        _ok(self.library.clb_command_push(self.base, (abi.Command * len(commands))(*commands), len(commands)))

    def turn(self) -> int:
        worked = ctypes.c_uint32()
        status = int(self.library.seam_turn(self.handle, ctypes.byref(worked)))
        self.backend.tick()
        return status

    def events(self) -> list[abi.Event]:
        batch = (abi.Event * 64)()
        count = self.library.clb_event_pop(self.base, batch, 64)
        return list(batch[:count])

    def record(self, slot: int, index: int) -> abi.Record:
        at = self.base + self.layout.results + slot * self.layout.result_stride + self.layout.result_records
        return abi.Record.from_address(at + index % self.records * ctypes.sizeof(abi.Record))

    def advance(self, slot: int, tail: int) -> None:
        _ok(self.library.clb_result_advance(self.base, slot, tail))

    def close(self) -> None:
        if self.handle:
            self.library.seam_close(self.handle)
            self.handle = _P()


def make_driver(library: ctypes.CDLL, backend: Fake | Gpu) -> Driver:
    """A driver table over a small channel of its own."""
    driver = Driver()
    channel = Mapping(4096)
    driver.keep = (channel, backend.describe(channel, 4096, 256))  # type: ignore[attr-defined]
    _ok(library.clb_device_attach(ctypes.byref(driver.keep[1]), ctypes.byref(driver), None))  # type: ignore[attr-defined]
    _ok(driver.bind(ctypes.byref(driver)))
    return driver


def route_on_host(
    library: ctypes.CDLL, logits: Any, policies: Any, *, k: int, k_max: int, score: int, renormalise: int,
    scale: float, limit: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """The host twin over (tokens, experts) float32 logits and (tokens, 2) policies as uint32 bits. limit: 0 = none."""
    import numpy as np

    tokens, experts = logits.shape
    layer = abi.LayerDesc(
        experts=experts, experts_per_token=k, score=score, renormalise=renormalise, routed_scale=scale
    )
    out = {
        "indices": np.zeros((tokens, k_max), np.uint32),
        "weights": np.zeros((tokens, k_max), np.float32),
        "kept": np.zeros(tokens, np.uint32),
        "trimmed": np.zeros(tokens, np.uint32),
        "dropped": np.zeros(tokens, np.uint32),
        "status": np.zeros(tokens, np.int32),
        "counts": np.zeros(experts, np.uint32),
        "offsets": np.zeros(experts + 1, np.uint32),
        "token_list": np.zeros(tokens * k_max, np.uint32),
        "place_list": np.zeros(tokens * k_max, np.uint32),
    }
    arguments = HostRouting(
        logits=logits.ctypes.data, layer=ctypes.addressof(layer), policies=policies.ctypes.data,
        logits_stride=experts, tokens=tokens, k_max=k_max, max_tokens_per_expert=limit,
        **{name: array.ctypes.data for name, array in out.items()},
    )  # fmt: skip
    library.clb_routing_run(ctypes.byref(arguments))
    return out


class RouterRun:
    """Buffers of one router and bucket launch on a backend, for up to max_tokens."""

    def __init__(
        self, backend: Fake | Gpu, *, max_tokens: int, experts: int, k: int, k_max: int, score: int = 0,
        renormalise: int = 1, scale: float = 1.0,
    ) -> None:  # fmt: skip
        self.backend, self.max_tokens, self.experts, self.k_max = backend, max_tokens, experts, k_max
        blocks = max(1, -(-max_tokens // BLOCK_TOKENS))
        ranks = max_tokens * k_max * 4
        sizes = {
            "logits": max_tokens * experts * 4, "policy": max_tokens * 8, "token_count": 4, "indices": ranks,
            "weights": ranks, "kept": max_tokens * 4, "block_counts": blocks * experts * 4, "counts": experts * 4,
            "offsets": (experts + 1) * 4, "tokens": ranks, "places": ranks,
        }  # fmt: skip
        self.sizes = sizes
        self.at = {name: backend.arena(size) for name, size in sizes.items()}
        at = self.at
        self.router = RouterArgs(
            logits=at["logits"], policy=at["policy"], token_count=at["token_count"], indices=at["indices"],
            weights=at["weights"], kept=at["kept"], block_counts=at["block_counts"], logits_stride=experts,
            policy_stride=1, experts=experts, k=k, k_max=k_max, score=score, renormalise=renormalise,
            routed_scale=scale, block_tokens=BLOCK_TOKENS, not_finite=abi.Status.NOT_FINITE,
        )  # fmt: skip
        self.bucket = BucketArgs(
            indices=at["indices"], block_counts=at["block_counts"], token_count=at["token_count"], counts=at["counts"],
            offsets=at["offsets"], tokens=at["tokens"], places=at["places"], experts=experts, k_max=k_max,
        )  # fmt: skip
        shape = {"grid": (ctypes.c_uint32 * 3)(blocks, 1, 1), "block": (ctypes.c_uint32 * 3)(ROUTER_THREADS, 1, 1)}
        kernels = backend.kernels
        self.launches = (
            Launch(function=kernels["clb_router_fp32"], args=ctypes.addressof(self.router), edge=1, **shape),
            Launch(function=kernels["clb_bucket"], args=ctypes.addressof(self.bucket), edge=1, **shape),
        )

    def upload(self, driver: Driver, logits: Any, policies: Any) -> None:
        """Poison all outputs, then copy the inputs."""
        import numpy as np

        this = ctypes.byref(driver)
        for name in ("indices", "weights", "kept", "block_counts", "counts", "offsets", "tokens", "places"):
            _ok(driver.fill(this, self.backend.stream, self.at[name], 0xAB, self.sizes[name]))
        count = np.array([logits.shape[0]], np.uint32)
        for name, array in (("logits", logits), ("policy", policies), ("token_count", count)):
            if array.nbytes:
                _ok(driver.copy_in(this, self.backend.stream, self.at[name], array.ctypes.data, array.nbytes))
        _ok(driver.stream_wait(this, self.backend.stream))

    def run(self, driver: Driver) -> None:
        this = ctypes.byref(driver)
        for launch in self.launches:
            _ok(driver.launch(this, self.backend.stream, ctypes.byref(launch)))
        _ok(driver.stream_wait(this, self.backend.stream))

    def download(self, driver: Driver, name: str, array: Any) -> Any:
        this = ctypes.byref(driver)
        if array.nbytes:
            _ok(driver.copy_out(this, self.backend.stream, array.ctypes.data, self.at[name], array.nbytes))
            _ok(driver.stream_wait(this, self.backend.stream))
        return array


def _ok(status: int) -> None:
    assert status == 0, f"status {status}"
