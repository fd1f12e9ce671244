"""Layer by layer: what the experts do, what one expert fewer costs, and the search for a number for each layer.

The search starts from one number for all layers and takes an expert from one layer after another, always where that
hurts least. What it hurts is measured by the engine on a part of the data, of all layers before the first step; after a
step only the layer that seemed to hurt least is measured anew, and the next one if that has become worse. As long as a
cut hurts no less after others than before them, that is the order that measuring all of them each time would give.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

import msgspec

from colibrid.tune.progress import silent
from colibrid.tune.quality import measure, read
from colibrid.tune.result import LayerStats, Point

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from colibrid.model.manifest import Manifest
    from colibrid.tune.progress import Progress
    from colibrid.tune.quality import Base
    from colibrid.tune.runner import Runner

LAYER_TOKENS = 8192  # of the data on which single layers are measured
TRIES = 4  # points that the search measures, for each layer with experts
CANDIDATES = 6  # that it returns


def numbers(manifest: Manifest, point: Point) -> tuple[int, ...]:
    """Experts a token of each layer under this point; 0 in layers without experts."""
    asked = point.per_token
    each = asked if isinstance(asked, tuple) else [asked or 0] * len(manifest.layers)
    return tuple(
        min(wanted, layer.experts) or layer.experts_per_token
        for wanted, layer in zip(each, manifest.layers, strict=True)
    )


def cut_points(manifest: Manifest) -> dict[int, Point]:
    """By layer: the model's own setting with one expert fewer there alone. Not of layers with one expert a token."""
    own = numbers(manifest, Point())
    return {layer: Point(per_token=_less(own, layer)) for layer, wanted in enumerate(own) if wanted > 1}


def layer_stats(
    runner: Runner,
    base: Base,
    *,
    tokens: int = LAYER_TOKENS,
    progress: Progress = silent,
) -> tuple[LayerStats, ...]:
    """Of each layer with experts: load over all of the data, the cut on at most so many tokens of it.

    progress counts layers that are cut.
    """
    cuts = cut_points(runner.manifest)
    part = base.part(runner, tokens)
    if part.data.task != "embed":
        base.divergence.add(cuts.values())
    found = []
    for index, layer in enumerate(runner.manifest.layers):
        if not layer.experts:
            continue
        cut = cuts.get(index)
        total = sum(base.loads[index])
        found.append(
            LayerStats(
                layer=index,
                experts=layer.experts,
                per_token=layer.experts_per_token,
                load=tuple(count / total for count in base.loads[index]),
                entropy=base.divergence.entropy[index] or 0.0,
                cut=None if cut is None else measure(runner, part.data, cut, part),
            )
        )
        progress(len(found), sum(bool(layer.experts) for layer in runner.manifest.layers))
    return tuple(found)


def search(
    runner: Runner,
    base: Base,
    start: Point,
    *,
    tokens: int = LAYER_TOKENS,
    progress: Progress = silent,
) -> list[Point]:
    """Points with a number for each layer, the largest numbers first; `start` has one number for all.

    Of all steps of the search those after which the next expert hurts most. progress counts points that are measured.
    Nothing where all layers are alike in every step.
    """
    part = base.part(runner, tokens)
    tries = TRIES * sum(bool(layer.experts) for layer in runner.manifest.layers)
    done = 0

    def harm(wanted: tuple[int, ...]) -> float:
        nonlocal done
        done += 1
        progress(done, tries)
        return part.harm(read(runner, part.data, msgspec.structs.replace(start, per_token=wanted)))

    steps = steps_of(numbers(runner.manifest, start), harm, tries)
    hurts = [after - before for (_, before), (_, after) in itertools.pairwise(steps)]
    mixed = [place for place in range(1, len(steps)) if len({wanted for wanted in steps[place][0] if wanted}) > 1]
    hurts.append(float("-inf"))  # nothing is known of what follows the last step
    chosen = sorted(sorted(mixed, key=lambda place: -hurts[place])[:CANDIDATES])
    return [msgspec.structs.replace(start, per_token=steps[place][0]) for place in chosen]


def steps_of(
    present: tuple[int, ...], harm: Callable[[tuple[int, ...]], float], tries: int
) -> list[tuple[tuple[int, ...], float]]:
    """The numbers and their harm, first the present ones, then after each step; `harm` is asked at most so often."""
    found = [(present, harm(present))]
    # What one expert fewer hurts in each layer, the layer, and after how many steps that was measured.
    queue = [(float("-inf"), layer, -1) for layer, wanted in enumerate(present) if wanted > 1]
    while queue:
        hurt, layer, when = heapq.heappop(queue)
        present, before = found[-1]
        if when < len(found):
            tries -= 1
            if tries <= 0:
                break
            heapq.heappush(queue, (harm(_less(present, layer)) - before, layer, len(found)))
            continue
        found.append((_less(present, layer), before + hurt))
        if present[layer] > 2:
            heapq.heappush(queue, (hurt, layer, -1))
    return found


def _less(wanted: Sequence[int], layer: int) -> tuple[int, ...]:
    """One expert fewer in one layer."""
    return tuple(count - (place == layer) for place, count in enumerate(wanted))
