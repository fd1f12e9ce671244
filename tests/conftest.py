"""What several folders of tests share: the native library and the bundled model as a pack."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog

import colibrid
from colibrid.engine.library import Library
from colibrid.model.convert import convert
from colibrid.model.pack import Pack, open_pack

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Commands configure the logs of the process: each test gets them as a new process has them."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.reset_defaults()
    root.handlers, root.level = handlers, level


@pytest.fixture(scope="session")
def library() -> Library:
    """The native library of the package under test."""
    return Library()


@pytest.fixture(scope="session")
def bundled_pack(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """hummingbird-13m, converted once. Not to be changed."""
    source = Path(colibrid.__file__).parent / "models" / "hummingbird-13m"
    target = tmp_path_factory.mktemp("bundled") / "hummingbird-13m.colibri"
    convert(source, target, crc32c=lambda data: library.c.clb_crc32c(0, bytes(data), len(data)))
    return open_pack(target)
