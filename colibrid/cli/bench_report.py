"""What the benches print for people."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING

from colibrid.config.sizes import format_bytes
from colibrid.model.footprint import footprint, format_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from colibrid.cli.bench_http import HttpReport
    from colibrid.cli.bench_stats import Spread
    from colibrid.cli.engine_bench import Row
    from colibrid.engine.spec import EngineSpec
    from colibrid.model.manifest import Manifest


def machine_name(cpus: int, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's own name and how many of its CPUs are used."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {_count(cpus, 'CPU')}"


def engine_head(
    manifest: Manifest, spec: EngineSpec, device: str, memory: Sequence[str], reader: str, bandwidth: float
) -> Iterator[str]:
    """What stands above the lines of `bench engine`; memory: lines of the bill; bandwidth in bytes a second."""
    parts = footprint(manifest)
    formats = ", ".join(format_names(manifest))
    weights = "random weights, " if spec.weights == "dummy" else "weights "
    yield f"model      {manifest.name} ({manifest.family}), {weights}{formats}, KV {spec.kv_precision}"
    yield (f"device     {device}; chunks of {spec.prefill_chunk}, {spec.prefill_tokens} tokens a prefill step")
    yield (
        f"bytes      {format_bytes(parts.dense_read)} dense a step + {format_bytes(int(parts.mean_expert))} a run of an "
        f"expert ({parts.expert_count} in {len(manifest.layers)} layers)"
    )
    total, *rows = memory
    yield f"memory     {total}"
    yield from (f"         {row}" for row in rows)
    yield f"read       {bandwidth / 1e9:.1f} GB/s by {reader}, measured now and beside each line"
    yield ""
    yield "                prefill   decode     step    layer  above floor  experts    calls       bytes    read     of"
    yield " batch  context   tok/s    tok/s       ms       us     us/layer   a step    saved      a step    GB/s  floor"


def engine_line(row: Row) -> str:
    """One measurement."""
    return (
        f"{row.slots:6d} {row.context:8d} {row.prefill_tokens_per_s:7.0f} {row.decode_tokens_per_s:8.0f} "
        f"{row.step_ms:8.3f} {row.layer_us:8.1f} {row.layer_us_above_floor:12.1f} {row.expert_runs_per_step:8.1f} "
        f"{row.expert_calls_saved_per_step:8.1f} {format_bytes(row.bytes_per_step):>11} "
        f"{row.read_bandwidth / 1e9:7.1f} {100 * row.floor_share:4.0f} %"
    )


def http_lines(report: HttpReport) -> Iterator[str]:
    """A whole run of `bench http`."""
    load = report.load
    size = f"{load.requests} requests" if load.requests is not None else f"{load.seconds:g} s"
    yield f"server     {load.url}, model {report.model}"
    yield (
        f"load       {_count(load.clients, 'client')}, {size}, prompts of {_count(load.prompt_tokens, 'token')}, "
        f"at most {load.max_tokens} out, {'streamed' if load.stream else 'whole answers'}"
    )
    yield f"requests   {report.ok} answered, {report.refused} refused, {report.failed} failed in {report.elapsed_s:.2f} s"
    for problem in report.problems:
        yield f"           failed: {problem}"
    yield (
        f"rate       {report.requests_per_s:.1f} requests/s, {report.output_tokens_per_s:.0f} tokens/s out, "
        f"{report.tokens_per_request:.1f} tokens a request"
    )
    yield ""
    yield "ms                   mean       p50       p90       p99       max"
    for name, spread in (
        ("request", report.request_ms),
        ("first token", report.first_token_ms),
        ("between tokens", report.between_tokens_ms),
        ("between events", report.between_events_ms),
    ):
        if spread is not None:
            yield _spread_line(name, spread)


def _spread_line(name: str, spread: Spread) -> str:
    values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
    return f"{name:15}" + "".join(f"{value:10.2f}" for value in values)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
