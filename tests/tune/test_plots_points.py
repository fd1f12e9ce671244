"""Pictures of the points: what is drawn is what was found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from made_result import made_result
from matplotlib.figure import Figure

from colibrid.tune.choose import latency
from colibrid.tune.drawing import LIGHT, Picture
from colibrid.tune.plots_points import experts_picture, front_picture

if TYPE_CHECKING:
    from colibrid.tune.result import Task


def painted(picture: Picture | None) -> Figure:
    assert picture is not None
    figure = Figure(figsize=picture.size, layout="constrained")
    picture.paint(figure, LIGHT)
    return figure


@pytest.mark.parametrize("task", ["generate", "score", "embed"])
def test_front(task: Task) -> None:
    """Points of the front are joined from fast to slow, others are hollow, by the figures that the choice uses."""
    result = made_result(task)
    axes = painted(front_picture(result)).axes[0]
    behind, front = axes.lines[:2]
    assert len(front.get_xdata()) == len(result.front)
    assert len(behind.get_xdata()) == sum(one.hopeless is None for one in result.tried) - len(result.front)
    assert list(front.get_xdata()) == sorted(
        latency(one.cost) for one in map(result.tried.__getitem__, result.front) if one.cost
    )
    assert axes.get_ylabel() == ("cosine" if task == "embed" else "loss")


def test_front_names_points() -> None:
    """Every point has its number once, alone or with its neighbours; the chosen one stands first among the names."""
    result = made_result()
    axes, beside = painted(front_picture(result)).axes
    numbers = [int(number) for text in axes.texts for number in text.get_text().replace(" …", "").split(", ")]
    assert len(set(numbers)) == len(numbers)
    assert set(numbers) <= {number for number, one in enumerate(result.tried) if one.hopeless is None}
    assert {"1", "2", "3", "9", "10"} <= {text.get_text() for text in axes.texts}  # these stand alone
    assert beside.texts[0].get_text().startswith(f"{result.chosen}  ")
    assert beside.texts[0].get_text().endswith("(chosen)")


def test_limits_are_lines() -> None:
    """Limits of the two figures that are shown are drawn where they are; others, and those far away, are not."""
    axes = painted(front_picture(made_result(slo="p50_itl_ms<7, loss<2.55, kl<0.02, p99_itl_ms<900"))).axes[0]
    dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
    across, up = dashed
    assert list(across.get_xdata()) == [7, 7]
    assert list(up.get_ydata()) == [2.55, 2.55]
    far = painted(front_picture(made_result(slo="p50_itl_ms<9000"))).axes[0]
    assert [line for line in far.lines if line.get_linestyle() == "--"] == []


def test_experts() -> None:
    """One number for all layers makes the line, other kinds have marks; points that were stopped early are left out."""
    result = made_result()
    figure = painted(experts_picture(result))
    assert [axes.get_title() for axes in figure.axes] == ["loss", "KL", "exact"]
    lines = {line.get_label(): line for line in figure.axes[1].lines}
    assert list(lines["same in all layers"].get_xdata()) == [1, 2, 3, 4]
    assert list(lines["same in all layers"].get_ydata()) == pytest.approx([0.1, 0, 0.004, 0.008])
    assert len(lines["threshold"].get_xdata()) == 4
    assert list(lines["a number for each layer"].get_xdata()) == [1.5]


def test_experts_without_costs() -> None:
    """Where no clock ran, the points say how many experts there are, but for thresholds."""
    bare = tuple(msgspec.structs.replace(one, cost=None) for one in made_result().tried)
    figure = painted(experts_picture(msgspec.structs.replace(made_result(), tried=bare)))
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert list(lines["same in all layers"].get_xdata()) == [1, 2, 3, 4]
    assert "threshold" not in lines


def test_nothing_to_show() -> None:
    """One point alone makes no picture."""
    alone = msgspec.structs.replace(made_result(), tried=made_result().tried[:1], front=(0,), chosen=0)
    assert front_picture(alone) is None
    assert experts_picture(alone) is None
