"""A made Result of `colibrid tune`: no model was run for it, and no figure in it is real."""

from __future__ import annotations

import msgspec

from colibrid.tune.choose import choose, front
from colibrid.tune.result import Cost, LayerStats, Point, Quality, Result, Spread, Task, Tried
from colibrid.tune.slo import parse_slo

LAYERS, EXPERTS = 6, 8


def made_quality(task: Task, short: float, more: float = 0.0) -> Quality:
    """Of a point whose experts are `short` of the own setting, or `more` than it."""
    away = 0.1 * short**2 + 0.004 * more
    if task == "embed":
        return Quality(tokens=900, cosine=1 - away, neighbours=1 - min(3 * away, 1.0))
    return Quality(
        tokens=20_000,
        loss=2.5 + 1.2 * away,
        kl=away,
        kl_tokens=2048,
        top1=1 - away,
        divergence=40 - 100 * away if task == "generate" else None,
        same=1 - 2 * away if task == "generate" else None,
        exact=0.9 - away if task == "generate" else None,
    )


def made_cost(task: Task, experts: float, slots: int = 8) -> Cost:
    step = 2 + experts + 0.3 * slots
    generates = task == "generate"
    return Cost(
        concurrency=8,
        requests=64,
        seconds=12.5,
        tokens_per_s=1000 * slots / step,
        ttft_ms=Spread(p50=4 * step, p99=9 * step) if generates else None,
        itl_ms=Spread(p50=step, p99=1.7 * step) if generates else None,
        e2e_ms=Spread(p50=40 * step, p99=60 * step),
        bytes_per_token=1e6 + 5e5 * experts,
        distinct_experts=min(8.0, 3 * experts),
        experts_per_token=experts,
    )


def made_layers(layers: int, experts: int, *, cuts: bool = True) -> tuple[LayerStats, ...]:
    found = []
    for layer in range(layers):
        weights = [1 + (7 * expert + 3 * layer) % 11 for expert in range(experts)]
        weights[layer % experts] = 0
        found.append(
            LayerStats(
                layer=layer,
                experts=experts,
                per_token=2,
                load=tuple(weight / sum(weights) for weight in weights),
                entropy=0.4 + 0.5 * layer / layers,
                cut=made_quality("generate", 0.1 + 0.3 * layer / layers) if cuts else None,
            )
        )
    return tuple(found)


def made_result(
    task: Task = "generate",
    slo: str | None = None,
    *,
    layers: int = LAYERS,
    experts: int = EXPERTS,
    model: str = "made",
) -> Result:
    """Own setting, k of 1, 3 and 4, thresholds, one k a layer, slots, and one point that was stopped early."""
    settings: list[tuple[Point, float, int]] = [
        (Point(), 2.0, 8),
        *((Point(per_token=count), float(count), 8) for count in (1, 3, 4)),
        *((Point(threshold=share), 2 - 0.9 * share, 8) for share in (0.1, 0.2, 0.3, 0.5)),
        (Point(per_token=(1, 2) * (layers // 2) + (2,) * (layers % 2)), 1.5, 8),
        (Point(slots=16), 2.0, 16),
        (Point(slots=4), 2.0, 4),
    ]
    tried = [
        Tried(
            point=point,
            quality=made_quality(task, max(2 - used, 0), max(used - 2, 0)),
            cost=made_cost(task, used, slots),
        )
        for point, used, slots in settings
    ]
    worst = msgspec.structs.replace(made_quality(task, 1.4), tokens=1000)
    tried.append(Tried(point=Point(per_token=1, threshold=0.9), quality=worst, hopeless="kl<0.02: kl is 0.196"))
    chosen, reason = choose(tried, () if slo is None else parse_slo(slo, task))
    return Result(
        version="0.0.0",
        model=model,
        pack="made of nothing",
        device="cpu",
        machine="no machine",
        data="made.jsonl",
        data_sha256="0" * 64,
        task=task,
        slo=slo,
        made="2000-01-01T00:00:00Z",
        tried=tuple(tried),
        front=front(tried),
        chosen=chosen,
        reason=reason,
        layers=made_layers(layers, experts),
    )
