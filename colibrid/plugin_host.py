"""Loads the plugins that the configuration names, and calls their parts so that a bad one harms nobody else."""

from __future__ import annotations

import re
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import structlog

from colibrid.errors import ConfigError, RequestError
from colibrid.plugins import API_VERSION, GROUP, Parts, Plugin

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from importlib.metadata import EntryPoint

    from colibrid.model.families.base import Family
    from colibrid.plugins import Authenticator, MetricsSink, RequestFilter, ResponseObserver, SamplingPolicy
    from colibrid.text.reasoning import ReasoningFormat
    from colibrid.text.tools import ToolFormat

SLOW_S = 0.01  # of a call on the event loop; above it, it is counted and logged
_PLACE = re.compile(r" - at `\$([^`]*)`$")
_STEP = re.compile(r"\[(\d+)\]|\.?([^.\[\]]+)")
_PART = TypeVar("_PART")
_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class PluginFaultError(RequestError):
    """A plugin raised what it should not: 500 for the request that it was called for."""

    status = 500
    type = "server_error"

    def __init__(self, plugin: str, kind: str) -> None:
        message = f"The server's plugin {plugin} failed ({kind}); tell its operator, and try again."
        super().__init__(message, code="plugin_failed")


class Health:
    """Counts what went wrong in plugins. Any thread may add to it."""

    def __init__(self) -> None:
        self.failures = 0
        self.slow = 0
        self._lock = threading.Lock()

    def failed(self, plugin: str, kind: str, error: BaseException | str) -> None:
        """Counts and logs a mistake of a plugin."""
        with self._lock:
            self.failures += 1
        trace = error if isinstance(error, BaseException) else None
        _log.error("plugin_failed", plugin=plugin, kind=kind, reason=_said(error)[:400], exc_info=trace)

    def took(self, plugin: str, kind: str, seconds: float) -> None:
        """Counts and logs a call that took too long."""
        if seconds > SLOW_S:
            with self._lock:
                self.slow += 1
            _log.warning("plugin_slow", plugin=plugin, kind=kind, ms=round(seconds * 1000, 1))


@dataclass(frozen=True, slots=True)
class Hook(Generic[_PART]):
    """One part of one plugin."""

    plugin: str
    kind: str
    part: _PART
    health: Health

    @contextmanager
    def call(self, *, timed: bool = True) -> Iterator[_PART]:
        """The part, to be used inside. RequestErrors pass; anything else is logged and becomes a PluginFaultError."""
        began = time.perf_counter()
        error: Exception | None = None
        try:
            yield self.part
        except RequestError:
            raise
        except Exception as raised:
            error = raised
            raise PluginFaultError(self.plugin, self.kind) from raised
        finally:
            if timed:
                self.health.took(self.plugin, self.kind, time.perf_counter() - began)
            if error is not None:
                self.health.failed(self.plugin, self.kind, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugins:
    """The loaded plugins by what they do; the empty value is for a daemon without any."""

    names: tuple[str, ...] = ()
    families: tuple[Family, ...] = ()
    filters: tuple[Hook[RequestFilter], ...] = ()
    policies: tuple[Hook[SamplingPolicy], ...] = ()
    authenticators: tuple[Hook[Authenticator], ...] = ()
    observers: tuple[Hook[ResponseObserver], ...] = ()
    sinks: tuple[Hook[MetricsSink], ...] = ()
    tool_format: ToolFormat | None = None
    reasoning_format: ReasoningFormat | None = None
    health: Health = field(default_factory=Health)


def installed() -> tuple[EntryPoint, ...]:
    """Every plugin that is installed, by name. Nothing of them is imported."""
    return tuple(sorted(entry_points(group=GROUP), key=lambda entry: entry.name))


def package_of(entry: EntryPoint) -> str:
    """Name and version of the package that brings it."""
    return "an unknown package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def load_plugins(named: Mapping[str, Mapping[str, Any]], origins: Mapping[str, str]) -> Plugins:
    """Imports and makes the plugins that are named, in that order; `origins`: where each setting comes from, by path.

    ConfigError tells all that is wrong, with places and names.
    """
    if not named:
        return Plugins()
    errors: list[str] = []
    made: dict[str, Parts] = {}
    entries = installed()
    for name, settings in named.items():
        where = _Where(f"plugins.{name}", origins)
        try:
            plugin = _imported(name, entries)
            made[name] = _made(plugin, settings, where)
        except ConfigError as error:
            errors += [line if ": plugins." in line else where.says(line) for line in str(error).splitlines()]
    for kind in ("tool_format", "reasoning_format"):
        having = [name for name, parts in made.items() if getattr(parts, kind) is not None]
        if len(having) > 1:
            second = _Where(f"plugins.{having[1]}", origins)
            errors.append(second.says(f"{having[0]} has a {kind.replace('_', ' ')} already; name one"))
    if errors:
        raise ConfigError("\n".join(errors))
    return collect(made)


def collect(made: Mapping[str, Parts]) -> Plugins:
    """Parts by what they do, in the order of their plugins."""
    health = Health()

    def hooks(kind: str) -> Iterator[Hook[Any]]:
        for name, parts in made.items():
            if (part := getattr(parts, kind)) is not None:
                yield Hook(name, kind, part, health)

    return Plugins(
        names=tuple(made),
        families=tuple(family for parts in made.values() for family in parts.families),
        filters=tuple(hooks("request_filter")),
        policies=tuple(hooks("sampling_policy")),
        authenticators=tuple(hooks("authenticator")),
        observers=tuple(hooks("observer")),
        sinks=tuple(hooks("metrics_sink")),
        tool_format=next((_guarded(hook) for hook in hooks("tool_format")), None),
        reasoning_format=next((hook.part for hook in hooks("reasoning_format")), None),
        health=health,
    )


def _guarded(hook: Hook[ToolFormat]) -> ToolFormat:
    """The format; a section that its reader fails on is content, like any that it does not understand."""
    read = hook.part.read
    if read is None:
        return hook.part

    def guarded(section: str) -> Iterable[tuple[object, object]]:
        try:
            with hook.call() as form:
                assert form.read is not None, "see above"
                try:
                    return list(form.read(section))
                except ValueError as error:  # it is no call
                    no_call = error
        except PluginFaultError as error:
            no_call = ValueError(error.message)
        raise no_call

    return msgspec.structs.replace(hook.part, read=guarded)


# ------------------------------------------------------------------ loading


@dataclass(frozen=True, slots=True)
class _Where:
    """A path of the configuration, and where it was given."""

    path: str
    origins: Mapping[str, str]

    def below(self, steps: Iterable[str]) -> _Where:
        """The nearest place to that path below, which keeps its full name."""
        return _Where(".".join((self.path, *steps)), self.origins)

    def says(self, message: str) -> str:
        """An error's line."""
        known = self.path
        while known and known not in self.origins:
            known = known.rpartition(".")[0]
        return f"{self.origins.get(known, 'plugins')}: {self.path}: {message}"


def _imported(name: str, entries: Iterable[EntryPoint]) -> Plugin:
    entries = tuple(entries)
    found = [entry for entry in entries if entry.name == name]
    if not found:
        known = ", ".join(dict.fromkeys(entry.name for entry in entries)) or "none"
        raise ConfigError(
            f"no installed package has a plugin of this name (installed: {known}); install it, or remove it"
        )
    if len(found) > 1:
        raise ConfigError(f"several packages have it: {', '.join(map(package_of, found))}; uninstall all but one")
    package = package_of(found[0])
    try:
        plugin = found[0].load()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{package} cannot be loaded: {_said(error)}; correct it, or remove it here") from error
    if not isinstance(plugin, Plugin):
        raise ConfigError(f"{package}: {found[0].value} is no colibrid.plugins.Plugin; report it to its author")
    if plugin.api != API_VERSION:
        raise ConfigError(
            f"{package} was written for version {plugin.api} of the plugin API, this is {API_VERSION}; install another version"
        )
    return plugin


def _made(plugin: Plugin, settings: Mapping[str, Any], where: _Where) -> Parts:
    checked = _settings(plugin.settings, settings, where)
    try:
        parts = plugin.make(checked)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"it cannot be made: {_said(error)}; correct its settings, or remove it") from error
    if not isinstance(parts, Parts):
        raise ConfigError("its make returns no colibrid.plugins.Parts; report it to its author")
    if parts.metrics_sink is not None and not parts.metrics_sink.interval_s >= 1:
        raise ConfigError(f"interval_s of its metrics sink is {parts.metrics_sink.interval_s}, at least 1 is allowed")
    return parts


def _settings(kind: type[msgspec.Struct], given: Mapping[str, Any], where: _Where) -> msgspec.Struct:
    """The plugin's settings, all mistakes of single keys told at once. Keys without a field are mistakes always."""
    fields = {one.encode_name: one for one in msgspec.structs.fields(kind)}
    errors = []
    for name, value in given.items():
        if name not in fields:
            known = ", ".join(fields) or "none"
            errors.append(where.below([name]).says(f"unknown key; known: {known}"))
            continue
        try:
            msgspec.convert(value, fields[name].type)
        except msgspec.ValidationError as error:
            errors.append(_explained(*_narrowed(error, value, fields[name].type, where.below([name]))))
    errors += [
        where.below([name]).says("it is missing; give it")
        for name, one in fields.items()
        if one.required and name not in given
    ]
    if not errors:
        try:
            return msgspec.convert(given, kind)
        except msgspec.ValidationError as error:  # its own __post_init__
            errors.append(_explained(error, where))
    raise ConfigError("\n".join(errors))


def _narrowed(
    error: msgspec.ValidationError, value: Any, kind: Any, where: _Where
) -> tuple[msgspec.ValidationError, _Where]:
    """The error at the entry of a map that it is about: msgspec does not say which."""
    if isinstance(value, dict) and " - at `$[...]" in str(error):
        for name, item in value.items():
            try:
                msgspec.convert({name: item}, kind)
            except msgspec.ValidationError as own:
                return own, where.below([name])
    return error, where


def _explained(error: msgspec.ValidationError, where: _Where) -> str:
    text = str(error)
    place = _PLACE.search(text)
    steps = (
        []
        if place is None
        else [index or name for index, name in _STEP.findall(place.group(1)) if index or name != "..."]
    )
    reason = text if place is None else text[: place.start()]
    return where.below(steps).says(reason[:1].lower() + reason[1:].replace("`", ""))


def _said(error: BaseException | str) -> str:
    return error if isinstance(error, str) else " ".join(f"{type(error).__name__}: {error}".split())
