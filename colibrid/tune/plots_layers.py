"""Pictures of the layers: the experts' load, the router's entropy, what it costs to take one expert from one layer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from colibrid.tune.drawing import Picture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from colibrid.tune.drawing import Theme
    from colibrid.tune.result import LayerStats, Result

_WRITTEN_EXPERTS = 16  # more are shown by colour alone ...
_WRITTEN_LAYERS = 24  # ... and so are more layers
_DARK = 0.18  # luminance below which white stands out more than black
_WIDTH = 9.0


def load_picture(result: Result) -> Picture | None:
    """Heat map: a row a layer, a column an expert."""
    layers = result.layers
    if not layers:
        return None
    fullest = max(layers, key=lambda layer: max(layer.load) * layer.experts)
    idle = sum(share == 0 for layer in layers for share in layer.load)
    experts = max(layer.experts for layer in layers)
    return Picture(
        name="load",
        title="Load of the experts",
        caption="Of the assignments of a layer, how many per cent go to each expert, under the model's own setting.",
        alt=f"Heat map of {len(layers)} layers and {experts} experts. The fullest expert, {_fullest(fullest)} of layer"
        f" {fullest.layer}, has {100 * max(fullest.load):.1f} % of its layer's assignments, an even share is"
        f" {100 / fullest.experts:.1f} %. {idle} experts have none.",
        size=(_WIDTH, min(max(0.42 * len(layers) + 1.3, 2.8), 9.0)),
        paint=partial(_paint_load, layers=layers),
    )


def _fullest(layer: LayerStats) -> int:
    return layer.load.index(max(layer.load))


def _paint_load(figure: Figure, _theme: Theme, *, layers: Sequence[LayerStats]) -> None:
    experts = max(layer.experts for layer in layers)
    shares = np.full((len(layers), experts), np.nan)
    for row, layer in enumerate(layers):
        shares[row, : layer.experts] = layer.load
    axes = figure.subplots()
    top = 100 * float(np.nanmax(shares))
    mesh = axes.pcolormesh(100 * shares, cmap="viridis", vmin=0, vmax=top, rasterized=True)
    axes.set(xlabel="expert", ylabel="layer")
    axes.grid(visible=False)
    axes.invert_yaxis()
    axes.set_xticks(*_ticks(range(experts), 0.5))
    axes.set_yticks(*_ticks([layer.layer for layer in layers], 0.5))
    axes.tick_params(length=0)
    if experts <= _WRITTEN_EXPERTS and len(layers) <= _WRITTEN_LAYERS:
        for (row, column), share in np.ndenumerate(shares):
            if not np.isnan(share):
                red, green, blue, _ = mesh.to_rgba(100 * share)
                colour = (
                    "#000000" if 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 > _DARK else "#ffffff"
                )
                axes.text(
                    column + 0.5, row + 0.5, f"{100 * share:.1f}", ha="center", va="center", color=colour, fontsize=9
                )
    same = len({layer.experts for layer in layers}) == 1
    label = "% of the layer's assignments" + ("\n(line: an even share)" if same else "")
    bar = figure.colorbar(mesh, ax=axes, pad=0.02, label=label)
    bar.outline.set_visible(False)
    if same:
        bar.ax.axhline(100 / experts, color="#ffffff", linewidth=4)
        bar.ax.axhline(100 / experts, color="#111111", linewidth=2)


def _ticks(numbers: Sequence[int], offset: float = 0.0, most: int = 16) -> tuple[list[float], list[str]]:
    """Places and words, of every so manieth so that they do not run into each other."""
    step = 1
    while len(numbers) > most * step:
        step *= 2
    return [place + offset for place in range(0, len(numbers), step)], [str(number) for number in numbers[::step]]


def entropy_picture(result: Result) -> Picture | None:
    """A bar a layer."""
    layers = result.layers
    if not layers:
        return None
    lowest = min(layers, key=lambda layer: layer.entropy)
    highest = max(layers, key=lambda layer: layer.entropy)
    return Picture(
        name="entropy",
        title="Entropy of the routing",
        caption="How sure the routers are: 0 where a token's choice is always one expert, 1 where all are alike to it. Mean"
        " over the tokens of the data.",
        alt=f"A bar for each of {len(layers)} layers, from {lowest.entropy:.3f} in layer {lowest.layer} to"
        f" {highest.entropy:.3f} in layer {highest.layer}.",
        size=(_WIDTH, 3.0),
        paint=partial(_paint_entropy, layers=layers),
    )


def _paint_entropy(figure: Figure, theme: Theme, *, layers: Sequence[LayerStats]) -> None:
    axes = figure.subplots()
    _bars(axes, theme, [layer.layer for layer in layers], [layer.entropy for layer in layers], "{:.2f}")
    axes.axhline(1.0, color=theme.soft, linestyle="--", linewidth=1)
    axes.set(ylabel="entropy / log(experts)", ylim=(0, 1.08))


def cut_picture(result: Result) -> Picture | None:
    """A bar a layer, a panel a figure."""
    layers = [layer for layer in result.layers if layer.cut is not None]
    own = result.tried[0].quality
    panels: list[tuple[str, list[float]]] = []
    for title, values in (
        ("rise of the loss, nats", [_rise(layer, own.loss, own.tokens) for layer in layers]),
        ("KL, nats", [layer.cut.kl if layer.cut else None for layer in layers]),
        ("1 - cosine", [_short(layer.cut.cosine if layer.cut else None) for layer in layers]),
    ):
        given = [value for value in values if value is not None]
        if given and len(given) == len(layers):
            panels.append((title, given))
    if not panels:
        return None
    title, first = panels[0]
    order = np.argsort(first, kind="stable")
    return Picture(
        name="cut",
        title="One expert fewer in one layer alone",
        caption="What it costs to take one expert from each token in this layer, all other layers as they are: low bars"
        " are layers that can do with fewer.",
        alt=f"{title.capitalize()}, a bar for each of {len(layers)} layers: least in layer {layers[order[0]].layer}"
        f" ({first[order[0]]:.5f}), most in layer {layers[order[-1]].layer} ({first[order[-1]]:.5f}).",
        size=(_WIDTH, 3.2),
        paint=partial(_paint_cut, numbers=[layer.layer for layer in layers], panels=panels),
    )


def _rise(layer: LayerStats, own: float | None, tokens: int) -> float | None:
    """Only over the same positions can two losses be compared."""
    cut = layer.cut
    return None if cut is None or cut.loss is None or own is None or cut.tokens != tokens else cut.loss - own


def _short(cosine: float | None) -> float | None:
    return None if cosine is None else 1 - cosine


def _paint_cut(
    figure: Figure, theme: Theme, *, numbers: Sequence[int], panels: Sequence[tuple[str, Sequence[float]]]
) -> None:
    for axes, (title, values) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _bars(axes, theme, numbers, values, "{:.4f}" if len(panels) > 1 else "{:.5f}")
        axes.set(ylabel=title)
        axes.axhline(0, color=theme.soft, linewidth=1)
        axes.margins(y=0.15)


def _bars(axes: Axes, theme: Theme, numbers: Sequence[int], values: Sequence[float], form: str) -> None:
    places = range(len(numbers))
    bars = axes.bar(places, values, color=theme.main, width=0.7)
    axes.set_xticks(*_ticks(numbers))
    axes.tick_params(axis="x", length=0)
    axes.set(xlabel="layer")
    axes.grid(visible=False, axis="x")
    if len(numbers) <= _WRITTEN_LAYERS // 2:
        axes.bar_label(bars, labels=[form.format(value) for value in values], padding=2, fontsize=8)
