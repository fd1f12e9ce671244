"""The GPU of one engine: opened, sized and handed to the engine's configuration before it opens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from colibrid.engine.cubins import CPU_HINT, DeviceError
from colibrid.engine.device_cuda import CudaDevice, DeviceInfo, probe
from colibrid.engine.library import CUBIN_FOLDER

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from pathlib import Path

    from colibrid.engine.channel import EngineChannel
    from colibrid.engine.configure import EngineSetup
    from colibrid.engine.state import MemoryPlan

_PAGE = 4096


def find_gpu(index: int = 0, cubins: Path = CUBIN_FOLDER) -> DeviceInfo:
    """The GPU that an engine would take. DeviceError: there is none, or no kernels were built."""
    require_kernels(cubins)
    return probe(index)


def require_kernels(cubins: Path = CUBIN_FOLDER) -> None:
    """DeviceError iff this installation was built without CUDA kernels."""
    if not (cubins / "manifest.json").is_file():
        raise DeviceError(
            f"this installation was built without CUDA kernels; build it where nvcc 13 is installed, {CPU_HINT}"
        )


class Attached(NamedTuple):
    """A GPU that waits for its engine to open."""

    plan: MemoryPlan
    device: CudaDevice


def attach_gpu(
    setup: EngineSetup,
    channel: EngineChannel,
    stack: ExitStack,
    *,
    index: int = 0,
    cubins: Path = CUBIN_FOLDER,
    warn: Callable[[str], None] = lambda _: None,
) -> Attached:
    """Open GPU `index` for the engine that `setup` describes.

    `stack` gets what closes the GPU again; the engine must be closed before. DeviceError or ConfigError: there is no
    GPU that can serve, or the engine does not fit.
    """
    require_kernels(cubins)
    device = CudaDevice.open(index, warn=warn)
    stack.callback(device.close)
    device.load(cubins)
    plan = setup.fit_gpu(device.free_bytes())
    device.take_arena(plan.arena)
    pinned = device.pinned(plan.pinned)
    mapped = device.map_host(channel.base, -(-channel.size // _PAGE) * _PAGE)
    setup.use_device(device.describe(pinned=pinned, channel_device=mapped))
    return Attached(plan, device)
