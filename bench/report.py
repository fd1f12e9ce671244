"""What the measurements say: medians, ratios, tables. Pure.

A comparison is a list of rounds; in each, both sides were measured one after the other. Its ratio is the median of
the rounds' ratios, so that a machine which slows down takes both sides along.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


MOST_BUSY = 0.05  # of the machine, with other work


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity, a value a round."""

    ours: list[float]
    theirs: list[float]

    @property
    def ratios(self) -> list[float]:
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


class EngineResult(msgspec.Struct, frozen=True, kw_only=True):
    """One model and precision without HTTP."""

    model: str
    precision: str
    rates: dict[str, Pair]  # "decode 128", "prefill 512" -> tokens/s
    floor_share: list[float]  # of our decode
    layer_us_above_floor: list[float]
    read_bandwidth: list[float]  # bytes/s
    bytes_ratio: float | None = None  # of our weights and llama.cpp's file, without the copy of a tied head


class ServerResult(msgspec.Struct, frozen=True, kw_only=True):
    """One model, precision, number of slots and of clients over HTTP."""

    model: str
    precision: str
    slots: int
    clients: int
    requests_per_s: Pair
    p50_ms: Pair
    p99_ms: Pair


class WrkResult(msgspec.Struct, frozen=True, kw_only=True):
    """400 connections that never wait, against POST /generate."""

    connections: int
    seconds: float
    ok: int
    refused: int  # 503 with Retry-After
    failed: int  # any other status, and errors of sockets
    ok_per_s: float
    memory_first_kib: int  # median of the first half after warm-up
    memory_last_kib: int  # median of the second half


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured where: the same for every comparison with llama.cpp."""

    date: str
    commit: str
    machine: str
    mode: str
    threads: int
    busy: float  # share of all CPUs that others used just before
    peer: str


class Results(Run, frozen=True, kw_only=True):
    """Everything of one run of compare_llama_cpp.py or measure.py."""

    prompt_tokens: int  # over HTTP
    max_tokens: int
    engine: list[EngineResult]
    server: list[ServerResult]
    same_text: dict[str, bool]  # model and precision -> both servers gave the same greedy text
    sweep: list[dict[str, Any]] = []  # documents of `colibrid bench engine --json`
    wrk: WrkResult | None = None


def markdown(results: Results) -> Iterator[str]:
    """The tables, line by line."""
    yield (
        f"{results.machine}; commit {results.commit}, {results.date}, {results.mode} run; {results.threads} "
        f"thread{'' if results.threads == 1 else 's'} on both sides, interleaved; medians of the rounds, lowest and "
        f"highest in brackets."
    )
    if results.busy > MOST_BUSY:
        yield ""
        yield f"**The machine was {results.busy:.0%} busy with other work: these numbers say nothing.**"
    if results.engine:
        yield ""
        yield from engine_table(results.engine)
    if results.server:
        yield ""
        yield (
            f"Servers: different prompts of {results.prompt_tokens} tokens, {results.max_tokens} tokens out, greedy, "
            "no prompt cache, the same client for both."
        )
        yield ""
        yield from server_table(results.server)
    if results.sweep:
        yield ""
        yield from sweep_table(results.sweep)
    if results.wrk is not None:
        yield ""
        yield from wrk_lines(results.wrk)


def engine_table(rows: Sequence[EngineResult]) -> Iterator[str]:
    yield "| model | weights | tokens/s of | colibrid | llama.cpp | ratio | of the floor | us/layer above it | bytes ratio |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        for name, pair in row.rates.items():
            floor = ["", ""]
            if name.startswith("decode"):
                floor = [
                    f"{statistics.median(row.floor_share):.0%}",
                    f"{statistics.median(row.layer_us_above_floor):.0f}",
                ]
            size = "" if row.bytes_ratio is None else f"{row.bytes_ratio:.3f}"
            rates = (_spread(pair.ours), _spread(pair.theirs), _ratio(pair))
            yield _line(row.model, row.precision, name, *rates, *floor, size)
    yield ""
    yield (
        "Bytes ratio: our weights by llama.cpp's file, a tied head counted once on both sides, which that file may "
        "have twice, as embedding and as head."
    )


def server_table(rows: Sequence[ServerResult]) -> Iterator[str]:
    yield "| model | weights | slots | clients | requests/s | llama.cpp | ratio | p99 ms | llama.cpp | ratio |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        rate, tail = row.requests_per_s, row.p99_ms
        yield _line(
            row.model, row.precision, str(row.slots), str(row.clients),
            _spread(rate.ours), _spread(rate.theirs), _ratio(rate),
            _spread(tail.ours), _spread(tail.theirs), _ratio(tail),
        )  # fmt: skip


def sweep_table(documents: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| model | weights | slots | context | prefill tok/s | decode tok/s | us/layer above floor | of the floor | expert calls saved |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for document in documents:
        for row in document["rows"]:
            yield _line(
                document["model"], document["precision"], str(row["slots"]), str(row["context"]),
                _number(row["prefill_tokens_per_s"]), _number(row["decode_tokens_per_s"]),
                f"{row['layer_us_above_floor']:.0f}", f"{row['floor_share']:.0%}",
                f"{row['expert_calls_saved_per_step']:.0f} of "
                f"{row['expert_calls_saved_per_step'] + row['expert_runs_per_step']:.0f} a step",
            )  # fmt: skip


def wrk_lines(row: WrkResult) -> Iterator[str]:
    growth = row.memory_last_kib - row.memory_first_kib
    yield (
        f"`wrk` with {row.connections} connections for {row.seconds:.0f} s against `/generate`: {row.ok} answered "
        f"({row.ok_per_s:.0f} a second), {row.refused} refused with Retry-After, {row.failed} failed; memory "
        f"{row.memory_first_kib / 1024:.0f} MiB, {growth:+d} KiB from the first half to the second."
    )


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _spread(values: Sequence[float]) -> str:
    middle = _number(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({_number(min(values))} to {_number(max(values))})"


def _ratio(pair: Pair) -> str:
    return f"**{pair.ratio:.2f}**"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def between(text: str, begin: str, end: str, lines: Sequence[str]) -> str:
    """The text with these lines in place of what stands between two marks. ValueError: a mark is missing."""
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the marks are missing:\n{begin}\n{end}")
    return "\n".join([head + begin, *lines, end + tail])
