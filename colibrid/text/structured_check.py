"""Tries grammars out in a process of its own, with limits on time and memory; lives on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import struct
import sys
from pathlib import Path

from colibrid.errors import OverloadedError
from colibrid.text.structured_limits import CHECK_CPU_S, CHECK_IDLE_S, CHECK_WALL_S, MAX_WAITING

_ROOT = Path(__file__).resolve().parent.parent.parent
_PROGRAM = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from colibrid.text.structured_child import main; main()"
_LENGTH = struct.Struct("<I")
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)  # not what its own limits do to it
_NOT_TRIED = "The grammar or schema could not be tried out, because the machine is too busy; try again shortly."
_TOO_COMPLEX = f"it is too complex: to compile it takes more than {CHECK_CPU_S} s, or too much memory"


class GrammarChecker:
    """Owns the process: started with the first grammar, ended when it dies, is too slow or has nothing to do."""

    def __init__(self, *, idle_s: float = CHECK_IDLE_S, wall_s: float = CHECK_WALL_S) -> None:
        self._idle_s = idle_s
        self._wall_s = wall_s
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._process: asyncio.subprocess.Process | None = None
        self._retirement: asyncio.TimerHandle | None = None
        self._ended_from_outside = False  # the last process that gave no answer

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    async def check(self, grammar: str) -> str:
        """What is wrong with the grammar; empty if it compiles.

        Raises OverloadedError if too many wait, and when nothing can be said of the grammar now.
        """
        if self._waiting >= MAX_WAITING:
            raise OverloadedError(
                f"{self._waiting} grammars and schemas wait to be compiled; try again shortly.",
                code="server_is_overloaded",
                retry_after_s=1.0,
            )
        self._waiting += 1
        try:
            async with self._turn:
                return await self._ask(grammar)
        finally:
            self._waiting -= 1

    async def _ask(self, grammar: str) -> str:
        self._keep()
        try:
            answer = await self._answer(grammar)
            if answer is None and self._ended_from_outside:
                answer = await self._answer(grammar)
            if answer is None and self._ended_from_outside:
                raise OverloadedError(_NOT_TRIED, code="server_is_overloaded", retry_after_s=1.0)
            return _TOO_COMPLEX if answer is None else answer
        finally:
            self._retire_later()

    async def _answer(self, grammar: str) -> str | None:
        """None if there is no answer, and then no process either."""
        done = False
        try:
            process = await self._started()
            assert process.stdin is not None, "it was started with pipes"
            assert process.stdout is not None, "it was started with pipes"
            data = grammar.encode("utf-8", "surrogatepass")
            async with asyncio.timeout(self._wall_s):
                process.stdin.write(_LENGTH.pack(len(data)) + data)
                await process.stdin.drain()
                (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
                answer = (await process.stdout.readexactly(length)).decode()
            done = True
        except TimeoutError:
            raise OverloadedError(_NOT_TRIED, code="server_is_overloaded", retry_after_s=1.0) from None
        except (asyncio.IncompleteReadError, OSError, RuntimeError):  # uvloop says RuntimeError of a closed pipe
            if self._process is not None:
                self._ended_from_outside = await self._process.wait() in _FROM_OUTSIDE
            return None
        else:
            return answer
        finally:
            if not done:  # also when the client has left: the answer would be taken for that of the next grammar
                await self._end()

    async def _started(self) -> asyncio.subprocess.Process:
        self._ended_from_outside = False
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-c",
                _PROGRAM,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,  # what a dying process says may hold the client's text
            )
        return self._process

    def _keep(self) -> None:
        if self._retirement is not None:
            self._retirement.cancel()
            self._retirement = None

    def _retire_later(self) -> None:
        self._keep()
        if self._process is not None:
            self._retirement = asyncio.get_running_loop().call_later(self._idle_s, self._retire)

    def _retire(self) -> None:
        """Lets it end by itself; the loop reaps it."""
        self._retirement = None
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def close(self) -> None:
        """Ends the process."""
        self._keep()
        await self._end()
