"""Draw a result of soak.py: the memory of daemon and engine over the requests that were served.

    python bench/soak_plot.py RESULT.json OUT.png

Needs matplotlib (`pip install matplotlib`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Mapping

COLOURS = {"daemon": "#0b6e4f", "engine": "#c1662f"}


def plot(result: Mapping[str, Any], picture: Path) -> None:
    """Growth in KiB since the first part, one line a process, with the limits that the run is held to."""
    mpl.rcParams["font.size"] = 9
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.add_subplot()
    samples = result["samples"]
    base = samples[1] if len(samples) > 1 else samples[0]
    requests = [one["requests"] / 1000 for one in samples[1:]]
    for name, colour in COLOURS.items():
        grown = [one[f"{name}_kib"] - base[f"{name}_kib"] for one in samples[1:]]
        whole = base[f"{name}_kib"] / 1024
        axes.plot(requests, grown, marker="o", color=colour, label=f"{name} ({whole:.1f} MiB)")
        limit = result[f"{name}_limit_kib"]
        if limit is not None:
            axes.axhline(limit, color=colour, linestyle=":", linewidth=1, label=f"limit of the {name}: {limit:.0f} KiB")
    axes.set_xlabel("requests served, thousands")
    axes.set_ylabel("private memory since the first part, KiB")
    axes.set_title(
        f"{result['requests']:,} mixed requests on the {result['device'].upper()}: {result['errors']} failed, "
        f"{result['engine_totals']['allocations_after_open']} allocations after ready",
        fontsize=9,
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    plot(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
