"""What a model takes under given settings: found without converting or loading it, for a device that may be absent."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from colibrid.cli.banner import memory_lines
from colibrid.cli.device import settle_device
from colibrid.cli.models import cache_options
from colibrid.cli.shapes import write_shape
from colibrid.config.sizes import format_bytes
from colibrid.engine.configure import EngineSetup
from colibrid.engine.host_memory import available_bytes
from colibrid.engine.replicas import make_specs
from colibrid.errors import ModelError
from colibrid.model.cache import locate
from colibrid.model.dummy import dummy_manifest
from colibrid.model.footprint import format_names
from colibrid.model.pack import open_pack
from colibrid.model.precision import AS_IT_IS, parse_plan
from colibrid.model.relaid import relaid

if TYPE_CHECKING:
    from collections.abc import Iterator

    from colibrid.config.environment import Environment
    from colibrid.config.settings import Settings
    from colibrid.engine.library import Library
    from colibrid.engine.spec import EngineSpec
    from colibrid.engine.state import MemoryPlan
    from colibrid.model.manifest import Backend, Manifest


class Found(NamedTuple):
    """A model as it would be served; its weights have not been looked at."""

    folder: Path
    manifest: Manifest


class Plan(NamedTuple):
    """What one of the engines takes."""

    specs: tuple[EngineSpec, ...]
    memory: MemoryPlan
    available: int | None  # bytes that it was fitted to; None: a GPU's, which only opening it would tell
    absent: bool  # a device that was described, not looked at


def find_model(settings: Settings, model: str | None, environment: Environment) -> Found:
    """The description of MODEL, else of model.path. engine.device is settled. ModelError: it is not on this host."""
    options = cache_options(settings, environment)
    located = locate(model if model is not None else settings.model.path, options.hub_cache)
    if not located.is_pack:
        return Found(located.path, _described(settings, located.path, located.name, options.backend))
    manifest = open_pack(located.path, check_files=False).manifest
    if manifest.backend == "any":
        manifest = relaid(manifest, options.backend)
    if manifest.backend != options.backend:
        raise ModelError(
            f"{located.path} is a pack for the {manifest.backend} backend, and engine.device is {options.backend}; make "
            f"another with convert --backend {options.backend}"
        )
    return Found(located.path, manifest)


def find_shape(settings: Settings, shape: str) -> Found:
    """The description of a published model that need not be here."""
    with TemporaryDirectory() as folder:
        source = write_shape(shape, Path(folder))
        backend: Backend = "cuda" if settings.engine.device == "cuda" else "cpu"
        return Found(source, _described(settings, source, shape, backend))


def _described(settings: Settings, folder: Path, name: str, backend: Backend) -> Manifest:
    """What a conversion of the checkpoint would make. ConfigError: model.precision does not fit the model."""
    rules = settings.model.precision
    rounding = AS_IT_IS if rules is None else parse_plan(rules, "model.precision")
    return dummy_manifest(folder, settings.model.dtype, name, backend, rounding)


def settle(
    settings: Settings, model: str | None, environment: Environment, library: Library, *, absent_gpu: bool
) -> Settings:
    """With engine.device cpu or cuda. absent_gpu: auto means a GPU, and nobody looks whether there is one."""
    if absent_gpu and settings.engine.device in ("auto", "cuda"):
        return msgspec.structs.replace(settings, engine=msgspec.structs.replace(settings.engine, device="cuda"))
    return settle_device(settings, model, environment, library).settings


def make_plan(settings: Settings, found: Found, library: Library, device_memory: int | None) -> Plan:
    """The bill of one engine. ConfigError: settings do not fit the model, or the engine does not fit the memory.

    device_memory: free bytes of each GPU, or of the host for CPU engines; None: those of this host.
    """
    specs = make_specs(settings, str(found.folder), found.manifest)
    setup = EngineSetup(library, specs[0], found.manifest)
    if specs[0].device == "cpu":
        available = available_bytes() if device_memory is None else device_memory
        return Plan(specs, setup.fit(available), available, absent=device_memory is not None)
    if device_memory is None:
        return Plan(specs, setup.plan(), None, absent=False)
    return Plan(specs, setup.fit_gpu(device_memory), device_memory, absent=True)


def plan_lines(plan: Plan, manifest: Manifest) -> Iterator[str]:
    """For people."""
    spec = plan.specs[0]
    total, *rows = memory_lines(plan.memory)
    where = "GPU" if spec.device == "cuda" else f"CPU, {spec.threads} threads"
    if plan.available is not None:
        share = f"{format_bytes(int(plan.available * spec.gpu_fraction))} of {format_bytes(plan.available)}"
        where += f", which may take {share} free" + (" as given" if plan.absent else " now")
    yield f"  model    {manifest.name}, {', '.join(format_names(manifest))}"
    if len(plan.specs) > 1:
        yield f"  engines  {len(plan.specs)}, each as follows"
    yield f"  device   {where}"
    yield f"  context  {spec.max_seq_len} tokens, {spec.slots} slots, KV of {plan.memory.kv_tokens} tokens ({spec.kv_precision})"
    yield f"  memory   {total}"
    yield from (f"         {row}" for row in rows)
