"""The page /ui of a real daemon in a real browser: what people do with it, and what it must never do."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from chromium import BINARY, Tab, tab
from daemon_process import DaemonProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from colibrid.model.pack import Pack

pytestmark = pytest.mark.skipif(BINARY is None, reason="chromium is not installed")

PROMPT = "Once upon"
KEY = "a-key-for-the-page"
SHOTS = os.environ.get("UI_SCREENSHOTS")  # a folder; for people who want to look


@pytest.fixture(scope="module")
def daemon(bundled_pack: Pack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """With a key that may do everything, and one that may not look."""
    folder = tmp_path_factory.mktemp("ui")
    keys = folder / "keys"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o600)
    with DaemonProcess(
        folder, str(bundled_pack.path), "--device", "cpu", "--set", f"auth.keys_file={keys}", "--set", "batch.slots=8"
    ) as started:
        yield started.wait_ready()


@asynccontextmanager
async def opened(daemon: DaemonProcess, folder: Path, key: str = KEY, *, dark: bool = False) -> AsyncIterator[Tab]:
    """The page, with a key typed in; at the end nothing may have been wrong, and nobody else asked."""
    url = f"http://127.0.0.1:{daemon.port}/ui"
    async with tab(folder / "browser", dark=dark) as page:
        await page.call("Page.navigate", url=url)
        await page.until("document.querySelector('#ask-key')?.open")
        await page.type("#key", key)
        await page.press("#key-form button")
        yield page
        problems = [one for one in page.problems if "401" not in one]  # before there was a key
        assert problems == []
        assert {one.split("/")[2] for one in page.asked if one != "about:blank"} == {f"127.0.0.1:{daemon.port}"}
        assert not any(KEY in one for one in page.asked)


async def shot(page: Tab, folder: Path, name: str) -> None:
    data = await page.screenshot((Path(SHOTS) if SHOTS else folder) / f"{name}.png")
    assert len(data) > 10_000  # an empty page has less


async def test_chat(daemon: DaemonProcess, tmp_path: Path) -> None:
    """An answer streams into the page and equals that of the API; markup in messages is text; keys and forms work."""
    text = "Hello <img src=x onerror=alert(1)> bird"
    async with opened(daemon, tmp_path) as page:
        await page.until("document.querySelector('#model').textContent")
        await page.run(
            "document.querySelector('#temperature').value = 0; document.querySelector('#max-tokens').value = 24"
        )
        await page.type("#chat-input", text)
        await page.press("#chat-send")
        await page.until("document.querySelector('#said').textContent.includes('new, first after')")
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 24}
        expected = daemon.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {KEY}"})[1]
        assert (
            await page.run("document.querySelector('.message.assistant').textContent")
            == expected["choices"][0]["message"]["content"]
        )
        assert await page.run("document.querySelector('.message.user').textContent") == text
        assert await page.run("document.querySelectorAll('#messages img').length") == 0
        await shot(page, tmp_path, "chat")
        await page.press("#chat-clear")
        assert await page.run("document.querySelector('#messages').childElementCount") == 0


async def test_completion_is_coloured(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Every token is there, in a colour by its probability, with the likeliest others when it is chosen."""
    async with opened(daemon, tmp_path) as page:
        await page.press("#tab-complete")
        await page.run(
            "document.querySelector('#temperature').value = 0; document.querySelector('#max-tokens').value = 60"
        )
        await page.type("#complete-input", PROMPT)
        await page.press("#complete-send")
        await page.until("document.querySelector('#said').textContent.includes('new, first after')")
        spans = "[...document.querySelectorAll('#tokens span:not(.prompt)')]"
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 60, "logprobs": 5}
        expected = daemon.request("POST", "/v1/completions", body, {"Authorization": f"Bearer {KEY}"})[1]["choices"][0]
        assert await page.run(f"{spans}.map((one) => one.textContent)") == expected["logprobs"]["tokens"]
        levels = await page.run(f"{spans}.map((one) => one.className)")
        assert all(level.startswith("p") for level in levels)
        assert len(set(levels)) > 1
        colours = await page.run(f"[...new Set({spans}.map((one) => getComputedStyle(one).backgroundColor))].length")
        assert colours == len(set(levels))
        await page.press("#tokens span:nth-child(3)")
        rows = await page.run(
            "[...document.querySelectorAll('#alternatives td:first-child')].map((one) => JSON.parse(one.textContent))"
        )
        top = expected["logprobs"]["top_logprobs"][1]
        assert rows == sorted(top, key=lambda token: -top[token])
        await shot(page, tmp_path, "completion")


async def test_the_engine_can_be_watched(daemon: DaemonProcess, tmp_path: Path) -> None:
    """While answers run, slots fill, tokens are counted and experts light up; stopping frees the slot."""
    async with opened(daemon, tmp_path, dark=True) as page:
        await page.run("document.querySelector('#max-tokens').value = 1500")
        over = threading.Event()
        streams = [asyncio.to_thread(_long_answers, daemon, number, over) for number in range(3)]
        others = [asyncio.ensure_future(one) for one in streams]
        try:
            await page.type("#chat-input", "Tell me a very long story")
            await page.press("#chat-send")
            await page.until("document.querySelectorAll('.cell.running').length >= 2")
            await page.until("Number(document.querySelector('#rate').textContent) > 0")
            await shot(page, tmp_path, "slots")
            await page.until("last.load.some((row) => row.assignments.some((count) => count > 0))")
            await page.until("recent.some((row) => row.some((count) => count > 0.5))")
            drawn = (
                "(() => { const c = document.querySelector('#heat'); const d = c.getContext('2d')"
                ".getImageData(0, 0, c.width, c.height).data; const s = new Set();"
                " for (let i = 0; i < d.length; i += 4) s.add(d[i] * 65536 + d[i + 1] * 256 + d[i + 2]); return s.size; })()"
            )
            assert await page.until(f"{drawn} > 20")
            await page.hover("#heat")
            assert "times the layer's mean" in await page.run("document.querySelector('#heat-said').textContent")
            await shot(page, tmp_path, "watching")
        finally:
            over.set()
            await asyncio.gather(*others)
        if await page.run("running !== null"):
            await page.press("#chat-send")
            await page.until("running === null")
        await page.until("document.querySelectorAll('.cell.running').length === 0")


def _long_answers(daemon: DaemonProcess, number: int, over: threading.Event) -> None:
    """One after another, until what they are for has been seen."""
    body = {"prompt": f"Story {number}:", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    while not over.is_set():
        with daemon.open("POST", "/v1/completions", body, {"Authorization": f"Bearer {KEY}"}) as response:
            assert b"[DONE]" in response.read()


async def test_a_wrong_key(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Is said, and asked for again."""
    async with opened(daemon, tmp_path, "nobody's") as page:
        await page.until(
            "document.querySelector('#ask-key').open && document.querySelector('#key-said').textContent.includes('API key')"
        )
        await page.type("#key", KEY)
        await page.press("#key-form button")
        await page.until(
            "document.querySelector('#model').textContent && document.querySelectorAll('.cell').length === 8"
        )


async def test_the_policy_holds(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Scripts, styles and addresses that are not the page's own are refused by the browser."""
    async with tab(tmp_path / "browser") as page:
        await page.call("Page.navigate", url=f"http://127.0.0.1:{daemon.port}/ui")
        await page.until("document.querySelector('#ask-key')?.open")
        assert await page.run(
            "(() => { const s = document.createElement('script'); try { s.textContent = 'window.bad = 1'; }"
            " catch { return true; } document.body.append(s); return window.bad === undefined; })()"
        )
        assert await page.run(
            "(() => { try { document.body.innerHTML = '<b>x</b>'; return false; } catch { return true; } })()"
        )
        assert await page.run("fetch('http://127.0.0.1:9/').then(() => 'went', () => 'refused')") == "refused"
        assert any("Content Security Policy" in one for one in page.problems)
