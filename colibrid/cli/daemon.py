"""The daemon from settings to exit code: the order in which its parts start; they end in reverse.

    1  check keys, bind the addresses what is wrong here is told before anything expensive is done
    2  resolve the model              converts a checkpoint that the cache does not have
    -- from here on the event loop runs; until here a signal simply ends the process
    3  start the engine process       it loads while this process goes on
    4  load HTTP and text             the imports overlap with 3
    5  answer /livez and /readyz      503 until the engine is ready
    6  ready                          banner, READY=1
    7  wait                           for a signal, or for the supervisor to give up
    8  drain                          new requests 503, running ones end within server.drain_timeout_s

Exit codes: 0 drained, 1 the engine failed or the address is taken, 78 configuration or model.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import structlog
import uvloop

from colibrid.batch.service import prepare_settings
from colibrid.cli.access import check_access, check_hosts, has_keys, log_access, read_access
from colibrid.cli.assembly import Assembly, assemble
from colibrid.cli.banner import banner, place_of, print_lines, ready_line
from colibrid.cli.device import settled
from colibrid.cli.heartbeat import heartbeat
from colibrid.cli.listen import bind_path, host_of, open_sockets
from colibrid.cli.models import resolve_model
from colibrid.cli.profiles import check_named, check_profile, read_profiles
from colibrid.cli.serve import check_shape
from colibrid.engine.library import Library
from colibrid.model.footprint import format_names
from colibrid.ops.collector import calm_collector, collect_when_idle
from colibrid.ops.lifecycle import Lifecycle
from colibrid.ops.logging import configure
from colibrid.ops.reload import SettingsReloader
from colibrid.ops.systemd import Notifier, passed_sockets
from colibrid.plugin_host import Plugins

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from colibrid.batch.pool import EnginePool
    from colibrid.cli.banner import Place
    from colibrid.config.environment import Environment
    from colibrid.config.settings import Settings
    from colibrid.model.cache import Resolved
    from colibrid.model.convert import Progress

_CONVERT_FILE_S = 600.0  # longest time for one file of a conversion
_CLOSE_S = 2.0  # for connections to go once everything is answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the command line asks for."""

    settings: Settings
    reload: Callable[[], Settings]  # the same sources, read again
    plugins: Plugins = field(default_factory=Plugins)
    environment: Environment
    profile: str | None = None  # a file, whose settings are among `settings`
    model: str | None
    api_keys: tuple[str, ...]
    num_layers: int | None
    num_experts: int | None


class _Listening(NamedTuple):
    """Bound sockets, for who asks and for who runs the daemon."""

    public: tuple[socket.socket, ...]
    admin: socket.socket | None


class _Drainer:
    """Implements admin_state.Drainer."""

    def __init__(self, pool: EnginePool, life: Lifecycle) -> None:
        self._pool = pool
        self._life = life

    async def drain(self, timeout_s: float) -> bool:
        return await self._pool.drain(timeout_s)

    def exit(self) -> None:
        if not self._life.drain.is_set():  # a second time would be: now
            self._life.stop("admin")


def run_daemon(order: Order) -> int:
    """Serve until told to stop; the exit code. ColibridError when it cannot start or the engine failed for good."""
    settings = order.settings
    configure(settings.logging)
    check_access(settings, order.environment, order.api_keys)
    with ExitStack() as stack:
        notifier = Notifier.from_environment()
        stack.callback(notifier.close)
        listening = open_sockets(settings.server, passed_sockets(), stack)
        check_hosts(map(host_of, listening), with_keys=_asks_keys(order))
        admin = None
        if settings.server.admin_socket is not None:
            admin = stack.enter_context(bind_path(settings.server.admin_socket, "server.admin_socket"))
        library = Library()
        settings = settled(settings, order.model, order.environment, library)
        reloader = SettingsReloader(order.settings, order.reload, serving=settings)
        order = replace(order, settings=settings)
        resolved = resolve_model(order.model, settings, order.environment, library, on_progress=_keep_waiting(notifier))
        check_profile(order.profile, resolved, settings)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(order, reloader, resolved, library, _Listening(listening, admin), notifier))


async def _serve(
    order: Order,
    reloader: SettingsReloader,
    resolved: Resolved,
    library: Library,
    listening: _Listening,
    notifier: Notifier,
) -> int:
    settings = order.settings
    marks = _Marks()
    async with AsyncExitStack() as stack:
        life = Lifecycle()
        stack.callback(life.watch_signals(asyncio.get_running_loop(), reloader.request))
        parts = assemble(settings, resolved, library)
        check_shape(parts.pack.manifest, order.num_layers, order.num_experts)
        _log_warnings(parts)
        stack.push_async_callback(parts.fleet.stop)
        stack.callback(parts.pool.stop)
        notifier.extend_timeout(settings.engine.load_timeout_s)
        parts.fleet.start()
        marks.set("start")
        beating = asyncio.create_task(heartbeat(notifier, parts.fleet, lambda: reloader.settings.engine))
        stack.callback(beating.cancel)
        reloader.subscribe(lambda new: partial(configure, new.logging))
        reloader.subscribe(lambda new: partial(parts.fleet.follow, new.engine))
        reloader.subscribe(lambda new: prepare_settings(parts.pool, new, str(resolved.path), parts.pack.manifest))
        await _open_http(order, reloader, parts, listening, life, stack)
        reloading = asyncio.create_task(reloader.run())
        stack.callback(reloading.cancel)
        calm_collector()
        collecting = asyncio.create_task(collect_when_idle(lambda: parts.pool.idle))
        stack.callback(collecting.cancel)
        marks.set("http")
        tls = settings.server.tls_cert_file is not None
        places = [place_of(one, tls=tls) for one in listening.public]
        return await _live(order, reloader, parts, life, notifier, places, marks)


async def _live(
    order: Order,
    reloader: SettingsReloader,
    parts: Assembly,
    life: Lifecycle,
    notifier: Notifier,
    places: Sequence[Place],
    marks: _Marks,
) -> int:
    """From listening to drained."""
    ready = asyncio.create_task(parts.fleet.wait_ready())
    ended = asyncio.create_task(parts.fleet.wait_ended())
    drain = asyncio.create_task(life.drain.wait())
    tasks = (ready, ended, drain)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if ready.done() and ready.exception() is None:
            life.serving()
            _announce(order, parts, places, marks)
            notifier.ready(f"serving {parts.pool.info.model_id} on {places[0].url}")
            await asyncio.wait((ended, drain), return_when=asyncio.FIRST_COMPLETED)
        if not drain.done():
            failure = await ended
            assert failure is not None, "nobody has stopped the supervisor"
            notifier.stopping("the engine failed")
            raise failure
        notifier.stopping("draining")
        timeout_s = reloader.settings.server.drain_timeout_s
        notifier.extend_timeout(timeout_s + 2 * _CLOSE_S)
        await _drain(parts, life, timeout_s)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if parts.fleet.failure is not None:
        raise parts.fleet.failure
    life.stopped()
    return 0


async def _drain(parts: Assembly, life: Lifecycle, timeout_s: float) -> None:
    """Let running requests end, until the time is up or somebody insists."""
    draining = asyncio.create_task(parts.pool.drain(timeout_s))
    now = asyncio.create_task(life.now.wait())
    await asyncio.wait((draining, now), return_when=asyncio.FIRST_COMPLETED)
    complete = draining.done() and draining.result()
    draining.cancel()
    now.cancel()
    await asyncio.gather(draining, now, return_exceptions=True)
    parts.pool.stop()
    lanes = zip(parts.pool.lanes, parts.fleet.supervisors, strict=True)
    held = sum(lane.held_bytes(supervisor.spec.tier_kv.page_bytes) for lane, supervisor in lanes)
    structlog.get_logger().info("drained", complete=complete, kv_bytes_held=held)  # see engine_totals: kv_bytes_used


async def _open_http(
    order: Order,
    reloader: SettingsReloader,
    parts: Assembly,
    listening: _Listening,
    life: Lifecycle,
    stack: AsyncExitStack,
) -> None:
    """Load the HTTP side and begin to answer on `listening`."""
    # Imported here: they take longest, and meanwhile the engine process loads.
    from colibrid.http.admin import create_admin  # noqa: PLC0415
    from colibrid.http.admin_state import AdminState  # noqa: PLC0415
    from colibrid.http.runner import run_application  # noqa: PLC0415
    from colibrid.http.server import start_server  # noqa: PLC0415
    from colibrid.http.state import AppState  # noqa: PLC0415
    from colibrid.http.tls import Tls, make_tls  # noqa: PLC0415
    from colibrid.text.model_text import load_text  # noqa: PLC0415

    keys = read_access(order.settings, order.environment, order.api_keys)
    log_access(order.settings, order.environment, order.api_keys, keys)
    text = load_text(parts.pack.path, parts.pack.manifest.text)
    profiles = read_profiles(order.settings, parts.pack.manifest)
    state = AppState(
        settings=order.settings, scheduler=parts.pool, text=text, keys=keys, plugins=order.plugins, profiles=profiles
    )
    if order.plugins.names:
        structlog.get_logger().info("plugins", names=order.plugins.names)
    stack.callback(text.tokenizer.close)

    context = make_tls(order.settings.server)
    tls = None if context is None else Tls(context)

    def follow(new: Settings) -> Callable[[], None]:
        keys = read_access(new, order.environment, order.api_keys)
        check_hosts(map(host_of, listening.public), with_keys=bool(keys) or bool(order.plugins.authenticators))
        check_named(order.profile, parts.pack.manifest)
        profiles = read_profiles(new, parts.pack.manifest)

        def commit() -> None:
            state.follow(new, keys, profiles)
            structlog.get_logger().info("keys_in_force", count=len(keys.keys))

        return commit

    def renew(new: Settings) -> Callable[[], None]:
        context = make_tls(new.server)
        return (lambda: None) if tls is None or context is None else partial(tls.replace, context)

    reloader.subscribe(follow)
    reloader.subscribe(renew)
    assert parts.pool.swaps is not None, "make_service gives it"
    admin = AdminState(swaps=parts.pool.swaps, reloader=reloader, drainer=_Drainer(parts.pool, life))
    await start_server(state, listening.public, stack, None if tls is None else tls.listening, admin)
    if listening.admin is not None:
        await run_application(create_admin(state, admin), [listening.admin], stack)


def _asks_keys(order: Order) -> bool:
    """True iff clients must send a key."""
    return has_keys(order.settings, order.environment, order.api_keys) or bool(order.plugins.authenticators)


def _keep_waiting(notifier: Notifier) -> Progress:
    """Tells the service manager that a conversion goes on."""

    def report(done: int, total: int, _file: str) -> None:
        notifier.status(f"converting the model: {100 * done // max(total, 1)} %")
        notifier.extend_timeout(_CONVERT_FILE_S)

    return report


def _log_warnings(parts: Assembly) -> None:
    for warning in parts.pack.warnings:
        structlog.get_logger().warning("pack_warning", message=warning)


def _announce(order: Order, parts: Assembly, places: Sequence[Place], marks: _Marks) -> None:
    marks.set("ready")
    memory, timings = parts.fleet.memory, parts.fleet.timings
    assert memory, "a ready engine has a bill"
    assert timings is not None, "a ready engine was timed"
    needs_key = _asks_keys(order)
    phases = {
        "start": marks.at("start"),
        "http": marks.at("http") - marks.at("start"),
        "engine beside it": timings.total_ms,
        "of that pack": timings.pack_ms,
        "weights": timings.open_ms,
    }
    total = marks.at("ready")
    engines, formats = len(parts.fleet.supervisors), ", ".join(format_names(parts.pack.manifest))
    lines = banner(
        parts.pool.info,
        formats,
        memory[0],
        places,
        needs_key=needs_key,
        engines=engines,
        profile=order.profile,
        profiles=order.settings.experts.profiles,
    )
    print_lines([*lines, ready_line(total, phases)])
    structlog.get_logger().info(
        "serving", url=places[0].url, model=parts.pool.info.model_id, pid=os.getpid(), ready_ms=round(total)
    )


class _Marks:
    """Milliseconds from the start of this process to named moments."""

    def __init__(self) -> None:
        self._began = _process_start()
        self._marks: dict[str, float] = {}

    def set(self, name: str) -> None:
        self._marks[name] = (time.clock_gettime(time.CLOCK_BOOTTIME) - self._began) * 1000

    def at(self, name: str) -> float:
        return self._marks[name]


def _process_start() -> float:
    """Seconds on CLOCK_BOOTTIME when the kernel started this process, to a tick (10 ms)."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")
