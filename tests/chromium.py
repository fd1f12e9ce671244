"""A headless Chromium, driven over its DevTools protocol: as much of it as tests of the page need."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DEADLINE_S = 60.0
_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


class Tab:
    """One page. `problems` has everything that its console, its scripts and its policy complained about."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.problems: list[str] = []
        self.asked: list[str] = []  # addresses of all requests

    async def listen(self) -> None:
        """Takes what the browser says; runs until the connection ends."""
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif said["method"] == "Network.requestWillBeSent":
                self.asked.append(said["params"]["request"]["url"])
            elif said["method"] == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(said["params"]["exceptionDetails"]))
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.problems.append(said["params"]["entry"]["text"])

    async def call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(DEADLINE_S):
            said = await answer
        assert "error" not in said, said
        return said["result"]

    async def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, script: str) -> Any:
        """The first true value of an expression."""
        async with asyncio.timeout(DEADLINE_S):
            while not (found := await self.run(script)):  # noqa: ASYNC110 - it is looked at
                await asyncio.sleep(0.05)  # the browser has no event for it
        return found

    async def press(self, selector: str) -> None:
        """A real click in the middle of an element."""
        box = await self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}});"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call(
                "Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", buttons=1, clickCount=1
            )

    async def hover(self, selector: str) -> None:
        """The mouse in the middle of an element."""
        box = await self.run(
            f"(() => {{ const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    async def type(self, selector: str, text: str) -> None:
        """Replaces what a field holds, by typing."""
        await self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.focus(); e.select(); }})()"
        )
        await self.call("Input.insertText", text=text)

    async def screenshot(self, path: Path) -> bytes:
        data = base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])
        path.write_bytes(data)  # noqa: ASYNC240 - a test may wait
        return data


@asynccontextmanager
async def tab(folder: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> AsyncIterator[Tab]:
    """A browser of its own with one empty page."""
    assert BINARY is not None, "ask before"
    process = await asyncio.create_subprocess_exec(
        BINARY,
        *_ARGUMENTS,
        f"--user-data-dir={folder}",
        "about:blank",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession() as session:
            address = await _page_address(session, folder)
            async with session.ws_connect(address, max_msg_size=1 << 26) as socket:
                found = Tab(socket)
                listening = asyncio.create_task(found.listen())
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await found.call(f"{domain}.enable")
                await found.call(
                    "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
                )
                scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
                await found.call("Emulation.setEmulatedMedia", features=[scheme])
                try:
                    yield found
                finally:
                    listening.cancel()
                    await asyncio.gather(listening, return_exceptions=True)
    finally:
        process.kill()
        await process.wait()


async def _page_address(session: aiohttp.ClientSession, folder: Path) -> str:
    """Of the first page, which may come later than the port that tells of it."""
    port = folder / "DevToolsActivePort"
    async with asyncio.timeout(DEADLINE_S):
        while len(_read(port)) < 2:  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.05)  # the browser has no event for it
        while True:
            async with session.get(f"http://127.0.0.1:{_read(port)[0]}/json/list") as answer:
                targets: list[dict[str, str]] = await answer.json(content_type=None)
            for one in targets:
                if one["type"] == "page":
                    return one["webSocketDebuggerUrl"]
            await asyncio.sleep(0.05)


def _read(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []
