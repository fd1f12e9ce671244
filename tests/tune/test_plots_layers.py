"""Pictures of the layers: what is drawn is what was found."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from made_result import made_layers, made_result
from matplotlib.figure import Figure

from colibrid.tune.drawing import LIGHT, Picture
from colibrid.tune.plots_layers import cut_picture, entropy_picture, load_picture


def painted(picture: Picture | None) -> Figure:
    assert picture is not None
    figure = Figure(layout="constrained")
    picture.paint(figure, LIGHT)
    return figure


def test_heat_map_is_the_load() -> None:
    """A row a layer from the top, a column an expert, in per cent, written where there is room."""
    result = made_result()
    axes = painted(load_picture(result)).axes[0]
    drawn = np.asarray(axes.collections[0].get_array()).reshape(6, 8)
    assert drawn == pytest.approx(100 * np.array([layer.load for layer in result.layers]))
    assert axes.get_ylim()[0] > axes.get_ylim()[1]
    assert [text.get_text() for text in axes.texts][:3] == [f"{100 * share:.1f}" for share in result.layers[0].load[:3]]


def test_heat_map_of_unlike_layers() -> None:
    """Layers with fewer experts end earlier, and dense layers between them keep the numbers right."""
    layers = (made_layers(1, 4)[0], msgspec.structs.replace(made_layers(2, 8)[1], layer=3))
    axes = painted(load_picture(msgspec.structs.replace(made_result(), layers=layers))).axes[0]
    drawn = np.ma.masked_invalid(axes.collections[0].get_array()).reshape(2, 8)
    assert drawn.mask.sum() == 4
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "3"]
    assert len(axes.texts) == 12


def test_large_models_have_no_numbers_in_cells() -> None:
    """48 layers of 128 experts are colours alone, with few enough ticks."""
    axes = painted(load_picture(made_result(layers=48, experts=128))).axes[0]
    assert len(axes.texts) == 0
    assert max(len(axes.get_xticks()), len(axes.get_yticks())) <= 32


def test_words_of_the_heat_map() -> None:
    """The description names the fullest expert, the even share, and how many experts have nothing."""
    picture = load_picture(made_result())
    assert picture is not None
    fullest = max(made_layers(6, 8), key=lambda layer: max(layer.load))
    assert f"expert, {fullest.load.index(max(fullest.load))} of layer {fullest.layer}, has" in picture.alt
    assert "an even share is 12.5 %" in picture.alt
    assert "6 experts have none" in picture.alt


def test_entropy() -> None:
    """A bar a layer, with the line of even choice at 1."""
    result = made_result()
    axes = painted(entropy_picture(result)).axes[0]
    assert [bar.get_height() for bar in axes.patches] == [layer.entropy for layer in result.layers]
    assert list(axes.lines[0].get_ydata()) == [1, 1]


def test_cut() -> None:
    """Loss as its rise over the own one, where it is over the same positions, and KL as it is."""
    result = made_result()
    rise, divergence = painted(cut_picture(result)).axes
    own = result.tried[0].quality.loss
    assert own is not None
    cuts = [layer.cut for layer in result.layers if layer.cut is not None]
    assert [bar.get_height() for bar in rise.patches] == pytest.approx([cut.loss - own for cut in cuts if cut.loss])
    assert [bar.get_height() for bar in divergence.patches] == [cut.kl for cut in cuts]
    other = tuple(
        msgspec.structs.replace(layer, cut=msgspec.structs.replace(layer.cut, tokens=7))
        for layer in result.layers
        if layer.cut is not None
    )
    (only,) = painted(cut_picture(msgspec.structs.replace(result, layers=other))).axes
    assert only.get_ylabel() == "KL, nats"


def test_nothing_to_show() -> None:
    """Without layers, or without cuts, there is no picture."""
    result = msgspec.structs.replace(made_result(), layers=())
    assert load_picture(result) is None
    assert entropy_picture(result) is None
    assert cut_picture(result) is None
    assert cut_picture(msgspec.structs.replace(result, layers=made_layers(6, 8, cuts=False))) is None
