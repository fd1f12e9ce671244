"""Puts engines, supervisors and schedulers together for one pack.

Use, on the event loop::

    fleet, pool = make_service(library, settings, str(pack.path), pack.manifest)
    fleet.start()
    await fleet.wait_ready()  # raises ConfigError, ModelError or EngineError
    ...  # pool is the HTTP side's GenerationService
    await pool.drain(timeout_s)
    pool.stop()
    await fleet.stop()
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

import colibrid
from colibrid.batch.interfaces import EngineInfo
from colibrid.batch.measures import ExpertLoad, Measures
from colibrid.batch.pool import EnginePool
from colibrid.batch.request import ExpertPolicy
from colibrid.batch.scheduler import Scheduler, with_defaults
from colibrid.engine.fleet import Fleet
from colibrid.engine.replicas import make_specs
from colibrid.engine.spec import device_name, most_experts
from colibrid.engine.supervisor import Supervisor
from colibrid.engine.swaps import ExpertSwaps
from colibrid.engine.tables import experts_per_token, max_experts

if TYPE_CHECKING:
    from collections.abc import Callable

    from colibrid.batch.scheduler import Engine
    from colibrid.config.settings import ExpertsSettings, LimitsSettings, Settings
    from colibrid.engine.library import Library
    from colibrid.engine.spec import EngineSpec
    from colibrid.model.manifest import Manifest


def make_service(library: Library, settings: Settings, pack_dir: str, manifest: Manifest) -> tuple[Fleet, EnginePool]:
    """Neither is started. ConfigError if a setting does not fit the model or the host."""
    specs = make_specs(settings, pack_dir, manifest)
    fleet = Fleet([Supervisor(library, spec, manifest, settings.engine) for spec in specs])
    limits = _limits_of_one(settings, len(specs))
    row = max_experts(manifest)

    def scheduler_of(engine: Engine, index: int) -> Scheduler:
        spec = specs[index]
        return Scheduler(
            engine,
            make_info(spec, manifest, settings.model.served_name or manifest.name, settings.experts),
            [most_experts(layer, spec.experts_most) for layer in manifest.layers],
            batch=settings.batch,
            limits=limits,
            experts=settings.experts,
            measures=Measures(ExpertLoad([layer.experts for layer in manifest.layers], row, spec.max_seq_len)),
        )

    swaps = ExpertSwaps(fleet.supervisors, library, manifest, settings.experts)
    for supervisor in fleet.supervisors:
        supervisor.prepare_with(swaps.bring_up)
    return fleet, EnginePool(fleet.supervisors, scheduler_of, swaps)


def prepare_settings(pool: EnginePool, settings: Settings, pack_dir: str, manifest: Manifest) -> Callable[[], None]:
    """What makes `pool` follow changed live settings. ConfigError if they do not fit the model."""
    specs = make_specs(settings, pack_dir, manifest)
    limits = _limits_of_one(settings, len(specs))
    prints = [_fingerprint(spec, manifest, settings.experts) for spec in specs]

    def follow() -> None:
        if pool.swaps is not None:
            pool.swaps.follow(settings.experts)
        for lane, fingerprint in zip(pool.lanes, prints, strict=True):
            lane.scheduler.follow(
                batch=settings.batch, limits=limits, experts=settings.experts, fingerprint=fingerprint
            )

    return follow


def _limits_of_one(settings: Settings, engines: int) -> LimitsSettings:
    """Of one engine of several: they share the queue's places."""
    return msgspec.structs.replace(settings.limits, queue=-(-settings.limits.queue // engines))


def make_info(spec: EngineSpec, manifest: Manifest, model_id: str, experts: ExpertsSettings) -> EngineInfo:
    """What is known before the engine is ready."""
    return EngineInfo(
        model_id=model_id,
        family=manifest.family,
        vocab_size=manifest.hyperparameters.vocab_size,
        max_seq_len=spec.max_seq_len,
        slots=spec.slots,
        hidden=manifest.hyperparameters.hidden,
        experts_per_token=experts_per_token(manifest),
        experts_most=max((most_experts(layer, spec.experts_most) for layer in manifest.layers), default=0),
        batch_dependent=spec.max_tokens_per_expert > 0,
        device=device_name(spec),
        fingerprint=_fingerprint(spec, manifest, experts),
        output_is_prompt=spec.device == "cpu",
    )


def _fingerprint(spec: EngineSpec, manifest: Manifest, experts: ExpertsSettings) -> str:
    """Changes with build, device, pack, KV type, chunk size and the experts that a request gets which says nothing of
    them: that is what the text depends on.
    """
    policies = [with_defaults(ExpertPolicy(), task, experts) for task in (experts.generate, experts.score)]
    pieces = [
        colibrid.__version__,
        spec.device,
        spec.kv_precision,
        str(spec.prefill_chunk),
        str(spec.max_tokens_per_expert),
        f"dummy {spec.dummy_seed}" if spec.weights == "dummy" else "files",
        *(f"{policy.per_token} {policy.threshold}" for policy in policies),
    ]
    digest = hashlib.sha256(msgspec.json.encode(pieces))
    digest.update(msgspec.json.encode(manifest))
    return f"fp_{digest.hexdigest()[:12]}"
