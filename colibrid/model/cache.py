"""From what the user calls a model to a pack folder: the bundled one, a pack, a checkpoint, or a name on the Hub.

Checkpoints are converted on first use into the cache folder, as {name}-{fingerprint}.colibri. Nothing is downloaded.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from colibrid.errors import ConfigError, ModelError
from colibrid.model.fingerprint import Dtype, fingerprint, pack_fingerprint
from colibrid.model.pack import is_pack, open_pack
from colibrid.model.pack_writer import PackExistsError
from colibrid.model.precision import AS_IT_IS, Plan, parse_plan
from colibrid.paths import user_path

if TYPE_CHECKING:
    from colibrid.model.convert import Crc32c, Progress

BUNDLED_MODEL = Path(__file__).parent.parent / "models" / "hummingbird-13m"
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_KEY_DIGITS = 16


class CacheOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where to look and where to write."""

    cache_dir: Path  # model.cache_dir or its default
    hub_cache: Path  # Hugging Face's own cache: models--org--name folders
    dtype: Dtype = "auto"
    precision: str | None = None  # rules as in precision.py, for conversion
    weights: Literal["files", "dummy"] = "files"
    backend: Literal["cpu", "cuda"] = "cpu"  # whose packs are wanted


class Located(msgspec.Struct, frozen=True):
    """A folder that exists, and the model's default id."""

    path: Path
    name: str
    is_pack: bool


class Resolved(msgspec.Struct, frozen=True):
    """A pack that is ready to be opened."""

    path: Path
    name: str
    converted: bool  # by this call


def resolve(model: str | None, options: CacheOptions, *, crc32c: Crc32c, progress: Progress | None = None) -> Resolved:
    """The pack of a MODEL argument, converted now if it is a checkpoint that the cache does not have.

    ModelError: there is no such model, with the command that gets it, or it cannot be converted.
    ConfigError: the cache folder is not writable, or model.precision is wrong.
    """
    located = locate(model, options.hub_cache)
    plan = AS_IT_IS if options.precision is None else parse_plan(options.precision, "model.precision")
    if located.is_pack:
        if plan.rules:
            raise ConfigError(
                f"model.precision: {str(plan)!r} given, but {located.path} is a pack, whose formats are fixed; leave it out, "
                "or name the checkpoint"
            )
        return _resolve_pack(located, options, crc32c, progress)
    target = _place(located, options, plan)
    if is_pack(target):
        return Resolved(target, located.name, converted=False)
    _require_writable(options.cache_dir)
    return Resolved(target, located.name, converted=_make(located, target, options, plan, crc32c, progress))


def must_convert(located: Located, options: CacheOptions) -> bool:
    """Whether `resolve` would convert a checkpoint, into options.cache_dir. ConfigError: model.precision is wrong."""
    plan = AS_IT_IS if options.precision is None else parse_plan(options.precision, "model.precision")
    return not located.is_pack and not is_pack(_place(located, options, plan))


def _place(located: Located, options: CacheOptions, plan: Plan) -> Path:
    """Where the pack of a checkpoint is, or will be."""
    dummy = options.weights == "dummy"
    key = fingerprint(located.path, options.dtype, located.name, options.backend, plan=str(plan), weights=not dummy)
    kind = "dummy.colibri" if dummy else "colibri"
    return options.cache_dir / f"{_file_name(located.name)}-{key[:_KEY_DIGITS]}.{kind}"


def locate(model: str | None, hub_cache: Path) -> Located:
    """Finds a MODEL argument without writing anything. ModelError: it is not there, or not a model."""
    if model is None:
        return Located(BUNDLED_MODEL, BUNDLED_MODEL.name, is_pack=False)
    path = user_path(model)
    if path.is_dir():
        if is_pack(path):
            return Located(path, path.resolve().name.removesuffix(".colibri"), is_pack=True)
        if (path / "config.json").is_file():
            return Located(path, path.resolve().name, is_pack=False)
        raise ModelError(f"{path}: neither a pack (colibri.json) nor a Hugging Face checkpoint (config.json)")
    if path.exists():
        raise ModelError(
            f"{path}: not a folder; MODEL is a pack, the folder of a Hugging Face checkpoint in safetensors, or org/name; "
            "GGUF and other single files are not read"
        )
    if _HUB_NAME.fullmatch(model):
        return Located(_hub_snapshot(model, hub_cache), model, is_pack=False)
    raise ModelError(f"{path}: no such folder; MODEL is a pack, a Hugging Face checkpoint's folder, or org/name")


def _hub_snapshot(name: str, hub_cache: Path) -> Path:
    """The snapshot that `main` points to, else the newest."""
    folder = hub_cache / f"models--{name.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text().strip()
    except (OSError, UnicodeDecodeError):
        revision = ""
    snapshots = folder / "snapshots"
    if re.fullmatch(r"[0-9a-f]{7,64}", revision) and (snapshots / revision / "config.json").is_file():
        return snapshots / revision
    found = [path.parent for path in snapshots.glob("*/config.json")]
    if found:
        return max(found, key=lambda path: path.stat().st_mtime_ns)
    raise ModelError(
        f"{name} is not in the Hugging Face cache {hub_cache}; colibrid downloads nothing, so run\n"
        f"    hf download {name} --include '*.safetensors' --include '*.json' --include '*.jinja'\n"
        "and start again"
    )


def _resolve_pack(located: Located, options: CacheOptions, crc32c: Crc32c, progress: Progress | None) -> Resolved:
    """The pack itself; a flat one, for a GPU, laid out anew in the cache."""
    as_it_is = Resolved(located.path, located.name, converted=False)
    if options.backend == "cpu" or options.weights == "dummy":
        return as_it_is
    pack = open_pack(located.path)
    if pack.manifest.backend != "any":
        return as_it_is
    # Imported here: they bring numpy along, which a start from the cache does without.
    from colibrid.model.relay import relay  # noqa: PLC0415

    key = pack_fingerprint(located.path, located.name, options.backend)
    target = options.cache_dir / f"{_file_name(located.name)}-{key[:_KEY_DIGITS]}.colibri"
    if is_pack(target):
        return Resolved(target, located.name, converted=False)
    _require_writable(options.cache_dir)
    report = progress or (lambda *_: None)
    try:
        relay(pack, target, report, crc32c=crc32c, backend=options.backend, name=located.name, wait=True)
    except PackExistsError:  # another process made it while this one waited
        return Resolved(target, located.name, converted=False)
    return Resolved(target, located.name, converted=True)


def _require_writable(folder: Path) -> None:
    remedy = "set model.cache_dir to a folder that this user can write, or name a pack instead of a checkpoint"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"model.cache_dir: {folder} cannot be created ({error.strerror}); {remedy}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"model.cache_dir: {folder} is not writable; {remedy}")


def _make(
    located: Located, target: Path, options: CacheOptions, plan: Plan, crc32c: Crc32c, progress: Progress | None
) -> bool:
    # Imported here: they bring numpy along, which a start from the cache does without.
    from colibrid.model.convert import convert  # noqa: PLC0415
    from colibrid.model.dummy import write_dummy_pack  # noqa: PLC0415

    try:
        if options.weights == "dummy":
            write_dummy_pack(located.path, target, options.dtype, located.name, options.backend, plan)
        else:
            convert(
                located.path,
                target,
                options.dtype,
                progress,
                crc32c=crc32c,
                backend=options.backend,
                name=located.name,
                wait=True,
                plan=plan,
            )
    except PackExistsError:  # another process made it while this one waited
        return False
    return True


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip(".-")[:80] or "model"
