"""What the routes share: made once by the command line; a reload replaces settings and keys."""

from __future__ import annotations

import contextlib
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from colibrid.http.auth import KeyRing
from colibrid.http.gate import Gate
from colibrid.http.limits import FEW_STREAMS
from colibrid.http.origin import Origins
from colibrid.http.quota import Meters
from colibrid.http.served import Served
from colibrid.plugin_host import Plugins
from colibrid.text.structured_masks import StructuredOutput

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from colibrid.batch.interfaces import EngineInfo, GenerationService
    from colibrid.batch.request import ExpertPolicy
    from colibrid.config.settings import Settings
    from colibrid.text.model_text import ModelText


@dataclass(slots=True)
class Incoming:
    """Bodies on their way in; counted by the event loop only."""

    bytes: int = 0


@dataclass(slots=True, kw_only=True)
class AppState:
    """One served model and the settings it is served with.

    Lives on the event loop. What `follow` replaces is read anew by each request.
    """

    settings: Settings
    scheduler: GenerationService
    text: ModelText
    keys: KeyRing = field(default_factory=KeyRing)
    plugins: Plugins = field(default_factory=Plugins)
    profiles: Mapping[str, ExpertPolicy] = field(default_factory=dict)  # by the names of experts.profiles
    created: int = field(default_factory=lambda: int(time.time()))  # Unix seconds, of /v1/models
    incoming: Incoming = field(default_factory=Incoming)
    served: Served = field(default_factory=Served)
    # Writes large answers down. One thread: several would keep the event loop from the interpreter's lock.
    scribe: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="scribe"))
    # Reads large bodies. One thread again, and not the scribe's: a bad body must not wait for somebody's answer.
    reader: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="reader"))

    _streams: int = field(init=False, default=0)
    gate: Gate = field(init=False)
    meters: Meters = field(init=False)
    origins: Origins = field(init=False)
    structured: StructuredOutput = field(init=False)

    def __post_init__(self) -> None:
        self.structured = StructuredOutput(self.text.vocabulary, self.scheduler.info.mask_bytes)
        self.gate = Gate(self.settings.limits)
        self.meters = Meters(self.settings.auth.limits)
        self.origins = Origins(self.settings.server, has_keys=self.asks_keys)

    def follow(self, settings: Settings, keys: KeyRing, profiles: Mapping[str, ExpertPolicy]) -> None:
        """Serve with these, which were checked, from now on."""
        self.settings, self.keys, self.profiles = settings, keys, profiles
        self.meters.renew(keys.keys, settings.auth.limits)
        self.origins = Origins(settings.server, has_keys=self.asks_keys)

    def info_for(self, profile: str | None, policy: ExpertPolicy) -> EngineInfo:
        """What answers say of the engine: with a profile, whose name alone is in the request, another fingerprint.

        policy: what the profile said when the request was read; a reload may have changed or removed it since.
        """
        info = self.scheduler.info
        if profile is None:
            return info
        text = f"{info.fingerprint} {policy.per_token} {policy.threshold}"
        return msgspec.structs.replace(info, fingerprint=f"fp_{hashlib.sha256(text.encode()).hexdigest()[:12]}")

    @property
    def asks_keys(self) -> bool:
        """True iff clients must send a key."""
        return bool(self.keys) or bool(self.plugins.authenticators)

    @property
    def stream_pace_s(self) -> float:
        """From one beat of the streams' events to the next; 0 while there are few streams: each is sent at once."""
        return self.settings.server.stream_interval_ms / 1000 if self._streams > FEW_STREAMS else 0.0

    @contextlib.contextmanager
    def streaming(self) -> Iterator[None]:
        """One more stream is open."""
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names that requests may call the served model by."""
        return tuple(dict.fromkeys(self.settings.model.aliases))


STATE = web.AppKey("state", AppState)
