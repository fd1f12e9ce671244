"""Fixtures of the CUDA tests. Without a GPU, nvcc or a C compiler the tests that need them say so and are skipped."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cuda_harness
import kernel_harness

from colibrid.engine import device_cuda
from colibrid.engine.library import CUBIN_FOLDER

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    built = cuda_harness.build_library(tmp_path_factory.mktemp("seam"))
    if built is None:
        pytest.skip("no C compiler")
    return built


@pytest.fixture(scope="session")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All kernels and the trial's: those of the package if bench/gpu_check.sh has built them in, and they are new."""
    if cuda_harness.is_current(CUBIN_FOLDER):
        return CUBIN_FOLDER
    folder = tmp_path_factory.mktemp("cubins")
    if reason := cuda_harness.build_cubins(folder):
        pytest.skip(reason)
    return folder


@pytest.fixture(params=["fake", "cuda"])
def backend(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Iterator[cuda_harness.Fake | cuda_harness.Gpu]:
    """The same test on the host twin and on the GPU."""
    if request.param == "fake":
        made: cuda_harness.Fake | cuda_harness.Gpu = cuda_harness.Fake(library)
    else:
        try:
            device_cuda.probe(0)
        except device_cuda.DeviceError as error:
            pytest.skip(str(error))
        made = cuda_harness.Gpu(request.getfixturevalue("cubins"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    built = kernel_harness.build_emulator(tmp_path_factory.mktemp("emulator"))
    if built is None:
        pytest.skip("no C++ compiler")
    return built


@pytest.fixture(scope="session")
def gpu_machine(request: pytest.FixtureRequest) -> Iterator[kernel_harness.OnGpu]:
    try:
        device_cuda.probe(0)
    except device_cuda.DeviceError as error:
        pytest.skip(str(error))
    library, cubins = (request.getfixturevalue(name) for name in ("library", "cubins"))
    made = kernel_harness.OnGpu(library, cubins)
    yield made
    made.close()


@pytest.fixture(params=["emulated", "emulated backwards", "cuda"])
def machine(request: pytest.FixtureRequest) -> Iterator[kernel_harness.Machine]:
    """The same test on the CPU, with threads first to last and last to first, and on the GPU."""
    if request.param == "cuda":
        made: kernel_harness.Machine = request.getfixturevalue("gpu_machine")
    else:
        made = kernel_harness.Emulated(request.getfixturevalue("emulator"))
        made.order(int(request.param == "emulated backwards"))
    yield made
    made.reset()
