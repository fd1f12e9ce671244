"""Which settings a sweep tries: from --grid 'per_token=1,2,3;threshold=0,0.2;slots=4,8', or by the model alone. Pure.

The first point is always the model's own setting, and each setting is there once: a number of experts that is the model's
own in every layer is written as None.
"""

from __future__ import annotations

import difflib
import itertools
import math
from typing import TYPE_CHECKING, Any

import msgspec

from colibrid.errors import ConfigError
from colibrid.tune.result import Point

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from colibrid.model.manifest import Manifest

MAX_POINTS = 256
MAX_PER_TOKEN = 16  # as experts.per_token allows
MAX_SLOTS = 64  # as batch.slots allows
MAX_WINDOW_MS = 1000.0  # as batch.window_ms allows
MAX_TOKENS = 65536  # of one step, as batch.prefill_tokens allows: more is no limit
_THRESHOLDS = (0.1, 0.2, 0.3, 0.5)
_NONE = "none"
_AXES = ("per_token", "threshold", "max_tokens_per_expert", "window_ms", "slots")
_HINT = "write it as 'per_token=1,2;threshold=0,0.2', with none for the model's own or the default"


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What a grid has to know of the model."""

    own: tuple[int, ...]  # experts a token in each layer, 0: a layer without
    experts: tuple[int, ...]  # of each layer

    @property
    def own_most(self) -> int:
        return max(self.own, default=0)

    @property
    def most(self) -> int:
        """Experts a token that can be tried at all."""
        return min(MAX_PER_TOKEN, max(self.experts, default=0))


def shape_of(manifest: Manifest) -> Shape:
    return Shape(
        own=tuple(layer.experts_per_token for layer in manifest.layers),
        experts=tuple(layer.experts for layer in manifest.layers),
    )


def default_points(shape: Shape) -> tuple[Point, ...]:
    """Fewer experts and two more than the model's own, and its own with some thresholds. No products of both."""
    own = shape.own_most
    if own == 0:
        return (Point(),)
    tried = {*range(1, own)} if own <= 4 else {1, own // 4, own // 2, 3 * own // 4, own - 1}
    more = {count for count in (own + 1, own + 2) if count <= shape.most}
    points = [Point(per_token=count) for count in sorted(tried | more)]
    return _distinct([Point(), *points, *(Point(threshold=share) for share in _THRESHOLDS)], shape)


def grid_points(grid: str, shape: Shape) -> tuple[Point, ...]:
    """All combinations of the values that `grid` lists. ConfigError names the axis, the value and what is allowed."""
    axes: dict[str, list[Any]] = {}
    for part in filter(None, (part.strip() for part in grid.split(";"))):
        name, equals, listed = part.partition("=")
        name = name.strip()
        if name not in _AXES:
            near = difflib.get_close_matches(name, _AXES, n=1)
            known = f"did you mean {near[0]}?" if near else f"there are {', '.join(_AXES)}"
            raise ConfigError(f"--grid: no axis {name!r}; {known}")
        if name in axes:
            raise ConfigError(f"--grid: {name} is there twice; list all its values once")
        if not equals or not listed.strip():
            raise ConfigError(f"--grid: {name} has no values; {_HINT}")
        axes[name] = [_value(name, text.strip(), shape) for text in listed.split(",")]
    if not axes:
        raise ConfigError(f"--grid {grid!r}: nothing in it; {_HINT}")
    count = math.prod(map(len, axes.values()))
    if count > MAX_POINTS:
        sizes = " x ".join(f"{len(values)} of {name}" for name, values in axes.items())
        raise ConfigError(f"--grid: {sizes} make {count} points, at most {MAX_POINTS}; leave some out")
    made = [Point(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]
    return _distinct([Point(), *made], shape)


def normal(point: Point, shape: Shape) -> Point:
    """The same setting as every other way to write it: what is the model's own is None, what is alike in all layers is
    one number.
    """
    asked = point.per_token
    if asked is None:
        return point
    each = tuple(min(asked, most) for most in shape.experts) if isinstance(asked, int) else asked
    if each == shape.own:
        return msgspec.structs.replace(point, per_token=None)
    counts = {count for count in each if count}
    return msgspec.structs.replace(point, per_token=counts.pop()) if len(counts) == 1 else point


def experts_only(point: Point) -> Point:
    """The part that decides about answers: window and slots only change speed, unless experts may drop tokens."""
    if point.max_tokens_per_expert is not None:
        return point
    return msgspec.structs.replace(point, window_ms=None, slots=None)


def point_name(point: Point) -> str:
    """In a few words, with the names of the settings."""
    named = ((name, getattr(point, name)) for name in _AXES)
    parts = [f"{name} {_shown(value)}" for name, value in named if value is not None and (value or name != "threshold")]
    return ", ".join(parts) or "the model's own setting"


def _shown(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else f"{value:g}"


def _distinct(points: Iterable[Point], shape: Shape) -> tuple[Point, ...]:
    return tuple(dict.fromkeys(normal(point, shape) for point in points))


def _value(name: str, text: str, shape: Shape) -> Any:
    if name == "threshold":
        return _number(name, text, 0.0, 1.0)
    if text == _NONE:
        return None
    if name == "window_ms":
        return _number(name, text, 0.0, MAX_WINDOW_MS)
    if name == "slots":
        return _whole(name, text, MAX_SLOTS)
    if name == "max_tokens_per_expert":
        return _whole(name, text, MAX_TOKENS)
    if shape.most == 0:
        raise ConfigError(f"--grid: per_token is {text}, but the model has no experts; leave it out")
    return _whole(name, text, shape.most)


def _whole(name: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= most):
        raise ConfigError(f"--grid: {name} must be whole numbers from 1 to {most}, or {_NONE} (given: {text!r})")
    return int(text)


def _number(name: str, text: str, least: float, most: float) -> float:
    words = "" if name == "threshold" else f", or {_NONE}"
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise ConfigError(f"--grid: {name} must be numbers from {least:g} to {most:g}{words} (given: {text!r})")
    return value


def most_per_token(points: Sequence[Point], shape: Shape) -> int | None:
    """What experts.max_per_token must be for all of them; None: the model's own suffices."""
    asked = [max(point.per_token) if isinstance(point.per_token, tuple) else point.per_token or 0 for point in points]
    most = max(asked, default=0)
    return most if most > shape.own_most else None
