"""Reports of `colibrid bench http` and `bench compare` as pages. Pure."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from colibrid.cli.bench_report import arrival_words, cut_words, figure_cells, http_facts, interval_words
from colibrid.cli.bench_svg import STYLE, Series, Span, chart, ratios, shares
from colibrid.report.page import facts, page

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from colibrid.cli.bench_intervals import Comparison
    from colibrid.cli.bench_result import HttpReport, Sample
    from colibrid.report.percentiles import Spread

_STYLE = f"""
:root {{ --a: #0072b2; --b: #c4500a; }}
@media (prefers-color-scheme: dark) {{ :root {{ --a: #56b4e9; --b: #f0a04b; }} }}
body {{ max-width: 60rem; }}
.big {{ display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0; padding: 0; list-style: none; }}
.big li {{ padding: .6rem 1rem; background: var(--box); border: 1px solid var(--line); border-radius: 6px; min-width: 9rem; }}
.big strong {{ display: block; font-size: 1.3rem; }}
.better {{ color: var(--good); }} .worse {{ color: var(--bad); }}
{STYLE}"""
_SLICES = 60  # of a run, in its chart of tokens over time
_HEADS = ("mean", "p50", "p90", "p99", "max")


def report_page(report: HttpReport) -> str:
    """One run."""
    samples = report.samples
    parts = [
        f"<main><h1>{escape(report.model)}</h1>",
        f'<p class="soft">Load on {escape(report.load.url)}, {escape(report.made)}: {escape(arrival_words(report.load))}.</p>',
        *([] if report.cut_short is None else [f'<p class="bad">{escape(cut_words(report).capitalize())}.</p>']),
        *(f'<p class="bad">Failed: {escape(problem)}</p>' for problem in report.problems),
        *_big(_headlines(report)),
        "<h2>Times in ms</h2>",
        *_spreads(report),
    ]
    if samples:
        parts += [
            "<h2>How many requests were how fast</h2>",
            chart(
                "ms", "% of requests",
                [Series("until the first token", shares(_firsts(samples))), Series("whole", shares([s.e2e_ms for s in samples]))],
                alt="share of requests over time to first token and over whole time", log_x=True,
            ),
            "<h2>Over the run</h2>",
            chart(
                "s since the beginning", "ms",
                [
                    Series("until the first token", [(s.at, s.ttft_ms) for s in samples if s.ttft_ms is not None], "dots"),
                    Series("whole", [(s.at, s.e2e_ms) for s in samples], "dots"),
                ],
                alt="whole time and time to first token of each request, by when it was to be sent",
            ),
            chart("s since the beginning", "tokens/s", [Series("out", _tokens(report))], alt="tokens a second over the run"),
        ]  # fmt: skip
    gaps = [gap for sample in samples for gap in sample.gaps_ms]
    if gaps:
        parts += [
            "<h2>Waits between events</h2>",
            chart(
                "ms", "% of waits", [Series("between events", shares(gaps))], alt="share of waits by length", log_x=True
            ),
        ]
    parts += ["<h2>Evidence</h2>", facts(http_facts(report)), "</main>"]
    return page(f"{report.model}: bench http", parts, _STYLE)


def comparison_page(
    found: Comparison, names: tuple[str, str], sides: tuple[Sequence[HttpReport], Sequence[HttpReport]]
) -> str:
    """Two sides and what they differ in."""
    rows = [
        Span(figure.name, figure.ratio, figure.low, figure.high, figure.verdict)
        for figure in found.figures
        if figure.ratio is not None and figure.low is not None and figure.high is not None
    ]
    first, second = ([sample for report in side for sample in report.samples] for side in sides)
    parts = [
        f"<main><h1>{escape(names[1])} against {escape(names[0])}</h1>",
        f'<p class="soft">{escape(interval_words(found))}</p>',
        *(f'<p class="bad">{escape(warning)}</p>' for warning in found.warnings),
        (
            '<div class="wide"><table><thead><tr><th></th><th></th><th>first</th><th>second</th><th>second / first</th>'
            "<th>interval</th><th>the second is</th></tr></thead><tbody>"
        ),
    ]
    for figure in found.figures:
        name, *cells, verdict = figure_cells(figure)
        shown = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        parts.append(
            f'<tr><th class="name">{escape(name)}</th>{shown}<td class="{figure.verdict}">{escape(verdict)}</td></tr>'
        )
    parts += [
        "</tbody></table></div>",
        "<h2>Ratios</h2>",
        ratios(rows, alt="ratio of each figure with its interval"),
    ]
    for title, of in (
        ("Time to the first token", _firsts),
        ("Waits between events", lambda samples: [gap for sample in samples for gap in sample.gaps_ms]),
        ("Whole requests", lambda samples: [sample.e2e_ms for sample in samples]),
    ):
        drawn = chart(
            "ms", "%", [Series("first", shares(of(first))), Series("second", shares(of(second)))], alt=title, log_x=True
        )
        parts += [f"<h2>{title}</h2>", drawn] if drawn else []
    evidence = [
        (f"{name}: {fact}", value)
        for name, side in zip(("first", "second"), sides, strict=True)
        for report in side
        for fact, value in http_facts(report)
    ]
    parts += ["<h2>Evidence</h2>", facts(evidence), "</main>"]
    return page(f"{names[1]} against {names[0]}", parts, _STYLE)


def _big(cells: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield '<ul class="big">'
    yield from (f"<li><strong>{escape(value)}</strong>{escape(name)}</li>" for value, name in cells)
    yield "</ul>"


def _headlines(report: HttpReport) -> Iterator[tuple[str, str]]:
    yield f"{report.requests_per_s:,.1f}", "requests/s"
    yield f"{report.output_tokens_per_s:,.0f}", "tokens/s out"
    if report.goodput is not None:
        goodput = report.goodput
        yield f"{goodput.requests_per_s:,.1f}", f"good requests/s, {100 * goodput.share:.1f} % ({goodput.slo})"
    for name, spread in (("until the first token", report.ttft_ms), ("whole", report.e2e_ms)):
        if spread is not None:
            yield f"{spread.p99:,.1f} ms", f"p99 {name}"
    yield f"{report.ok}", f"answered, {report.refused} refused, {report.failed} failed"


def _spreads(report: HttpReport) -> Iterator[str]:
    rows: Sequence[tuple[str, Spread | None]] = (
        ("TTFT: until the first token", report.ttft_ms),
        ("TPOT: a token after the first, mean of a request", report.tpot_ms),
        ("ITL: between events", report.itl_ms),
        ("e2e: whole request", report.e2e_ms),
        ("sent late", report.late_ms),
    )
    yield f'<div class="wide"><table><thead><tr><th></th>{"".join(f"<th>{head}</th>" for head in _HEADS)}</tr></thead><tbody>'
    for name, spread in rows:
        if spread is not None:
            cells = "".join(f"<td>{getattr(spread, head):,.2f}</td>" for head in _HEADS)
            yield f'<tr><th class="name">{escape(name)}</th>{cells}</tr>'
    yield "</tbody></table></div>"


def _firsts(samples: Sequence[Sample]) -> list[float]:
    return [sample.ttft_ms for sample in samples if sample.ttft_ms is not None]


def _tokens(report: HttpReport) -> list[tuple[float, float]]:
    """Tokens a second in slices of the run: each event's when it came, of whole answers all at their end."""
    width = report.elapsed_s / _SLICES
    if width < 1e-9:
        return []
    counts = [0.0] * _SLICES
    for sample in report.samples:
        times = [sample.at + sample.e2e_ms / 1e3]
        if sample.ttft_ms is not None:
            times = [sample.at + sample.ttft_ms / 1e3]
            for gap in sample.gaps_ms:
                times.append(times[-1] + gap / 1e3)
        for time in times:
            counts[min(_SLICES - 1, max(0, int(time / width)))] += (sample.tokens or 0) / len(times)
    return [((index + 0.5) * width, count / width) for index, count in enumerate(counts)]
