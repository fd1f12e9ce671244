"""The report as files, and as a browser without a network shows it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from chromium import BINARY, tab
from made_result import made_result

from colibrid.errors import ConfigError
from colibrid.tune.drawing import DARK, LIGHT
from colibrid.tune.report import PAGE, write_report

if TYPE_CHECKING:
    from colibrid.tune.result import Result


PICTURES = ("front", "experts", "load", "entropy", "cut")
SHOTS = os.environ.get("TUNE_SCREENSHOTS")  # a folder; for people who want to look
HOSTILE = "<img src=http://198.51.100.1/x onerror=alert(1)>'\"&</title><script>alert(2)</script>"


def test_files(tmp_path: Path) -> None:
    """The page and a PNG a picture, in a folder that may not be there yet, and their paths."""
    paths = write_report(made_result(), tmp_path / "new" / "folder")
    assert {path.name for path in paths} == {PAGE, *(f"{name}.png" for name in PICTURES)}
    assert all(path.parent == tmp_path / "new" / "folder" for path in paths)
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in paths if path.suffix == ".png")
    assert all(path.stat().st_size < 300_000 for path in paths if path.suffix == ".png")


def test_same_figures_same_page(tmp_path: Path) -> None:
    """Nothing of the time or of the process is in the page."""
    one, two = (write_report(made_result(), tmp_path / name) for name in ("one", "two"))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not installed, it is said what to install, and nothing is written."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'colibrid\[bench\]'"):
        write_report(made_result(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_folder_in_the_way(tmp_path: Path) -> None:
    """A file where the folder should be is named."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file: the report cannot be written"):
        write_report(made_result(), tmp_path / "file")


@pytest.mark.skipif(BINARY is None, reason="chromium is not installed")
@pytest.mark.parametrize(
    ("name", "result", "dark"),
    [
        ("own", made_result(), True),
        ("limits", made_result(slo="p99_itl_ms<10.5, kl<0.025", model=HOSTILE), False),
        ("none", made_result(slo="p99_itl_ms<1"), False),
        ("embed", made_result("embed"), True),
        ("score", made_result("score"), False),
        ("large", made_result(layers=48, experts=128), False),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_in_a_browser(tmp_path: Path, name: str, result: Result, dark: bool) -> None:
    """Without a network all pictures are there, nothing is asked for, nothing complains, and texts stay texts."""
    write_report(result, tmp_path / "out")
    url = (tmp_path / "out" / PAGE).as_uri()
    async with tab(tmp_path / "browser", dark=dark, height=1000) as page:
        await page.call(
            "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0
        )
        await page.call("Page.navigate", url=url)
        await page.until("document.readyState === 'complete' && document.images.length > 0")
        await page.until("[...document.images].every(one => one.complete)")
        assert await page.run("[...document.images].map(one => one.naturalWidth > 400 && one.alt.length > 40)") == (
            [True] * await page.run("document.images.length")
        )
        back = (DARK if dark else LIGHT).back
        sources = await page.run("[...document.images].map(one => atob(one.currentSrc.split(',')[1]))")
        assert all(f"fill: {back}" in source for source in sources)
        assert await page.run("getComputedStyle(document.body).maxWidth") != "none"  # its style is not refused
        assert await page.run("document.querySelector('h1').textContent") == result.model
        assert await page.run("document.querySelectorAll('main tbody tr').length") >= len(result.tried)
        assert await page.run("document.querySelectorAll('script, link, iframe').length") == 0
        for width in (360, 1280):  # wide tables scroll by themselves
            await page.call(
                "Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=False
            )
            assert await page.run("document.documentElement.scrollWidth") <= width
        height = await page.run("document.documentElement.scrollHeight")
        await page.call(
            "Emulation.setDeviceMetricsOverride", width=1280, height=height, deviceScaleFactor=1, mobile=False
        )
        await page.screenshot((Path(SHOTS) if SHOTS else tmp_path) / f"{name}.png")
        assert page.problems == []
        assert {one.split(",")[0] for one in page.asked} <= {"about:blank", url, "data:image/svg+xml;base64"}
