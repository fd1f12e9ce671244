"""What no single value can show: relations between keys. Each rule sees settings whose values are all right alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from colibrid.config.settings import Settings


class Conflict(NamedTuple):
    """The keys that do not go together, the one to change first, and why."""

    keys: tuple[str, ...]
    message: str


def conflicts(settings: Settings) -> Iterator[Conflict]:
    """Everything that contradicts itself."""
    for rule in _RULES:
        yield from rule(settings)


def _prefill(settings: Settings) -> Iterator[Conflict]:
    chunk, tokens = settings.batch.prefill_chunk, settings.batch.prefill_tokens
    if chunk != "auto" and tokens != "auto" and chunk > tokens:
        yield Conflict(
            ("batch.prefill_chunk", "batch.prefill_tokens"),
            f"batch.prefill_chunk ({chunk}) must not exceed batch.prefill_tokens ({tokens}); lower the first",
        )


def _kv_size(settings: Settings) -> Iterator[Conflict]:
    memory = settings.memory
    if memory.kv_tokens is not None and memory.tiers.kv.bytes != "auto":
        yield Conflict(
            ("memory.kv_tokens", "memory.tiers.kv.bytes"),
            "memory.kv_tokens and memory.tiers.kv.bytes both size the KV cache; leave one of them out",
        )


_RULES: tuple[Callable[[Settings], Iterator[Conflict]], ...] = (_prefill, _kv_size)
