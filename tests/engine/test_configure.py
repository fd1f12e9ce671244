"""The engine's configuration: its memory bill, and how it is made to fit."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
import pytest

from colibrid.config.settings import BatchSettings, Settings
from colibrid.engine import abi
from colibrid.engine.configure import EngineSetup, plan_memory
from colibrid.engine.library import InstallError
from colibrid.engine.spec import EngineSpec, make_spec
from colibrid.errors import ConfigError, EngineError, ModelError

if TYPE_CHECKING:
    from colibrid.engine.library import Library
    from colibrid.model.pack import Pack


@pytest.fixture
def spec(bundled_pack: Pack) -> EngineSpec:
    return make_spec(Settings(batch=BatchSettings(slots=4)), str(bundled_pack.path), bundled_pack.manifest)


def test_the_bill_adds_up(library: Library, spec: EngineSpec, bundled_pack: Pack) -> None:
    """Total is the sum of its parts, and KV holds all slots at full length."""
    plan = plan_memory(library, spec, bundled_pack.manifest)
    assert plan.total == plan.weights + plan.kv + plan.temp + plan.host == sum(size for _, size in plan.parts())
    assert 0 < plan.dispatch < plan.temp
    assert plan.kv_tokens >= spec.slots * spec.max_seq_len


def test_kv_takes_at_most_a_quarter_of_the_host(library: Library, spec: EngineSpec, bundled_pack: Pack) -> None:
    """On a small host an automatic KV tier shrinks to its share, in whole pages."""
    setup = EngineSetup(library, spec, bundled_pack.manifest)
    plan = setup.fit(80 << 20)
    assert plan.kv <= 20 << 20
    assert plan.kv % spec.tier_kv.page_bytes == 0
    assert 0 < plan.kv_tokens < spec.slots * spec.max_seq_len


def test_kv_of_a_given_size_is_not_changed(library: Library, spec: EngineSpec, bundled_pack: Pack) -> None:
    """What the operator asked for is taken or refused, never cut."""
    tier = msgspec.structs.replace(spec.tier_kv, bytes=40 << 20)
    setup = EngineSetup(library, msgspec.structs.replace(spec, tier_kv=tier), bundled_pack.manifest)
    assert setup.fit(1 << 30).kv == 40 << 20
    with pytest.raises(ConfigError, match=r"memory.kv_tokens: \d+ would fit"):
        setup.fit(48 << 20)


def test_a_model_that_does_not_fit_is_refused_with_numbers(
    library: Library, spec: EngineSpec, bundled_pack: Pack
) -> None:
    """The error says what is needed, what there is, and what to lower."""
    with pytest.raises(
        ConfigError, match=r"needs .*MiB.*weights .*kv .*workspace .*available 8\.00 MiB; the weights alone"
    ):
        EngineSetup(library, spec, bundled_pack.manifest).fit(8 << 20)


def test_what_the_error_suggests_fits(library: Library, spec: EngineSpec, bundled_pack: Pack) -> None:
    """A KV tier that is too large is refused with the number of tokens that is not, and with it the engine fits."""
    asked = msgspec.structs.replace(spec, kv_tokens=100_000)
    with pytest.raises(ConfigError, match=r"memory.kv_tokens: \d+ would fit") as refused:
        EngineSetup(library, asked, bundled_pack.manifest).fit(200 << 20)
    tokens = int(re.findall(r"kv_tokens: (\d+)", str(refused.value))[0])
    for change, fits in ((0, True), (-16, True), (64, False)):
        setup = EngineSetup(library, msgspec.structs.replace(asked, kv_tokens=tokens + change), bundled_pack.manifest)
        if fits:
            assert setup.fit(200 << 20).kv_tokens >= tokens + change
        else:
            with pytest.raises(ConfigError):
                setup.fit(200 << 20)


def test_swap_slots_are_reserved(library: Library, spec: EngineSpec, bundled_pack: Pack) -> None:
    """Each takes the bytes of the largest expert; steps get room for the codes that quantised ones read, all else stays."""
    without = plan_memory(library, spec, bundled_pack.manifest)
    plan = plan_memory(library, msgspec.structs.replace(spec, swap_slots=40), bundled_pack.manifest)
    experts = {name for layer in bundled_pack.manifest.layers for name in layer.expert_files}
    largest = max(file.bytes for file in bundled_pack.manifest.files if file.name in experts)
    assert without.swap == 0
    assert 40 * largest * 0.9 < plan.swap < 40 * largest + spec.tier_weights.page_bytes
    assert (plan.weights, plan.kv) == (without.weights, without.kv)
    assert without.temp < plan.temp < 2 * without.temp
    assert plan.total == without.total + plan.swap + plan.temp - without.temp + plan.host - without.host


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (abi.Status.CHECKSUM, ModelError),
        (abi.Status.MEMORY, ConfigError),
        (abi.Status.VERSION, InstallError),
        (abi.Status.DEVICE, EngineError),
        (abi.Status.INTERNAL, EngineError),
    ],
)
def test_statuses_become_the_right_errors(
    status: abi.Status, kind: type[Exception], library: Library, spec: EngineSpec, bundled_pack: Pack
) -> None:
    """Whether a restart can help depends on the status; the message is C's own."""
    error = EngineSetup(library, spec, bundled_pack.manifest).error(status, abi.Error(status, b"dense.bin is short"))
    assert type(error) is kind
    assert "dense.bin is short" in str(error)
