"""What several folders of tests share: the native library, the bundled model as a pack, what engines run on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import engine_backends
import engine_device
import kernel_harness
import pytest
import structlog
from hypothesis import HealthCheck, settings

import colibrid
from colibrid.engine import device_cuda
from colibrid.engine.gpu import require_kernels
from colibrid.engine.library import CUBIN_FOLDER, Library
from colibrid.model.convert import convert
from colibrid.model.pack import Pack, open_pack

if TYPE_CHECKING:
    from collections.abc import Iterator

# The same examples in each run, however slow the machine is. make fuzz-histories looks for others.
settings.register_profile(
    "steady", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--histories", type=int, help="random histories of each state machine of hypothesis")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --histories the state machines run as many, each time others; other tests do not run."""
    count = config.getoption("--histories")
    if count is None:
        return
    items[:] = [item for item in items if isinstance(getattr(getattr(item, "cls", None), "settings", None), settings)]
    for item in items:
        machine = getattr(item, "cls")  # noqa: B009 - an attribute that Item does not declare
        machine.settings = settings(machine.settings, max_examples=count, derandomize=False)


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Commands configure the logs of the process: each test gets them as a new process has them."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.reset_defaults()
    root.handlers, root.level = handlers, level


@pytest.fixture(scope="session")
def library() -> Library:
    """The native library of the package under test."""
    return Library()


@pytest.fixture(scope="session")
def bundled_pack(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """hummingbird-13m, converted once. Not to be changed."""
    source = Path(colibrid.__file__).parent / "models" / "hummingbird-13m"
    target = tmp_path_factory.mktemp("bundled") / "hummingbird-13m.colibri"
    convert(source, target, crc32c=lambda data: library.c.clb_crc32c(0, bytes(data), len(data)))
    return open_pack(target)


@pytest.fixture(scope="session")
def emulated_device(tmp_path_factory: pytest.TempPathFactory) -> engine_device.EmulatedDevice:
    """The kernels' own source on the CPU, behind a fake libcuda."""
    fake = engine_device.build_fake(tmp_path_factory.mktemp("enginefake"))
    emulator = kernel_harness.build_emulator(tmp_path_factory.mktemp("emulator"))
    if fake is None or emulator is None:
        pytest.skip("no C and C++ compiler")
    return engine_device.EmulatedDevice(fake, emulator)


@pytest.fixture(scope="session")
def gpu_device() -> engine_device.Gpu:
    """GPU 0 with the kernels of the package under test."""
    try:
        require_kernels()
        device_cuda.probe(0)
    except device_cuda.DeviceError as error:
        pytest.skip(str(error))
    return engine_device.Gpu(CUBIN_FOLDER)


@pytest.fixture(scope="session", params=engine_backends.BACKENDS)
def backend(request: pytest.FixtureRequest) -> engine_backends.Backend:
    """The same test on the CPU, on the emulator and on a GPU."""
    if request.param == "cpu":
        return engine_backends.cpu()
    device = request.getfixturevalue({"emulated": "emulated_device", "cuda": "gpu_device"}[request.param])
    return engine_backends.accelerated(request.param, device)
