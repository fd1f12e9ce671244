"""Two questions about where weights lie: do huge pages pay, and does it matter where experts begin?

    python bench/memory_trial.py huge-pages [--shape qwen2-moe-240m] [--dtype fp32] [--rounds 20]
    python bench/memory_trial.py banks ...

Every variant is an engine of its own with the same random weights; all are open at once and take turns, and each
round's time is compared with the first variant's of the same round. Needs the variants' memory (1 GB each for the
default shape) and an idle machine.

huge-pages  memory.tiers.*.huge_pages off, try, and require where the machine has reserved enough (vm.nr_hugepages).
banks       expert e begins (e mod 8) times some bytes later than it would, so that experts that are read side by side
            do not begin at the same place of a cache set, a page or a memory bank. All experts of one shape otherwise
            begin at equal low address bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

import msgspec
from random_checkpoint import DTYPE_NAMES, SHAPES

from colibrid.cli.engine_bench import EngineBench, Load
from colibrid.config.settings import BatchSettings, EngineSettings, ModelSettings, Settings
from colibrid.engine import tables
from colibrid.engine.library import Library
from colibrid.engine.spec import EngineSpec, make_spec
from colibrid.errors import ConfigError
from colibrid.model.cache import BUNDLED_MODEL
from colibrid.model.dummy import dummy_manifest
from colibrid.model.manifest import Manifest, PackFile

COLOURS = 8  # the low three bits of an expert's index
STRIDES = (0, 512, 8192, 65536)  # within a page, within the sets of a second-level cache, beyond them
PREFILL_TOKENS = 128
DECODE_STEPS = 16

Variant = tuple[str, EngineSpec, Manifest]


class _NoProbe:
    """The trial compares times, and needs no floor."""

    def measure(self) -> float:
        return 1e9


def describe(shape: str, dtype: str) -> Manifest:
    """A model of this shape without weights."""
    config = json.loads((BUNDLED_MODEL / "config.json").read_text(encoding="utf-8"))
    config |= SHAPES[shape] | {"torch_dtype": DTYPE_NAMES[dtype]}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return dummy_manifest(Path(folder), name=shape)


def coloured(manifest: Manifest, stride: int) -> Manifest:
    """The same model with expert e (e mod 8) * stride bytes further in its file."""
    shifts = {
        name: index % COLOURS * stride for layer in manifest.layers for index, name in enumerate(layer.expert_files)
    }

    def shifted(file: PackFile) -> PackFile:
        shift = shifts.get(file.name, 0)
        sections = tuple(msgspec.structs.replace(section, offset=section.offset + shift) for section in file.sections)
        return msgspec.structs.replace(file, bytes=file.bytes + shift, sections=sections)

    return msgspec.structs.replace(manifest, files=tuple(shifted(file) for file in manifest.files))


def with_pages(spec: EngineSpec, policy: str) -> EngineSpec:
    """The same engine with all tiers on pages of this policy."""
    tiers = {
        name: msgspec.structs.replace(getattr(spec, name), huge_pages=policy)
        for name in ("tier_weights", "tier_kv", "tier_temp")
    }
    return msgspec.structs.replace(spec, **tiers)


def variants(question: str, spec: EngineSpec, manifest: Manifest) -> list[Variant]:
    """What is compared; the first one is what the others are measured against."""
    if question == "banks":
        tables.EXPERT_ALIGNMENT = tables.DENSE_ALIGNMENT  # the loader takes gaps shorter than a file's alignment
        return [(f"{stride} bytes apart", spec, coloured(manifest, stride)) for stride in STRIDES]
    return [(policy, with_pages(spec, policy), manifest) for policy in ("off", "try", "require")]


def measure(found: list[Variant], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds of a prefill and of a decode step, by variant and round."""
    load = Load(slots=1, prompt_tokens=PREFILL_TOKENS, steps=DECODE_STEPS, repeat=1)
    times: dict[str, list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        benches = {}
        for name, spec, manifest in found:
            try:
                benches[name] = stack.enter_context(EngineBench(Library(), spec, manifest))
            except ConfigError as error:
                print(f"{name}: left out: {error}")
        for bench in benches.values():
            bench.warm_up()
        probe = _NoProbe()
        for number in range(rounds):
            order = list(benches) if number % 2 == 0 else list(reversed(benches))
            for name in order:
                row = benches[name].measure(load, probe)
                times.setdefault(name, []).append((1e3 * PREFILL_TOKENS / row.prefill_tokens_per_s, row.step_ms))
    return {name: times[name] for name, _, _ in found if name in times}


def report(times: dict[str, list[tuple[float, float]]]) -> None:
    """Medians, and the middle half of each round's ratio to the first variant."""
    base = next(iter(times.values()))
    print(f"{'variant':20} {'prefill ms':>11} {'decode ms':>10}   {'prefill / first':>22}   {'decode / first':>22}")
    for name, rows in times.items():
        shown = []
        for column in (0, 1):
            ratios = [row[column] / first[column] for row, first in zip(rows, base, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            shown.append(f"{middle:.3f} ({low:.3f} .. {high:.3f})")
        prefill, decode = (statistics.median(row[column] for row in rows) for column in (0, 1))
        print(f"{name:20} {prefill:11.2f} {decode:10.3f}   {shown[0]:>22}   {shown[1]:>22}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=("huge-pages", "banks"))
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2-moe-240m")
    parser.add_argument("--dtype", choices=sorted(DTYPE_NAMES), default="fp32")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=0, help="0: one a core")
    arguments = parser.parse_args()
    manifest = describe(arguments.shape, arguments.dtype)
    settings = Settings(
        batch=BatchSettings(slots=1),
        engine=EngineSettings(threads=arguments.threads or "auto"),
        model=ModelSettings(weights="dummy", max_seq_len=512),
    )
    spec = make_spec(settings, "none", manifest)
    print(f"{arguments.shape} {arguments.dtype}, {spec.threads} threads, {arguments.rounds} rounds")
    report(measure(variants(arguments.question, spec, manifest), arguments.rounds))


if __name__ == "__main__":
    main()
