from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from colibrid.errors import ModelError
from colibrid.model import fingerprint as module
from colibrid.model.fingerprint import fingerprint

if TYPE_CHECKING:
    from pathlib import Path


def test_the_same_checkpoint_has_the_same_fingerprint(source: Path) -> None:
    """Nothing but the checkpoint and the wishes counts."""
    assert fingerprint(source, "auto", "a") == fingerprint(source, "auto", "a")
    assert (
        len({fingerprint(source, "auto", "a"), fingerprint(source, "bf16", "a"), fingerprint(source, "auto", "b")}) == 3
    )


def test_another_converter_makes_another_fingerprint(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs of an older converter are not reused."""
    before = fingerprint(source, "auto", "a")
    monkeypatch.setattr(module, "CONVERTER_VERSION", module.CONVERTER_VERSION + 1)
    assert fingerprint(source, "auto", "a") != before


def test_time_and_header_of_a_shard_count(source: Path) -> None:
    """A touched shard, or one with another header, is another checkpoint."""
    path = source / "model.safetensors"
    before = fingerprint(source, "auto", "a")
    status = path.stat()
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"format": "pt"', b'"format": "np"'))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    changed = fingerprint(source, "auto", "a")
    os.utime(path, ns=(0, 0))
    assert len({before, changed, fingerprint(source, "auto", "a")}) == 3


def test_without_weights_the_shards_do_not_matter(source: Path) -> None:
    """A description alone does not depend on weights, nor need them."""
    before = fingerprint(source, "auto", "a", weights=False)
    (source / "model.safetensors").unlink()
    assert fingerprint(source, "auto", "a", weights=False) == before
    with pytest.raises(ModelError, match="only safetensors"):
        fingerprint(source, "auto", "a")
