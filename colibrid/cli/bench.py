"""`colibrid bench engine`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click
import msgspec

from colibrid.cli.engine_bench import EngineBench, Row, read_bandwidth
from colibrid.cli.footprint import footprint
from colibrid.cli.models import resolve_model
from colibrid.cli.options import engine_options, load_settings
from colibrid.config.environment import read_environment
from colibrid.config.sizes import format_bytes
from colibrid.engine.library import Library
from colibrid.engine.spec import EngineSpec, make_spec
from colibrid.errors import ConfigError
from colibrid.model.pack import open_pack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from colibrid.model.manifest import Manifest


@click.group(short_help="Measure the speed of this machine.")
def bench() -> None:
    """Measure the speed of this machine."""


@bench.command(short_help="Prefill and decode of the C engine, without HTTP.")
@click.argument("model", metavar="[MODEL]", required=False)
@engine_options
@click.option("--slots", "slot_list", default="1,2,4,8,16,32", show_default=True, metavar="N,N,…",
              help="Numbers of requests computed together.")  # fmt: skip
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, show_default=True, help="Of each request.")
@click.option("--steps", type=click.IntRange(1), default=64, show_default=True, help="Decode steps measured.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def engine(
    model: str | None,
    config_file: str | None,
    sets: tuple[str, ...],
    slot_list: str,
    prompt_tokens: int,
    steps: int,
    as_json: bool,
    **given: str | None,
) -> None:
    """Measure prefill and decode of the C engine in this process, without HTTP and text.

    Every row says how many bytes a decode step read and how that compares with the read bandwidth of one core,
    measured in the same run over a buffer as large as the weights.
    """
    counts = _counts(slot_list)
    environment = read_environment()
    sets = (*sets, f"batch.slots={max(counts)}")
    settings = load_settings(environment, config_file, sets, given).settings
    library = Library()
    resolved = resolve_model(model, settings.model, environment, library)
    manifest = open_pack(resolved.path, check_files=settings.model.weights == "files").manifest
    spec = make_spec(settings, str(resolved.path), manifest)
    room = spec.max_seq_len - prompt_tokens - steps - max(counts) * prompt_tokens // spec.prefill_tokens - 8
    if room < 0:
        raise ConfigError(f"{prompt_tokens} prompt tokens and {steps} steps do not fit {spec.max_seq_len}; lower them")
    bandwidth = read_bandwidth(footprint(manifest).total)
    rows: list[Row] = []
    with EngineBench(library, spec, manifest) as opened:
        if not as_json:
            for line in _head(manifest, spec, bandwidth):
                print(line)
        for count in counts:
            rows.append(opened.measure(count, prompt_tokens, steps, bandwidth))
            if not as_json:
                print(_line(rows[-1]), flush=True)
    if as_json:
        document = {
            "model": manifest.name,
            "family": manifest.family,
            "precision": manifest.precision,
            "kv_precision": spec.kv_precision,
            "device": spec.device,
            "layers": len(manifest.layers),
            "read_bandwidth": bandwidth,
            "rows": [msgspec.to_builtins(row) for row in rows],
        }
        print(json.dumps(document, indent=2))


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or any(not 1 <= count <= 64 for count in counts):
        raise ConfigError(f"--slots {text!r}: write numbers from 1 to 64 with commas between them, e.g. 1,8,32")
    return counts


def _head(manifest: Manifest, spec: EngineSpec, bandwidth: float) -> Iterator[str]:
    parts = footprint(manifest)
    yield f"model      {manifest.name} ({manifest.family}), weights {manifest.precision}, KV {spec.kv_precision}"
    yield f"device     {spec.device}, 1 thread; chunks of {spec.prefill_chunk}, {spec.prefill_tokens} tokens a prefill step"
    yield (
        f"bytes      {format_bytes(parts.dense_read)} dense a step + {format_bytes(int(parts.mean_expert))} a run of an "
        f"expert ({parts.expert_count} in {len(manifest.layers)} layers)"
    )
    yield f"read       {bandwidth / 1e9:.1f} GB/s by one core, measured now"
    yield ""
    yield " batch  context   prefill    decode      step      layer    experts      bytes    of floor"
    yield "                    tok/s     tok/s        ms         us     a step     a step"


def _line(row: Row) -> str:
    return (
        f"{row.slots:6d} {row.context:8d} {row.prefill_tokens_per_s:9.0f} {row.decode_tokens_per_s:9.0f} "
        f"{row.step_ms:9.3f} {row.layer_us:10.1f} {row.expert_runs_per_step:10.1f} "
        f"{format_bytes(row.bytes_per_step):>10} {100 * row.floor_share:9.1f} %"
    )
