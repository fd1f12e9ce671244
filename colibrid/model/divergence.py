"""How far a model with other numbers of experts is from itself, and how sure its routers are: over texts, in float32.

All routings go through the layers together, as far as they are alike as one, so that each matrix is read once; where
there are too many for the memory, in several passes. The figures of one do not depend on the others.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from colibrid.model import forward
from colibrid.model.forward import OWN, Forward

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from colibrid.model.floats import Array
    from colibrid.model.forward import Routing, Weights

MOST_BYTES = 1 << 30  # of the values that are kept for all rows of one pass, about
_ROW_VALUES = 8  # rows of x that a row of a layer's values takes, about


class Text(NamedTuple):
    """Token ids, and the first of them whose prediction counts; at least 1."""

    ids: Sequence[int]
    first: int = 1


class Divergences(NamedTuple):
    """What was found."""

    kl: tuple[float, ...]  # of the model itself from each routing, mean over positions, whole vocabulary, nats
    positions: int  # 0: the texts have none that counts, and each kl is 0
    entropy: tuple[float | None, ...]  # of each layer's router, in units of log(experts), mean over all tokens


def divergences(
    weights: Weights,
    texts: Sequence[Text],
    routings: Sequence[Routing],
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Divergences:
    """Progress is called with the layers done, and all, of all passes. ModelError: a text does not fit the model."""
    hyper, layers = weights.description.hyperparameters, weights.description.layers
    tokens = sum(len(text.ids) for text in texts)
    fitting = MOST_BYTES // (4 * _ROW_VALUES * hyper.hidden * tokens)  # branches of one pass
    size = max(1, fitting - 1)
    parts = [routings[begin : begin + size] for begin in range(0, len(routings), size)] or [[]]
    kl: list[float] = []
    for index, part in enumerate(parts):
        model = _Watched(weights, [text.ids for text in texts], [OWN, *part])
        done = index * len(layers)
        model.run(lambda layer, _, done=done: progress(done + layer, len(parts) * len(layers)))  # type: ignore[misc]
        kl += _from_first(model, _positions(texts))
    entropy = tuple(model.entropy.get(layer) for layer in range(len(layers)))
    return Divergences(tuple(kl), len(_positions(texts)), entropy)


class _Watched(Forward):
    """Notes the entropy of the routers, of the model itself."""

    def __init__(self, weights: Weights, texts: Sequence[Sequence[int]], routings: Sequence[Routing]) -> None:
        super().__init__(weights, texts, routings)
        self.entropy: dict[int, float] = {}

    def scores(self, index: int, normed: Array) -> Array:
        found = super().scores(index, normed)
        own = found[: len(self.ids)].astype(np.float64)
        each = -(own * np.log(np.maximum(own, np.finfo(np.float64).tiny))).sum(axis=1)
        self.entropy[index] = float(each.mean()) / math.log(max(own.shape[1], 2))
        return found


def _positions(texts: Sequence[Text]) -> Array:
    """Those whose prediction counts, in all texts one after another."""
    found, begin = [], 0
    for text in texts:
        found.append(np.arange(begin + text.first - 1, begin + len(text.ids) - 1))
        begin += len(text.ids)
    return np.concatenate(found)


def _from_first(model: Forward, positions: Array) -> list[float]:
    """KL divergence of the first routing from each other one."""
    head = model.head()
    blocks = model.x.reshape(len(model.branches), len(model.ids), -1)
    sums = np.zeros(len(blocks))
    for begin in range(0, len(positions), forward.POSITIONS):
        rows = positions[begin : begin + forward.POSITIONS]
        own = model.predict(blocks[0, rows], head)
        shares = np.exp(own)
        for block in range(1, len(blocks)):
            sums[block] += float((shares * (own - model.predict(blocks[block, rows], head))).sum(dtype=np.float64))
    each = {number: block for block, members in enumerate(model.branches) for number in members}
    means = [max(float(total) / max(len(positions), 1), 0.0) for total in sums]
    return [means[each[number]] for number in range(1, len(each))]
