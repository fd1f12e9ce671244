"""report.html: what a run found.

Everything that comes from outside - names of models, files and machines - is written as text.
"""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from colibrid.report.page import facts, page
from colibrid.tune import columns
from colibrid.tune.drawing import DARK, LIGHT, to_svg
from colibrid.tune.points import point_name
from colibrid.tune.slo import misses, parse_slo

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from colibrid.tune.columns import Column
    from colibrid.tune.drawing import Picture
    from colibrid.tune.result import LayerStats, Result, Tried
    from colibrid.tune.slo import Limit

_STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
_OF_LAYERS = {"load", "entropy", "cut"}
_OF_CUTS = {"kl", "top1", "cosine", "neighbours"}  # against the own setting; a loss would be that of a part of the data


def report_page(result: Result, pictures: Sequence[Picture]) -> str:
    """The whole file."""
    limits = () if result.slo is None else parse_slo(result.slo, result.task)
    body = [
        f"<header><h1>{escape(result.model)}</h1>",
        f'<p class="soft">What <code>colibrid tune</code> found on {escape(result.data)}, <time>{escape(result.made)}</time></p></header>',
        "<main>",
        *_verdict(result, limits),
        *(_figure(picture) for picture in pictures if picture.name not in _OF_LAYERS),
        *_points(result, limits),
        *_layers(result, [picture for picture in pictures if picture.name in _OF_LAYERS]),
        *_evidence(result),
        "</main>",
    ]
    return page(f"{result.model}: colibrid tune", body, _STYLE)


def _verdict(result: Result, limits: Sequence[Limit]) -> Iterator[str]:
    if result.chosen is None:
        yield '<section class="verdict none" aria-label="Choice"><strong>Nothing meets the limits</strong>'
    else:
        chosen = result.tried[result.chosen]
        yield f'<section class="verdict" aria-label="Choice"><strong>{escape(point_name(chosen.point))}</strong>'
    yield f"<p>{escape(result.reason)}</p>"
    if limits:
        yield '<ul class="limits">'
        for limit in limits:
            missed = None if result.chosen is None else misses([limit], result.tried[result.chosen])
            if missed is None:
                yield f"<li>{escape(str(limit))}</li>"
            elif missed:
                yield f'<li class="bad">✗ {escape(missed[0])}</li>'
            else:
                yield f'<li class="good">✓ {escape(str(limit))}</li>'
        yield "</ul>"
    if result.chosen:
        yield from _compared(result, result.tried[result.chosen])
    yield "</section>"


def _compared(result: Result, chosen: Tried) -> Iterator[str]:
    """The chosen point beside the model's own."""
    own = result.tried[0]
    yield '<div class="sides">'
    for title, shown in (("quality", columns.QUALITY), ("cost", columns.COST)):
        yield f'<table><thead><tr><th class="name">{title}</th><th>own setting</th><th>chosen</th><th>change</th></tr></thead>'
        yield "<tbody>"
        for column in columns.measured(shown, result):
            before, after = column.read(own), column.read(chosen)
            if before is not None and after is not None:
                change = _ratio(before, after) if title == "cost" else _difference(column, before, after)
                cells = f"<td>{column.write(before)}</td><td>{column.write(after)}</td><td>{change}</td>"
                yield f'<tr><th class="name" title="{escape(column.meaning)}">{escape(column.title)}</th>{cells}</tr>'
        yield "</tbody></table>"
    yield "</div>"


def _ratio(before: float, after: float) -> str:
    return "=" if after == before else f"{after / before:.2f} times" if before else ""


def _difference(column: Column, before: float, after: float) -> str:
    if after == before:
        return "="
    return f"{100 * (after - before):+.1f} points" if column.share else f"{after - before:+.2g}"


def _figure(picture: Picture) -> str:
    light, dark = (base64.b64encode(to_svg(picture, theme)).decode() for theme in (LIGHT, DARK))
    kind = "data:image/svg+xml;base64,"
    width, height = (round(96 * inches) for inches in picture.size)
    return (
        f'<figure id="{picture.name}"><figcaption><b>{escape(picture.title)}</b>{escape(picture.caption)}</figcaption>'
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{kind}{dark}">'
        f'<img src="{kind}{light}" alt="{escape(picture.alt)}" width="{width}" height="{height}"></picture></figure>'
    )


def _points(result: Result, limits: Sequence[Limit]) -> Iterator[str]:
    shown = columns.measured((*columns.QUALITY, *columns.COST), result)
    says = bool(limits) or any(tried.hopeless for tried in result.tried)
    yield '<h2>All points</h2><div class="wide" role="region" aria-label="All points" tabindex="0"><table>'
    yield "<caption>● on the Pareto front: no other point is as good in quality and cost and better in one. ★ chosen.</caption>"
    yield '<thead><tr><th></th><th class="said">point</th>'
    yield '<th class="said">limits</th>' if says else ""
    yield from (f'<th title="{escape(column.meaning)}">{escape(column.title)}</th>' for column in shown)
    yield "</tr></thead><tbody>"
    whole = [tried for tried in result.tried if tried.hopeless is None]
    best = {column.name: _best(column, whole) for column in columns.measured(columns.QUALITY, result)}
    for number, tried in enumerate(result.tried):
        kinds = [kind for kind, is_so in (("chosen", number == result.chosen), ("hopeless", tried.hopeless)) if is_so]
        mark = "★" if number == result.chosen else "●" if number in result.front else ""
        yield f'<tr class="{" ".join(kinds)}"><td>{number} <span class="mark">{mark}</span></td>'
        yield f'<th class="name" scope="row">{escape(point_name(tried.point))}</th>'
        yield _said(tried, limits) if says else ""
        yield from (_cell(column, tried, best.get(column.name)) for column in shown)
        yield "</tr>"
    yield "</tbody></table></div>"
    meanings = facts((column.title, column.meaning) for column in shown)
    yield f"<details><summary>What the columns mean</summary>{meanings}</details>"


def _best(column: Column, tried: Iterable[Tried]) -> float | None:
    values = [value for each in tried if (value := column.read(each)) is not None]
    return (max if column.rises else min)(values) if values else None


def _cell(column: Column, tried: Tried, best: float | None) -> str:
    value = column.read(tried)
    if value is None:
        return "<td></td>"
    text = column.write(value)
    return f'<td class="best">{text}</td>' if best is not None and text == column.write(best) else f"<td>{text}</td>"


def _said(tried: Tried, limits: Sequence[Limit]) -> str:
    if tried.hopeless is not None:
        return f'<td class="said">stopped early: {escape(tried.hopeless)}</td>'
    missed = misses(limits, tried)
    if missed:
        return f'<td class="said bad">✗ {escape("; ".join(missed))}</td>'
    return '<td class="said good">✓</td>' if limits else "<td></td>"


def _layers(result: Result, pictures: Sequence[Picture]) -> Iterator[str]:
    if not result.layers:
        return
    cuts = [column for column in columns.QUALITY if column.name in _OF_CUTS and any(_cut(column, result.layers))]
    yield '<h2>Layers</h2><p class="soft">Under the model\'s own setting, over the same data.</p>'
    yield from map(_figure, pictures)
    yield "<details><summary>The same in numbers</summary>"
    yield '<div class="wide" role="region" aria-label="Layers" tabindex="0"><table><thead><tr><th>layer</th><th>experts</th>'
    yield "<th>a token</th><th>fullest</th><th>emptiest</th><th>unused</th><th>entropy</th>"
    yield from (f"<th>{escape(column.title)}, one fewer</th>" for column in cuts)
    yield "</tr></thead><tbody>"
    for layer in result.layers:
        yield f"<tr>{''.join(f'<td>{cell}</td>' for cell in (*_layer(layer), *_cut_cells(layer, cuts)))}</tr>"
    yield "</tbody></table></div></details>"


def _layer(layer: LayerStats) -> tuple[object, ...]:
    return (
        layer.layer,
        layer.experts,
        layer.per_token,
        f"{100 * max(layer.load):.2f} %",
        f"{100 * min(layer.load):.2f} %",
        sum(share == 0 for share in layer.load),
        f"{layer.entropy:.3f}",
    )


def _cut(column: Column, layers: Iterable[LayerStats]) -> Iterator[bool]:
    return (layer.cut is not None and getattr(layer.cut, column.name) is not None for layer in layers)


def _cut_cells(layer: LayerStats, cuts: Sequence[Column]) -> Iterator[str]:
    for column in cuts:
        value = None if layer.cut is None else getattr(layer.cut, column.name)
        yield "" if value is None else column.write(value)


def _evidence(result: Result) -> Iterator[str]:
    own = result.tried[0]
    costs = [tried.cost for tried in result.tried if tried.cost is not None]
    measured = f"{own.quality.tokens:,} positions"
    if own.quality.kl_tokens:
        measured += f", KL over {own.quality.kl_tokens:,}"
    rows = [
        ("model", result.model),
        ("pack", result.pack),
        ("task", result.task),
        ("data", f"{result.data}, SHA-256 {result.data_sha256}"),
        ("quality", f"{measured}; deterministic: the same pack, data and point give the same numbers"),
        ("limits", result.slo or "none"),
        ("device", result.device),
        ("machine", result.machine),
        ("version", f"colibrid {result.version}"),
        ("made", result.made),
    ]
    if costs:
        seconds = sum(cost.seconds for cost in costs)
        words = (
            f"{costs[0].requests} requests a point, {costs[0].concurrency} at a time; {seconds:,.0f} s for all points"
        )
        rows.insert(5, ("cost", f"{words}; measured with a clock on this machine"))
    yield f"<h2>Evidence</h2>{facts(rows)}"
