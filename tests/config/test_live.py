"""colibrid.config.live."""

from __future__ import annotations

import msgspec

from colibrid.config.live import compare, with_live
from colibrid.config.settings import Settings


def _settings(**sections: object) -> Settings:
    return msgspec.convert(sections, Settings)


BEFORE = _settings(batch={"slots": 4, "window_ms": 1.0}, experts={"generate": {"per_token": [1, 2]}})
AFTER = _settings(
    batch={"slots": 8, "window_ms": 2.0},
    experts={"generate": {"per_token": 1}, "swap_slots": 2},
    model={"aliases": ["other"]},
)


def test_differences_are_told_by_kind() -> None:
    """Changed keys come in the order of declaration, those that SIGHUP reloads apart from the others."""
    change = compare(BEFORE, AFTER)
    assert change.live == ("model.aliases", "batch.window_ms", "experts.generate.per_token")
    assert change.restart == ("batch.slots", "experts.swap_slots")
    assert compare(AFTER, AFTER).live == compare(AFTER, AFTER).restart == ()


def test_only_live_keys_are_taken_over() -> None:
    """The merged settings have the new live values and the old others."""
    merged = with_live(BEFORE, AFTER)
    assert compare(merged, AFTER).live == ()
    assert compare(BEFORE, merged).restart == ()
    assert (merged.batch.slots, merged.batch.window_ms, merged.model.aliases) == (4, 2.0, ("other",))
