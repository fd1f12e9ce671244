"""What one engine is asked to be: the settings that matter to it, resolved against a pack and the host's CPUs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import msgspec

from colibrid.config.settings import (
    BatchSettings,
    ExpertsSettings,
    HugePages,
    ModulesSettings,
    Settings,
    TierSettings,
)
from colibrid.config.sizes import parse_bytes
from colibrid.engine.channel import ChannelShape
from colibrid.engine.host_cpus import HostCpus, host_cpus
from colibrid.engine.library import CustomModule
from colibrid.engine.tables import max_experts
from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibrid.model.manifest import Layer, Manifest

_KIB = 1 << 10
_MIB = 1 << 20
_MIN_PAGE = 4 * _KIB
_MAX_PAGE = 1 << 30
# Tokens of a chunk and of a prefill step. A step of a GPU reads nearly all weights however few tokens it has.
_AUTO_PREFILL = {"cpu": (64, 512), "cuda": (512, 1024)}
_TILE = 16  # tokens; runs of the cache pool are whole tiles


class TierSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One memory tier (clb_tier_config)."""

    bytes: int  # 0 = auto: what is needed
    page_bytes: int
    huge_pages: HugePages


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that the worker needs besides the pack's own description."""

    pack_dir: str
    device: Literal["cpu", "cuda"]
    slots: int
    max_seq_len: int
    prefill_chunk: int
    prefill_tokens: int
    kv_precision: Literal["fp32", "fp16"]
    max_tokens_per_expert: int  # 0 = none
    weights: Literal["files", "dummy"]
    dummy_seed: int
    gpu_fraction: float
    threads: int
    cpus: tuple[int, ...]  # one for each thread; empty: the system decides
    tier_weights: TierSpec
    tier_kv: TierSpec
    tier_temp: TierSpec
    swap_slots: int = 0
    swap_formats: tuple[str, ...] = ()  # of experts that swaps may bring to a GPU, beyond the pack's own
    kv_tokens: int = 0  # of the KV tier; 0: what tier_kv says
    modules: tuple[CustomModule, ...] = ()
    experts_most: int = 0  # experts a token that a request may ask for beyond the model's own; 0: none
    index: int = 0  # which of the daemon's engines
    device_index: int = 0  # which GPU
    cpu_set: tuple[int, ...] = ()  # the only CPUs that its process may use; empty: all that the daemon may


def make_spec(settings: Settings, pack_dir: str, manifest: Manifest, cpus: HostCpus | None = None) -> EngineSpec:
    """Resolve every `auto`. ConfigError if a setting does not fit the model, naming it, its value and the limit.

    `cpus`: what threads may run on; None: what this process may.
    """
    shapes = manifest.hyperparameters
    batch = settings.batch
    max_seq_len = settings.model.max_seq_len or shapes.max_positions
    if max_seq_len > shapes.max_positions:
        raise ConfigError(
            f"model.max_seq_len is {max_seq_len}, but the model was made for {shapes.max_positions}; lower it"
        )
    if settings.model.dtype not in ("auto", manifest.precision):
        raise ConfigError(
            f"model.dtype is {settings.model.dtype}, but the pack {manifest.name} is {manifest.precision}; leave it "
            f"out, or make another pack with convert --dtype {settings.model.dtype}"
        )
    _check_experts(settings.experts, manifest)
    tiers = settings.memory.tiers
    if settings.memory.kv_tokens is not None and tiers.kv.bytes != "auto":
        raise ConfigError("memory.kv_tokens and memory.tiers.kv.bytes both size the KV cache; leave one of them out")
    device: Literal["cpu", "cuda"] = "cuda" if settings.engine.device == "cuda" else "cpu"
    chunk, tokens = prefill_tokens(settings.batch, device)
    cpus = cpus or host_cpus()
    threads = cpus.auto_threads if settings.engine.threads == "auto" else settings.engine.threads
    return EngineSpec(
        pack_dir=pack_dir,
        device=device,
        slots=batch.slots,
        max_seq_len=max_seq_len,
        prefill_chunk=chunk,
        prefill_tokens=tokens,
        kv_precision=_kv_precision(settings, device),
        max_tokens_per_expert=settings.experts.max_tokens_per_expert or 0,
        weights=settings.model.weights,
        dummy_seed=settings.model.dummy_seed,
        gpu_fraction=settings.memory.gpu_fraction,
        threads=threads,
        cpus=cpus.pins(threads),
        tier_weights=_tier("weights", tiers.weights, 2 * _MIB),
        tier_kv=_tier("kv", tiers.kv, 64 * _KIB),
        tier_temp=_tier("temp", tiers.temp, 4 * _KIB),
        swap_slots=settings.experts.swap_slots,
        swap_formats=settings.experts.swap_formats,
        kv_tokens=settings.memory.kv_tokens or 0,
        modules=_modules(settings.modules, device),
        experts_most=settings.experts.max_per_token or 0,
    )


def _modules(modules: ModulesSettings, device: str) -> tuple[CustomModule, ...]:
    if modules.load and device == "cuda":
        raise ConfigError("modules.load is for engines on the CPU; leave it out, or set engine.device: cpu")
    return tuple(
        CustomModule(name=name, file=module.file, folders=modules.folders, sha256=module.sha256)
        for name, module in sorted(modules.load.items())
    )


def most_experts(layer: Layer, allowed: int) -> int:
    """Experts a token that a request may use in this layer; `allowed`: EngineSpec.experts_most."""
    return max(layer.experts_per_token, min(allowed, layer.experts))


def _check_experts(experts: ExpertsSettings, manifest: Manifest) -> None:
    allowed = experts.max_per_token or 0
    largest = max_experts(manifest)
    if allowed > largest:
        raise ConfigError(f"experts.max_per_token is {allowed}, but the model has {largest} experts a layer; lower it")
    tasks = {"generate": experts.generate, "score": experts.score, "embed": experts.embed}
    named = {"experts.per_token": experts.per_token}
    named |= {f"experts.{name}.per_token": task.per_token for name, task in tasks.items()}
    most = [most_experts(layer, allowed) for layer in manifest.layers]
    for name, value in named.items():
        check_per_token(name, value, most)


def check_per_token(name: str, value: int | Sequence[int] | None, most: Sequence[int]) -> None:
    """ConfigError: `name` says more than `most` of each layer, or has not a number for each."""
    if isinstance(value, int):
        if value > max(most):
            raise ConfigError(
                f"{name} is {value}, but the model uses {max(most)}; lower it, or allow more by experts.max_per_token"
            )
    elif value is not None:
        _check_layers(name, value, most)


def _check_layers(name: str, values: Sequence[int], most: Sequence[int]) -> None:
    if len(values) != len(most):
        raise ConfigError(f"{name} has {len(values)} numbers, but the model has {len(most)} layers; write one for each")
    for layer, (value, limit) in enumerate(zip(values, most, strict=True)):
        if not min(limit, 1) <= value <= limit:
            allowed = f"1 to {limit}" if limit else "0: it has no experts"
            raise ConfigError(f"{name} is {value} in layer {layer}; allowed there: {allowed}")


def prefill_tokens(batch: BatchSettings, device: Literal["cpu", "cuda"]) -> tuple[int, int]:
    """Tokens of a chunk and of a step. An automatic one gives way to the other."""
    chunk, tokens = _AUTO_PREFILL[device]
    if batch.prefill_chunk != "auto":
        chunk = batch.prefill_chunk
        tokens = max(tokens, chunk)
    if batch.prefill_tokens != "auto":
        tokens = batch.prefill_tokens
        chunk = chunk if batch.prefill_chunk != "auto" else min(chunk, tokens)
    if tokens < chunk:
        raise ConfigError(f"batch.prefill_tokens is {tokens}, below batch.prefill_chunk {chunk}; raise it")
    return chunk, tokens


def _kv_precision(settings: Settings, device: str) -> Literal["fp32", "fp16"]:
    if settings.kv.precision == "auto":
        return "fp16" if device == "cuda" else "fp32"
    return settings.kv.precision


def device_name(spec: EngineSpec) -> str:
    """The CPU for people: "cpu, 2 threads"."""
    return f"{spec.device}, {spec.threads} thread{'s' if spec.threads > 1 else ''}"


def channel_shape(spec: EngineSpec, manifest: Manifest) -> ChannelShape:
    """The channel between daemon and this engine."""
    return ChannelShape(
        slots=spec.slots,
        layers=len(manifest.layers),
        vocab_size=manifest.hyperparameters.vocab_size,
        hidden=manifest.hyperparameters.hidden,
        max_experts=max_experts(manifest),
        max_seq_len=spec.max_seq_len,
    )


def run_tokens(tokens: int) -> int:
    """Tokens that the KV tier reserves for a request of `tokens` (clb_cache_capacity).

    n * 2^e with n in 8..16, and whole tiles of 16.
    """
    unit = max(_TILE, 1 << max(0, math.ceil(math.log2(tokens)) - 4))
    return -(-tokens // unit) * unit


def _tier(name: str, tier: TierSettings, default_page: int) -> TierSpec:
    page = default_page if tier.page_size == "auto" else _size(f"memory.tiers.{name}.page_size", tier.page_size)
    if not _MIN_PAGE <= page <= _MAX_PAGE or page & (page - 1):
        raise ConfigError(
            f"memory.tiers.{name}.page_size is {page} bytes; it must be a power of two from {_MIN_PAGE} to {_MAX_PAGE}"
        )
    size = 0 if tier.bytes == "auto" else _size(f"memory.tiers.{name}.bytes", tier.bytes)
    return TierSpec(bytes=size, page_bytes=page, huge_pages=tier.huge_pages)


def _size(name: str, value: str | int) -> int:
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
