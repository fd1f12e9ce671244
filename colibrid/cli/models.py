"""From a MODEL argument and settings to a pack folder, converting on first use with a progress bar."""

from __future__ import annotations

from typing import TYPE_CHECKING

from colibrid.cli.progress import Progress
from colibrid.model.cache import CacheOptions, Resolved, resolve
from colibrid.paths import user_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from colibrid.config.environment import Environment
    from colibrid.config.settings import Settings
    from colibrid.engine.library import Library
    from colibrid.model.convert import Progress as ProgressCall


def resolve_model(
    model: str | None,
    settings: Settings,
    environment: Environment,
    library: Library,
    *,
    on_progress: ProgressCall | None = None,
) -> Resolved:
    """The pack of MODEL, of model.path without it, of the bundled model without both.

    on_progress is called beside the progress bar. ConfigError or ModelError: what is wrong and what to do.
    """
    bar = Progress("converting")

    def progress(done: int, total: int, what: str) -> None:
        bar(done, total, what)
        if on_progress is not None:
            on_progress(done, total, what)

    try:
        return resolve(
            model if model is not None else settings.model.path,
            cache_options(settings, environment),
            crc32c=checksum(library),
            progress=progress,
        )
    finally:
        bar.close()


def cache_options(settings: Settings, environment: Environment) -> CacheOptions:
    """Where packs are cached and found, and for which device; engine.device is settled."""
    model = settings.model
    return CacheOptions(
        cache_dir=environment.cache_dir if model.cache_dir is None else user_path(model.cache_dir),
        hub_cache=environment.hugging_face_hub,
        dtype=model.dtype,
        precision=model.precision,
        weights=model.weights,
        backend="cuda" if settings.engine.device == "cuda" else "cpu",
    )


def checksum(library: Library) -> Callable[[bytes | memoryview], int]:
    """crc32c of one block, by the engine's own function."""

    def crc32c(data: bytes | memoryview) -> int:
        block = bytes(data)
        return int(library.c.clb_crc32c(0, block, len(block)))

    return crc32c
