"""`colibrid bench`, and of its verbs `engine`."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click
import msgspec

from colibrid import __version__
from colibrid.cli.bench_verbs import compare, http
from colibrid.cli.options import engine_options, load_settings, quietly
from colibrid.cli.shapes import SHAPES, write_shape
from colibrid.config.environment import read_environment
from colibrid.config.sizes import format_bytes
from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibrid.cli.engine_bench import EngineBench, Load, Probe, Row
    from colibrid.config.settings import Settings
    from colibrid.engine.spec import EngineSpec
    from colibrid.model.manifest import Manifest

_MAX_SLOTS = 64
_MAX_PROMPT = 1 << 20


@click.group(short_help="Measure the speed of this machine, or of a server.")
def bench() -> None:
    """Measure the speed of this machine, or of a server."""


bench.add_command(http)
bench.add_command(compare)


@bench.command(short_help="Prefill and decode of the C engine, without HTTP.")
@click.argument("model", metavar="[MODEL]", required=False)
@engine_options
@click.option("--dummy", is_flag=True, help="Random weights: MODEL needs no more than a config.json.")
@click.option("--shape", type=click.Choice(list(SHAPES)), help="A published model's shape with random weights.")
@click.option("--slots", "slot_list", default="1,2,4,8,16,32", show_default=True, metavar="N,N,…",
              help="Numbers of requests computed together.")  # fmt: skip
@click.option("--prompt-tokens", "prompt_list", default="128", show_default=True, metavar="N,N,…",
              help="Lengths of each request's prompt.")  # fmt: skip
@click.option("--steps", type=click.IntRange(1), default=64, show_default=True, help="Decode steps of one measurement.")
@click.option("--repeat", type=click.IntRange(1, 1000), default=5, show_default=True,
              help="Measurements of each number, at most; a slow one is repeated less.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def engine(
    *,
    model: str | None,
    config_file: str | None,
    sets: tuple[str, ...],
    dummy: bool,
    shape: str | None,
    slot_list: str,
    prompt_list: str,
    steps: int,
    repeat: int,
    as_json: bool,
    **given: str | None,
) -> None:
    """Measure prefill and decode of the C engine in this process, without HTTP and text.

    Every row says how many bytes a decode step read and how that compares with the read bandwidth of this machine,
    measured beside it.
    """
    # Imported here: the other bench needs neither numpy nor the engine.
    from colibrid.cli.engine_bench import Load  # noqa: PLC0415

    slots = _numbers("--slots", slot_list, _MAX_SLOTS)
    prompts = _numbers("--prompt-tokens", prompt_list, _MAX_PROMPT)
    if shape is not None and model is not None:
        raise click.UsageError("--shape takes the place of MODEL; leave one of them out")
    random_weights = ("model.weights=dummy",) if dummy or shape is not None else ()
    sets = (*sets, f"batch.slots={max(slots)}", *random_weights)
    cpus = os.sched_getaffinity(0)  # now: an engine pins the thread that opens it
    settings = quietly(load_settings(read_environment(), config_file, sets, given))
    loads = [
        Load(slots=count, prompt_tokens=prompt, steps=steps, repeat=repeat) for prompt in prompts for count in slots
    ]
    with ExitStack() as stack:
        if shape is not None:
            model = str(write_shape(shape, Path(stack.enter_context(TemporaryDirectory()))))
        spec, manifest, opened = _open(settings, model, loads)
        stack.enter_context(opened)
        _measure(opened, spec, manifest, loads, cpus, as_json=as_json)


def _open(settings: Settings, model: str | None, loads: Sequence[Load]) -> tuple[EngineSpec, Manifest, EngineBench]:
    """The engine, with room for the loads and no more. ConfigError: they do not fit the model."""
    from colibrid.cli.device import settled  # noqa: PLC0415
    from colibrid.cli.engine_bench import EngineBench  # noqa: PLC0415
    from colibrid.cli.models import resolve_model  # noqa: PLC0415
    from colibrid.engine.library import Library  # noqa: PLC0415
    from colibrid.engine.spec import make_spec  # noqa: PLC0415
    from colibrid.model.pack import open_pack  # noqa: PLC0415

    library = Library()
    environment = read_environment()
    settings = settled(settings, model, environment, library)
    resolved = resolve_model(model, settings, environment, library)
    manifest = open_pack(resolved.path, check_files=settings.model.weights == "files").manifest
    spec = make_spec(settings, str(resolved.path), manifest)
    for load in loads:
        if load.context(spec.prefill_tokens) > spec.max_seq_len:
            raise ConfigError(
                f"{load.slots} prompts of {load.prompt_tokens} tokens and {load.steps} steps do not fit "
                f"{spec.max_seq_len}; lower --prompt-tokens or --steps"
            )
    spec = msgspec.structs.replace(spec, max_seq_len=max(load.context(spec.prefill_tokens) for load in loads))
    return spec, manifest, EngineBench(library, spec, manifest)


def _measure(
    opened: EngineBench, spec: EngineSpec, manifest: Manifest, loads: Sequence[Load], cpus: set[int], *, as_json: bool
) -> None:
    from colibrid.cli.banner import memory_lines  # noqa: PLC0415
    from colibrid.cli.bench_bandwidth import (  # noqa: PLC0415
        PROBE_BYTES,
        BandwidthProbe,
        GpuBandwidthProbe,
        probe_threads,
    )
    from colibrid.cli.bench_report import engine_head, engine_line, machine_name  # noqa: PLC0415
    from colibrid.engine.spec import device_name  # noqa: PLC0415
    from colibrid.model.footprint import footprint, format_names  # noqa: PLC0415

    if opened.gpu is None:
        machine, device = machine_name(len(cpus)), device_name(spec)
        probe: Probe = BandwidthProbe(probe_threads(opened.threads, len(cpus)), PROBE_BYTES, cpus)
    else:
        machine, probe = opened.gpu.info.name, GpuBandwidthProbe(opened.gpu)
        device = f"cuda, {machine}"
    opened.warm_up()
    bill = memory_lines(opened.plan)
    if opened.beside_arena:
        bill.append(f"  taken beside the arena while opening: {format_bytes(opened.beside_arena)}")
    if not as_json:
        for line in engine_head(manifest, spec, device, bill, probe.reader, probe.measure()):
            print(line)
    rows: list[Row] = []
    for load in loads:
        rows.append(opened.measure(load, probe))
        if not as_json:
            print(engine_line(rows[-1]), flush=True)
    if as_json:
        document = {
            "version": __version__,
            "machine": machine,
            "model": manifest.name,
            "family": manifest.family,
            "weights": "random" if spec.weights == "dummy" else "files",
            "precision": manifest.precision,
            "formats": format_names(manifest),
            "weights_bytes": footprint(manifest).total,
            "kv_precision": spec.kv_precision,
            "device": spec.device,
            "threads": opened.threads,
            "layers": len(manifest.layers),
            "memory": msgspec.to_builtins(opened.plan),
            "memory_beside_arena": opened.beside_arena,
            "prefill_chunk": spec.prefill_chunk,
            "prefill_tokens": spec.prefill_tokens,
            "probe_threads": probe.threads,
            "read_bandwidth": max(row.read_bandwidth for row in rows),
            "rows": [msgspec.to_builtins(row) for row in rows],
        }
        print(json.dumps(document, indent=2))


def _numbers(option: str, text: str, most: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or any(not 1 <= number <= most for number in numbers):
        raise ConfigError(f"{option} {text!r}: write numbers from 1 to {most} with commas between them, e.g. 1,8,32")
    return numbers
