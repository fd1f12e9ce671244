"""Draw results of gpu_check.sh as a roofline: steps of decode and prompts, beside recorded figures of vLLM.

    python bench/gpu_plot.py bench/results/gpu-DATE-DEVICE.json OUT.png

A step at one row reads each weight that it uses once and does two operations a weight, of two bytes; so its bytes are
also its operations, and a step of B rows does B times as many. Bytes are the engine's own count. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

TENSOR_FLOPS = 790e12  # of an 8192 x 8192 x 8192 product of bf16 on random data, measured on such a card
LONG_CONTEXT = 1024  # decode behind longer prompts reads K and V above all: not in the picture
# vLLM 0.26.0, same weights, context 512, greedy, the same card: ms a step by batch (docs/PERFORMANCE.md)
PEER_MS = {
    "qwen3-30b-a3b": {1: 4.15, 8: 9.23, 32: 16.06},
    "qwen1.5-moe-a2.7b": {1: 2.56, 8: 5.07, 32: 8.77},
}
COLOURS = ("#0b6e4f", "#c8553d", "#2b59c3", "#8f5bb0")


@dataclass(frozen=True)
class Point:
    """One step: operations, bytes that must be read, seconds."""

    label: str
    flops: float
    moved: float
    seconds: float

    @property
    def intensity(self) -> float:
        return self.flops / self.moved

    @property
    def rate(self) -> float:
        return self.flops / self.seconds


def decode_points(engine: dict[str, Any]) -> list[Point]:
    """One for each batch of one model's run."""
    rows = [row for row in engine["rows"] if row["context"] < LONG_CONTEXT]
    one = next((row["bytes_per_step"] for row in rows if row["slots"] == 1), None)
    if one is None:
        return []
    first = {row["slots"]: row for row in reversed(rows)}
    return [
        Point(f"{slots}", one * slots, row["bytes_per_step"], row["step_ms"] / 1e3)
        for slots, row in sorted(first.items())
    ]


def prompt_points(engine: dict[str, Any]) -> list[Point]:
    """One for each length of prompt, if there are several: all weights are read."""
    rows = engine["rows"]
    one = next((row["bytes_per_step"] for row in rows if row["slots"] == 1), None)
    lengths = {row["prompt_tokens"] for row in rows}
    if one is None or len(lengths) < 2:
        return []
    return [
        Point(f"{row['prompt_tokens']:,} tokens", one * row["prompt_tokens"], engine["memory"]["weights"], seconds)
        for row in rows
        if (seconds := row["prompt_tokens"] / row["prefill_tokens_per_s"]) and row["slots"] == 1
    ]


def peer_points(model: str, ours: list[Point]) -> list[Point]:
    times = PEER_MS.get(model, {})
    return [Point(p.label, p.flops, p.moved, times[int(p.label)] / 1e3) for p in ours if int(p.label) in times]


def draw(results: dict[str, Any]) -> Figure:
    """Roof, and a line a model."""
    mpl.rcParams["font.size"] = 8
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axis = figure.subplots()
    engines = results["engine"]
    bandwidth = max(row["read_bandwidth"] for engine in engines for row in engine["rows"])
    knee = TENSOR_FLOPS / bandwidth
    axis.plot([0.5, knee, 20 * knee], [bandwidth * 0.5, TENSOR_FLOPS, TENSOR_FLOPS], color="black", lw=1)
    axis.text(9, bandwidth * 14, f"{bandwidth / 1e12:.2f} TB/s read in the same run", rotation=40, fontsize=7)
    axis.text(knee * 1.2, TENSOR_FLOPS * 1.1, f"{TENSOR_FLOPS / 1e12:.0f} TFLOP/s", fontsize=7)
    seen: dict[str, str] = {}
    for engine in engines:
        model = engine["model"]
        colour = seen.setdefault(model, COLOURS[len(seen) % len(COLOURS)])
        prompts = prompt_points(engine)
        if prompts:
            _line(axis, prompts, colour, f"{model}, prompts", "s:")
            continue
        ours = decode_points(engine)
        _line(axis, ours, colour, f"{model}, decode of 1, 8, 32 rows", "o-")
        if peers := peer_points(model, ours):
            _line(axis, peers, colour, f"{model}, decode, vLLM 0.26.0", "x--", named=False)
    axis.set(xscale="log", yscale="log", xlabel="operations a byte that must be read", ylabel="operations a second")
    axis.set_title(
        f"{results['device']}, bf16, random weights; commit {results['commit']}, {results['date']}", fontsize=8
    )
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=6.5, loc="lower right")
    return figure


def _line(axis: Any, points: list[Point], colour: str, label: str, style: str, *, named: bool = True) -> None:
    axis.plot([p.intensity for p in points], [p.rate for p in points], style, color=colour, label=label, lw=0.8, ms=4)
    for point in points if named else ():
        axis.annotate(
            point.label, (point.intensity, point.rate), xytext=(3, -8), textcoords="offset points", fontsize=6
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw results of gpu_check.sh as a roofline.")
    parser.add_argument("results", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    draw(json.loads(options.results.read_text())).savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
