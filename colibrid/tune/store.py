"""The folder of a run: what was finished stays finished, whenever the run is interrupted.

run.json           what figures depend on; a run with anything else does not go on here
points/*.json      one file a point, complete or not there
layers.json        what was found of single layers, and the points that the search proposed
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from colibrid.errors import ConfigError
from colibrid.tune.files import replace_file
from colibrid.tune.result import LayerStats, Point, Struct, Task, Tried

if TYPE_CHECKING:
    from pathlib import Path

_S = TypeVar("_S", bound=msgspec.Struct)
_POINTS = "points"
_RUN = "run.json"
_LAYERS = "layers.json"
_MAX_BYTES = 64 << 20
_DIGITS = 24


class Key(Struct, frozen=True, kw_only=True):
    """What figures of quality and cost depend on."""

    version: str
    pack: str
    data_sha256: str
    task: Task
    device: str
    tokens: int | None
    kl_tokens: int
    answer_tokens: int
    concurrency: int
    requests: int
    output_tokens: int


class Record(Struct, frozen=True, kw_only=True):
    """One point."""

    tried: Tried
    whole: bool  # its quality is of all the data
    slo: str | None = None  # the limits that it was given up for


class Layers(Struct, frozen=True, kw_only=True):
    """What was found layer by layer."""

    stats: tuple[LayerStats, ...]
    proposed: tuple[Point, ...]


class Store:
    """Owner of the folder while a run lasts."""

    def __init__(self, folder: Path, key: Key, *, resume: bool) -> None:
        """ConfigError: the folder cannot be used, or holds another run."""
        self._folder = folder
        try:
            (folder / _POINTS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {folder}: cannot be created: {error.strerror}; choose another folder") from None
        run = folder / _RUN
        if not run.exists():
            replace_file(run, _text(key))
        elif not resume:
            raise ConfigError(
                f"--out {folder}: holds an earlier run; add --resume to go on with it, or choose another folder"
            )
        else:
            _check_same(_read(run, Key), key, folder)

    def record(self, point: Point, slo: str | None) -> Tried | None:
        """What is known of a point. Of one that was given up for other limits: its quality, if that is of all the data."""
        path = self._path(point)
        if not path.exists():
            return None
        record = _read(path, Record)
        tried = record.tried
        if tried.point != point:
            return None
        if tried.hopeless is None or record.slo == slo:
            return tried
        return Tried(point=point, quality=tried.quality) if record.whole else None

    def keep(self, tried: Tried, slo: str | None, *, whole: bool) -> None:
        """In one step."""
        record = Record(tried=tried, whole=whole, slo=slo if tried.hopeless else None)
        replace_file(self._path(tried.point), _text(record))

    @property
    def layers(self) -> Layers | None:
        """None: not looked at yet."""
        path = self._folder / _LAYERS
        return _read(path, Layers) if path.exists() else None

    def keep_layers(self, layers: Layers) -> None:
        replace_file(self._folder / _LAYERS, _text(layers))

    def _path(self, point: Point) -> Path:
        digest = hashlib.sha256(msgspec.json.encode(point)).hexdigest()[:_DIGITS]
        return self._folder / _POINTS / f"{digest}.json"


def _check_same(found: Key, wanted: Key, folder: Path) -> None:
    differ = [
        f"{name} was {getattr(found, name)!r}, now {getattr(wanted, name)!r}"
        for name in found.__struct_fields__
        if getattr(found, name) != getattr(wanted, name)
    ]
    if differ:
        raise ConfigError(
            f"--out {folder}: its run is of something else ({'; '.join(differ)}); choose another folder, or give what it had"
        )


def _text(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def _read(path: Path, kind: type[_S]) -> _S:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path}: larger than {_MAX_BYTES} bytes; this is no file of a run, remove it")
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}; remove it, and this part of the run is done again") from None
