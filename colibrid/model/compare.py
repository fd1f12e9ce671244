"""How far a model's predictions are from another's, over texts: KL divergence, loss and agreement on the likeliest token."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from colibrid.errors import ModelError
from colibrid.model.forward import Forward

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from colibrid.model.forward import Weights


class Distance(msgspec.Struct, frozen=True):
    """Of a model from its reference, means over positions; logarithms are natural."""

    tokens: int
    kl: float  # sum of p ln(p / q), p the reference's prediction, over the whole vocabulary
    top1: float  # share of positions whose likeliest token is the reference's
    loss: float  # of the text's own next tokens
    reference_loss: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


def distance(
    reference: Weights,
    model: Weights,
    texts: Sequence[Sequence[int]],
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Distance:
    """Both run through all layers, then position by position. ModelError: their vocabularies differ."""
    both = (Forward(reference, texts), Forward(model, texts))
    sizes = [forward.hyper.vocab_size for forward in both]
    if sizes[0] != sizes[1]:
        raise ModelError(f"vocabularies of {sizes[0]} and {sizes[1]} tokens: these are not the same model")
    total = sum(len(forward.layers) for forward in both)
    for number, forward in enumerate(both):
        before = number * len(both[0].layers)
        forward.run(lambda done, _all, before=before: progress(before + done, total))  # type: ignore[misc]
    following = np.full(len(both[0].ids), -1)
    for begin, end in both[0].bounds:
        following[begin : end - 1] = both[0].ids[begin + 1 : end]
    sums = np.zeros(4)
    for (where, own), (_, other) in zip(both[0].log_softmax(), both[1].log_softmax(), strict=True):
        known = np.nonzero(following[where] >= 0)[0]
        tokens = following[where][known]
        sums += (
            float((np.exp(own) * (own - other)).sum(dtype=np.float64)),
            float((own.argmax(axis=1) == other.argmax(axis=1)).sum()),
            -float(other[known, tokens].sum(dtype=np.float64)),
            -float(own[known, tokens].sum(dtype=np.float64)),
        )
    positions = len(following)
    scored = max(int((following >= 0).sum()), 1)
    kl, same, loss, own_loss = map(float, sums)
    return Distance(positions, max(kl / positions, 0.0), same / positions, loss / scored, own_loss / scored)
