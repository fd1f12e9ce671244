"""A runner over the bundled model on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from colibrid.config.settings import BatchSettings, EngineSettings, ModelSettings, Settings
from colibrid.tune.result import Point
from colibrid.tune.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Iterator

    from colibrid.engine.library import Library
    from colibrid.model.pack import Pack

SETTINGS = Settings(
    engine=EngineSettings(device="cpu"), batch=BatchSettings(slots=8), model=ModelSettings(max_seq_len=1024)
)


@pytest.fixture(scope="module")
def runner(library: Library, bundled_pack: Pack) -> Iterator[Runner]:
    """A service with the model's own setting is open. Whoever opens another one opens this again."""
    with Runner(library, SETTINGS, bundled_pack, most=4) as opened:
        opened.use(Point())
        yield opened
