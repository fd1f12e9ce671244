"""`colibrid inspect PACK|MODEL`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click
import msgspec

from colibrid.cli.banner import memory_lines
from colibrid.cli.models import resolve_model
from colibrid.cli.options import engine_options, load_settings, use_plugins
from colibrid.config.environment import read_environment
from colibrid.config.sizes import format_bytes
from colibrid.engine.configure import plan_memory
from colibrid.engine.library import Library
from colibrid.engine.spec import EngineSpec, make_spec
from colibrid.model.footprint import Footprint, footprint, format_names
from colibrid.model.pack import open_pack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from colibrid.engine.state import MemoryPlan
    from colibrid.model.manifest import Layer, Manifest

_QK_NORM_TEXTS = {"none": "", "head": ", norm of each q and k head", "row": ", norm of q and of k"}


@click.command(short_help="Show what a model is and what it needs.")
@click.argument("model", metavar="[PACK|MODEL]", required=False)
@engine_options
@click.option("--max-batch-size", "slots", metavar="N", help="Requests computed together, for the memory bill.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def inspect(
    model: str | None, config_file: str | None, sets: tuple[str, ...], as_json: bool, **given: str | None
) -> None:
    """Show family, shapes, precision, bytes by part, experts, context and the memory bill of a model.

    MODEL is as in `colibrid serve`; a checkpoint is converted first. The bill is the one of these settings.
    """
    environment = read_environment()
    loaded = load_settings(environment, config_file, sets, given)
    use_plugins(loaded)
    settings = loaded.settings
    library = Library()
    resolved = resolve_model(model, settings, environment, library)
    pack = open_pack(resolved.path, check_files=settings.model.weights == "files")
    spec = make_spec(settings, str(resolved.path), pack.manifest)
    plan = plan_memory(library, spec, pack.manifest)
    parts = footprint(pack.manifest)
    if as_json:
        print(json.dumps(_document(str(resolved.path), pack.manifest, parts, spec, plan, pack.warnings), indent=2))
        return
    for line in _lines(str(resolved.path), pack.manifest, parts, spec, plan, pack.warnings):
        print(line)


def _lines(
    path: str, manifest: Manifest, parts: Footprint, spec: EngineSpec, plan: MemoryPlan, warnings: tuple[str, ...]
) -> Iterator[str]:
    shapes = manifest.hyperparameters
    yield f"{manifest.name}: {path}"
    yield f"  family      {manifest.family}"
    yield f"  precision   {', '.join(format_names(manifest))}, backend {manifest.backend}, {manifest.created_by or 'written by hand'}"
    yield (f"  parameters  {_millions(parts.parameters)}, of which a token uses {_millions(parts.active_parameters)}")
    yield (
        f"  shape       vocabulary {shapes.vocab_size}, hidden {shapes.hidden}, {len(manifest.layers)} layers, "
        f"{shapes.heads} heads of {shapes.head_dim}, {shapes.kv_heads} KV heads, "
        f"{'tied' if shapes.tied_head else 'own'} head{_QK_NORM_TEXTS[shapes.qk_norm]}"
    )
    for names, layer in _layer_groups(manifest.layers):
        yield f"  {names:<11} {_layer_text(layer)}"
    yield f"  context     {shapes.max_positions} tokens"
    yield f"  bytes       {format_bytes(parts.total)} in {len(manifest.files)} files"
    for name, size in parts.parts.items():
        if size:
            formats = ", ".join(parts.formats[name])
            yield f"    {name:<15} {format_bytes(size):>10}  {100 * size / parts.total:5.1f} %  {formats}".rstrip()
    if parts.expert_count:
        yield f"  experts     {parts.expert_count} of {format_bytes(int(parts.mean_expert))} each{_mixture(parts)}"
    total, *rows = memory_lines(plan)
    yield (
        f"  memory      {total} for {spec.slots} slots of {spec.max_seq_len} tokens; KV {plan.kv_bytes_per_token} bytes a "
        f"token ({spec.kv_precision})"
    )
    yield from (f"  {row}" for row in rows)
    for warning in warnings:
        yield f"  warning     {warning}"


def _mixture(parts: Footprint) -> str:
    """How many experts are in which format, if not all are in one."""
    formats = parts.formats["experts"]
    if len(formats) < 2:
        return ""
    return " in the mean: " + ", ".join(f"{count} {name}" for name, count in formats.items())


def _layer_groups(layers: tuple[Layer, ...]) -> Iterator[tuple[str, Layer]]:
    """("layers 0-5", one of them) for each run of equal layers; expert files do not count."""
    begin = 0
    plain = [msgspec.structs.replace(layer, expert_files=()) for layer in layers]
    for index in range(1, len(plain) + 1):
        if index == len(plain) or plain[index] != plain[begin]:
            last = index - 1
            yield (f"layer {begin}" if last == begin else f"layers {begin}-{last}"), plain[begin]
            begin = index


def _layer_text(layer: Layer) -> str:
    window = f", window of {layer.window} tokens" if layer.window else ""
    if layer.ffn == "dense":
        return f"dense, width {layer.shared_width}{window}"
    weights = "renormalised" if layer.renormalise else "not renormalised"
    shared = f", shared expert of width {layer.shared_width}" if layer.shared_width else ""
    return (
        f"{layer.experts} experts of width {layer.expert_width}, {layer.experts_per_token} a token, "
        f"{layer.score} weights {weights}{shared}{window}"
    )


def _millions(count: int) -> str:
    if count < 1e5:
        return str(count)
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def _document(
    path: str, manifest: Manifest, parts: Footprint, spec: EngineSpec, plan: MemoryPlan, warnings: tuple[str, ...]
) -> dict[str, Any]:
    shapes = msgspec.to_builtins(manifest.hyperparameters)
    del shapes["rope_inv_freq"]
    layers = [msgspec.to_builtins(layer) for layer in manifest.layers]
    for layer in layers:
        del layer["expert_files"]
    return {
        "name": manifest.name,
        "path": path,
        "family": manifest.family,
        "precision": manifest.precision,
        "backend": manifest.backend,
        "parameters": parts.parameters,
        "active_parameters": parts.active_parameters,
        "hyperparameters": shapes,
        "layers": layers,
        "files": len(manifest.files),
        "bytes": parts.total,
        "bytes_by_part": parts.parts,
        "formats_by_part": {name: formats for name, formats in parts.formats.items() if formats},
        "experts": parts.expert_count,
        "mean_expert_bytes": parts.mean_expert,
        "slots": spec.slots,
        "max_seq_len": spec.max_seq_len,
        "kv_precision": spec.kv_precision,
        "memory": msgspec.to_builtins(plan),
        "warnings": list(warnings),
    }
