"""Settles on the device before a model is resolved: packs are converted for the processor that will read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import structlog

from colibrid.cli.models import cache_options
from colibrid.engine.configure import plan_memory
from colibrid.engine.cubins import DeviceError
from colibrid.engine.replicas import device_indexes
from colibrid.engine.spec import make_spec
from colibrid.errors import ColibridError, ConfigError
from colibrid.model.cache import locate
from colibrid.model.dummy import dummy_manifest
from colibrid.model.pack import open_pack
from colibrid.model.precision import AS_IT_IS, parse_plan
from colibrid.model.relaid import relaid

if TYPE_CHECKING:
    from colibrid.config.environment import Environment
    from colibrid.config.settings import Device, Settings
    from colibrid.engine.library import Library


class Settled(NamedTuple):
    """Settings whose engine.device is cpu or cuda, and in one line why `auto` is not the GPU."""

    settings: Settings
    reason: str | None


def settle_device(settings: Settings, model: str | None, environment: Environment, library: Library) -> Settled:
    """Take the GPU if it is asked for, or if `auto` finds one that can serve the model.

    ConfigError: cuda is asked for, but there is no GPU that can serve, or it was built without kernels.
    """
    wanted = settings.engine.device
    if wanted == "cpu":
        return Settled(settings, None)
    # Imported here: a CPU daemon does without.
    from colibrid.engine.gpu import find_gpu  # noqa: PLC0415

    try:
        found, *_ = [find_gpu(index) for index in device_indexes(settings.engine)]
    except DeviceError as error:
        if wanted == "cuda":
            raise ConfigError(f"engine.device is cuda, but {error}") from error
        return Settled(_with_device(settings, "cpu"), str(error))
    on_gpu = _with_device(settings, "cuda")
    if wanted == "auto" and (reason := _refusal(on_gpu, model, environment, library)) is not None:
        return Settled(_with_device(settings, "cpu"), f"{found.name} is not used: {reason}")
    return Settled(on_gpu, None)


def settled(settings: Settings, model: str | None, environment: Environment, library: Library) -> Settings:
    """The same, with the reason in the log."""
    result = settle_device(settings, model, environment, library)
    if result.reason is not None:
        structlog.get_logger().info("device_cpu", reason=result.reason)
    return result.settings


def _with_device(settings: Settings, device: Device) -> Settings:
    return msgspec.structs.replace(settings, engine=msgspec.structs.replace(settings.engine, device=device))


def _refusal(settings: Settings, model: str | None, environment: Environment, library: Library) -> str | None:
    """Why the CUDA engine would not compute this model; None: it would, or the model is wrong for other reasons."""
    options = cache_options(settings, environment)
    try:
        located = locate(model if model is not None else settings.model.path, options.hub_cache)
        if located.is_pack:
            manifest = open_pack(located.path, check_files=False).manifest
            if manifest.backend == "cpu" and settings.model.weights == "files":
                return "the pack is for the cpu backend; make another with `convert --backend cuda`"
            if manifest.backend == "any":  # it will be laid out anew
                manifest = relaid(manifest, "cuda")
        else:
            rules = settings.model.precision
            plan = AS_IT_IS if rules is None else parse_plan(rules, "model.precision")
            manifest = dummy_manifest(located.path, settings.model.dtype, backend="cuda", plan=plan)
        spec = make_spec(settings, str(located.path), manifest)
    except ColibridError:
        return None  # it is told where the model is resolved
    try:
        plan_memory(library, spec, manifest)
    except ConfigError as error:
        return str(error)
    return None
