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


class Reference:
    """A model that has read some texts, to compare others with. It is read once; what it knows then is small."""

    def __init__(
        self,
        weights: Weights,
        texts: Sequence[Sequence[int]],
        progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> None:
        self.texts = [list(text) for text in texts]
        self._forward = Forward(weights, texts)
        self._forward.run(progress)
        self._following = np.full(len(self._forward.ids), -1)  # the token that comes next; none behind a text
        for begin, end in self._forward.bounds:
            self._following[begin : end - 1] = self._forward.ids[begin + 1 : end]

    def distance(self, model: Weights, progress: Callable[[int, int], None] = lambda _done, _total: None) -> Distance:
        """Of a model from this one. ModelError: their vocabularies differ."""
        own_size, size = self._forward.hyper.vocab_size, model.description.hyperparameters.vocab_size
        if own_size != size:
            raise ModelError(f"vocabularies of {own_size} and {size} tokens: these are not the same model")
        forward = Forward(model, self.texts)
        forward.run(progress)
        sums = np.zeros(4)
        for (where, own), (_, other) in zip(self._forward.log_softmax(), forward.log_softmax(), strict=True):
            known = np.nonzero(self._following[where] >= 0)[0]
            tokens = self._following[where][known]
            sums += (
                float((np.exp(own) * (own - other)).sum(dtype=np.float64)),
                float((own.argmax(axis=1) == other.argmax(axis=1)).sum()),
                -float(other[known, tokens].sum(dtype=np.float64)),
                -float(own[known, tokens].sum(dtype=np.float64)),
            )
        positions = len(self._following)
        scored = max(int((self._following >= 0).sum()), 1)
        kl, same, loss, own_loss = map(float, sums)
        return Distance(positions, max(kl / positions, 0.0), same / positions, loss / scored, own_loss / scored)
