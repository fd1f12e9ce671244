"""A few of the source's predictions, kept beside a pack: so that it can be compared again where the source is not.

golden.json of a pack holds some short texts as token ids and, for each position, the TOP likeliest next tokens of the
source with their log-probabilities. The divergence is then over these and everything else together, which is at most
what it is over the whole vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from colibrid.errors import ModelError
from colibrid.model.checkpoint import read_bounded
from colibrid.model.forward import Forward

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from colibrid.model.floats import Array
    from colibrid.model.forward import Weights

GOLDEN_FILE = "golden.json"
TOP = 8
MOST_TEXTS = 8
MOST_TOKENS = 64  # of a text
MAX_BYTES = 16 << 20
_LEAST = 1e-12  # a share below it counts as this much


class Golden(msgspec.Struct, frozen=True):
    """The content of golden.json."""

    source: str  # name of the model that predicted
    texts: tuple[tuple[int, ...], ...]
    top: tuple[tuple[tuple[int, float], ...], ...]  # (token, log-probability) of each position, likeliest first


class GoldenDistance(msgspec.Struct, frozen=True):
    """Of a model from a golden file, means over positions."""

    source: str
    tokens: int
    kl: float
    top1: float


def make_golden(source: str, weights: Weights, texts: Sequence[Sequence[int]]) -> Golden:
    """From the beginnings of the first texts."""
    short = [tuple(text[:MOST_TOKENS]) for text in texts[:MOST_TEXTS]]
    forward = Forward(weights, short)
    forward.run()
    top: list[tuple[tuple[int, float], ...]] = []
    for _, predicted in forward.log_softmax():
        for row in predicted:
            best = np.argsort(-row, kind="stable")[:TOP]
            top.append(tuple((int(token), round(float(row[token]), 6)) for token in best))
    return Golden(source, tuple(short), tuple(top))


def write_golden(folder: Path, golden: Golden) -> None:
    (folder / GOLDEN_FILE).write_bytes(msgspec.json.encode(golden) + b"\n")


def read_golden(folder: Path) -> Golden | None:
    """None: there is no such file. ModelError: it is damaged."""
    where = folder / GOLDEN_FILE
    if not where.is_file():
        return None
    try:
        golden = msgspec.json.decode(read_bounded(where, MAX_BYTES), type=Golden)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{where}: {error}; remove it, or store it again with --against SOURCE --store") from None
    if sum(map(len, golden.texts)) != len(golden.top) or not golden.top or not all(golden.top):
        raise ModelError(f"{where}: texts and predictions do not belong together; store it again")
    return golden


def golden_distance(golden: Golden, weights: Weights) -> GoldenDistance:
    """How far the model's predictions are from those kept."""
    forward = Forward(weights, golden.texts)
    if any(token >= forward.hyper.vocab_size for row in golden.top for token, _ in row):
        raise ModelError(
            f"{GOLDEN_FILE}: has tokens beyond the vocabulary of {forward.hyper.vocab_size}; store it again"
        )
    forward.run()
    divergence, same = 0.0, 0
    for where, predicted in forward.log_softmax():
        for row, kept in zip(predicted, golden.top[where], strict=True):
            tokens = [token for token, _ in kept]
            divergence += _bucketed(np.array([value for _, value in kept]), row[tokens])
            same += int(row.argmax()) == tokens[0]
    count = len(golden.top)
    return GoldenDistance(golden.source, count, divergence / count, same / count)


def _bucketed(own: Array, other: Array) -> float:
    """KL divergence over the given tokens, by their log-probabilities, and over all others as one."""
    p, q = _shares(own), _shares(other)
    return max(float((p * np.log(p / q)).sum()), 0.0)


def _shares(logarithms: Array) -> Array:
    """Of the tokens, and of all others together."""
    known = np.exp(logarithms, dtype=np.float64)
    shares = np.maximum(np.append(known, 1.0 - known.sum()), _LEAST)
    return np.asarray(shares / shares.sum())
