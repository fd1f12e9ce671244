"""Settings are resolved against the model, and what does not fit is named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibrid.config.settings import (
    BatchSettings,
    EngineSettings,
    ExpertsSettings,
    KvSettings,
    MemorySettings,
    ModelSettings,
    Settings,
    TaskExpertsSettings,
    TierSettings,
    TiersSettings,
)
from colibrid.engine.host_cpus import HostCpus, host_cpus
from colibrid.engine.spec import channel_shape, device_name, make_spec, run_tokens
from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from colibrid.model.pack import Pack


def test_defaults_follow_the_model(bundled_pack: Pack) -> None:
    """Without settings the context is the checkpoint's, KV is fp32 and all tiers are automatic."""
    spec = make_spec(Settings(), "folder", bundled_pack.manifest)
    assert spec.max_seq_len == bundled_pack.manifest.hyperparameters.max_positions
    assert spec.kv_precision == "fp32"
    assert (spec.tier_weights.bytes, spec.tier_weights.page_bytes) == (0, 2 << 20)
    assert (spec.tier_kv.page_bytes, spec.tier_temp.page_bytes) == (64 << 10, 4 << 10)
    shape = channel_shape(spec, bundled_pack.manifest)
    assert (shape.slots, shape.max_seq_len) == (32, spec.max_seq_len)


@pytest.mark.parametrize(
    ("device", "batch", "expected"),
    [
        ("cpu", BatchSettings(), (64, 512)),
        ("cuda", BatchSettings(), (512, 1024)),
        ("cuda", BatchSettings(prefill_tokens=128), (128, 128)),
        ("cpu", BatchSettings(prefill_chunk=1024), (1024, 1024)),
        ("cuda", BatchSettings(prefill_chunk=32, prefill_tokens=96), (32, 96)),
    ],
)
def test_prefill_follows_the_device(
    device: Literal["cpu", "cuda"], batch: BatchSettings, expected: tuple[int, int], bundled_pack: Pack
) -> None:
    """Chunks and steps are longer on a GPU; one that is given is taken, and an automatic one gives way to it."""
    spec = make_spec(Settings(engine=EngineSettings(device=device), batch=batch), "folder", bundled_pack.manifest)
    assert (spec.prefill_chunk, spec.prefill_tokens) == expected


def test_sizes_are_read_as_people_write_them(bundled_pack: Pack) -> None:
    """Tiers take texts with units and plain numbers."""
    tiers = TiersSettings(kv=TierSettings(bytes="1MiB", page_size=8192, huge_pages="off"))
    settings = Settings(memory=MemorySettings(tiers=tiers), kv=KvSettings(precision="fp16"))
    spec = make_spec(settings, "folder", bundled_pack.manifest)
    assert (spec.tier_kv.bytes, spec.tier_kv.page_bytes, spec.tier_kv.huge_pages) == (1 << 20, 8192, "off")
    assert spec.kv_precision == "fp16"


@pytest.mark.parametrize(("threads", "chosen", "pinned"), [("auto", 2, (5, 6)), (1, 1, ()), (2, 2, (5, 6)), (9, 9, ())])
def test_threads_follow_the_cores(
    threads: Literal["auto"] | int, chosen: int, pinned: tuple[int, ...], bundled_pack: Pack
) -> None:
    """Automatic threads are one a core; a number is taken as it is; the host's CPUs are looked at by default."""
    settings = Settings(engine=EngineSettings(threads=threads))
    spec = make_spec(settings, "folder", bundled_pack.manifest, HostCpus(ids=(5, 6, 7), cores=2, quota=None))
    assert (spec.threads, spec.cpus) == (chosen, pinned)
    assert device_name(spec) == f"cpu, {chosen} thread{'s' if chosen > 1 else ''}"
    assert make_spec(Settings(), "folder", bundled_pack.manifest).threads == host_cpus().auto_threads


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        (Settings(model=ModelSettings(max_seq_len=1 << 20)), r"model\.max_seq_len is 1048576"),
        (Settings(model=ModelSettings(dtype="fp16")), r"model\.dtype is fp16, but the pack .* is bf16"),
        (Settings(batch=BatchSettings(prefill_chunk=64, prefill_tokens=32)), r"batch\.prefill_tokens is 32"),
        (Settings(experts=ExpertsSettings(per_token=16)), r"experts\.per_token is 16"),
        (Settings(experts=ExpertsSettings(embed=TaskExpertsSettings(per_token=3))), r"experts\.embed\.per_token is 3"),
        (Settings(experts=ExpertsSettings(per_token=[2, 2])), r"2 numbers, but the model has 6 layers"),
        (Settings(experts=ExpertsSettings(per_token=[2, 2, 2, 3, 2, 2])), r"is 3 in layer 3; allowed there: 1 to 2"),
        (Settings(experts=ExpertsSettings(per_token=[2, 0, 2, 2, 2, 2])), r"is 0 in layer 1; allowed there: 1 to 2"),
        (Settings(experts=ExpertsSettings(max_per_token=16)), r"max_per_token is 16, but the model has 8 experts"),
        (
            Settings(memory=MemorySettings(tiers=TiersSettings(kv=TierSettings(page_size="5000")))),
            r"memory\.tiers\.kv\.page_size is 5000",
        ),
        (
            Settings(memory=MemorySettings(tiers=TiersSettings(weights=TierSettings(bytes="many")))),
            r"memory\.tiers\.weights\.bytes: 'many'",
        ),
    ],
)
def test_settings_that_do_not_fit_are_named(settings: Settings, pattern: str, bundled_pack: Pack) -> None:
    """Each error names the setting and its value."""
    with pytest.raises(ConfigError, match=pattern):
        make_spec(settings, "folder", bundled_pack.manifest)


@given(st.integers(1, 1 << 20))
def test_run_sizes_waste_less_than_an_eighth(tokens: int) -> None:
    """A run holds what was asked for, wastes at most 12.5 % of it or a tile, and is n * 2^e, n in 8..16, or small."""
    size = run_tokens(tokens)
    assert tokens <= size
    assert size % 16 == 0
    assert (size - tokens) * 8 < size or size - tokens < 16
    if tokens > 128:
        unit = size & -size
        while size // unit < 8:
            unit //= 2
        assert size % unit == 0
        assert size // unit <= 16
    assert run_tokens(size) == size


def test_more_experts_are_allowed_by_name(bundled_pack: Pack) -> None:
    """experts.max_per_token lifts the model's own k, for the engine and for every per_token."""
    experts = ExpertsSettings(per_token=4, max_per_token=4, score=TaskExpertsSettings(per_token=[4, 3, 2, 1, 1, 1]))
    assert make_spec(Settings(experts=experts), "folder", bundled_pack.manifest).experts_most == 4
