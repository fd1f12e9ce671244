"""The folder of a run: what was finished stays finished, whenever the run is interrupted.

run.json           what figures depend on; a run with anything else does not go on here
points/*.json      one file a point, complete or not there
layers.json        what was found of single layers, and the points that the search proposed
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from colibrid.config.settings import Settings
from colibrid.errors import ConfigError
from colibrid.paths import read_bounded
from colibrid.tune.files import replace_file
from colibrid.tune.result import LayerStats, Point, Struct, Task, Tried
from colibrid.tune.slo import Limit  # noqa: TC001 (msgspec reads it)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from colibrid.tune.points import Shape

_S = TypeVar("_S", bound=msgspec.Struct)
_POINTS = "points"
_RUN = "run.json"
_LAYERS = "layers.json"
_MAX_BYTES = 64 << 20
_DIGITS = 24
_AGAIN = "remove it, and this part of the run is done again"


class Key(Struct, frozen=True, kw_only=True):
    """What figures of quality and cost depend on."""

    version: str
    pack: str
    data_sha256: str
    task: Task
    device: str
    machine: str
    tokens: int | None
    kl_tokens: int
    answer_tokens: int
    concurrency: int
    requests: int
    output_tokens: int
    ids_sha256: str  # of what tokenizer, template and context make of the data
    service: dict[str, str]  # settings that are not the default, as JSON by their keys


_SERVICE = ("engine", "batch", "embeddings", "memory", "kv", "modules")  # sections, and single keys:
_SERVICE_KEYS = ("model.max_seq_len", "model.weights", "model.dummy_seed")
_NOT_OF_IT = ("engine.stall_timeout_s", "engine.load_timeout_s", "batch.prefix_reuse")


def service_settings(settings: Settings) -> dict[str, str]:
    """What figures depend on beyond points, as in Key."""
    present, default = (dict(_flat(msgspec.to_builtins(one))) for one in (settings, Settings()))
    return {
        key: value
        for key, value in sorted(present.items())
        if (key.partition(".")[0] in _SERVICE or key in _SERVICE_KEYS)
        and key not in _NOT_OF_IT
        and default.get(key) != value
    }


def _flat(values: dict[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", msgspec.json.encode(value).decode()


class Record(Struct, frozen=True, kw_only=True):
    """One point."""

    tried: Tried
    whole: bool  # its quality is of all the data
    limits: tuple[Limit, ...] = ()  # that it was given up for


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
            if (folder / _LAYERS).exists() or any((folder / _POINTS).glob("*.json")):
                raise ConfigError(
                    f"--out {folder}: holds points of a run, but no {_RUN}, which says what they are of; choose another folder"
                )
            replace_file(run, _text(key))
        elif not resume:
            raise ConfigError(
                f"--out {folder}: holds an earlier run; add --resume to go on with it, or choose another folder"
            )
        else:
            _check_same(_read(run, Key, "choose another folder with --out"), key, folder)

    def record(self, point: Point, limits: Sequence[Limit]) -> Tried | None:
        """What is known of a point. Of one that was given up for other limits: its quality, if that is of all the data."""
        path = self._path(point)
        if not path.exists():
            return None
        record = _read(path, Record)
        tried = record.tried
        if tried.point != point:
            return None
        if tried.hopeless is None or record.limits == tuple(limits):
            return tried
        return Tried(point=point, quality=tried.quality) if record.whole else None

    def keep(self, tried: Tried, limits: Sequence[Limit], *, whole: bool) -> None:
        """In one step."""
        record = Record(tried=tried, whole=whole, limits=tuple(limits) if tried.hopeless else ())
        replace_file(self._path(tried.point), _text(record))

    def layers(self, shape: Shape) -> Layers | None:
        """Of a model of this shape; None: not looked at yet. ConfigError: they are of another."""
        path = self._folder / _LAYERS
        if not path.exists():
            return None
        found = _read(path, Layers)
        wrong = [one.layer for one in found.stats if not _fits_layer(one, shape)]
        if wrong or not all(_fits(point, shape) for point in found.proposed):
            what = f"layer {wrong[0]} is not the model's" if wrong else "its points are not for the model's layers"
            raise ConfigError(f"{path}: {what}; {_AGAIN}")
        return found

    def keep_layers(self, layers: Layers) -> None:
        replace_file(self._folder / _LAYERS, _text(layers))

    def _path(self, point: Point) -> Path:
        digest = hashlib.sha256(msgspec.json.encode(point)).hexdigest()[:_DIGITS]
        return self._folder / _POINTS / f"{digest}.json"


def _fits_layer(stats: LayerStats, shape: Shape) -> bool:
    known = 0 <= stats.layer < len(shape.experts)
    return known and 0 < stats.experts == shape.experts[stats.layer] == len(stats.load)


def _fits(point: Point, shape: Shape) -> bool:
    """Whether it has a number for each layer, or one for all."""
    asked = point.per_token
    if asked is None:
        return True
    each = asked if isinstance(asked, tuple) else (asked,) * len(shape.experts)
    return len(each) == len(shape.experts) and all(
        wanted >= (most > 0) and (isinstance(asked, int) or wanted <= most)
        for wanted, most in zip(each, shape.experts, strict=True)
    )


def _check_same(found: Key, wanted: Key, folder: Path) -> None:
    differ = [
        f"{name} was {getattr(found, name)!r}, now {getattr(wanted, name)!r}"
        for name in found.__struct_fields__
        if name not in ("ids_sha256", "service") and getattr(found, name) != getattr(wanted, name)
    ]
    differ += [
        f"{name} was {found.service.get(name, 'the default')}, now {wanted.service.get(name, 'the default')}"
        for name in sorted(found.service.keys() | wanted.service.keys())
        if found.service.get(name) != wanted.service.get(name)
    ]
    if not differ and found.ids_sha256 != wanted.ids_sha256:
        differ.append("tokenizer, chat template or what is read of the data is another")
    if differ:
        raise ConfigError(
            f"--out {folder}: its run is of something else ({'; '.join(differ)}); choose another folder, or give what it had"
        )


def _text(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def _read(path: Path, kind: type[_S], remedy: str = _AGAIN) -> _S:
    data = read_bounded(path, _MAX_BYTES, str(path), remedy)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}; {remedy}") from None
