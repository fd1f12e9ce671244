"""From a spec and a manifest to the configuration that C opens, and its memory bill."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from colibrid.config.sizes import format_bytes
from colibrid.engine import abi
from colibrid.engine.library import InstallError
from colibrid.engine.spec import EngineSpec, TierSpec, channel_shape, run_tokens
from colibrid.engine.state import MemoryPlan
from colibrid.engine.tables import ModelTables
from colibrid.errors import ColibridError, ConfigError, EngineError, ModelError
from colibrid.model.formats import format_of

if TYPE_CHECKING:
    from colibrid.engine.library import KernelModules, Library
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
        self._swap_formats = _weight_formats(spec.swap_formats)
        self.config = abi.EngineConfig(
            abi_version=abi.ABI_VERSION,
            struct_bytes=ctypes.sizeof(abi.EngineConfig),
            channel=channel_shape(spec, manifest).to_c(),
            prefill_chunk=spec.prefill_chunk,
            prefill_tokens=spec.prefill_tokens,
            kv_precision=abi.Precision[spec.kv_precision.upper()],
            max_tokens_per_expert=spec.max_tokens_per_expert,
            experts_most=spec.experts_most,
            threads=spec.threads,
            weights=abi.Weights[spec.weights.upper()],
            dummy_seed=spec.dummy_seed,
            swap_slots=spec.swap_slots,
            tier_weights=_tier(spec.tier_weights),
            tier_kv=_tier(spec.tier_kv),
            tier_temp=_tier(spec.tier_temp),
            dir_fd=-1,
            command_fd=-1,
            event_fd=-1,
            model=ctypes.pointer(self._tables.desc),
            cpus=self._cpus if spec.cpus else None,
            swap_formats=self._swap_formats,
            swap_format_count=len(self._swap_formats),
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

        ConfigError if even so the engine would take more than memory.gpu_fraction of it.
        """
        plan = self.plan()
        if self.config.tier_kv.bytes == 0:
            page = self._spec.tier_kv.page_bytes
            share = min(KV_SHARE_OF_HOST, self._spec.gpu_fraction)
            budget = max(int(available * share) // page * page, page)
            if plan.kv > budget:
                self.config.tier_kv.bytes = budget
                plan = self.plan()
        self._require(plan, plan.total, available, "memory", "the available")
        return plan

    def fit_gpu(self, free: int) -> MemoryPlan:
        """Size an automatic KV tier for a GPU with `free` bytes, and return the bill.

        ConfigError if even with the smallest KV tier arena and graphs would take more than memory.gpu_fraction of it.
        """
        plan = self.plan()
        limit = int(free * self._spec.gpu_fraction)
        page = self._spec.tier_kv.page_bytes
        needed = plan.arena + plan.graphs
        budget = (limit - needed + plan.kv) // page * page
        if self.config.tier_kv.bytes == 0 and needed > limit and budget >= self._one_request(plan):
            self.config.tier_kv.bytes = budget
            plan = self.plan()
        self._require(plan, plan.arena + plan.graphs, free, "GPU memory", "the free")
        return plan

    def _one_request(self, plan: MemoryPlan) -> int:
        """Bytes of the shortest KV run: a tier that holds less serves nothing."""
        page = self._spec.tier_kv.page_bytes
        return -(-run_tokens(1) * plan.kv_bytes_per_token // page) * page

    def _require(self, plan: MemoryPlan, needed: int, given: int, kind: str, whose: str) -> None:
        """ConfigError iff more is needed than the fraction of what is given; it says what would fit."""
        limit = int(given * self._spec.gpu_fraction)
        if needed <= limit:
            return
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in plan.parts())
        page = self._spec.tier_kv.page_bytes
        left = (limit - needed + plan.kv) // page * page // plan.kv_bytes_per_token
        if left >= run_tokens(1):
            hint = f"memory.kv_tokens: {left} would fit; set it"
        elif plan.weights > limit:
            hint = "the weights alone are more; use a smaller model"
        else:
            hint = "lower batch.prefill_tokens, batch.slots or experts.swap_slots, use a smaller model"
        raise ConfigError(
            f"the engine needs {format_bytes(needed)} of {kind} ({parts}), but {format_bytes(limit)} is "
            f"memory.gpu_fraction {self._spec.gpu_fraction} of {whose} {format_bytes(given)}; {hint}, "
            "or stop other programs that use this memory"
        )

    def use_device(self, device: abi.DeviceDesc) -> None:
        """The accelerator to open, or to plan for; must stay valid until the engine is closed."""
        self._device = device
        self.config.device = ctypes.pointer(device)

    def use_modules(self, modules: KernelModules) -> None:
        """Kernel modules that C may load; they must stay open until clb_engine_open has returned."""
        names, paths = modules.names, modules.paths
        self._modules = (abi.ModuleRef * len(names))(
            *(
                abi.ModuleRef(name=name.encode(), path=path.encode(), by_name=index >= modules.built_in)
                for index, (name, path) in enumerate(zip(names, paths, strict=True))
            )
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


def _weight_formats(names: tuple[str, ...]) -> ctypes.Array[abi.WeightFormat]:
    formats = [format_of(name) for name in names]
    return (abi.WeightFormat * len(formats))(
        *(
            abi.WeightFormat(abi.Precision[each.precision.upper()], each.group_rows, each.group_cols, each.zero_points)
            for each in formats
        )
    )


def _tier(tier: TierSpec) -> abi.TierConfig:
    return abi.TierConfig(tier.bytes, tier.page_bytes, abi.HugePages[tier.huge_pages.upper()])
