"""How many engines there are, and what of the host each of them gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from colibrid.config.settings import EngineSettings, MemorySettings, Settings
from colibrid.engine.host_cpus import HostCpus
from colibrid.engine.replicas import device_indexes, make_specs, parse_cpus
from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from colibrid.engine.spec import EngineSpec
    from colibrid.model.pack import Pack

EIGHT = HostCpus(ids=(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), cores=8, quota=None)


def specs_of(pack: Pack, cpus: HostCpus = EIGHT, **engine: Any) -> tuple[EngineSpec, ...]:
    settings = Settings(engine=EngineSettings(**{"device": "cpu", **engine}), memory=MemorySettings(gpu_fraction=0.8))
    return make_specs(settings, str(pack.path), pack.manifest, cpus)


def test_one_engine_has_the_whole_host(bundled_pack: Pack) -> None:
    """By default there is one engine, which is bound to nothing."""
    (spec,) = specs_of(bundled_pack)
    assert (spec.index, spec.device_index, spec.cpu_set, spec.threads, spec.gpu_fraction) == (0, 0, (), 8, 0.8)


def test_replicas_share_cores_and_memory(bundled_pack: Pack) -> None:
    """Each of several CPU engines gets its part of the cores and of the memory; parts do not overlap."""
    specs = specs_of(bundled_pack, replicas=3)
    assert [spec.index for spec in specs] == [0, 1, 2]
    assert [spec.cpu_set for spec in specs] == [(0, 1), (2, 3, 4), (5, 6, 7)]
    assert [spec.threads for spec in specs] == [2, 3, 3]
    assert [spec.cpus for spec in specs] == [(0, 1), (2, 3, 4), (5, 6, 7)]
    assert {round(spec.gpu_fraction * 3, 6) for spec in specs} == {0.8}


def test_more_engines_than_cores_are_not_bound(bundled_pack: Pack) -> None:
    """The system shares what there is: one thread each."""
    specs = specs_of(bundled_pack, HostCpus(ids=(4,), cores=1, quota=None), replicas=2)
    assert [(spec.threads, spec.cpu_set, spec.cpus) for spec in specs] == [(1, (), ())] * 2


def test_the_quota_is_shared(bundled_pack: Pack) -> None:
    """Two engines under a quota of four CPUs' time compute with two threads each."""
    specs = specs_of(bundled_pack, msgspec_quota(EIGHT, 4.0), replicas=2)
    assert [spec.threads for spec in specs] == [2, 2]


def msgspec_quota(cpus: HostCpus, quota: float) -> HostCpus:
    return HostCpus(ids=cpus.ids, cores=cpus.cores, quota=quota)


def test_cpu_sets_are_taken_as_given(bundled_pack: Pack) -> None:
    """One engine a set, with a thread for each of its cores; second threads of a core only where a set has no other."""
    specs = specs_of(bundled_pack, cpu_sets=["0-3,8-11", "12, 13"])
    assert [spec.cpu_set for spec in specs] == [(0, 1, 2, 3, 8, 9, 10, 11), (12, 13)]
    assert [spec.threads for spec in specs] == [4, 2]


def test_gpus_have_their_memory_for_themselves(bundled_pack: Pack) -> None:
    """One engine a GPU, each with the whole fraction of it."""
    pack = msgspec.structs.replace(bundled_pack.manifest, backend="cuda")
    settings = Settings(engine=EngineSettings(device="cuda", devices=[1, 3]), memory=MemorySettings(gpu_fraction=0.8))
    specs = make_specs(settings, "p", pack, EIGHT)
    assert [(spec.device_index, spec.gpu_fraction, spec.cpu_set) for spec in specs] == [(1, 0.8, ()), (3, 0.8, ())]
    assert device_indexes(EngineSettings(replicas=2)) == (0, 1)


@pytest.mark.parametrize(
    ("engine", "text"),
    [({"cpu_sets": ["0-1", "1-2"]}, "holds CPU 1, as an earlier set does"),
     ({"cpu_sets": ["14-16"]}, "may not use CPU 16"),
     ({"cpu_sets": ["3-1"]}, "write it like 0-7"),
     ({"cpu_sets": ["1-"]}, "write it like 0-7"),
     ({"cpu_sets": ["all"]}, "write it like 0-7"),
     ({"cpu_sets": ["0-999999999"]}, "write it like 0-7"),
     ({"cpu_sets": ["0", "1"], "replicas": 3}, "engine.replicas is 3, but engine.cpu_sets lists 2"),
     ({"devices": [0, 1]}, "the engines run on the CPU"),
     ({"device": "cuda", "devices": [0, 1], "replicas": 4}, "engine.replicas is 4, but engine.devices lists 2"),
     ({"device": "cuda", "devices": [1, 1]}, "names a GPU twice")],
)  # fmt: skip
def test_what_contradicts_is_refused(bundled_pack: Pack, engine: dict[str, Any], text: str) -> None:
    """The error names the setting and what is wrong with it."""
    with pytest.raises(ConfigError, match=text):
        specs_of(bundled_pack, **engine)


def test_lists_of_cpus() -> None:
    """Single numbers and ranges, with commas between."""
    assert parse_cpus("0-3, 8,10-11") == {0, 1, 2, 3, 8, 10, 11}
