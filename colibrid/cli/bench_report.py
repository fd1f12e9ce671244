"""What the benches print for people."""

from __future__ import annotations

import math
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from colibrid.config.sizes import format_bytes
from colibrid.model.footprint import footprint, format_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from colibrid.cli.bench_intervals import Comparison, Figure
    from colibrid.cli.bench_load import HttpLoad
    from colibrid.cli.bench_result import HttpReport
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
    for name, value in http_facts(report):
        yield f"{name:11}{value}"
    yield ""
    yield "ms              mean       p50       p90       p99       max"
    for name, spread in (
        ("TTFT", report.ttft_ms),
        ("TPOT", report.tpot_ms),
        ("ITL", report.itl_ms),
        ("e2e", report.e2e_ms),
        ("sent late", report.late_ms),
    ):
        if spread is not None:
            values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
            yield f"{name:10}" + "".join(f"{value:10.2f}" for value in values)


def http_facts(report: HttpReport) -> Iterator[tuple[str, str]]:
    """What was sent and how it was answered."""
    load = report.load
    form = "streamed" if load.stream else "whole answers"
    yield "server", f"{load.url}, model {report.model}"
    yield "load", arrival_words(load)
    if load.trace is None:
        yield "lengths", f"prompts of {load.prompt_tokens} tokens, at most {load.max_tokens} out, {form}"
    else:
        yield (
            "lengths",
            f"of {load.trace.file} ({_count(load.trace.lines, 'line')}, SHA-256 {load.trace.sha256}), {form}",
        )
    adapted = list(_adapted(report))
    if adapted:
        yield "adapted", "; ".join(adapted)
    if report.cut_short is not None:
        yield "cut short", f"{cut_words(report)}; {_count(report.cut_short.under_way, 'request')} under way not counted"
    answered = f"{report.ok} answered, {report.refused} refused, {report.failed} failed in {report.elapsed_s:.2f} s"
    yield "requests", f"{answered}, at most {report.in_flight} under way"
    yield from (("failed", problem) for problem in report.problems)
    prompts = report.prompt_tokens_per_request
    counted = "" if prompts is None else f", {prompts:.1f} in"
    yield (
        "rate",
        (
            f"{report.requests_per_s:.1f} requests/s, {report.output_tokens_per_s:.0f} tokens/s out, "
            f"{report.tokens_per_request:.1f} tokens a request{counted}"
        ),
    )
    if report.goodput is not None:
        good = report.goodput
        yield "goodput", f"{good.requests_per_s:.1f} requests/s, {100 * good.share:.1f} % within {good.slo}"


def cut_words(report: HttpReport) -> str:
    """How far a run came that was interrupted."""
    assert report.cut_short is not None, "a run that was"
    load = report.load
    after = f"interrupted after {report.cut_short.after_s:.1f} s"
    return (
        f"{after} of {load.seconds:g} s"
        if load.seconds is not None
        else f"{after}, at {report.ok} of {load.requests} requests"
    )


def arrival_words(load: HttpLoad) -> str:
    """When requests are sent."""
    size = "" if load.requests is None else f", {_count(load.requests, 'request')}"
    size = size if load.seconds is None else f", {load.seconds:g} s"
    if not load.open:
        return f"closed loop, {_count(load.clients, 'client')}{size}"
    if load.rate is None:
        return f"open loop at the times of the trace{size}, times count from there"
    kind = "Poisson arrivals" if load.arrivals == "poisson" else "arrivals at even times"
    return f"open loop, {load.rate:g} requests/s, {kind}{size}, times count from arrival"


def _adapted(report: HttpReport) -> Iterator[str]:
    """What the server did not take."""
    load, form = report.load, report.form
    if not form.ids and not load.chat and load.prompt_form == "auto":
        yield "the server takes no token ids: prompts are words, of about that many tokens"
    if load.ignore_eos and not form.ignore_eos:
        yield "it takes no ignore_eos: answers may be shorter"
    if report.tokens_from == "events":
        yield "it does not say usage: each event counts as one token"


def compare_lines(found: Comparison, names: tuple[str, str]) -> Iterator[str]:
    """What `bench compare` prints."""
    yield f"first      {names[0]}, {found.requests[0]} requests"
    yield f"second     {names[1]}, {found.requests[1]} requests"
    yield f"interval   {interval_words(found)}"
    yield from (f"warning    {warning}" for warning in found.warnings)
    yield ""
    yield f"{'':14}{'':12}{'first':>10}{'second':>10}{'ratio':>8}  {'interval':16}the second is"
    for figure in found.figures:
        name, unit, a, b, ratio, interval, verdict = figure_cells(figure)
        yield f"{name:14}{unit:12}{a:>10}{b:>10}{ratio:>8}  {interval:16}{verdict}"


def interval_words(found: Comparison) -> str:
    """How the intervals came about."""
    sizes = " and ".join(f"{count / found.parts:.0f}" for count in found.requests)
    return f"{100 * found.confidence:.0f} % of second / first, from {found.parts} parts of {sizes} requests a side"


def figure_cells(figure: Figure) -> tuple[str, str, str, str, str, str, str]:
    """Name, unit, both values, ratio, interval and verdict."""
    shown = "" if figure.ratio is None else f"{figure.ratio:.3f}"
    interval = "" if figure.low is None else f"from {figure.low:.3f}"
    if figure.high is not None:
        interval = f"{figure.low:.3f} to {figure.high:.3f}"
    verdict = {"unclear": "not shown to differ", "zero": "no ratio to 0", "few": "not enough data"}.get(
        figure.verdict, figure.verdict
    )
    if figure.verdict == "few" and figure.needs is not None:
        verdict += f", measure {math.ceil(figure.needs)} x as long"
    return figure.name, figure.unit, f"{figure.a:,.2f}", f"{figure.b:,.2f}", shown, interval, verdict


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
