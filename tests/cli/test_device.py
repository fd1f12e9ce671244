"""Settling on a device: what auto does with and without a GPU, and why it is the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from in_process import crc32c

from colibrid.cli.device import settle_device
from colibrid.config.environment import read_environment
from colibrid.config.settings import EngineSettings, ModelSettings, Settings
from colibrid.engine import gpu
from colibrid.engine.cubins import DeviceError
from colibrid.engine.device_cuda import DeviceInfo
from colibrid.errors import ConfigError
from colibrid.model.cache import BUNDLED_MODEL
from colibrid.model.convert import convert

if TYPE_CHECKING:
    from pathlib import Path

    from colibrid.config.settings import Device
    from colibrid.engine.library import Library
    from colibrid.model.manifest import Backend

GPU = DeviceInfo(0, "Testor 9000", (9, 0), 13000, 1 << 40, 132, 232448)


def _settings(device: Device, **model: str) -> Settings:
    return Settings(engine=EngineSettings(device=device), model=ModelSettings(**model))  # type: ignore[arg-type]


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "find_gpu", lambda index: GPU)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(index: int) -> DeviceInfo:
        raise DeviceError("no GPU: the driver sees none; check nvidia-smi")

    monkeypatch.setattr(gpu, "find_gpu", none)


@pytest.mark.usefixtures("with_gpu")
def test_auto_takes_a_gpu_that_can_serve(library: Library) -> None:
    """The bundled model runs on the GPU without being asked for."""
    settled = settle_device(_settings("auto"), None, read_environment(), library)
    assert (settled.settings.engine.device, settled.reason) == ("cuda", None)


@pytest.mark.usefixtures("with_gpu")
def test_auto_says_why_a_gpu_does_not_serve(library: Library) -> None:
    """A model that the kernels cannot compute goes to the CPU, with the reason in one line."""
    settled = settle_device(_settings("auto", dtype="fp32"), None, read_environment(), library)
    assert settled.settings.engine.device == "cpu"
    assert settled.reason is not None
    assert settled.reason.startswith("Testor 9000 is not used: ")
    assert "--dtype bf16" in settled.reason


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize(("backend", "device"), [("any", "cuda"), ("cuda", "cuda"), ("cpu", "cpu")])
def test_a_pack_decides_too(backend: Backend, device: Device, library: Library, tmp_path: Path) -> None:
    """A pack for CUDA and a flat one, which will be laid out anew, go to the GPU; one for the CPU stays there."""
    convert(BUNDLED_MODEL, tmp_path / "pack", crc32c=crc32c, backend=backend)
    settled = settle_device(_settings("auto"), str(tmp_path / "pack"), read_environment(), library)
    assert settled.settings.engine.device == device
    assert (settled.reason is None) == (device == "cuda")


@pytest.mark.usefixtures("without_gpu")
def test_auto_without_a_gpu_is_the_cpu(library: Library) -> None:
    """No GPU: the CPU serves, and the reason is the driver's."""
    settled = settle_device(_settings("auto"), None, read_environment(), library)
    assert settled.settings.engine.device == "cpu"
    assert settled.reason == "no GPU: the driver sees none; check nvidia-smi"


@pytest.mark.usefixtures("without_gpu")
def test_cuda_without_a_gpu_is_refused(library: Library) -> None:
    """Who asks for a GPU by name does not get the CPU."""
    with pytest.raises(ConfigError, match="engine.device is cuda, but no GPU: the driver sees none"):
        settle_device(_settings("cuda"), None, read_environment(), library)


@pytest.mark.usefixtures("with_gpu")
def test_cpu_is_not_asked_twice(library: Library) -> None:
    """An explicit cpu stays, whatever there is."""
    settled = settle_device(_settings("cpu"), None, read_environment(), library)
    assert (settled.settings.engine.device, settled.reason) == ("cpu", None)
