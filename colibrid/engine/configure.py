"""From a spec and a manifest to the configuration that C opens, and its memory bill."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from colibrid.config.sizes import format_bytes
from colibrid.engine import abi
from colibrid.engine.library import InstallError
from colibrid.engine.spec import EngineSpec, TierSpec, channel_shape
from colibrid.engine.state import MemoryPlan
from colibrid.engine.tables import ModelTables
from colibrid.errors import ColibridError, ConfigError, EngineError, ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibrid.engine.library import Library
    from colibrid.model.manifest import Manifest

KV_SHARE_OF_HOST = 0.25  # of the available memory, for the CPU's KV tier when its size is auto

_MODEL_STATUSES = frozenset(
    {abi.Status.IO, abi.Status.FORMAT, abi.Status.CHECKSUM, abi.Status.NOT_FINITE, abi.Status.MODULE}
)
_CONFIG_STATUSES = frozenset({abi.Status.ARGUMENT, abi.Status.MEMORY, abi.Status.UNSUPPORTED})


class EngineSetup:
    """Owns a `clb_engine_config` and all that it points to, until open has returned."""

    def __init__(self, library: Library, spec: EngineSpec, manifest: Manifest) -> None:
        self._library = library
        self._spec = spec
        self._tables = ModelTables(manifest)
        self._modules: ctypes.Array[abi.ModuleRef] | None = None
        self._cpus = (ctypes.c_uint32 * len(spec.cpus))(*spec.cpus)
        self.config = abi.EngineConfig(
            abi_version=abi.ABI_VERSION,
            struct_bytes=ctypes.sizeof(abi.EngineConfig),
            channel=channel_shape(spec, manifest).to_c(),
            prefill_chunk=spec.prefill_chunk,
            prefill_tokens=spec.prefill_tokens,
            kv_precision=abi.Precision[spec.kv_precision.upper()],
            max_tokens_per_expert=spec.max_tokens_per_expert,
            threads=spec.threads,
            weights=abi.Weights[spec.weights.upper()],
            dummy_seed=spec.dummy_seed,
            tier_weights=_tier(spec.tier_weights),
            tier_kv=_tier(spec.tier_kv),
            tier_temp=_tier(spec.tier_temp),
            dir_fd=-1,
            command_fd=-1,
            event_fd=-1,
            model=ctypes.pointer(self._tables.desc),
            cpus=self._cpus if spec.cpus else None,
        )
        if spec.device == "cuda":
            self.use_device(abi.DeviceDesc())
        if spec.kv_tokens:
            page = spec.tier_kv.page_bytes
            self.config.tier_kv.bytes = -(-spec.kv_tokens * self.plan().kv_bytes_per_token // page) * page

    def plan(self) -> MemoryPlan:
        """The bill of the configuration as it stands. ConfigError or ModelError if C refuses it."""
        plan, error = abi.MemoryPlan(), abi.Error()
        status = self._library.c.clb_engine_plan(ctypes.byref(self.config), ctypes.byref(plan), ctypes.byref(error))
        if status != abi.Status.OK:
            raise self.error(status, error)
        return MemoryPlan(**{name: getattr(plan, name) for name in MemoryPlan.__struct_fields__})

    def fit(self, available: int) -> MemoryPlan:
        """Size an automatic KV tier for a host with `available` bytes, and return the bill.

        ConfigError if even so the engine would take more than memory.device_fraction of it.
        """
        plan = self.plan()
        if self.config.tier_kv.bytes == 0:
            page = self._spec.tier_kv.page_bytes
            share = min(KV_SHARE_OF_HOST, self._spec.device_fraction)
            budget = max(int(available * share) // page * page, page)
            if plan.kv > budget:
                self.config.tier_kv.bytes = budget
                plan = self.plan()
        limit = int(available * self._spec.device_fraction)
        if plan.total > limit:
            raise ConfigError(
                f"the engine needs {format_bytes(plan.total)} (weights {format_bytes(plan.weights)}, "
                f"kv {format_bytes(plan.kv)}, temp {format_bytes(plan.temp)}), but {format_bytes(limit)} is "
                f"memory.device_fraction {self._spec.device_fraction} of the available {format_bytes(available)}; "
                "lower batch.slots, model.max_seq_len or memory.tiers.kv.bytes, or use a smaller model"
            )
        return plan

    def fit_gpu(self, free: int) -> MemoryPlan:
        """Size an automatic KV tier for a GPU with `free` bytes, and return the bill.

        What memory.device_fraction leaves is for the driver's own needs, step graphs among them. ConfigError if even
        with the smallest KV tier the arena would take more.
        """
        plan = self.plan()
        limit = int(free * self._spec.device_fraction)
        page = self._spec.tier_kv.page_bytes
        budget = (limit - plan.arena + plan.kv) // page * page
        if self.config.tier_kv.bytes == 0 and plan.arena > limit and budget > 0:
            self.config.tier_kv.bytes = budget
            plan = self.plan()
        if plan.arena > limit:
            raise ConfigError(
                f"the engine needs {format_bytes(plan.arena)} of GPU memory (weights {format_bytes(plan.weights)}, "
                f"kv {format_bytes(plan.kv)}, temp {format_bytes(plan.temp)}), but {format_bytes(limit)} is "
                f"memory.device_fraction {self._spec.device_fraction} of the free {format_bytes(free)}; "
                "lower batch.slots, batch.prefill_tokens, model.max_seq_len or memory.kv_tokens, use a smaller model, "
                "or stop other programs that use this GPU"
            )
        return plan

    def use_device(self, device: abi.DeviceDesc) -> None:
        """The accelerator to open, or to plan for; must stay valid until the engine is closed."""
        self._device = device
        self.config.device = ctypes.pointer(device)

    def use_modules(self, names: Sequence[str], paths: Sequence[str]) -> None:
        """Kernel modules that C may load; `paths` must stay valid until open has returned."""
        self._modules = (abi.ModuleRef * len(names))(
            *(abi.ModuleRef(name.encode(), path.encode()) for name, path in zip(names, paths, strict=True))
        )
        self.config.modules = self._modules
        self.config.module_count = len(names)

    def error(self, status: int, error: abi.Error) -> ColibridError:
        """The exception for a failed plan or open."""
        text = error.message.decode("utf-8", "replace") or "the engine gave no reason"
        message = f"{text} ({self._library.status_name(status)})"
        if status in _MODEL_STATUSES:
            return ModelError(message)
        if status in _CONFIG_STATUSES:
            return ConfigError(message)
        if status == abi.Status.VERSION:
            return InstallError(f"{message}; install colibrid again")
        return EngineError(message)


def plan_memory(library: Library, spec: EngineSpec, manifest: Manifest) -> MemoryPlan:
    """What an engine of this spec would take, without looking at the host. Raises as EngineSetup.plan does."""
    return EngineSetup(library, spec, manifest).plan()


def _tier(tier: TierSpec) -> abi.TierConfig:
    return abi.TierConfig(tier.bytes, tier.page_bytes, abi.HugePages[tier.huge_pages.upper()])
