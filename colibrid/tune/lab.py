"""Measures points by an engine: what a sweep asks for. The comparison's base is made when it is first needed, so that a
run that goes on, and has all it needs, reads nothing twice.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from colibrid.tune.cost import cost_of, measure_round
from colibrid.tune.layers import layer_stats, search
from colibrid.tune.quality import make_base, measure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibrid.tune.cost import Load, Round
    from colibrid.tune.data import Data
    from colibrid.tune.forecast import Forecast
    from colibrid.tune.progress import Progress
    from colibrid.tune.quality import Base
    from colibrid.tune.result import Cost, LayerStats, Point, Quality
    from colibrid.tune.runner import Runner

GLIMPSE_SHARE = 0.1  # of the data
GLIMPSE_TOKENS = 2048  # at least: of fewer tokens a part says little
OWN, KL, LAYERS, SEARCH = "own", "kl", "layers", "search"  # kinds of work


class EngineLab:
    """Implements sweep.Lab, and looks at layers."""

    def __init__(
        self, runner: Runner, data: Data, points: Sequence[Point], load: Load, kl_tokens: int, forecast: Forecast
    ) -> None:
        """points: whose KL is computed together, in one pass."""
        self._runner = runner
        self._data = data
        self._points = points
        self._load = load
        self._kl_tokens = kl_tokens
        self._forecast = forecast
        self._base: Base | None = None
        self._part: Base | None = None
        self._looked = False
        self._rounds: dict[Point, Round] = {}

    def prepare(self) -> None:
        if self._base is None:
            self._base = self._make()

    def quality(self, point: Point, progress: Progress) -> Quality:
        return measure(self._runner, self._data, point, self.base, progress)

    def glimpse(self, point: Point, progress: Progress) -> Quality | None:
        part = self._part_of_base()
        return None if part is None else measure(self._runner, part.data, point, part, progress)

    def cost(self, point: Point, progress: Progress) -> Cost:
        found = measure_round(self._runner, self._data, point, self._load, progress)
        before = self._rounds.get(point)
        self._rounds[point] = found if before is None else before.and_then(found)
        return cost_of(self._rounds[point], self._runner.manifest, self._data.task, self._load.concurrency)

    def layers(self) -> tuple[LayerStats, ...]:
        """Of each layer with experts."""
        base = self.base
        with self._forecast.piece(LAYERS, "single layers") as progress:
            return layer_stats(self._runner, base, progress=progress)

    def search(self, start: Point) -> tuple[Point, ...]:
        """Points with a number of experts for each layer."""
        base = self.base
        with self._forecast.piece(SEARCH, "a number for each layer") as progress:
            found = search(self._runner, base, start, progress=progress)
        if found and self._data.task != "embed":
            self._forecast.plan(KL, 1)
            with self._forecast.piece(KL, "divergence of all points") as progress:
                base.divergence.add(found, progress)
        return tuple(found)

    @property
    def base(self) -> Base:
        """The model's own answers."""
        self.prepare()
        assert self._base is not None, "prepare makes it"
        return self._base

    def _make(self) -> Base:
        """Two pieces of work: the divergences of all points, then the model's own answers."""
        forecast = self._forecast
        forecast.plan(KL, 1)
        forecast.plan(OWN, 1)
        with ExitStack() as stack:
            diverging = stack.enter_context(forecast.piece(KL, "divergence of all points"))
            asking: Progress | None = None

            def asked(done: int, total: int) -> None:
                nonlocal asking
                if asking is None:
                    stack.close()
                    asking = stack.enter_context(forecast.piece(OWN, "the model's own answers"))
                asking(done, total)

            base = make_base(
                self._runner, self._data, self._points, kl_tokens=self._kl_tokens, progress=asked, kl_progress=diverging
            )
            if asking is None:
                forecast.drop(OWN)
            return base

    def _part_of_base(self) -> Base | None:
        if not self._looked:
            self._looked = True
            most = max(GLIMPSE_TOKENS, int(GLIMPSE_SHARE * self._data.tokens))
            if 2 * most <= self._data.tokens:
                self._part = self.base.part(self._runner, most)
        return self._part
