"""Several engines of one model behind one daemon: how many, and what of the host each of them gets.

    CUDA   engine i takes GPU engine.devices[i], or GPU i
    CPU    engine i takes engine.cpu_sets[i], or an equal share of the CPUs that this process may use

Each engine is a whole replica with slots, KV memory and a process of its own. CPU engines share the host's RAM, so each
gets an equal share of memory.gpu_fraction; a GPU's memory belongs to its engine alone.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from colibrid.engine.host_cpus import HostCpus, host_cpus
from colibrid.engine.spec import EngineSpec, make_spec
from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from colibrid.config.settings import EngineSettings, Settings
    from colibrid.model.manifest import Manifest

_MAX_CPU = 8191  # of a Linux kernel


class Share(NamedTuple):
    """What one engine gets."""

    device_index: int
    cpus: HostCpus
    bound: bool  # its process may use no other CPUs


def make_specs(
    settings: Settings, pack_dir: str, manifest: Manifest, cpus: HostCpus | None = None
) -> tuple[EngineSpec, ...]:
    """A spec for each engine. ConfigError if a setting does not fit the model or the host; `cpus` as for make_spec."""
    shares = _shares(settings.engine, cpus or host_cpus())
    fraction = settings.memory.gpu_fraction / (1 if settings.engine.device == "cuda" else len(shares))
    specs = []
    for index, share in enumerate(shares):
        spec = make_spec(settings, pack_dir, manifest, share.cpus)
        specs.append(
            msgspec.structs.replace(
                spec,
                index=index,
                device_index=share.device_index,
                cpu_set=share.cpus.ids if share.bound else (),
                gpu_fraction=fraction,
            )
        )
    return tuple(specs)


def device_indexes(engine: EngineSettings) -> tuple[int, ...]:
    """The GPUs that the engines take if they run on GPUs. ConfigError if replicas and devices contradict."""
    if engine.devices is None:
        return tuple(range(_count(engine, None, "engine.devices")))
    if len(set(engine.devices)) != len(engine.devices):
        raise ConfigError(f"engine.devices names a GPU twice: {engine.devices}; an engine takes a whole GPU")
    return tuple(engine.devices[: _count(engine, len(engine.devices), "engine.devices")])


def _count(engine: EngineSettings, listed: int | None, name: str) -> int:
    if engine.replicas == "auto":
        return listed or 1
    if listed is not None and listed != engine.replicas:
        raise ConfigError(f"engine.replicas is {engine.replicas}, but {name} lists {listed}; leave one of them out")
    return engine.replicas


def _shares(engine: EngineSettings, cpus: HostCpus) -> list[Share]:
    if engine.device == "cuda":
        return [Share(index, cpus, bound=False) for index in device_indexes(engine)]
    if engine.devices is not None:
        raise ConfigError("engine.devices lists GPUs, but the engines run on the CPU; use engine.cpu_sets")
    if engine.cpu_sets is None:
        return [Share(0, *part) for part in _split(cpus, _count(engine, None, "engine.cpu_sets"))]
    count = _count(engine, len(engine.cpu_sets), "engine.cpu_sets")
    sets = [parse_cpus(text) for text in engine.cpu_sets]
    seen: set[int] = set()
    for text, members in zip(engine.cpu_sets, sets, strict=True):
        missing = sorted(members - set(cpus.ids))
        if missing:
            raise ConfigError(
                f"engine.cpu_sets {text!r}: this process may not use CPU {missing[0]}; it may: {cpus.ids}"
            )
        if members & seen:
            raise ConfigError(f"engine.cpu_sets {text!r} holds CPU {min(members & seen)}, as an earlier set does")
        seen |= members
    return [Share(0, cpus.among(members, count), bound=True) for members in sets]


def _split(cpus: HostCpus, count: int) -> list[tuple[HostCpus, bool]]:
    """Equal shares of the cores; where there are fewer cores than engines, all of them for each."""
    if count == 1:
        return [(cpus, False)]
    if count > cpus.cores:
        return [(cpus.among(cpus.ids[:1], count), False)] * count
    cuts = [core * cpus.cores // count for core in range(count + 1)]
    return [(cpus.among(cpus.ids[first:last], count), True) for first, last in itertools.pairwise(cuts)]


def parse_cpus(text: str) -> frozenset[int]:
    """`0-3,8` as CPU numbers. ConfigError if it is no such list."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        digits = first.isdecimal() and (last.isdecimal() or not dash)
        if not digits or not int(first) <= int(last or first) <= _MAX_CPU:
            raise ConfigError(f"engine.cpu_sets {text!r} is no list of CPUs; write it like 0-7,16-23")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
