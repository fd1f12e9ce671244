"""Draw results of compare_llama_cpp.py or measure.py: colibrid as a multiple of llama.cpp.

    python bench/plot.py RESULTS.json OUT.png

Needs matplotlib (`pip install matplotlib`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import msgspec
from matplotlib.figure import Figure
from report import Pair, Results

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

OURS, THEIRS = "#0b6e4f", "#9aa5b1"
Bar = tuple[str, Pair]


def engine_bars(results: Results) -> list[Bar]:
    """Tokens a second of the engine alone."""
    return [
        (f"{row.model} {row.precision}, {name}", pair) for row in results.engine for name, pair in row.rates.items()
    ]


def server_bars(results: Results) -> list[Bar]:
    """Requests a second over HTTP."""
    return [
        (f"{row.model} {row.precision}, {row.slots} slots, {row.clients} clients", row.requests_per_s)
        for row in results.server
    ]


def draw(results: Results) -> Figure:
    """One bar a quantity, its ratio; whiskers are the rounds' lowest and highest."""
    mpl.rcParams["font.size"] = 8
    groups = [
        (title, bars)
        for title, bars in (
            ("tokens/s, one request, without HTTP", engine_bars(results)),
            ("requests/s over HTTP", server_bars(results)),
        )
        if bars
    ]
    heights = [len(bars) + 1.5 for _, bars in groups]
    figure = Figure(figsize=(7.5, 0.22 * sum(heights) + 0.5), layout="constrained")
    axes = figure.subplots(len(groups), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for axis, (title, bars) in zip(axes, groups, strict=True):
        _panel(axis, title, bars)
    axes[-1].set_xlabel("colibrid as a multiple of llama.cpp (same weights and precision; 1 = equal)")
    figure.suptitle(
        f"{results.machine}, {results.threads} threads; commit {results.commit}, {results.date}", fontsize=8
    )
    return figure


def _panel(axis: Axes, title: str, bars: Sequence[Bar]) -> None:
    places = range(len(bars))
    ratios = [pair.ratio for _, pair in bars]
    low = [pair.ratio - min(pair.ratios) for _, pair in bars]
    high = [max(pair.ratios) - pair.ratio for _, pair in bars]
    colours = [OURS if ratio >= 1 else THEIRS for ratio in ratios]
    axis.barh(places, ratios, xerr=(low, high), color=colours, height=0.7, error_kw={"lw": 0.8, "ecolor": "#333333"})
    axis.axvline(1.0, color="black", lw=0.8)
    axis.set_yticks(places, [name for name, _ in bars])
    axis.invert_yaxis()
    axis.set_title(title, fontsize=8, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    for place, (ratio, above) in enumerate(zip(ratios, high, strict=True)):
        axis.text(ratio + above + 0.02, place, f"{ratio:.2f}", va="center", fontsize=7)


def plot(results: Results, path: Path) -> None:
    """Writes a PNG."""
    draw(results).savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw results beside llama.cpp.")
    parser.add_argument("results", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    plot(msgspec.json.decode(arguments.results.read_bytes(), type=Results), arguments.out)


if __name__ == "__main__":
    main()
