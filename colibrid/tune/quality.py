"""What a setting does to the answers, against the model's own: deterministic, no clock.

Use::

    base = make_base(runner, data, points)  # the model's own answers; KL of all points in one pass
    measure(runner, data, point, base)

Loss, the likeliest tokens, greedy answers and vectors are the engine's. KL needs the whole vocabulary: it is from the
float32 pass of model/forward.py, over a bounded number of tokens that are spread over the data. With
max_tokens_per_expert texts that are computed together change each other: the pass reads them as the runner has them read,
in waves of as many as there are slots (model/steps.py).
"""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from colibrid.engine.spec import prefill_tokens
from colibrid.model.divergence import Text, divergences
from colibrid.model.floats import Array
from colibrid.model.forward import Routing
from colibrid.model.pack_model import PackModel
from colibrid.model.steps import TokenLimit
from colibrid.tune.data import Data, evenly
from colibrid.tune.progress import silent
from colibrid.tune.result import Point, Quality
from colibrid.tune.runner import answer_request, embed_request, policy_of, score_request

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from colibrid.config.settings import Settings
    from colibrid.model.pack import Pack
    from colibrid.tune.data import Item
    from colibrid.tune.progress import Progress
    from colibrid.tune.runner import Runner

KL_TOKENS = 8192  # a few places have most of it: of 2048 tokens it comes out anywhere from a fifth to twice of all
NEAREST = 10  # neighbours of a vector
_ROWS = 1024  # vectors whose neighbours are looked for at once


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine said of the data under one point."""

    logprobs: tuple[array[float], ...]  # of the scored tokens of each item of data.scored
    best: tuple[array[int], ...]  # the likeliest token at each of their places
    answers: tuple[tuple[int, ...], ...]  # to each item of data.asked
    vectors: Array  # (items, hidden)

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood of a scored token."""
        return -math.fsum(value for each in self.logprobs for value in each) / sum(map(len, self.logprobs))


def read(runner: Runner, data: Data, point: Point, progress: Progress = silent) -> Read:
    """Ask all: answers first, then scores or vectors, each in the order of the data."""
    runner.answer_as(point)
    policy = policy_of(point)
    if data.task == "embed":
        pooling = runner.settings.embeddings.pooling
        found = runner.ask([embed_request(item.ids, policy, pooling) for item in data.items], progress)
        return Read(logprobs=(), best=(), answers=(), vectors=np.array([one.pooled for one in found], np.float32))
    stop, context, longest = runner.manifest.text.eos_token_ids, runner.context, data.longest_answer
    asked = [
        answer_request(item.prompt, policy, min(longest, context - len(item.prompt)), stop)
        for item in data.asked
        if item.prompt is not None
    ]
    found = runner.ask([*asked, *(score_request(item.ids, policy) for item in data.scored)], progress)
    scores = list(zip(data.scored, found[len(asked) :], strict=True))
    return Read(
        logprobs=tuple(one.prompt_logprobs[item.first :] for item, one in scores),
        best=tuple(one.prompt_best[item.first :] for item, one in scores),
        answers=tuple(one.tokens for one in found[: len(asked)]),
        vectors=np.zeros((0, runner.manifest.hyperparameters.hidden), np.float32),
    )


class Divergence:
    """KL of the model itself from points, and the entropy of its routers; each point is computed once."""

    def __init__(self, pack: Pack, settings: Settings, items: Sequence[Item], most: int) -> None:
        """settings: with engine.device settled. items: of which at most so many tokens are read."""
        self._weights = PackModel(pack)
        self._settings = settings
        some = evenly(items, most) or (msgspec.structs.replace(items[0], ids=items[0].ids[:most]),)
        self._texts = [Text(item.ids, item.first) for item in some]
        self._known: dict[Routing, float] = {}
        self.positions = 0
        self.entropy: tuple[float | None, ...] = ()  # of each layer's router, in units of log(experts)

    def add(self, points: Iterable[Point], progress: Progress = silent) -> None:
        """Compute those of the points that are not known yet, in one pass."""
        wanted = dict.fromkeys(routing_of(point, self._settings) for point in points)
        new = [routing for routing in wanted if routing not in self._known]
        if new or not self.entropy:
            found = divergences(self._weights, self._texts, new, progress)
            self.positions, self.entropy = found.positions, found.entropy
            self._known.update(zip(new, found.kl, strict=True))

    def of(self, point: Point) -> float | None:
        """None: no position of the texts counts."""
        self.add([point])
        return self._known[routing_of(point, self._settings)] if self.positions else None


def routing_of(point: Point, settings: Settings) -> Routing:
    """What the float32 pass has to do to compute as a service for this point: see runner.serving.

    settings: with engine.device settled.
    """
    limit = None
    if point.max_tokens_per_expert is not None:
        slots = settings.batch.slots if point.slots is None else point.slots
        chunk, most = prefill_tokens(settings.batch, "cuda" if settings.engine.device == "cuda" else "cpu")
        limit = TokenLimit(point.max_tokens_per_expert, slots, chunk, most)
    return Routing(point.per_token or 0, point.threshold, limit)


class Base:
    """The model's own answers to the data, which others are compared with."""

    def __init__(self, data: Data, own: Read, loads: Sequence[Sequence[int]], divergence: Divergence) -> None:
        self.data = data
        self.own = own
        self.loads = loads  # (token, expert) pairs of each layer and expert
        self.divergence = divergence
        self._nearest = _nearest(own.vectors)

    def part(self, runner: Runner, most: int) -> Base:
        """The same of a part of the data, of at most so many tokens, without answers."""
        items = self.data.items if self.data.task == "embed" else self.data.scored
        some = tuple(msgspec.structs.replace(item, prompt=None) for item in evenly(items, most) or items[:1])
        return _base(runner, msgspec.structs.replace(self.data, items=some), self.divergence, silent)

    def cosine(self, found: Read) -> float:
        """Mean over all vectors."""
        each = (found.vectors.astype(np.float64) * self.own.vectors).sum(axis=1)
        return math.fsum(each) / len(each)

    def harm(self, found: Read) -> float:
        """What is to be small: the loss, or how far the vectors have turned."""
        return 1.0 - self.cosine(found) if self.data.task == "embed" else found.loss

    def compare(self, runner: Runner, point: Point, found: Read) -> Quality:
        """All figures that the data and its task have."""
        if self.data.task == "embed":
            return Quality(
                tokens=self.data.tokens,
                cosine=self.cosine(found),
                neighbours=_overlap(self._nearest, _nearest(found.vectors)),
            )
        tokens = sum(item.scored for item in self.data.scored)
        kl = self.divergence.of(point) if tokens else None
        quality = Quality(
            tokens=tokens,
            loss=found.loss if tokens else None,
            kl=kl,
            kl_tokens=0 if kl is None else self.divergence.positions,
            top1=_agreement(found.best, self.own.best) / tokens if tokens else None,
        )
        return quality if not found.answers else self._with_answers(runner, quality, found.answers)

    def _with_answers(self, runner: Runner, quality: Quality, answers: Sequence[tuple[int, ...]]) -> Quality:
        own, count = self.own.answers, len(answers)
        together = [_common(mine, other) for mine, other in zip(answers, own, strict=True)]
        right = [
            _said(runner, tokens) == item.answer.strip()
            for item, tokens in zip(self.data.asked, answers, strict=True)
            if item.answer is not None
        ]
        return msgspec.structs.replace(
            quality,
            divergence=sum(together) / count,
            same=sum(mine == other for mine, other in zip(answers, own, strict=True)) / count,
            exact=sum(right) / len(right) if right else None,
        )


def make_base(
    runner: Runner,
    data: Data,
    points: Iterable[Point] = (),
    *,
    kl_tokens: int = KL_TOKENS,
    progress: Progress = silent,
    kl_progress: Progress = silent,
) -> Base:
    """The model's own answers, and the KL of the points that will be measured.

    progress counts requests, kl_progress layers. Any point may be measured; one that is not named costs a pass.
    """
    scored = data.task != "embed"
    divergence = Divergence(runner.pack, runner.settings, (data.scored if scored else ()) or data.items, kl_tokens)
    divergence.add(points if scored else (), kl_progress)
    return _base(runner, data, divergence, progress)


def measure(runner: Runner, data: Data, point: Point, base: Base, progress: Progress = silent) -> Quality:
    """Of one point, on the data that `base` is of."""
    assert data is base.data, "a point is compared on the same data"
    own = point == Point()
    return base.compare(runner, point, base.own if own else read(runner, data, point, progress))


def _base(runner: Runner, data: Data, divergence: Divergence, progress: Progress) -> Base:
    runner.answer_as(Point())
    before = runner.loads()
    own = read(runner, data, Point(), progress)
    loads = [[b - a for a, b in zip(old, new, strict=True)] for old, new in zip(before, runner.loads(), strict=True)]
    return Base(data, own, loads, divergence)


def _agreement(some: Sequence[array[int]], others: Sequence[array[int]]) -> int:
    return sum(a == b for mine, other in zip(some, others, strict=True) for a, b in zip(mine, other, strict=True))


def _common(some: Sequence[int], other: Sequence[int]) -> int:
    """Tokens until the two part."""
    pairs = enumerate(zip(some, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(some), len(other)))


def _said(runner: Runner, tokens: Sequence[int]) -> str:
    return runner.text.tokenizer.decode(list(tokens), skip_special_tokens=False).strip()


def _nearest(vectors: Array) -> Array | None:
    """(vectors, NEAREST) numbers of the nearest others, sorted by number; None: all others would be neighbours."""
    if len(vectors) <= NEAREST + 1:
        return None
    found = []
    for begin in range(0, len(vectors), _ROWS):
        near = vectors[begin : begin + _ROWS] @ vectors.T
        near[np.arange(len(near)), begin + np.arange(len(near))] = -np.inf
        found.append(np.sort(np.argsort(-near, axis=1, kind="stable")[:, :NEAREST], axis=1))
    return np.concatenate(found)


def _overlap(some: Array | None, other: Array | None) -> float | None:
    """Share of neighbours that both have."""
    if some is None or other is None:
        return None
    both = sum(len(np.intersect1d(a, b, assume_unique=True)) for a, b in zip(some, other, strict=True))
    return both / other.size
