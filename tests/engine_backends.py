"""What the C engine's tests run on: the CPU, the emulator behind a fake libcuda, and GPU 0. In this one place.

A test takes the fixture `backend` (tests/conftest.py) and opens its engines through it; so it runs on each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from in_process import Accelerator, InProcessEngine, crc32c
from random_checkpoints import write_checkpoint

from colibrid.model.convert import convert

if TYPE_CHECKING:
    from pathlib import Path

    from random_cases import Case

BACKENDS = ("cpu", "emulated", "cuda")


@dataclass(frozen=True)
class Backend:
    """Where engines are opened, and what may be expected of them (architecture, section 10)."""

    name: str  # of BACKENDS
    layout: Literal["cpu", "cuda"]  # whose packs it reads
    kv: str  # precision of K and V that it can do, the default one
    device: Accelerator | None  # None: the CPU
    relative_error: float  # of a position's logits with 16-bit weights, where the same experts were chosen
    within: float  # share of log-probabilities that lie within 2e-2 of the bundled model's reference
    clear_gap: float  # between the two best logits: above it greedy ids are equal

    @property
    def slow(self) -> bool:
        """A thread at a time: tests ask for less."""
        return self.name == "emulated"

    def pack(self, case: Case, folder: Path) -> Path:
        """A random checkpoint as a pack, below `folder`."""
        target = folder / f"{case.name}.{self.layout}"
        if not target.exists():
            source = write_checkpoint(case, folder / f"{case.name}.hf")
            convert(source, target, crc32c=crc32c, backend=self.layout)
        return target

    def open(self, pack: Path, **options: Any) -> InProcessEngine:
        """As InProcessEngine, on this backend."""
        return InProcessEngine(pack, device=self.device, **{"kv": self.kv, **options})


def cpu() -> Backend:
    """The CPU's kernels, the best that this machine has."""
    return Backend("cpu", "cpu", "fp32", None, relative_error=1e-3, within=1.0, clear_gap=0.05)


def accelerated(name: str, device: Accelerator) -> Backend:
    """The CUDA engine."""
    return Backend(name, "cuda", "fp16", device, relative_error=1e-2, within=0.97, clear_gap=0.25)
