"""The GPU of an engine: what is needed before it is opened, and how the engine is made to fit it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from colibrid.config.settings import (
    BatchSettings,
    EngineSettings,
    KvSettings,
    MemorySettings,
    Settings,
    TierSettings,
    TiersSettings,
)
from colibrid.engine.configure import EngineSetup, plan_memory
from colibrid.engine.cubins import DeviceError
from colibrid.engine.gpu import find_gpu
from colibrid.engine.spec import EngineSpec, make_spec
from colibrid.errors import ConfigError
from colibrid.model.cache import BUNDLED_MODEL
from colibrid.model.dummy import dummy_manifest

if TYPE_CHECKING:
    from pathlib import Path

    from colibrid.engine.library import Library
    from colibrid.model.manifest import Manifest

ON_GPU = Settings(engine=EngineSettings(device="cuda"), batch=BatchSettings(slots=4))


@pytest.fixture
def manifest() -> Manifest:
    """The bundled model as CUDA packs have it."""
    return dummy_manifest(BUNDLED_MODEL, backend="cuda")


@pytest.fixture
def spec(manifest: Manifest) -> EngineSpec:
    return make_spec(ON_GPU, "", manifest)


def test_without_kernels_there_is_no_gpu(tmp_path: Path) -> None:
    """A wheel that was built without nvcc says so in one line, before any driver is asked."""
    with pytest.raises(
        DeviceError, match="built without CUDA kernels; build it where nvcc 13 is installed, or run with"
    ):
        find_gpu(cubins=tmp_path)


def test_the_arena_is_the_bill(library: Library, spec: EngineSpec, manifest: Manifest) -> None:
    """Weights, swap slots, KV and temp lie in the arena, graphs beside it; page-locked memory is part of the host's."""
    plan = plan_memory(library, msgspec.structs.replace(spec, swap_slots=3), manifest)
    assert plan.arena == plan.weights + plan.swap + plan.kv + plan.temp
    assert 0 < plan.pinned < plan.host
    assert 0 < plan.dispatch < plan.temp
    assert plan.total == plan.arena + plan.graphs + plan.host == sum(size for _, size in plan.parts())
    assert plan.swap == 3 * max(file.bytes for file in manifest.files if file.name.startswith("expert_"))
    assert plan.kv_tokens >= spec.slots * spec.max_seq_len


def test_kv_shrinks_to_what_the_gpu_has(library: Library, spec: EngineSpec, manifest: Manifest) -> None:
    """An automatic KV tier takes what the fraction of free memory leaves; the rest is not touched."""
    whole = plan_memory(library, spec, manifest)
    free = int((whole.arena + whole.graphs - whole.kv + (16 << 20)) / spec.gpu_fraction) + 1
    plan = EngineSetup(library, spec, manifest).fit_gpu(free)
    assert plan.arena + plan.graphs <= free * spec.gpu_fraction
    assert (15 << 20) < plan.kv <= 16 << 20


def test_a_model_that_does_not_fit_is_refused_with_numbers(
    library: Library, spec: EngineSpec, manifest: Manifest
) -> None:
    """The error says what is needed, what there is, and what to lower."""
    with pytest.raises(ConfigError, match=r"needs .*MiB of GPU memory .*free 32\.0 MiB; lower batch\.prefill_tokens"):
        EngineSetup(library, spec, manifest).fit_gpu(32 << 20)


def test_kv_tokens_size_the_cache(library: Library, manifest: Manifest) -> None:
    """memory.kv_tokens reserves that many tokens, to the page."""
    settings = msgspec.structs.replace(ON_GPU, memory=MemorySettings(kv_tokens=5000))
    plan = plan_memory(library, make_spec(settings, "", manifest), manifest)
    assert 5000 <= plan.kv_tokens <= 5000 + 65536 // plan.kv_bytes_per_token


def test_one_setting_sizes_the_cache(manifest: Manifest) -> None:
    """kv_tokens beside a size in bytes is a contradiction."""
    memory = MemorySettings(kv_tokens=5000, tiers=TiersSettings(kv=TierSettings(bytes="1GiB")))
    with pytest.raises(ConfigError, match="leave one of them out"):
        make_spec(msgspec.structs.replace(ON_GPU, memory=memory), "", manifest)


def test_kv_is_fp16_on_a_gpu(manifest: Manifest) -> None:
    """auto halves the cache on CUDA; a named precision is kept."""
    assert make_spec(ON_GPU, "", manifest).kv_precision == "fp16"
    exact = msgspec.structs.replace(ON_GPU, kv=KvSettings(precision="fp32"))
    assert make_spec(exact, "", manifest).kv_precision == "fp32"


@pytest.mark.parametrize(
    ("dtype", "backend", "text"),
    [("fp32", "cuda", "convert the model with --dtype bf16"), ("auto", "cpu", "convert --backend cuda")],
)
def test_what_the_kernels_cannot_read_is_refused(library: Library, dtype: str, backend: str, text: str) -> None:
    """fp32 weights and packs for another processor are refused with the command that helps."""
    manifest = dummy_manifest(BUNDLED_MODEL, dtype, backend=backend)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=text):
        plan_memory(library, make_spec(ON_GPU, "", manifest), manifest)
