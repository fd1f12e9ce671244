"""Pages of `bench http` and `bench compare`: everything in one file, in a browser without a network."""

from __future__ import annotations

import os
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from bench_runs import make_report, run_of
from chromium import BINARY, tab

from colibrid.cli.bench_intervals import compare
from colibrid.cli.bench_page import comparison_page, report_page
from colibrid.cli.bench_result import HttpReport, Sample

SHOTS = os.environ.get("BENCH_SCREENSHOTS")  # a folder; for people who want to look


class Outside(HTMLParser):
    """Collects everything by which a page could load or run something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {name for name, _ in attrs}
        if tag in {"script", "link", "iframe", "img", "object", "image", "use"} or names & {"src", "href", "srcset"}:
            self.found.append(tag)
        self.found += [name for name in names if name.startswith("on")]


def many(rate: float = 20.0, mean_ms: float = 80.0) -> HttpReport:
    """Two hundred requests as of an open loop."""
    source = random.Random(int(mean_ms))
    samples = []
    for index in range(200):
        time = mean_ms * source.lognormvariate(0, 0.6)
        gaps = [time / 25 * source.lognormvariate(0, 0.4) for _ in range(16)]
        samples.append(
            Sample(at=index / rate, e2e_ms=time + sum(gaps), ttft_ms=time, tokens=17, late_ms=0.1, gaps_ms=gaps)
        )
    return make_report(samples, elapsed=200 / rate + 0.2, rate=rate, slo="ttft_ms<100, itl_ms<9")


def pages() -> dict[str, str]:
    first, second = many(), many(mean_ms=60.0)
    names = ("a.json", "b.json")
    return {
        "report": report_page(first),
        "comparison": comparison_page(compare([first], [second]), names, ([first], [second])),
    }


@pytest.mark.parametrize("name", ["report", "comparison"])
def test_pages_hold_all_they_need(name: str) -> None:
    """No script, no address, and a policy that would not allow any; the charts are in it."""
    text = pages()[name]
    outside = Outside()
    outside.feed(text)
    assert outside.found == []
    assert "default-src 'none'" in text
    assert text.count("<svg") >= 4
    assert len(text) < 400_000


def test_a_page_has_the_numbers_of_its_run() -> None:
    """Rates, goodput, times and the load."""
    report = many()
    text = report_page(report)
    assert report.goodput is not None
    assert f"{report.requests_per_s:,.1f}</strong>requests/s" in text
    assert f"good requests/s, {100 * report.goodput.share:.1f} % (ttft_ms&lt;100, itl_ms&lt;9)" in text
    assert "open loop, 20 requests/s, Poisson arrivals" in text
    assert '<th class="name">sent late</th>' in text


def test_text_of_servers_is_text() -> None:
    """What a server says of itself or answers is never markup."""
    report = msgspec.structs.replace(many(), model="<b>m</b>", problems=["500: <script>alert(1)</script>"])
    text = report_page(report)
    assert "<script" not in text
    assert "<b>m" not in text
    assert "500: &lt;script&gt;" in text


def test_runs_without_streams_or_answers_have_pages() -> None:
    """There is less on them."""
    assert "<svg" not in report_page(make_report([]))
    whole = report_page(make_report([Sample(at=0.5, e2e_ms=3.0, tokens=4)]))
    assert "between events" not in whole.split("<h2>Evidence")[0].split("<h2>How many")[1]


def test_a_comparison_says_what_is_shown() -> None:
    """A verdict for each figure, and both runs' evidence."""
    source = random.Random(2)
    slow, fast = run_of(source, 150), run_of(source, 150, mean_ms=40)
    text = comparison_page(compare([slow], [fast]), ("a", "b"), ([slow], [fast]))
    assert "<h1>b against a</h1>" in text
    assert '<td class="better">better</td>' in text
    assert "<dt>second: requests</dt>" in text
    assert re.search(r'<td class="few">not enough data, measure \d+ x as long</td>', text)


@pytest.mark.skipif(BINARY is None, reason="chromium is not installed")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_a_browser_shows_them(tmp_path: Path, dark: bool) -> None:
    """Without a network: no complaint, no request but for the file, nothing wider than the window, charts of some size."""
    async with tab(tmp_path / "browser", height=2200, dark=dark) as page:
        await page.call(
            "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0
        )
        for name, text in pages().items():
            file = tmp_path / f"{name}.html"
            file.write_text(text)
            await page.call("Page.navigate", url=file.as_uri())
            await page.until(f"location.pathname.endsWith('{name}.html') && document.readyState === 'complete'")
            assert await page.run("document.documentElement.scrollWidth <= innerWidth")
            sizes = await page.run("[...document.querySelectorAll('svg')].map(e => e.getBoundingClientRect().height)")
            assert all(size > 100 for size in sizes)
            assert len(sizes) >= 4
            colour = await page.run("getComputedStyle(document.querySelector('svg .line.s0')).stroke")
            assert colour == ("rgb(86, 180, 233)" if dark else "rgb(0, 114, 178)")
            await page.screenshot((Path(SHOTS) if SHOTS else tmp_path) / f"{name}-{'dark' if dark else 'light'}.png")
        assert page.problems == []
        assert all(url.startswith(("file:", "about:")) for url in page.asked)
